"""``arvideo score``: score video files with one or more rewards, or compare two sets of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

if TYPE_CHECKING:
    from arvideo_rl.scoring.run import Result
    from arvideo_rl.scoring.settings import Job

MEMORY_KEYS = "gib, batch or workers"
SHOWN = 20  # rows of the table on the screen; with more files the worst of them
WORST = 5


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.scoring.settings import ScoreConfig

    return f"""arvideo score FILE|FOLDER|GLOB|MANIFEST ... [config.yaml] [key=value ...]

Scores each video with one or more rewards. A manifest is a .csv or .jsonl with path and, if known, prompt, actions and
fps; other columns are passed through to the rows. Else prompt and actions come from FILE.json beside a file (arvideo
generate writes it) or from the command line. A file that cannot be scored gets a row with the reason; the exit code is
1 when none could be. With out= a stopped command goes on where it was when given again; a finished one begins anew and
replaces its rows. Examples:

  arvideo score ball.mp4
  arvideo score videos/ args.score=accuracy out=scores.csv
  arvideo score clip.mp4 actions='forward*17'
  arvideo score videos/ reward=inverse_dynamics,naive_colour out=scores.jsonl
  arvideo score videos/ reward=sharpness,epipolar maps=maps/
  arvideo score after/ compare=before/
  arvideo score samples.csv reward=epipolar pairs=pairs.jsonl pairing.gap=0.1

keys and defaults
{keys(ScoreConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Score every file; returns 1 when none could be scored."""
    recipes = [w for w in words if w.lower().endswith((".yaml", ".yml"))]
    files = [w for w in words if w not in recipes]
    if not files or len(recipes) > 1:
        raise UsageError("score takes video files, folders or a manifest, then key=value; e.g. arvideo score ball.mp4")
    from arvideo_rl.scoring import run as scoring
    from arvideo_rl.scoring.settings import ScoreConfig, prepare

    job = prepare(load(ScoreConfig, recipes[0] if recipes else None, items), files)
    if "--dry-run" in flags:
        names = ", ".join(t.name for t in job.tasks[:5]) + (", ..." if len(job.tasks) > 5 else "")
        print(f"would score {len(job.tasks)} files with {', '.join(job.rewards)} on {job.device}: {names}")
        return 0
    result = _with_bar(job, scoring.run)
    show(job, result)
    return 0 if any(r["value"] is not None for r in result.rows) else 1


def _with_bar(job: Job, work: Any) -> Result:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from arvideo_rl.progress import hidden

    columns = (TextColumn("scoring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"))
    with Progress(*columns, TimeRemainingColumn(), disable=hidden(), transient=True) as bar:
        shown = bar.add_task("scoring", total=len(job.tasks), start=False)

        def tell(clips: int) -> None:
            if bar.tasks[0].started:
                bar.advance(shown, clips)
            else:  # what an earlier command left took no time, and must not count for the time left
                bar.reset(shown, completed=clips)

        return work(job, tell)


def show(job: Job, result: Result) -> None:
    """Print the table, the summary of each reward and where the rows are."""
    _table(job, result)
    if result.resumed:
        print(f"{result.resumed} of {len(job.tasks)} files were scored before the command was stopped")
    for name in job.rewards:
        found = result.summary[name]
        label = f"{name}: " if len(job.rewards) > 1 else ""
        if "paired" in found:
            for which in ("own", "compare"):
                _numbers(f"{label}{which}: ", found[which])
            _paired(label, found["paired"])
        elif found["files"] > 1 or found["invalid"]:
            _numbers(label, found)
        if job.config.maps:
            _pictures(label, [r for r in result.rows if r["reward"] == name])
    if job.config.pairs:
        _preferences(result, job.config.pairs)
    took = result.seconds
    if took["clock"] > 2 and took["decoding"] + took["scoring"] > 0:
        hidden = 1 - min(1.0, took["waiting"] / took["decoding"]) if took["decoding"] else 1.0
        more = "; more workers would help" if took["waiting"] > took["clock"] / 2 else ""
        print(
            f"{took['clock']:.1f} s: {took['scoring']:.1f} s of scoring, {took['waiting']:.1f} s of waiting for files;"
            f" {hidden:.0%} of {took['decoding']:.1f} s of decoding went on beside that{more}"
        )
    if job.config.out:
        from pathlib import Path

        from arvideo_rl.scoring.tables import summary_path

        print(f"wrote {job.config.out} and {summary_path(Path(job.config.out))}")


def _table(job: Job, result: Result) -> None:
    """All rows, or with many files the worst of each reward."""
    from rich.table import Table
    from rich.text import Text

    from arvideo_rl.progress import console

    rows, title = result.rows, None
    if len(rows) > SHOWN:
        good = [r for r in rows if r["value"] is not None]
        worst = {n: sorted((r for r in good if r["reward"] == n), key=lambda r: r["value"]) for n in job.rewards}
        rows, title = [r for n in worst for r in worst[n][:WORST]], f"the {WORST} lowest"
    names = list(dict.fromkeys(k for r in rows for k in r["components"]))
    several = ["reward"] if len(job.rewards) > 1 else []
    table = Table("file", *several, "value", *names, "reason", title=title)
    for column in table.columns[: 1 + len(several)]:
        column.overflow = "fold"  # a name that is cut short says nothing
    for r in rows:
        numbers = {"value": r["value"], **r["components"]}
        cells = [f"{numbers[k]:.4f}" if numbers.get(k) is not None else "" for k in ("value", *names)]
        why = ": ".join(x for x in (r["reason"], r["detail"]) if x)
        texts = [r["file"], *(r[k] for k in several), *cells, why or r["note"]]
        table.add_row(*(Text(x) for x in texts))  # as text: a name may hold what rich takes for a style
    if rows:
        console().print(table)


def _numbers(label: str, found: dict[str, Any]) -> None:
    files = f"{found['scored']} of {found['files']} files"
    if found["scored"]:
        error = f" +- {found['se']:.4f}" if found["se"] is not None else ""
        spread = ", ".join(f"{k} {found[k]:.4f}" for k in ("min", "q25", "median", "q75", "max"))
        print(f"{label}mean {found['mean']:.4f}{error} over {files}; {spread}")
        if found["scored"] > 1:
            print(f"{label}lowest {found['worst']}, highest {found['best']}")
    else:
        print(f"{label}0 of {found['files']} files could be scored")
    if found["invalid"]:
        print(f"{label}not scored: " + ", ".join(f"{n} {reason}" for reason, n in found["invalid_by_reason"].items()))


def _pictures(label: str, rows: list[dict[str, Any]]) -> None:
    """Where to look: the pictures of the lowest clip, or of one that could not be measured."""
    drawn = [r for r in rows if r["maps"] and not r["maps"].startswith("none")]
    if drawn:
        worst = min(drawn, key=lambda r: (r["value"] is None, r["value"] or 0.0))
        many = f" of {len(drawn)} clips; of the lowest" if len(drawn) > 1 else ""
        print(f"{label}pictures{many}: {worst['maps']}")
    if missing := [r for r in rows if r["maps"].startswith("none")]:
        print(f"{label}no picture of {missing[0]['file']}: {missing[0]['maps'][6:]} ({len(missing)} such)")


def _preferences(result: Result, where: str) -> None:
    """The pairs that were made, and what became of everything else."""
    found = result.summary["pairs"]
    gaps = sorted(pair["gap"] for pair in result.pairs)
    spread = f"; gap {gaps[0]:.4f} to {gaps[-1]:.4f}, median {gaps[len(gaps) // 2]:.4f}" if gaps else ""
    pairs, groups = (f"{found[k]} {k if found[k] != 1 else k[:-1]}" for k in ("pairs", "groups"))
    print(f"{pairs} in {groups} by {found['reward']}{spread}")
    for what in ("clips", "groups"):
        if left := found[f"{what}_left_out"]:
            print(f"{what} left out: " + ", ".join(f"{n} {reason}" for reason, n in left.items()))
    print(f"wrote {where}")


def _paired(label: str, found: dict[str, Any]) -> None:
    left = f"{found['invalid_pairs']} pairs not scored, {found['without_partner']} files without partner"
    if not found["pairs"]:
        print(f"{label}no pair could be scored; {left}")
        return
    error = f" +- {found['se']:.4f} (95 % {found['low']:.4f} to {found['high']:.4f})" if found["se"] is not None else ""
    wins = f"{found['wins']} won, {found['ties']} tied, {found['losses']} lost: {100 * found['win_rate']:.0f} %"
    print(f"{label}own - compare {found['difference']:+.4f}{error} over {found['pairs']} pairs; {wins}; {left}")
