"""The run directory: configuration, environment, metrics. Everything is written aside, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml

from arvideo_rl.training.checkpoints import checkpoints

PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "numpy", "omegaconf")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; OSError leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:  # a full disk names no file of its own
        with suppress(OSError):
            draft.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_text(path: Path, text: str) -> None:
    """Write UTF-8; see :func:`write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: Path, data: Any) -> None:
    """Write JSON, indented; see :func:`write_text`."""
    write_text(path, json.dumps(data, indent=2) + "\n")


def environment() -> dict[str, Any]:
    """Versions, platform and git revision, for the record of a run."""
    here = Path(__file__).resolve().parent

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "processes": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "packages": {name: installed(name) for name in PACKAGES},
        "git": git("rev-parse", "HEAD"),
        "git_dirty": bool(git("status", "--porcelain")),
    }


def identity(config: dict[str, Any], free: tuple[str, ...]) -> str:
    """Fingerprint of a resolved configuration without the keys in ``free``, which may change when a run resumes."""
    kept = {k: v for k, v in config.items() if k not in free}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def look(folder: Path, kind: str, resolved: dict[str, Any], free: tuple[str, ...]) -> bool:
    """Whether a run of this configuration was begun here; changes nothing. ValueError when the folder belongs to
    another kind of run or another configuration."""
    stamp = folder / "identity.json"
    if not stamp.exists():
        if checkpoints(folder):
            raise ValueError(f"{folder} holds checkpoints of unknown origin; choose another name= or out=")
        return False
    theirs = read_json(stamp, "kind", "identity")
    if theirs["kind"] != kind:
        raise ValueError(f"{folder} belongs to a run of {theirs['kind']!r}, not {kind!r}; choose another name= or out=")
    if theirs["identity"] != identity(resolved, free):
        odd = _difference(folder, resolved, free)
        raise ValueError(f"{folder} holds a run with another configuration{odd}; choose another name= or out=, "
                         "or delete it")  # fmt: skip
    return True


def _difference(folder: Path, resolved: dict[str, Any], free: tuple[str, ...]) -> str:
    """The first keys whose values differ from those of the run in ``folder``, in brackets; empty where unknown."""
    try:
        theirs = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return ""
    if not isinstance(theirs, dict):
        return ""
    plain = json.loads(json.dumps(resolved, default=str))
    there, here = (flat({k: v for k, v in x.items() if k not in free}) for x in (theirs, plain))
    odd = [k for k in here if k in there and here[k] != there[k]]
    shown = ", ".join(f"{k}: {there[k]} there, {here[k]} here" for k in odd[:3])
    if not odd and "prompt_file" in here:
        return " (what is in the prompt file has changed)"
    return f" ({shown}{', ...' if len(odd) > 3 else ''})" if odd else ""


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted names of all that is no object."""
    out: dict[str, Any] = {}
    for k, v in data.items():
        out |= flat(v, f"{prefix}{k}.") if isinstance(v, dict) else {f"{prefix}{k}": v}
    return out


def read_json(path: Path, *keys: str) -> dict[str, Any]:
    """An object of a run's directory that has ``keys``; ValueError names a file that is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        for key in keys:
            data[key]
    except (ValueError, KeyError, TypeError):
        way_out = "choose another name= or out=, or delete it with its run"
        raise ValueError(f"{path} is damaged; {way_out}") from None
    return data


def claim(folder: Path, kind: str, resolved: dict[str, Any], free: tuple[str, ...]) -> None:
    """Mark the folder as this run's."""
    write_json(folder / "identity.json", {"kind": kind, "identity": identity(resolved, free)})


def start(folder: Path, given: str | None, resolved: dict[str, Any]) -> None:
    """Write the configuration as given and as resolved, and the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    if given and not (folder / "config_given.yaml").exists():  # a run is also continued from its own config.yaml
        write_text(folder / "config_given.yaml", given)
    write_text(folder / "config.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    write_json(folder / "environment.json", environment())


def rows(path: Path, key: str, resume_at: int) -> TextIO:
    """Open a JSON-lines file to append to, without rows whose ``key`` is ``resume_at`` or more (they will come again)
    and without a torn last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = []
        for number, line in enumerate(lines, 1):
            try:
                kept += [line] if line.endswith("\n") and json.loads(line)[key] < resume_at else []
            except (ValueError, KeyError, TypeError):
                raise ValueError(f"{path} line {number} is damaged; delete that line to continue the run") from None
        write_text(path, "".join(kept))
    return path.open("a", encoding="utf-8")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, without a torn last line; none when there is no file."""
    if not path.exists():
        return []
    return [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines(keepends=True) if x.endswith("\n")]


class Events:
    """Appends to events.jsonl what a user should know of a run, one object a line: ``iteration`` (how many were done),
    ``kind`` (alarm or note), ``text`` and what else is given. On resume, later ones are dropped; they come again."""

    def __init__(self, folder: Path, resume_at: int = 0) -> None:
        self._file = rows(folder / "events.jsonl", "iteration", resume_at + 1)
        self.told = read_rows(folder / "events.jsonl")

    def tell(self, iteration: int, kind: str, text: str, **more: Any) -> None:
        """Write one event to the disk."""
        self.told.append({"iteration": iteration, "kind": kind, "text": text, **more})
        self._file.write(json.dumps(self.told[-1]) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Metrics:
    """Appends one JSON object a line to metrics.jsonl and the same numbers to TensorBoard. On resume, lines from the
    resumed iteration on are dropped first, so that no iteration stands twice."""

    def __init__(self, folder: Path, resume_at: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        self._file = rows(folder / "metrics.jsonl", "iteration", resume_at)
        # TensorBoard reads files in the order of their names, which begin with the second they were made in
        made = [int(p.name.split(".")[3]) for p in (folder / "tensorboard").glob("events.out.tfevents.*")]
        time.sleep(min(1.0, max(0.0, max(made, default=0) + 1 - time.time())))
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_at)

    def write(self, iteration: int, values: dict[str, float]) -> None:
        """Log one iteration."""
        self._file.write(json.dumps({"iteration": iteration, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, iteration)

    def sync(self) -> None:
        """Bring all rows to the disk. Called before a checkpoint, which says that they are there."""
        os.fsync(self._file.fileno())
        self._board.flush()

    def close(self) -> None:
        """Flush everything."""
        self._file.close()
        self._board.close()
