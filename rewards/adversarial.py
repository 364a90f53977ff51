"""Changed copies of clips: some that a reward should notice, some that it should not (``CHANGES``).

Frames change and what is said of a clip (prompt, actions, cameras) stays, or the other way round. Sizes are shares of
the image diagonal, so that a change is the same at every resolution. Seeded; clips lie on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rewards import distortions as d
from rewards.contract import Clips

Make = Callable[[Clips, int], Clips | None]  # (clips, seed) -> changed copy; None where the clips do not allow it


@dataclass(frozen=True)
class Change:
    """One way to change clips."""

    about: str  # what it does, in words
    make: Make
    of: str = ""  # what it exchanges, a key of contract.NEEDS: no reward sees it but one that needs that
    harmless: bool = False  # as good as before for most purposes


def _frames(change: Callable[..., Tensor], seeded: bool = False) -> Make:
    """A change of frames [T, 3, H, W] alone; where it draws, clip i is changed with ``seed`` + i."""

    def make(clips: Clips, seed: int) -> Clips | None:
        if clips.frames.shape[1] < 2:
            return None
        changed = [change(clip, seed + i) if seeded else change(clip) for i, clip in enumerate(clips.frames)]
        return replace(clips, frames=torch.stack(changed))

    return make


def _another(items: Sequence[Any]) -> list[int] | None:
    """For each item the index of the next that differs; None when all are equal."""
    count = len(items)
    found = [next((j % count for j in range(i + 1, i + count) if items[j % count] != items[i]), None)
             for i in range(count)]  # fmt: skip
    return None if None in found else found  # type: ignore[return-value]


def wrong_prompt(clips: Clips, seed: int = 0) -> Clips | None:
    """Every clip with the prompt of the next clip that has another."""
    chosen = _another(clips.prompts) if clips.prompts is not None else None
    return None if chosen is None else replace(clips, prompts=[clips.prompts[j] for j in chosen])  # type: ignore[index]


def wrong_actions(clips: Clips, seed: int = 0) -> Clips | None:
    """Every clip with the actions of the next clip that has others."""
    chosen = _another(clips.actions.tolist()) if clips.actions is not None else None
    return None if chosen is None else replace(clips, actions=clips.actions[chosen])  # type: ignore[index]


def wrong_cameras(clips: Clips, seed: int = 0) -> Clips | None:
    """Every clip with the target path of the next clip that has another."""
    chosen = _another(clips.cameras.c2w.tolist()) if clips.cameras is not None else None
    return None if chosen is None else replace(clips, cameras=replace(clips.cameras, c2w=clips.cameras.c2w[chosen]))


def mirror(clips: Clips, seed: int = 0, actions: Sequence[int] = ()) -> Clips:
    """Left and right exchanged, in prompts and cameras too. ``actions``: what each action becomes; without it the copy
    has none."""
    cameras, prompts = clips.cameras, clips.prompts
    if cameras is not None:
        flip = torch.tensor([-1.0, 1, 1, 1])
        k = cameras.intrinsics
        if k is not None:
            k = k.clone()
            k[0, 2] = 1 - k[0, 2]
        cameras = replace(cameras, c2w=flip[:, None] * cameras.c2w * flip, intrinsics=k)
    if prompts is not None:
        sides = {"left": "right", "right": "left", "Left": "Right", "Right": "Left"}
        prompts = [re.sub(rf"\b({'|'.join(sides)})\b", lambda m: sides[m[1]], p) for p in prompts]
    told = torch.tensor(actions)[clips.actions] if clips.actions is not None and len(actions) else None
    return replace(clips, frames=clips.frames.flip(-1), prompts=prompts, actions=told, cameras=cameras)


def half_rate(clips: Clips, seed: int = 0) -> Clips | None:
    """Every second frame, at half the frame rate; without actions, of which two would become one."""
    if clips.frames.shape[1] < 4 or clips.chunk_starts is not None:
        return None
    cameras = replace(clips.cameras, c2w=clips.cameras.c2w[:, ::2]) if clips.cameras is not None else None
    fps = None if clips.fps is None else clips.fps / 2
    return replace(clips, frames=clips.frames[:, ::2].clone(), fps=fps, actions=None, cameras=cameras)


def _blur(share: float) -> Make:
    return _frames(lambda f: d.blur(f, d.diagonals(f, share)))


def _noise(std: float) -> Make:
    return _frames(partial(d.add_noise, std=std), seeded=True)


CHANGES = {
    "frozen": Change("the first frame throughout", _frames(d.freeze)),
    "half_frozen": Change("the second half stands still", _frames(d.freeze_half)),
    "darkened": Change("brightness x 0.3", _frames(lambda f: 0.3 * f)),
    "saturated": Change("saturation x 2.5", _frames(lambda f: d.saturate(f, 2.5))),
    "blurred": Change("Gaussian blur, 2 % of the diagonal", _blur(0.02)),
    "texture_free": Change("Gaussian blur, 5 % of the diagonal", _blur(0.05)),
    "noisy": Change("normal noise, 0.1", _noise(0.1)),
    "flickering": Change("brightness of each frame x 1 +- 0.15", _frames(d.flicker, seeded=True)),
    "jittered": Change("each frame shifted by about 2 % of the diagonal",
                       _frames(lambda f, seed: d.jitter(f, seed, d.diagonals(f, 0.02)), seeded=True)),
    "melted": Change("content flows away, by about 3 % of the diagonal at the end",
                     _frames(lambda f, seed: d.melt(f, seed, d.diagonals(f, 0.03)), seeded=True)),
    "shuffled": Change("no frame at its place", _frames(d.shuffle, seeded=True)),
    "reversed": Change("backwards in time", _frames(lambda f: f.flip(0))),
    "looped": Change("the first quarter, four times", _frames(d.loop)),
    "wrong_prompt": Change("another clip's prompt", wrong_prompt, of="prompts"),
    "wrong_actions": Change("another clip's actions", wrong_actions, of="actions"),
    "wrong_cameras": Change("another clip's target path", wrong_cameras, of="cameras"),
    "grainy": Change("normal noise, 0.01", _noise(0.01), harmless=True),
    "resized": Change("half the size and back", _frames(d.halve), harmless=True),
    "mirrored": Change("left and right exchanged", mirror, harmless=True),
    "half_rate": Change("every second frame at half the rate", half_rate, harmless=True),
}  # fmt: skip
