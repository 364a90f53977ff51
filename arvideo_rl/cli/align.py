"""``arvideo align``."""

from __future__ import annotations

from rich.table import Table

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import find, load
from arvideo_rl.progress import console

MEMORY_KEYS = "update_batch, rollout_batch, held_out.batch or objective.args.levels_per_chunk"


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.objectives.nft import NFT
    from arvideo_rl.training.settings import AlignConfig

    return f"""arvideo align <config.yaml | preset> [key=value ...] [--dry-run]

Aligns a generator: prompts -> rollouts -> rewards -> advantages -> update; ends with a held-out comparison.
The same command continues a run that was interrupted. Example:

  arvideo align align/tiny_nft name=mine iterations=40 rewards.actions.args.score=accuracy
  arvideo align align/tiny_nft rewards.mine.target=my_reward:judge    (function judge of my_reward.py in this directory)
  arvideo align align/tiny_nft prompts.source=prompts.jsonl

Of a prompt file every fifth different text is held out for the comparison; a file of fewer than 10 is trained on whole.
Paths are relative to the directory where the command runs; only base: in a YAML file is relative to that file.

keys and defaults; NAME is a reward's name, of your choice
{keys(AlignConfig)}

objective.args of nft
{keys(NFT, "objective.args.")}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Run or dry-run."""
    if len(words) != 1:
        raise UsageError("align takes one YAML file or preset, then key=value; e.g. arvideo align align/tiny_nft")
    from arvideo_rl.training.launch import align, dry_run, quiet
    from arvideo_rl.training.settings import AlignConfig

    quiet()
    config = load(AlignConfig, words[0], items)
    if "--dry-run" in flags:
        show(config, dry_run(config))
        return 0
    given = find(words[0]).read_text(encoding="utf-8-sig")
    align(config, given + "".join(f"# override: {item}\n" for item in items))
    return 0


def show(config: object, sizes: dict[str, str]) -> None:
    """Print the resolved configuration and what follows from it."""
    import dataclasses

    import yaml

    print(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True), end="")  # type: ignore[call-overload]
    table = Table(show_header=False, title="what follows", title_justify="left")
    for name, value in sizes.items():
        table.add_row(name, value)
    console().print(table)
