"""``arvideo report``: one HTML file about one or several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import check_ranges, load
from arvideo_rl.outputs import check_file


@dataclass
class ReportConfig:
    """What ``arvideo report`` reads."""

    out: str = ""  # the file to write; default: report.html in the first run's directory
    file_mib: float = 4.0  # a larger video is left out, and named
    total_mib: float = 40.0  # of all that is embedded


def help_text() -> str:
    """Text of --help."""
    return f"""arvideo report RUN [RUN ...] [key=value ...]

Writes one HTML file that opens without a network: did it learn, was anything sacrificed, the held-out comparison,
before/after videos with their scores, the curves, configuration and environment. Several runs are laid over each other,
and what differs between them is named. A run that is still going can be looked at too. Examples:

  arvideo report runs/quickstart
  arvideo report runs/seed0 runs/seed1 out=seeds.html

keys and defaults
{keys(ReportConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Read, draw, write."""
    if not words:
        raise UsageError("report takes one run directory or more; e.g. arvideo report runs/quickstart")
    config = load(ReportConfig, None, items)
    check_ranges(config, {"file_mib": "[0, inf)", "total_mib": "[0, inf)"})
    from arvideo_rl.report.data import find, labels, read_run
    from arvideo_rl.report.embed import Budget
    from arvideo_rl.report.page import page
    from arvideo_rl.training.rundir import write_text

    folders = find(words)
    out = Path(config.out) if config.out else folders[0] / "report.html"
    check_file(out, suffixes=(".html", ".htm"))
    if "--dry-run" in flags:
        print(f"would write {out} about {', '.join(map(str, folders))}")
        return 0
    runs = [read_run(folder, label) for folder, label in zip(folders, labels(folders))]
    budget = Budget(config.file_mib, config.total_mib)
    write_text(out, page(runs, budget))
    print(f"wrote {out} ({out.stat().st_size / 2**20:.1f} MiB, {budget.used / 2**20:.1f} of them videos and pictures)")
    return 0
