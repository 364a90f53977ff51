"""``arvideo distill``."""

from __future__ import annotations

from arvideo_rl.cli import align
from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import find, load, read

MEMORY_KEYS = "batch, levels, clips or the network"


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.distill import DistillConfig

    return f"""arvideo distill <config.yaml | preset> [key=value ...] [--dry-run]

Renders the embedded world, trains the tiny generator on it and writes it to <out>/generator.
The same command continues an interrupted training. Example:

  arvideo distill distill/tiny out=runs/mine steps=500

A YAML with an objective is a distillation by distribution matching, of a generator that is there: it has the keys of
arvideo align and runs as that does, with a teacher and no reward (beta=0). Example:

  arvideo distill distill/dmd_tiny

keys and defaults
{keys(DistillConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Run or dry-run."""
    if len(words) != 1:
        raise UsageError("distill takes one YAML file or preset, then key=value; e.g. arvideo distill distill/tiny")
    if "objective" in read(find(words[0])):
        return align.run(words, items, flags)
    from arvideo_rl.training import distill
    from arvideo_rl.training.launch import quiet

    quiet()
    config = load(distill.DistillConfig, words[0], items)
    if "--dry-run" in flags:
        from arvideo_rl.cli.align import show

        show(config, distill.plan(config))
        return 0
    print(f"generator written to {distill.run(config)}")
    return 0
