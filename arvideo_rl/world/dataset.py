"""Clips of the world on disk: rendered once per (first seed, count, frames, style), then memory-mapped.

Seeds below HELD_OUT are for training, those from HELD_OUT on for measuring; the two never meet.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from arvideo_rl.progress import hidden
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import Scenes, sample_scenes
from arvideo_rl.world.switch import switched

VERSION = 1  # raise it whenever scenes or rendering change, so that no stale cache is read
HELD_OUT = 1_000_000_000
OTHER = 400_000_000  # from a clip's seed to that of the objects its prompt switches to
SWITCHES = (6, 9, 12)  # frames at which the prompt of a ``switch`` clip changes, taken in turn by seed
SIZE = 32


@dataclass(frozen=True)
class Clips:
    """Rendered clips with their words and actions."""

    pixels: np.ndarray  # [B, T, 3, H, W] uint8, memory-mapped
    captions: tuple[str, ...]
    actions: Tensor  # [B, T] int64
    later: tuple[tuple[int, str], ...] = ()  # per clip the caption that comes into force, and when; empty = none does

    @classmethod
    def join(cls, first: Clips, second: Clips) -> Clips:
        """Both, one after the other (pixels are read into memory)."""
        never = tuple((0, c) for c in (*first.captions, *second.captions))
        n = len(first.captions)
        later = (first.later or never[:n]) + (second.later or never[n:])
        return cls(
            np.concatenate([first.pixels, second.pixels]), first.captions + second.captions,
            torch.cat([first.actions, second.actions]), later,
        )  # fmt: skip

    def captions_at(self, rows: np.ndarray, frame: int) -> list[str]:
        """Captions of ``rows`` in force at ``frame``."""
        later = [self.later[i] if self.later else (0, self.captions[i]) for i in rows]
        return [text if start <= frame else self.captions[i] for i, (start, text) in zip(rows, later)]

    def batch(self, rows: np.ndarray) -> Tensor:
        """Pixels of ``rows`` as float32 [b, T, 3, H, W] in [0, 1]."""
        return torch.from_numpy(self.pixels[np.asarray(rows)]).float() / 255


def cache_dir() -> Path:
    """Where rendered clips are kept: $ARVIDEO_CACHE, else ~/.cache/arvideo-rl."""
    return Path(os.environ.get("ARVIDEO_CACHE", Path.home() / ".cache" / "arvideo-rl"))


def load_clips(first_seed: int, count: int, *, frames: int, style: str = "smooth", progress: bool = False) -> Clips:
    """Clips of the scenes with seeds first_seed .. first_seed + count - 1, rendered now or read from the cache.

    ``style`` is one of the action styles of scenes, or ``switch``: smooth actions and a prompt that changes on the way.
    """
    path = cache_dir() / "world" / f"v{VERSION}-{style}-{frames}f-{first_seed}-{count}.npy"
    seeds = range(first_seed, first_seed + count)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        shape = (count, frames, 3, SIZE, SIZE)
        if (free := shutil.disk_usage(path.parent).free) < (size := math.prod(shape)):  # a full disk kills a memory map
            room = f"{size / 2**20:.0f} MiB of clips do not fit into {free / 2**20:.0f} MiB"
            raise OSError(f"{path.parent}: {room}; free some space or set ARVIDEO_CACHE to another folder")
        try:
            out = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=shape)
            blocks = [seeds[i : i + 8] for i in range(0, count, 8)]
            for i, block in enumerate(track(blocks, "rendering the world", disable=not progress or hidden())):
                out[8 * i : 8 * i + len(block)] = to_uint8(_pixels(block, frames, style))
            out.flush()
            del out
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    try:
        pixels = np.load(path, mmap_mode="r")
    except (ValueError, EOFError):
        raise ValueError(f"rendered clips {path} are damaged; delete the file, they will be rendered again") from None
    if style != "switch":
        scenes = sample_scenes(seeds, frames, style=style)
        return Clips(pixels, scenes.captions, scenes.actions)
    scenes, _ = _switch_scenes(seeds, frames, 0)
    later = tuple((_switch_at(s), _switch_scenes([s], frames, 0)[1].captions[0]) for s in seeds)
    return Clips(pixels, scenes.captions, scenes.actions, later)


def _pixels(seeds: range, frames: int, style: str) -> Tensor:
    """Rendered clips [B, T, 3, H, W] of the scenes named by ``seeds``."""
    if style != "switch":
        return render(sample_scenes(seeds, frames, style=style), SIZE)
    rows = []
    for seed in seeds:
        at = _switch_at(seed)
        before, after = (render(s, SIZE) for s in _switch_scenes([seed], frames, at))
        rows.append(torch.cat([before[:, :at], after[:, at:]], 1))
    return torch.cat(rows)


def _switch_at(seed: int) -> int:
    return SWITCHES[seed % len(SWITCHES)]


def _switch_scenes(seeds, frames: int, at: int) -> tuple[Scenes, Scenes]:
    """Scenes before and after a switch at frame ``at``."""
    first = sample_scenes(seeds, frames)
    return first, switched(first, sample_scenes([s + OTHER for s in seeds], frames), at)


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Pixels in [0, 1] to uint8 of the same shape, clamped and rounded; NaN raises ValueError."""
    if torch.isnan(pixels).any():
        raise ValueError("pixels hold NaN")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
