"""Score video files with one reward: a row per file, with its value and components or the reason why there is none."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arvideo_rl.config import ConfigError, check_ranges
from arvideo_rl.media import VIDEOS, read_video
from arvideo_rl.outputs import check_file
from arvideo_rl.training.prompts import list_actions, parse_actions
from arvideo_rl.training.rundir import write_bytes
from rewards import registry
from rewards.contract import Clips, Reward, score


@dataclass
class ScoreConfig:
    """What ``arvideo score`` reads."""

    reward: str = "inverse_dynamics"  # a short name (arvideo rewards list) or module:attribute
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward, e.g. args.score=accuracy
    actions: str = ""  # commanded actions for every file, e.g. 'turn left*17'; else from FILE.json beside it
    prompt: str = ""  # prompt for every file; else from FILE.json
    fps: float | None = None  # replaces what the files state
    out: str = ""  # also write rows here, as .csv


def prepare(config: ScoreConfig, words: list[str]) -> tuple[Reward, list[Path]]:
    """(the reward, loaded; the files); ConfigError or ValueError before anything is scored."""
    check_ranges(config, {"fps": "(0, inf)"})
    if config.out:
        check_file(Path(config.out), suffixes=(".csv",))
    list_actions(config.actions)
    files = find_files(words)
    reward = registry.build(config.reward, **config.args)
    registry.prepare(reward)
    return reward, files


def find_files(words: list[str]) -> list[Path]:
    """Video files named directly or found in folders, sorted; ConfigError for a path that does not exist."""
    out: list[Path] = []
    for word in words:
        path = Path(word)
        if not path.exists():
            raise ConfigError(f"no file or folder at {word!r}")
        out += sorted(p for p in path.rglob("*") if p.suffix.lower() in VIDEOS) if path.is_dir() else [path]
    if not out:
        raise ConfigError(f"no video files in {', '.join(words)}; known endings: {', '.join(VIDEOS)}")
    return out


def score_file(path: Path, reward: Reward, config: ScoreConfig) -> dict[str, Any]:
    """One row: file, value and components, or file and the reason why not."""
    row: dict[str, Any] = {"file": str(path)}
    try:
        pixels, fps = read_video(path, config.fps)
        known = beside(path)
        given = config.actions or known.get("actions")
        actions = torch.tensor(parse_actions(given, len(pixels)))[None, 1:] if given else None
        prompt = config.prompt or known.get("prompt")
        scores = score(reward, Clips(pixels[None], fps, [prompt] if prompt else None, actions))
    except (ValueError, OSError) as error:
        return {**row, "reason": " ".join(str(error).split())}
    reason = scores.reasons[0]
    if reason:
        return {**row, "reason": reason}
    parts = {k: float(v[0]) for k, v in scores.components.items() if v.ndim == 1}
    return {**row, "value": float(scores.value.mean()), **parts}


def beside(path: Path) -> dict[str, Any]:
    """What FILE.json beside video ``path`` says of it (prompt, actions); empty without one. ValueError names it."""
    note = path.with_name(path.name + ".json")
    if not note.is_file():
        return {}
    try:
        known = json.loads(note.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{note} is not readable JSON ({error}); mend or delete it") from None
    if not isinstance(known, dict):
        raise ValueError(f'{note} must hold an object with "prompt" and "actions", not a {type(known).__name__}')
    if not isinstance(known.get("prompt", ""), str):
        raise ValueError(f"{note}: prompt {known['prompt']!r} is not text")
    try:
        list_actions(known.get("actions", []))
    except ValueError as error:
        raise ValueError(f"{note}: {error}") from None
    return known


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows, with a column for every component any of them has."""
    names = list(dict.fromkeys(k for r in rows for k in r if k not in ("file", "value", "reason")))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["file", "value", *names, "reason"])
    writer.writeheader()
    writer.writerows(rows)
    write_bytes(path, text.getvalue().encode())
