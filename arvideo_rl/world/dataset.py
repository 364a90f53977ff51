"""Clips of the world on disk: rendered once per (first seed, count, frames, style), then memory-mapped.

Seeds below HELD_OUT are for training, those from HELD_OUT on for measuring; the two never meet.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from arvideo_rl.progress import hidden
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import Scenes, sample_scenes

VERSION = 1  # raise it whenever scenes or rendering change, so that no stale cache is read
HELD_OUT = 1_000_000_000
SIZE = 32


@dataclass(frozen=True)
class Clips:
    """Rendered clips with their words and actions."""

    pixels: np.ndarray  # [B, T, 3, H, W] uint8, memory-mapped
    captions: tuple[str, ...]
    actions: Tensor  # [B, T] int64

    def batch(self, rows: np.ndarray) -> Tensor:
        """Pixels of ``rows`` as float32 [b, T, 3, H, W] in [0, 1]."""
        return torch.from_numpy(self.pixels[np.asarray(rows)]).float() / 255


def cache_dir() -> Path:
    """Where rendered clips are kept: $ARVIDEO_CACHE, else ~/.cache/arvideo-rl."""
    return Path(os.environ.get("ARVIDEO_CACHE", Path.home() / ".cache" / "arvideo-rl"))


def load_clips(first_seed: int, count: int, *, frames: int, style: str = "smooth", progress: bool = False) -> Clips:
    """Clips of the scenes with seeds first_seed .. first_seed + count - 1, rendered now or read from the cache."""
    path = cache_dir() / "world" / f"v{VERSION}-{style}-{frames}f-{first_seed}-{count}.npy"
    seeds = range(first_seed, first_seed + count)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}.tmp")
        shape = (count, frames, 3, SIZE, SIZE)
        try:
            out = np.lib.format.open_memmap(draft, mode="w+", dtype=np.uint8, shape=shape)
            blocks = [seeds[i : i + 8] for i in range(0, count, 8)]
            for i, block in enumerate(track(blocks, "rendering the world", disable=not progress or hidden())):
                out[8 * i : 8 * i + len(block)] = to_uint8(render(sample_scenes(block, frames, style=style), SIZE))
            out.flush()
            del out
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    scenes: Scenes = sample_scenes(seeds, frames, style=style)
    return Clips(np.load(path, mmap_mode="r"), scenes.captions, scenes.actions)


def to_uint8(pixels: Tensor) -> np.ndarray:
    """Pixels in [0, 1] to uint8 of the same shape, clamped and rounded; NaN raises ValueError."""
    if torch.isnan(pixels).any():
        raise ValueError("pixels hold NaN")
    return (pixels.clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
