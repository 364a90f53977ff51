"""What is scored so far, kept beside the output while the command runs, so that it goes on where it was stopped.

A file of one JSON object a line: first the settings, then the rows as they are finished. Rows of one batch are written
together and synced; a batch whose last row is not marked as last was cut short and is done again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from arvideo_rl.config import ConfigError

Row = dict[str, Any]
VERSION = 1


def place(out: Path) -> Path:
    """Where the journal of ``out`` lies."""
    return out.with_name(out.name + ".partial")


class Journal:
    """Rows written beside ``out``. ``rows`` are those that an earlier command left, in the order they were written.

    Raises ConfigError when they were made with other ``settings``, or when another process writes there, and OSError
    that names ``out`` when writing fails.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out, self.path = out, place(out)
        settings = json.loads(json.dumps(settings, default=str))
        self.rows, whole = _read(self.path, settings, out) if self.path.exists() else ([], 0)
        out.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("r+b" if self.path.exists() else "w+b")
        _lock(self.file.fileno(), self.path)
        self.file.truncate(whole)
        self.file.seek(whole)
        self.empty = whole == 0
        if self.empty:
            self._write([{"arvideo score": VERSION, "settings": settings}])

    def add(self, rows: list[Row]) -> None:
        """Append the rows of one batch, so that they outlive this process and the machine's power."""
        self._write([*rows[:-1], {**rows[-1], "last": True}])
        self.empty = False

    def _write(self, lines: list[Row]) -> None:
        try:
            self.file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
            self.file.flush()
            os.fsync(self.file.fileno())
        except OSError as error:  # a full disk names no file of its own
            if self.empty:
                self.remove()
            raise OSError(error.errno, error.strerror, str(self.out)) from None

    def remove(self) -> None:
        """Delete it: the rows are where they belong."""
        self.path.unlink(missing_ok=True)
        self.file.close()

    def close(self) -> None:
        """Leave it for the next command."""
        self.file.close()


def _read(path: Path, settings: dict[str, Any], out: Path) -> tuple[list[Row], int]:
    """The rows of whole batches, and how many bytes they and the settings take."""
    way_out = f"delete {path} or choose another out"
    data = path.read_bytes()
    begin = json.dumps({"arvideo score": VERSION}).encode()[:-1]
    if data.rstrip(b"\0")[: len(begin)] != begin[: len(data.rstrip(b"\0"))]:
        raise ConfigError(f"{path} was not begun by this version of arvideo score; {way_out}")
    rows: list[Row] = []
    batch: list[Row] = []
    whole = at = 0
    for line in data.splitlines(keepends=True):
        at += len(line)
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(row, dict):
            break
        if not whole:
            theirs = row["settings"]
            if odd := [k for k in settings if theirs.get(k) != settings[k]]:
                were = "; ".join(f"{k} was {json.dumps(theirs.get(k))}, is {json.dumps(settings[k])}" for k in odd)
                raise ConfigError(f"{out} was begun with other settings ({were}); {way_out}")
            whole = at
            continue
        batch.append(row)
        if row.pop("last", False):
            rows += batch
            batch, whole = [], at
    return rows, whole


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no such thing on Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"{path} is being written by another arvideo score; wait or choose another out") from None
