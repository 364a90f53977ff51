"""Read a run directory into plain data. What is missing or damaged becomes a note for the page, never a guess."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MARKS = ("identity.json", "metrics.jsonl", "summary.json")  # any of these makes a folder a run directory


@dataclass(frozen=True)
class Clip:
    """One video with what is known of it. ``scores``: column ("before", "after", "scores") -> name -> value."""

    file: Path
    prompt: str = ""
    actions: str = ""
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass
class RunData:
    """Everything a report says of one run."""

    folder: Path
    label: str  # short and different from the other runs'
    kind: str = "align"  # or distill
    config: dict[str, Any] = field(default_factory=dict)
    given: str | None = None  # the file the user gave, with its overrides as comments
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)  # of metrics.jsonl, by iteration, each once
    written: float | None = None  # when the last row (or the folder's mark) was written, seconds since 1970
    events: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] | None = None
    clips: list[Clip] = field(default_factory=list)  # before and after
    sheet: Path | None = None  # a picture of all their frames
    samples: list[tuple[int, list[Clip]]] = field(default_factory=list)  # (iteration, videos) during the run
    notes: list[str] = field(default_factory=list)

    @property
    def clock(self) -> str:
        """The key that counts: iterations of an alignment, steps of a distillation."""
        return "step" if self.kind == "distill" else "iteration"


def find(words: list[str]) -> list[Path]:
    """The run directories that were asked for; ValueError that says which of them is none, and what is near."""
    found: list[Path] = []
    for word in words:
        folder = Path(word)
        if not folder.exists():
            known = [str(p) for p in _runs_in(folder.parent)][:8]
            raise ValueError(f"{word}: no such directory" + (f"; runs there: {', '.join(known)}" if known else ""))
        if not folder.is_dir():
            raise ValueError(f"{word} is a file; give the run directory, e.g. {folder.parent}")
        if not any((folder / mark).is_file() for mark in MARKS):
            inside = ", ".join(str(p) for p in _runs_in(folder)[:8])
            way = f"it holds runs: {inside}" if inside else f"it has none of {', '.join(MARKS)}"
            raise ValueError(f"{word} is not a run directory; {way}")
        if folder.resolve() in [f.resolve() for f in found]:
            raise ValueError(f"{word} is given twice; name each run once")
        found.append(folder)
    return found


def _runs_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if p.is_dir() and any((p / mark).is_file() for mark in MARKS))


def labels(folders: list[Path]) -> list[str]:
    """The folders' names, with as many parents as it takes to tell them apart."""
    parts = [f.resolve().parts for f in folders]
    depth = 1
    while len({p[-depth:] for p in parts}) < len(parts):
        depth += 1
    return [os.path.join(*p[-depth:]) for p in parts]


def read_run(folder: Path, label: str) -> RunData:
    """Read what there is."""
    run = RunData(folder, label)
    run.config = _mapping(run, "config.yaml", yaml.safe_load, yaml.YAMLError)
    run.environment = _mapping(run, "environment.json", json.loads, ValueError)
    identity = _mapping(run, "identity.json", json.loads, ValueError)
    rows, stray = _lines(run, "metrics.jsonl")
    run.kind = str(identity.get("kind") or ("distill" if rows and "step" in rows[0] else "align"))
    counted = {row[run.clock]: row for row in rows if type(row.get(run.clock)) is int}  # a later line replaces
    run.rows = [counted[i] for i in sorted(counted)]
    if stray := stray + sum(type(row.get(run.clock)) is not int for row in rows):
        run.notes.append(f"metrics.jsonl: {stray} unreadable {'line is' if stray == 1 else 'lines are'} left out.")
    run.events = [e for e in _lines(run, "events.jsonl")[0] if e.get("text") or e.get("kind")]
    run.summary = _mapping(run, "summary.json", json.loads, ValueError) or None
    if (folder / "config_given.yaml").is_file():
        run.given = (folder / "config_given.yaml").read_text(encoding="utf-8", errors="replace")
    newest = [p.stat().st_mtime for p in (folder / "metrics.jsonl", folder / "identity.json") if p.exists()]
    run.written = max(newest, default=None)
    run.clips = _clips(run, folder / "videos", "videos.json")
    sheet = folder / "videos" / "before_after.png"
    run.sheet = sheet if sheet.is_file() else None
    for inner in sorted((folder / "samples").glob("iteration-*")):
        number = inner.name.removeprefix("iteration-")
        if number.isdecimal() and inner.is_dir():
            run.samples.append((int(number), _clips(run, inner, "samples.json")))
    return run


def _mapping(run: RunData, name: str, parse, damage: type[Exception]) -> dict[str, Any]:
    """A file that holds one mapping; {} and a note when it does not."""
    path = run.folder / name
    if not path.is_file():
        return {}
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except (damage, UnicodeDecodeError):
        data = None
    if not isinstance(data, dict):
        run.notes.append(f"{name} cannot be read and is left out.")
        return {}
    return data


def _lines(run: RunData, name: str) -> tuple[list[dict[str, Any]], int]:
    """The objects of a JSON-lines file, and how many whole lines hold none. A last line cut short is noted."""
    path = run.folder / name
    if not path.is_file():
        return [], 0
    found, stray = [], 0
    for line in path.read_bytes().decode("utf-8", errors="replace").splitlines(keepends=True):
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if isinstance(data, dict):
            found.append(data)
        elif not line.endswith("\n"):
            run.notes.append(f"The last line of {name} is cut short and left out.")
        elif line.strip():
            stray += 1
    return found, stray


def _clips(run: RunData, folder: Path, name: str) -> list[Clip]:
    """The videos a folder's JSON names, in its order; without that file all its .mp4, which then have no scores."""
    where = f"{folder.relative_to(run.folder)}/{name}"
    if not folder.is_dir():
        return []
    try:
        items = json.loads((folder / name).read_text(encoding="utf-8"))
        clips = [_clip(folder, item) for item in items]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        clips = [Clip(p) for p in sorted(folder.glob("*.mp4"))]
        if clips:
            run.notes.append(f"{where} is missing or cannot be read: these videos are shown without prompt and scores.")
        return clips
    if missing := [c.file.name for c in clips if not c.file.is_file()]:
        run.notes.append(f"{where} names videos that are not there: {', '.join(missing)}.")
    return clips


def _clip(folder: Path, item: dict[str, Any]) -> Clip:
    columns = {str(k): v for k, v in item.items() if isinstance(v, dict)}
    file = folder / Path(str(item["file"])).name  # never outside the folder
    return Clip(file, str(item.get("prompt", "")), str(item.get("actions", "")), columns)
