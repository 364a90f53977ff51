"""What is to be scored: files, folders, globs and manifests become a list of tasks, one a clip.

What is wrong with one clip (a row of a manifest, the note beside a file) is kept with its task and becomes its row;
what is wrong with the whole (no such folder, a manifest without a path column) is a ConfigError before anything runs.
"""

from __future__ import annotations

import csv
import glob
import hashlib
import io
import json
import os
import re
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from arvideo_rl.config import ConfigError
from arvideo_rl.decoding import VIDEOS, frame_rate, images_of, is_animated
from arvideo_rl.training.prompts import Spoken, spoken_actions
from rewards.remote.wire import plain

MANIFESTS = (".csv", ".jsonl")
OWN = (
    "path",
    "file",
    "prompt",
    "actions",
    "fps",
    "pair",
)  # columns of a manifest that are read; the rest is passed through
Problem = tuple[str, str]  # (a reason that can be counted, a sentence)


@dataclass(frozen=True)
class Task:
    """One clip to score."""

    path: Path
    pair: str  # what it is called within its set; the same name in another set is its partner
    prompt: str | None = None
    actions: list[Spoken] | None = None  # one a frame from the second on, as they were said
    fps: float | None = None  # replaces what the file states
    given: dict[str, Any] = field(default_factory=dict)  # passed through to the row
    problem: Problem | None = None  # why it cannot be scored
    row: str = ""  # where a manifest names it
    against: bool = False  # belongs to the set that is compared with

    @property
    def name(self) -> str:
        """The path as it can be shown and written: names need not be UTF-8 nor one line."""
        text = os.fsencode(self.path).decode("utf-8", "backslashreplace")
        return re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\x{ord(m[0]):02x}", text)

    @property
    def key(self) -> str:
        """Fingerprint of the clip and all that is said of it; another one when the file has changed."""
        try:
            seen = os.stat(self.path)
            version = [seen.st_size, seen.st_mtime_ns]
        except OSError:
            version = []
        told = [self.name, self.pair, self.prompt, self.actions, self.fps, self.given, self.problem, self.against]
        return hashlib.sha256(json.dumps([told, version], default=str).encode()).hexdigest()[:20]


def collect(words: list[str], *, prompt: str = "", actions: str = "", fps: float | None = None) -> list[Task]:
    """The tasks of files, folders, globs and manifests, in this order; folders sorted by name. ``prompt``, ``actions``
    and ``fps`` hold for all and come before what a manifest says, which comes before the note beside a file."""
    known = spoken_actions(actions) if actions else None
    out: dict[str, Task] = {}
    for task in (t for word in words for t in _tasks_of(word)):
        said = _with_note(task)
        task = replace(said, prompt=prompt or said.prompt, actions=known or said.actions, fps=fps or said.fps)
        same = json.dumps([task.name, task.prompt, task.actions, task.fps, task.given, task.problem], default=str)
        if same not in out:
            out[same] = task
        elif task.row:  # one a manifest repeats is a mistake to tell; a file that two words name is not
            first = out[same].row or out[same].name
            out[f"{task.row} {same}"] = replace(task, problem=("input:duplicate", f"{task.row} repeats {first}"))
    if not out:
        raise ConfigError(f"no video files in {', '.join(words)}; known endings: {', '.join(VIDEOS)}")
    return list(out.values())


def check_names(tasks: list[Task], key: str) -> None:
    """ConfigError when two clips of one set are called the same; ``key`` is what needs names."""
    seen: dict[str, Task] = {}
    for task in tasks:
        if task.pair in seen and not task.problem:
            both = f"{seen[task.pair].name} and {task.name}"
            raise ConfigError(f"{key}: {both} would both be called {task.pair!r}; score them apart, or give them names "
                              "in the column 'pair' of a manifest")  # fmt: skip
        seen[task.pair] = task


def check_pairs(ours: list[Task], theirs: list[Task]) -> None:
    """ConfigError when two sets have no partners, or a name stands twice in one of them."""
    check_names(ours, "compare")
    check_names(theirs, "compare")
    if not {t.pair for t in ours} & {t.pair for t in theirs}:
        first = f"{ours[0].pair!r} and {theirs[0].pair!r}"
        raise ConfigError(f"compare: no two files have the same name (the first are {first}); partners have one name")


def _tasks_of(word: str) -> list[Task]:
    path = Path(word)
    if not os.path.lexists(path) and glob.has_magic(word):
        found = sorted(glob.glob(word, recursive=True))
        if not found:
            raise ConfigError(f"nothing matches {word!r}")
        return [t for name in map(Path, found) for t in (_walk(name) if name.is_dir() else _one(name)) if _plays(name)]
    if not os.path.lexists(path):
        raise ConfigError(f"no file or folder at {word!r}")
    if os.path.isdir(path):
        return _walk(path)
    if path.suffix.lower() in MANIFESTS:
        return _manifest(path)
    if path.suffix.lower() == ".json" and os.path.isfile(path.with_suffix("")):
        return []  # the note beside a video, named by a shell that expanded *
    return _one(path)


def _one(path: Path) -> list[Task]:
    return [Task(path, path.stem)]


def _plays(path: Path) -> bool:
    """Whether a name found in passing is taken for a video."""
    suffix = path.suffix.lower()
    return suffix in VIDEOS or os.path.isdir(path) or (suffix == ".webp" and is_animated(path))


def _walk(top: Path) -> list[Task]:
    """Videos in a folder and below, sorted; a folder of two or more images and no video is a clip. Hidden names are
    left out, links to folders not followed."""
    out: list[Task] = []

    def refused(error: OSError) -> None:
        where = Path(error.filename)
        out.append(Task(where, str(where), problem=("system:not_readable", f"cannot look into it: {error.strerror}")))

    for folder, inner, names in os.walk(top, onerror=refused):
        inner[:] = sorted(n for n in inner if not n.startswith("."))
        here = Path(folder)
        shown = [here / n for n in sorted(names) if not n.startswith(".")]
        videos = [p for p in shown if _plays(p)]
        if not videos and len(images_of(here)) > 1:
            videos = [here]
        for path in videos:
            name = path.relative_to(top)
            out.append(Task(path, str(name.with_suffix("")) if path != top else path.name))
    return out


def _manifest(path: Path) -> list[Task]:
    """A task for each row of a .csv or .jsonl manifest. Paths are looked for beside the manifest, then where the
    command runs."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path} is not UTF-8 (line {line}, byte {error.start}); save it as UTF-8") from None
    rows = _csv_rows(path, text) if path.suffix.lower() == ".csv" else _json_rows(text)
    out = []
    for number, row in rows:
        where = f"line {number} of {path.name}"
        if isinstance(row, str):
            out.append(Task(path, where, row=where, problem=("input:row", f"{where} {row}")))
        else:
            out.append(_task_of_row(path, where, row))
    if not out:
        raise ConfigError(f"{path} holds no row")
    return out


def _csv_rows(path: Path, text: str) -> list[tuple[int, dict[str, Any] | str]]:
    """(line, row or what is wrong with it) of a table with a head; cells are parted by comma, semicolon or tab."""
    head = text.lstrip().split("\n", 1)[0]
    mark = max(",;\t", key=head.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=mark, strict=True)
    out: list[tuple[int, dict[str, Any] | str]] = []
    try:
        columns = [(c or "").strip() for c in reader.fieldnames or ()]
        if not {"path", "file"} & set(columns):
            raise ConfigError(f"{path} has no column 'path'; its first line is {head.strip()[:60]!r}")
        if twice := {c for c in columns if columns.count(c) > 1}:
            raise ConfigError(f"{path} has the column {sorted(twice)[0]!r} twice")
        reader.fieldnames = columns
        for row in reader:
            if None in row or None in row.values():
                count = sum(v is not None for v in row.values()) + len(row.get(None) or []) - (None in row)  # type: ignore[call-overload]
                out.append(
                    (reader.line_num, f"has {count} cells for {len(columns)} columns; quote cells with {mark!r}")
                )
            else:
                out.append((reader.line_num, {k: v for k, v in row.items() if v != ""}))
    except csv.Error as error:
        raise ConfigError(f"{path} line {reader.line_num} cannot be read as CSV: {error}") from None
    return out


def _json_rows(text: str) -> list[tuple[int, dict[str, Any] | str]]:
    """(line, row or what is wrong with it) of one JSON object a line."""
    out: list[tuple[int, dict[str, Any] | str]] = []
    for number, line in enumerate(re.split(r"\r\n|\n|\r", text), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            out.append((number, f"is not JSON ({error})"))
        else:
            out.append((number, row if isinstance(row, dict) else "is not a JSON object"))
    return out


def _task_of_row(manifest: Path, where: str, row: dict[str, Any]) -> Task:
    """One row of a manifest; what is wrong with it becomes the task's problem."""
    given = plain({k: v for k, v in row.items() if k not in OWN})  # Python writes NaN, which is no JSON
    named = row.get("path", row.get("file"))
    if not isinstance(named, str) or not named.strip() or "\0" in named:
        return Task(manifest, where, given=given, row=where, problem=("input:path", f"{where} names no path"))
    path = manifest.parent / named
    if not os.path.lexists(path) and os.path.lexists(named):
        path = Path(named)
    task = Task(path, str(row.get("pair", Path(named).stem)), given=given, row=where)
    try:
        return _told(task, row)
    except _Wrong as error:
        return replace(task, problem=(f"input:{error.key}", f"{where}: {error}"))


def _with_note(task: Task) -> Task:
    """The task with what FILE.json beside the video says (prompt, actions), where nothing else was said."""
    note = task.path.with_name(task.path.name + ".json") if task.path.name else task.path
    if task.problem or not os.path.isfile(note):  # not Path.is_file, which raises for very long names
        return task
    try:
        known = json.loads(note.read_bytes().decode("utf-8-sig"))
        if not isinstance(known, dict):
            what = f'must hold an object with "prompt" and "actions", not a {type(known).__name__}'
            return replace(task, problem=("input:note", f"{note} {what}"))
    except (OSError, ValueError, RecursionError) as error:
        return replace(task, problem=("input:note", f"{note} is not readable JSON ({error}); mend or delete it"))
    try:
        told = _told(Task(task.path, ""), {k: known[k] for k in ("prompt", "actions") if k in known})
    except _Wrong as error:
        return replace(task, problem=("input:note", f"{note}: {error}"))
    return replace(task, prompt=task.prompt or told.prompt, actions=task.actions or told.actions)


class _Wrong(ValueError):
    """What is said of a clip will not do; ``key`` is which of it."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def _told(task: Task, row: dict[str, Any]) -> Task:
    """The task with prompt, actions and fps of ``row``; raises _Wrong."""
    prompt, actions, fps = (row.get(k) for k in ("prompt", "actions", "fps"))
    if prompt is not None and not isinstance(prompt, str):
        raise _Wrong("prompt", f"prompt {prompt!r} is not text")
    listed = None
    if actions not in (None, "", []):
        try:  # a table may hold them as names, or as the list that JSON would have
            listed = spoken_actions(
                json.loads(actions) if isinstance(actions, str) and actions.lstrip().startswith("[") else actions
            )
        except ValueError as error:
            raise _Wrong("actions", str(error)) from None
    rate = None
    if fps is not None:
        try:
            rate = float(frame_rate(Fraction(fps) if isinstance(fps, str) else fps))
        except (ValueError, ZeroDivisionError, OverflowError):
            raise _Wrong("fps", f"fps {fps!r} is no positive number of frames a second") from None
    return replace(task, prompt=prompt or None, actions=listed, fps=rate)
