"""How far a run is, read from its directory alone; nothing is loaded and nothing is changed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from arvideo_rl.config import ConfigError
from arvideo_rl.training.checkpoints import Damaged, best, checkpoints, read_state

COUNTS = {"align": ("iterations", "iteration"), "distill": ("steps", "step")}  # key of the total, of a row
SHOWN = 6  # metrics


def status(folder: Path) -> dict[str, str]:
    """Facts about run ``folder`` as text by name. ConfigError when it is no run."""
    try:
        config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        kind = json.loads((folder / "identity.json").read_text(encoding="utf-8"))["kind"]
        total_key, row_key = COUNTS[kind]
        total = config[total_key]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        raise ConfigError(f"{folder} is not a run: it needs a readable config.yaml and identity.json") from None
    good, bad = [], []
    for path in checkpoints(folder):
        try:
            good.append((path, read_state(path)))
        except Damaged as error:
            bad.append(str(error))
    saved = good[-1][1]["step"] if good else 0
    row = _last_row(folder / "metrics.jsonl")
    out = {"kind": kind}
    finished = _finished(folder, kind) >= total
    if finished:
        out["state"] = f"finished, {total} of {total} {row_key}s"
    else:
        out["state"] = f"not finished, {saved} of {total} {row_key}s saved"
        if row:
            age = time.time() - (folder / "metrics.jsonl").stat().st_mtime
            out["state"] += f"; {row[row_key] + 1} done, the last {_ago(age)} ago"
    if row:
        values = [f"{k} {v:.4g}" for k, v in row.items() if k != row_key and isinstance(v, float)]
        out["last metrics"] = ", ".join(values[:SHOWN])
    if good:
        out["newest checkpoint"] = _named(*good[-1])
    if (top := best(folder)) is not None:
        out["best checkpoint"] = _named(top, read_state(top))
    if bad:
        out["damaged"] = "; ".join(bad)
    half = sorted(p.name for p in (folder / "checkpoints").glob("*.tmp"))
    if half:
        out["half-written"] = f"{', '.join(half)} (being written, or left by a run that died; ignored)"
    command = f"arvideo {kind} {folder / 'config.yaml'}"
    if not finished:
        out["continue with"] = command
    elif kind == "align":
        out["extend with"] = f"{command} iterations={2 * total}"
    return out


def _finished(folder: Path, kind: str) -> float:
    """Iterations after which the run was concluded; 0 when it was not."""
    if kind == "distill":
        return float("inf") if (folder / "generator" / "generator.json").is_file() else 0
    path = folder / "summary.json"
    return json.loads(path.read_text(encoding="utf-8"))["iterations"] if path.is_file() else 0


def _last_row(path: Path) -> dict[str, Any]:
    """The last whole line of a JSON-lines file; the one after it may be under way."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        lines = [x for x in file.read().split(b"\n")[:-1] if x.strip()]
    return json.loads(lines[-1]) if lines else {}


def _named(path: Path, state: dict[str, Any]) -> str:
    score = state.get("score")
    return path.name + (f", score {score:.4g}" if score is not None else "")


def _ago(seconds: float) -> str:
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
