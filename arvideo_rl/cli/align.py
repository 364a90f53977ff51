"""``arvideo align``."""

from __future__ import annotations

from rich.table import Table

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import find, load
from arvideo_rl.progress import console


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.settings import AlignConfig

    return f"""arvideo align <config.yaml | preset> [key=value ...] [--dry-run]

Aligns a generator: prompts -> rollouts -> rewards -> advantages -> update; ends with a held-out comparison.
The same command continues a run that was interrupted. Example:

  arvideo align align/tiny_nft name=mine iterations=40 rewards.actions.args.score=accuracy

keys and defaults
{keys(AlignConfig)}"""


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
