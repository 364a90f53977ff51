"""``arvideo status``: how far runs are and how to continue them."""

from __future__ import annotations

from pathlib import Path

from arvideo_rl.cli.main import UsageError


def help_text() -> str:
    """Text of --help."""
    return """arvideo status RUN [RUN ...]

Says of each run directory: its kind, how far it is, the last metrics, the newest and the best checkpoint, what is
damaged, and the command that continues it. Only reads. Example:

  arvideo status runs/quickstart"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Print one table a run."""
    if not words or items:
        raise UsageError("status takes run directories and nothing else; e.g. arvideo status runs/quickstart")
    from rich.table import Table

    from arvideo_rl.progress import console
    from arvideo_rl.training.status import status

    for word in words:
        table = Table(title=word, title_justify="left", show_header=False)
        for name, value in status(Path(word)).items():
            table.add_row(name, value)
        console().print(table)
    return 0
