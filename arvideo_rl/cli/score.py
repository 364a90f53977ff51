"""``arvideo score``: score video files with one reward. First form: files, one reward, a table or a CSV."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load


@dataclass
class ScoreConfig:
    """What ``arvideo score`` reads."""

    reward: str = "inverse_dynamics"  # a short name (arvideo rewards list) or module:attribute
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward, e.g. args.score=accuracy
    actions: str = ""  # commanded actions for every file, e.g. 'turn left*17'; else from FILE.json beside it
    prompt: str = ""  # prompt for every file; else from FILE.json
    fps: float | None = None  # replaces what the files state
    out: str = ""  # also write rows here, as .csv


def help_text() -> str:
    """Text of --help."""
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
    config = load(ScoreConfig, None, items)
    if config.out and Path(config.out).suffix != ".csv":
        raise UsageError(f"out={config.out}: rows are written as .csv")
    from rich.progress import track
    from rich.table import Table

    from arvideo_rl.progress import console, hidden
    from rewards import registry

    reward = registry.build(config.reward, **config.args)
    files = find_files(words)
    if "--dry-run" in flags:
        print(f"would score {len(files)} files with {reward.name}: {', '.join(map(str, files[:5]))}")
        return 0
    rows = [score_file(path, reward, config) for path in track(files, "scoring", disable=hidden(), transient=True)]
    names = list(dict.fromkeys(k for r in rows for k in r if k not in ("file", "value", "reason")))
    table = Table("file", "value", *names, "reason")
    for r in rows:
        table.add_row(r["file"], *(f"{r[k]:.4f}" if k in r else "" for k in ("value", *names)), r.get("reason", ""))
    console().print(table)
    good = [r["value"] for r in rows if "value" in r]
    if len(rows) > 1 and good:
        print(f"mean {sum(good) / len(good):.4f} over {len(good)} of {len(rows)} files")
    if config.out:
        _write_csv(Path(config.out), ["file", "value", *names, "reason"], rows)
    return 0 if good else 1


def find_files(words: list[str]) -> list[Path]:
    """Video files named directly or found in folders, sorted; ValueError for a path that does not exist."""
    from arvideo_rl.media import VIDEOS

    out: list[Path] = []
    for word in words:
        path = Path(word)
        if not path.exists():
            raise ValueError(f"no file or folder at {word!r}")
        out += sorted(p for p in path.rglob("*") if p.suffix.lower() in VIDEOS) if path.is_dir() else [path]
    if not out:
        raise ValueError(f"no video files in {', '.join(words)}; known endings: {', '.join(VIDEOS)}")
    return out


def score_file(path: Path, reward: Any, config: ScoreConfig) -> dict[str, Any]:
    """One row: file, value and components, or file and the reason why not."""
    import torch

    from arvideo_rl.media import read_video
    from arvideo_rl.training.prompts import parse_actions
    from rewards.contract import Clips, score

    row: dict[str, Any] = {"file": str(path)}
    try:
        pixels, fps = read_video(path, config.fps)
        beside = path.with_name(path.name + ".json")
        known = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
        given = config.actions or known.get("actions")
        actions = torch.tensor(parse_actions(given, len(pixels)))[None, 1:] if given else None
        prompt = config.prompt or known.get("prompt")
        scores = score(reward, Clips(pixels[None], fps, [prompt] if prompt else None, actions))
    except (ValueError, OSError) as error:
        return {**row, "reason": " ".join(str(error).split())}
    if scores.reasons[0]:  # type: ignore[index]
        return {**row, "reason": scores.reasons[0]}  # type: ignore[index]
    parts = {k: float(v[0]) for k, v in scores.components.items() if v.ndim == 1}
    return {**row, "value": float(scores.value[0]), **parts}


def _write_csv(path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    draft.replace(path)
    print(f"wrote {path}")
