"""What can honestly be said of a run in a sentence, and the commands that repeat or continue it."""

from __future__ import annotations

import math
import shlex
import statistics
import time
from pathlib import Path
from typing import Any

from arvideo_rl.report.data import RunData

PATIENCE = 120.0  # seconds without a new row after which a run counts as stopped, or 5 of its iterations if longer


def done(run: RunData) -> int:
    """Iterations (steps) that have been finished."""
    return run.rows[-1][run.clock] + 1 if run.rows else 0


def planned(run: RunData) -> int | None:
    """Iterations (steps) the configuration asks for."""
    number = run.config.get("steps" if run.kind == "distill" else "iterations")
    return number if isinstance(number, int) else None


def status(run: RunData, now: float | None = None) -> dict[str, str]:
    """``badge`` (a word or two), ``tone`` (good, bad or open) and ``text`` (one or two sentences)."""
    if run.summary and isinstance(run.summary.get("sentence"), str):
        told = _told(run.summary)
        measured = run.summary.get("iterations")
        if isinstance(measured, int) and done(run) > measured:
            told["text"] += f" That was measured after iteration {measured}; {_progress(run, now)[1]}"
        return told
    badge, text = _progress(run, now)
    if run.kind == "distill":
        text += " A distillation ends with a generator and no held-out comparison; the curves are what there is."
    elif run.summary:
        text += " summary.json holds no sentence."
    else:
        text += " There is no held-out comparison, so whether it learned is not known."
    return {"badge": badge, "tone": "open", "text": text}


def _told(summary: dict[str, Any]) -> dict[str, str]:
    learned, kept = summary.get("learned"), summary.get("nothing_sacrificed")
    if not isinstance(learned, bool) or not isinstance(kept, bool):
        return {"badge": "compared", "tone": "open", "text": summary["sentence"]}
    badge = ("learned" if learned else "no gain shown") + ("" if kept else ", something lost")
    tone = "bad" if not kept else "good" if learned else "open"
    return {"badge": badge, "tone": tone, "text": summary["sentence"]}


def _progress(run: RunData, now: float | None) -> tuple[str, str]:
    """(badge, sentence) of a run that has not said how it ended."""
    at, goal, word = done(run), planned(run), run.clock
    where = f"{word} {at:,}" + (f" of {goal:,}" if goal is not None else "")
    if goal is not None and at >= goal > 0:
        if run.kind == "distill":
            return "trained", f"It trained all {goal:,} steps."
        return "not compared", f"It trained all {goal:,} {word}s, but the comparison that ends a run is missing."
    silent = (time.time() if now is None else now) - run.written if run.written is not None else math.inf
    if silent < max(PATIENCE, 5 * _pace(run)):
        return "running", f"It is still running, at {where} (last written {silent:.0f} s before this page was made)."
    last = run.events[-1] if run.events else {}
    why = f" The last event: {last['text']}" if last.get("kind") not in (None, "alarm") and last.get("text") else ""
    if not run.rows:
        return "not started", f"It stopped before its first {word} was finished.{why}"
    return "stopped", f"It stopped before its end, interrupted or crashed, at {where}.{why}"


def _pace(run: RunData) -> float:
    """Seconds an iteration takes, 0 if not known."""
    if run.kind == "distill":
        clock = [row["seconds"] for row in run.rows[-50:] if _finite(row.get("seconds"))]
        return max(0.0, (clock[-1] - clock[0]) / (len(clock) - 1)) if len(clock) > 1 else 0.0
    spent = [sum(v for k, v in row.items() if k.startswith("seconds/") and _finite(v)) for row in run.rows]
    return statistics.median(spent) if spent else 0.0


def _finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def commands(run: RunData) -> list[tuple[str, str]]:
    """(what it does, command) to repeat the run beside itself and to continue it; empty without a configuration."""
    if not run.config or run.kind not in ("align", "distill"):
        return []
    config, folder = shlex.quote(str(run.folder / "config.yaml")), run.folder
    at, goal = done(run), planned(run) or 0
    if run.kind == "distill":
        again = f"arvideo distill {config} {shlex.quote(f'out={folder}_again')}"
        place = "" if _same(run.config.get("out"), folder) else f" {shlex.quote(f'out={folder}')}"
        left = [("Continue it", f"arvideo distill {config}{place}")] if at < goal else []
        return [("Repeat it under another name", again), *left]
    again = f"arvideo align {config} {shlex.quote(f'name={folder.resolve().name}_again')}"
    place = ""
    if not _same(Path(str(run.config.get("out"))) / str(run.config.get("name")), folder):  # it was moved or copied
        place = "".join(f" {shlex.quote(x)}" for x in (f"out={folder.parent}", f"name={folder.name}"))
    more = f" iterations={goal + max(1, goal // 2)}" if run.summary and at >= goal else ""
    what = "Continue it with more iterations" if more else "Continue it"
    return [("Repeat it under another name", again), (what, f"arvideo align {config}{place}{more}")]


def _same(told: object, folder: Path) -> bool:
    return isinstance(told, (str, Path)) and Path(told).resolve() == folder.resolve()
