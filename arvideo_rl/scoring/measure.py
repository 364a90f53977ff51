"""One batch of decoded clips through every reward: rows, each a value or the reason why there is none."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arvideo_rl.decoding import Video
from arvideo_rl.media import write_video
from arvideo_rl.scoring.inputs import Problem, Task
from arvideo_rl.scoring.journal import Row
from arvideo_rl.scoring.settings import DTYPES, Job
from arvideo_rl.training.prompts import actions_for
from rewards.contract import Clips, Reward, score

LONGEST = 100  # bytes of a clip's name that go into that of its maps
SMALL = 128  # pixels: maps of clips less than half as high are enlarged
Measured = dict[str, Any]  # value, components, reason and detail of one clip


def score_batch(job: Job, batch: Sequence[tuple[Task, Video | Problem]]) -> list[list[Row]]:
    """Rows of each clip, one a reward. Clips of one size go through a reward together, as many as fit."""
    found: list[dict[str, Measured]] = [{} for _ in batch]
    shapes: dict[tuple[int, ...], list[int]] = {}
    for i, (_, seen) in enumerate(batch):
        if isinstance(seen, Video):
            shapes.setdefault(seen.frames.shape, []).append(i)
        else:
            found[i] = dict.fromkeys(job.rewards, _bad(*seen))
    for shape, members in shapes.items():
        most = max(1, int(job.config.gib * 2**30 / (4 * math.prod(shape))))
        for start in range(0, len(members), most):
            some = members[start : start + most]
            for i, measured in zip(some, _together(job, [batch[i] for i in some])):  # type: ignore[misc]
                found[i] = measured
    return [_rows(job, task, seen, measured) for (task, seen), measured in zip(batch, found)]


def _together(job: Job, clips: list[tuple[Task, Video]]) -> list[dict[str, Measured]]:
    """What each reward says of clips of one size: by clip, then by reward."""
    out: list[dict[str, Measured]] = [{} for _ in clips]
    pixels = torch.stack([torch.from_numpy(video.frames) for _, video in clips]).to(job.device)
    frames = pixels.permute(0, 1, 4, 2, 3).float() / 255
    for name, reward in job.rewards.items():
        ready = []
        for i, (task, _) in enumerate(clips):
            if lacking := _lacking(reward, task, job.config.sample_fps is not None):
                out[i][name] = _bad(*lacking)
            else:
                ready.append(i)
        chosen = frames if len(ready) == len(clips) else frames[ready]
        for i, measured in zip(ready, _measure(job, name, chosen, [clips[i] for i in ready]) if ready else []):
            out[i][name] = measured
    return out


def _lacking(reward: Reward, task: Task, sampled: bool) -> Problem | None:
    """What the reward needs and nobody said of this clip."""
    if "prompts" in reward.needs and task.prompt is None:
        return "input:no_prompt", f"{reward.name} needs a prompt; give prompt=, a manifest or FILE.json beside the file"
    if "actions" in reward.needs and task.actions is None:
        how = "give actions=, a manifest or FILE.json beside the file"
        return "input:no_actions", f"{reward.name} needs actions; {how}"
    if "actions" in reward.needs and sampled:
        return "input:no_actions", "actions are one a frame of the file; leave out sample_fps"
    if "actions" in reward.needs:
        try:
            actions_for(reward, task.actions or [], len(task.actions or []) + 1)
        except ValueError as error:
            return "input:actions", str(error)
    return None


def _measure(job: Job, name: str, frames: Tensor, clips: list[tuple[Task, Video]]) -> list[Measured]:
    """One reward on clips of one size. Where a batch fails each clip is tried alone, so that one does not take the
    others with it."""
    reward = job.rewards[name]
    try:
        with torch.autocast(job.device.type, DTYPES[job.config.dtype], enabled=job.config.dtype != "float32"):
            scores = score(reward, _clips(reward, frames, clips))
    except Exception as error:  # whatever a reward of somebody else raises
        if len(clips) > 1:
            return [_measure(job, name, frames[i : i + 1], clips[i : i + 1])[0] for i in range(len(clips))]
        if _is_memory(error):
            return [_bad("system:out_of_memory", "no memory to score it; lower gib or batch, or set short_side")]
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        return [_bad("system:reward_failed", kind + " ".join(str(error).split()))]
    out = []
    for i, reason in enumerate(scores.reasons):
        if reason is None:
            parts = {k: _finite(float(v[i])) for k, v in scores.components.items() if v.ndim == 1}
            out.append({"value": float(scores.value[i]), "components": parts, "reason": "", "detail": ""})
        else:
            out.append(_bad(reason, ""))
        if job.config.maps and hasattr(reward, "maps"):
            out[-1] |= _draw(job, name, frames[i : i + 1], clips[i : i + 1])
    return out


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _draw(job: Job, name: str, frames: Tensor, clips: list[tuple[Task, Video]]) -> Measured:
    """Write what the reward can show of one clip, also of one that it cannot measure, each map a sheet:
    ``reward.maps(clips)`` gives tensors [1, F, 3, H, W] in [0, 1] by name. Says where they are, or why there are
    none."""
    task = clips[0][0]
    folder = Path(job.config.maps) / "compare" if task.against else Path(job.config.maps)
    start, reward = f"{_file_name(task.pair)}.{_file_name(name)}", job.rewards[name]
    try:
        with torch.no_grad():
            drawn = reward.maps(_clips(reward, frames, clips))  # type: ignore[attr-defined]
        for kind, picture in drawn.items():
            write_video(folder / f"{start}.{kind}.png", picture, 1, max(1, SMALL // frames.shape[-2]))
    except Exception as error:  # pictures are not worth the values
        return {"maps": f"none: {type(error).__name__}: {' '.join(str(error).split())}"}
    return {"maps": str(folder / f"{start}.*.png")}


def _file_name(text: str) -> str:
    """``text`` as a name of a file, of at most LONGEST bytes; another text never has the same."""
    plain = re.sub(r"[^\w.-]+", "_", text)
    short = plain.encode("utf-8", "replace")[-LONGEST:].decode(errors="ignore")
    if short == text:
        return text
    return f"{short}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:6]}"


def _is_memory(error: Exception) -> bool:
    """Whether memory ran out: Python, a GPU, or torch on the CPU (a plain RuntimeError)."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _clips(reward: Reward, frames: Tensor, clips: list[tuple[Task, Video]]) -> Clips:
    """The clips with what the reward needs of them."""
    actions = None
    if "actions" in reward.needs:
        laid = [actions_for(reward, task.actions or [], frames.shape[1]) for task, _ in clips]
        actions = torch.stack(laid).to(frames.device)
    prompts = [task.prompt or "" for task, _ in clips] if "prompts" in reward.needs else None
    fps = torch.tensor([video.fps for _, video in clips], dtype=torch.float64)
    fps = fps if frames.device.type == "mps" else fps.to(frames.device)  # which has no float64
    return Clips(frames, fps, prompts, actions)


def _bad(reason: str, detail: str) -> Measured:
    return {"value": None, "components": {}, "reason": reason, "detail": detail}


def _rows(job: Job, task: Task, seen: Video | Problem, measured: dict[str, Measured]) -> list[Row]:
    """The rows of one clip."""
    size: Row = {"frames": None, "width": None, "height": None, "fps": None, "note": ""}
    if isinstance(seen, Video):
        t, h, w, _ = seen.frames.shape
        size = {"frames": t, "width": w, "height": h, "fps": seen.fps, "note": seen.note}
    told: Row = {"prompt": task.prompt, "given": task.given}
    if job.config.compare:
        told |= {"set": "compare" if task.against else "own", "pair": task.pair}
    if job.config.maps:
        told["maps"] = ""
    return [{"file": task.name, "reward": name, **size, **told, **measured[name]} for name in job.rewards]
