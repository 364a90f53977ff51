"""``arvideo score``: score video files with one reward. First form: files, one reward, a table or a CSV."""

from __future__ import annotations

from pathlib import Path

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.scoring import ScoreConfig

    return f"""arvideo score FILE|FOLDER ... [key=value ...]

Scores each video. Prompt and actions come from FILE.json beside a file (arvideo generate writes it) or from the command
line. A file that cannot be scored gets a row with the reason; the exit code is 1 when none could be. Examples:

  arvideo score ball.mp4
  arvideo score videos/ args.score=accuracy out=scores.csv
  arvideo score clip.mp4 actions='forward*17'

keys and defaults
{keys(ScoreConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Score every file; returns 1 when none could be scored."""
    if not words:
        raise UsageError("score takes video files or folders, then key=value; e.g. arvideo score ball.mp4")
    from rich.progress import track
    from rich.table import Table

    from arvideo_rl.progress import console, hidden
    from arvideo_rl.training import scoring

    config = load(scoring.ScoreConfig, None, items)
    reward, files = scoring.prepare(config, words)
    if "--dry-run" in flags:
        print(f"would score {len(files)} files with {reward.name}: {', '.join(map(str, files[:5]))}")
        return 0
    bar = track(files, "scoring", disable=hidden(), transient=True)
    rows = [scoring.score_file(path, reward, config) for path in bar]
    names = list(dict.fromkeys(k for r in rows for k in r if k not in ("file", "value", "reason")))
    table = Table("file", "value", *names, "reason")
    for r in rows:
        table.add_row(r["file"], *(f"{r[k]:.4f}" if k in r else "" for k in ("value", *names)), r.get("reason", ""))
    console().print(table)
    good = [r["value"] for r in rows if "value" in r]
    if len(rows) > 1 and good:
        print(f"mean {sum(good) / len(good):.4f} over {len(good)} of {len(rows)} files")
    if config.out:
        scoring.write_csv(Path(config.out), rows)
        print(f"wrote {config.out}")
    return 0 if good else 1
