"""``arvideo convert``: take a trained policy out of its run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import check_choice, load
from arvideo_rl.outputs import check_folder


@dataclass
class ConvertConfig:
    """What ``arvideo convert`` reads."""

    out: str = ""  # folder to write; must not exist
    format: str = "diffusers"  # diffusers or peft (an adapter), or merged (a generator folder)


def help_text() -> str:
    """Text of --help."""
    return f"""arvideo convert RUN | RUN@best | RUN@STEP | CHECKPOINT out=FOLDER [format=diffusers|peft|merged]

Writes the trained policy for other programs and checks it: loaded into a fresh base it must give the same output.
diffusers is what load_lora_weights and load_lora_adapter read, peft what PeftModel.from_pretrained reads, merged a
generator of its own. Examples:

  arvideo convert runs/mine out=mine_lora
  arvideo convert runs/mine@best out=mine_merged format=merged

keys and defaults
{keys(ConvertConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Write and check."""
    if len(words) != 1:
        raise UsageError("convert takes one run or checkpoint, then key=value; e.g. arvideo convert runs/x out=x_lora")
    config = load(ConvertConfig, None, items)
    if not config.out:
        raise UsageError("say where to write: out=FOLDER")
    from arvideo_rl.training.aligned import load_aligned
    from arvideo_rl.training.export import FORMS, export
    from arvideo_rl.training.launch import quiet

    quiet()
    out = Path(config.out)
    if out.exists():
        raise UsageError(f"out={out} exists; choose another folder or delete it")
    check_choice("format", config.format, FORMS)
    check_folder(out)
    if "--dry-run" in flags:
        print(f"would write {out} as {config.format} from {load_aligned(words[0]).checkpoint}")
        return 0
    print(export(words[0], out, config.format))
    return 0
