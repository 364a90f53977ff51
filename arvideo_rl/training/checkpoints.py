"""Checkpoints: one format, complete or not there, checked when read. docs/checkpoints.md describes the files.

A checkpoint is a folder ``checkpoints/step-000010`` of a run. It is written under a temporary name and renamed, and
``state.json``, which is written last, holds the size and SHA-256 of the other files and of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
TENSORS, OPTIMIZER, STATE = "tensors.safetensors", "optimizer.pt", "state.json"
NAME = re.compile(r"step-\d{6,}")
Say = Callable[[str], None]


class Damaged(ValueError):
    """A checkpoint that cannot be used; the message is one line with its path and what is wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint held."""

    path: Path
    tensors: dict[str, Tensor]
    optimizer: Any  # a state dict or a list of them
    state: dict[str, Any]  # step, score, base and what the run added


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    optimizer: Any,
    state: dict[str, Any],
    *,
    base: dict[str, Any] | None = None,
    score: float | None = None,
    keep_last: int | None = None,
) -> Path:
    """Write checkpoints/step-<step> of run ``folder``, then leave the newest ``keep_last`` (None: all) and the one with
    the highest ``score``. ``base`` says what the tensors belong to and is compared when they are loaded. A score that
    is not finite counts as none."""
    final = folder / "checkpoints" / f"step-{step:06d}"
    score = score if score is not None and math.isfinite(score) else None
    with aside(final) as draft:
        save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, draft / TENSORS)
        torch.save(optimizer, draft / OPTIMIZER)
        files = {n: {"bytes": (draft / n).stat().st_size, "sha256": digest(draft / n)} for n in (TENSORS, OPTIMIZER)}
        data = {"format": FORMAT, "step": step, "score": score, "base": base, **state, "files": files}
        text = json.dumps({**data, "sha256": _checksum(data)}, indent=2)
        (draft / STATE).write_text(text + "\n", encoding="utf-8")
    _prune(folder, keep_last)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of run ``folder``, oldest first. What was being written when a run died has another name and is not
    among them."""
    found = (folder / "checkpoints").iterdir() if (folder / "checkpoints").is_dir() else ()
    return sorted((p for p in found if NAME.fullmatch(p.name) and p.is_dir()), key=_step)


def read_state(path: Path) -> dict[str, Any]:
    """``state.json`` of a checkpoint, checked; Damaged when it or a file it names is missing or has another size."""
    try:
        data = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        raise Damaged(f"checkpoint {path} is incomplete: it has no {STATE}") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"checkpoint {path} is damaged: {STATE} cannot be read ({_line(error)})") from None
    if data.get("format", FORMAT) != FORMAT:
        raise Damaged(f"checkpoint {path} has format {data['format']!r}; this version reads {FORMAT}")
    told = data.pop("sha256", None)
    if (told or "format" in data) and told != _checksum(data):
        raise Damaged(f"checkpoint {path} is damaged: {STATE} does not match its own checksum")
    for name, file in data.get("files", {}).items():  # those written before there was a format name none
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size != file["bytes"]:
            is_now = "is missing" if size is None else f"has {size} bytes instead of {file['bytes']}"
            raise Damaged(f"checkpoint {path} is damaged: {name} {is_now}")
    return data


def read_tensors(path: Path, state: dict[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a checkpoint whose names begin with ``prefix``, after comparing the file's checksum."""
    _compare(path, TENSORS, state)
    try:
        with safe_open(path / TENSORS, "pt") as file:
            return {k: file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}  # noqa: SIM118
    except Exception as error:  # safetensors has its own kinds
        raise Damaged(f"checkpoint {path} is damaged: {TENSORS} cannot be read ({_line(error)})") from None


def load_checkpoint(path: Path) -> Checkpoint:
    """Everything in a checkpoint folder; Damaged when any of it is not what was written."""
    state = read_state(path)
    tensors = read_tensors(path, state)
    _compare(path, OPTIMIZER, state)
    try:
        optimizer = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
    except Exception as error:  # pickle and zip raise many kinds
        raise Damaged(f"checkpoint {path} is damaged: {OPTIMIZER} cannot be read ({_line(error)})") from None
    return Checkpoint(path, tensors, optimizer, state)


def newest(folder: Path, read: Callable[[Path], Any], say: Say) -> Any:
    """``read`` of the newest checkpoint of run ``folder`` that is whole, or None where there is no checkpoint at all.
    Damaged ones are told to ``say`` and passed over; Damaged when that leaves none, because starting over must be the
    user's decision."""
    found = checkpoints(folder)
    for path in reversed(found):
        try:
            return read(path)
        except Damaged as error:
            say(f"{error}; trying the one before")
    if found:
        raise Damaged(
            f"none of the {len(found)} checkpoints of {folder} can be used; bring one back, or delete "
            f"{folder / 'checkpoints'} to start over"
        )
    return None


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest score, the earliest of equals; None when none has a score."""
    scored = [(s["score"], -_step(p), p) for p, s in _whole(folder) if s.get("score") is not None]
    return max(scored)[2] if scored else None


def pick(folder: Path, which: str) -> Path:
    """The checkpoint of run ``folder`` called ``best`` or by the number of its step."""
    known = checkpoints(folder)
    if which == "best":
        path = best(folder)
        if path is None:
            raise ValueError(f"no checkpoint of {folder} has a score, so none is the best; name one by its step")
        return path
    path = next((p for p in known if which.isdecimal() and _step(p) == int(which)), None)
    if path is None:
        steps = ", ".join(str(_step(p)) for p in known) or "none"
        raise ValueError(f"{folder} has no checkpoint {which!r}; choose newest, best or one of the steps {steps}")
    return path


def check_base(path: Path, state: dict[str, Any], mine: dict[str, Any], where: str) -> None:
    """ValueError when a checkpoint was made on another base than ``mine``, which comes from ``where``."""
    theirs = state.get("base") or {}  # none in checkpoints written before there was a format
    for key in mine if theirs else ():
        if theirs.get(key) != mine[key]:
            raise ValueError(
                f"checkpoint {path} does not belong to {where}: {key} was {_short(theirs.get(key))} when it was saved "
                f"and is {_short(mine[key])} now"
            )


def tidy(folder: Path, newest_used: Path | None, keep_last: int | None) -> None:
    """Before run ``folder`` goes on from ``newest_used``: remove what was left half-written or too much, and set aside
    as *.damaged what is newer, so that it counts for nothing when the run comes by there again."""
    root = folder / "checkpoints"
    for path in list(root.glob("*.tmp")):
        shutil.rmtree(path)
    for path in checkpoints(folder):
        if newest_used is None or _step(path) > _step(newest_used):
            grave = path.with_name(path.name + ".damaged")
            shutil.rmtree(grave, ignore_errors=True)
            path.rename(grave)
    _prune(folder, keep_last)


@contextmanager
def aside(final: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``final`` when the block ends well, and is gone when it does not. Everything is
    on the disk before the rename, so that a folder of that name is complete, also after a power cut."""
    draft = final.with_name(final.name + ".tmp")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in sorted(draft.rglob("*"), reverse=True):
            if path.is_file():
                path.chmod(draft.stat().st_mode & 0o666)  # safetensors writes for its owner alone
            sync(path)
        sync(draft)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    before = final.with_name(final.name + ".before.tmp")
    shutil.rmtree(before, ignore_errors=True)
    if final.exists():
        final.rename(before)
    draft.rename(final)
    sync(final.parent)
    shutil.rmtree(before, ignore_errors=True)


def sync(path: Path) -> None:
    """Wait until a file or a folder's list of names is on the disk; not every system can do that for folders."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        if not path.is_dir():
            raise


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            found.update(block)
    return found.hexdigest()


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over names, shapes, types and values, whatever the order or device."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()


def _prune(folder: Path, keep_last: int | None) -> None:
    if keep_last is None:
        return
    kept = {p for p, _ in _whole(folder)[-keep_last:]} | {best(folder)}
    for path in checkpoints(folder):
        if path not in kept:
            doomed = path.with_name(path.name + ".tmp")  # a checkpoint that is half removed must not bear its name
            shutil.rmtree(doomed, ignore_errors=True)
            path.rename(doomed)
            shutil.rmtree(doomed)


def _whole(folder: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Checkpoints with their states, oldest first, without those that are damaged at first sight."""
    found = []
    for path in checkpoints(folder):
        try:
            found.append((path, read_state(path)))
        except Damaged:
            continue
    return found


def _compare(path: Path, name: str, state: dict[str, Any]) -> None:
    try:
        same = "files" not in state or digest(path / name) == state["files"][name]["sha256"]
    except OSError as error:
        raise Damaged(f"checkpoint {path} is damaged: {name} cannot be read ({_line(error)})") from None
    if not same:
        raise Damaged(f"checkpoint {path} is damaged: {name} does not match its checksum")


def _checksum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _short(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 80 else text[:12] + "..."
