"""``arvideo convert``: a trained policy, a checkpoint or a LoRA in the form another program reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import ConfigError, check_choice, load
from arvideo_rl.outputs import check_file, check_folder


@dataclass
class ConvertConfig:
    """What ``arvideo convert`` reads."""

    out: str = ""  # folder or file to write; must not exist
    format: str = ""  # default: official for a file, else diffusers; the table above has what there is
    merge: str = ""  # runs: RUN:SCALE, add what another run on the same base changed, times SCALE
    lora: str = ""  # checkpoints: merge this LoRA into the weights first
    lora_alpha: float | None = None  # of a LoRA file that does not say it
    container: str = ""  # checkpoints that hold several: generator, generator_ema or model
    dtype: str = ""  # checkpoints: float32, bfloat16 or float16; default: as they are


FORMATS = {"run": ("diffusers", "peft", "merged", "official"), "checkpoint": ("official", "diffusers"),
           "LoRA": ("diffusers", "peft")}  # fmt: skip


def help_text() -> str:
    """Text of --help."""
    return f"""arvideo convert SOURCE out=FOLDER_OR_FILE [key=value ...]

Writes weights for other programs and checks them by reading them back. SOURCE and format= may be:

  RUN, RUN@best, RUN@STEP or a checkpoint of a run
    diffusers    adapter for load_lora_weights and load_lora_adapter
    peft         adapter for PeftModel.from_pretrained
    merged       a generator of its own, for generator=
    official     the whole transformer in Wan's own names, for the projects' repositories
  a Wan checkpoint (.pt, .safetensors or diffusers folder; a path, or owner/name/file on the Hub)
    official     one .safetensors or .pt file in Wan's own names
    diffusers    a folder for WanTransformer3DModel.from_pretrained
  a LoRA (file or PEFT folder)
    diffusers, peft

Examples:

  arvideo convert runs/mine out=mine_lora
  arvideo convert runs/mine@best out=mine_merged format=merged
  arvideo convert runs/semi merge=runs/on:0.8 out=both    (a generator: base + semi + 0.8 on)
  arvideo convert self_forcing_dmd.pt out=self_forcing container=generator_ema dtype=bfloat16
  arvideo convert longlive_base.pt lora=lora.pt out=longlive.safetensors

keys and defaults
{keys(ConvertConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Write and check."""
    if len(words) != 1:
        raise UsageError("convert takes one source, then key=value; e.g. arvideo convert runs/x out=x_lora")
    config, source = load(ConvertConfig, None, items), words[0]
    if not config.out:
        raise UsageError("say where to write: out=FOLDER, or out=FILE.safetensors")
    from arvideo_rl.generators.hub import locate
    from arvideo_rl.generators.wan import DTYPES
    from arvideo_rl.training.aligned import add_policy, load_aligned, run_of, split
    from arvideo_rl.training.convert import convert_lora, convert_weights, is_lora
    from arvideo_rl.training.export import export, parse_merge
    from arvideo_rl.training.launch import quiet

    quiet()
    out = Path(config.out)
    if out.exists():
        raise UsageError(f"out={out} exists; choose another or delete it")
    if out.suffix in (".safetensors", ".pt"):
        check_file(out)
    else:
        check_folder(out)
    kind = "run"
    if not run_of(split(source)[0]):
        try:
            kind = "LoRA" if is_lora(locate(source)) else "checkpoint"
        except ValueError as error:
            raise ConfigError(f"{source!r} is not an alignment run, nor weights to convert: {error}") from None
    usual = "merged" if config.merge else "diffusers"
    form = config.format or ("official" if out.suffix in (".safetensors", ".pt") else usual)
    if form not in FORMATS[kind]:
        raise ConfigError(f"format={form}: a {kind} can be written as {', '.join(FORMATS[kind])}")
    unread = [k for k in ("lora", "container", "dtype") if kind != "checkpoint" and getattr(config, k)]
    if unread or (config.lora_alpha is not None and kind == "run"):
        raise ConfigError(f"{(unread or ['lora_alpha'])[0]}= is not for a {kind}")
    if config.merge and kind != "run":
        raise ConfigError(f"merge= is not for a {kind}")
    if config.dtype:
        check_choice("dtype", config.dtype, DTYPES)
    if "--dry-run" in flags:
        if kind == "run":
            policy = load_aligned(source)
            found = str(policy.checkpoint)
            if config.merge:
                other, scale = parse_merge(config.merge)
                found += f" + {scale:g} * {add_policy(policy, other, scale)}"
        else:
            found = f"the {kind} {source}"
        print(f"would write {out} as {form} from {found}")
    elif kind == "run":
        print(export(source, out, form, config.merge))
    elif kind == "LoRA":
        print(convert_lora(source, out, form, config.lora_alpha))
    else:
        print(convert_weights(source, out, form, container=config.container or None, dtype=DTYPES.get(config.dtype),
                              lora=config.lora or None, lora_alpha=config.lora_alpha))  # fmt: skip
    return 0
