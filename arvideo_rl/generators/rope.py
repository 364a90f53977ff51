"""Rotary positions over (frame, row, column) without a table, so a stream may run for ever.

Angles are computed in float64 and rotation happens in complex64: only the angles need the precision
(methods: Wan2.1, interleaved pairs, theta 10000, head dim D split as D - 4*(D//6) for time, 2*(D//6) each for space).
Shape letters: B batch, F frames, L tokens per frame, N heads, D head dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

THETA = 10000.0


def _angles(positions: Tensor, dim: int) -> Tensor:
    """Angles [len(positions), dim / 2] in float64."""
    inverse = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    return positions.double()[:, None] * inverse


@lru_cache(maxsize=16)
def rotation(frames: tuple[int, ...], height: int, width: int, dim: int, device: torch.device) -> Tensor:
    """Unit complex factors [F * height * width, 1, D / 2] for tokens of the frames at the given positions."""
    space = 2 * (dim // 6)
    time = dim - 2 * space
    t = _angles(torch.tensor(frames), time)[:, None, None].expand(-1, height, width, -1)
    h = _angles(torch.arange(height), space)[None, :, None].expand(len(frames), -1, width, -1)
    w = _angles(torch.arange(width), space)[None, None].expand(len(frames), height, -1, -1)
    angles = torch.cat([t, h, w], -1).reshape(-1, 1, dim // 2)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64).to(device)


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Rotate x [B, F*L, N, D] by ``factors`` of :func:`rotation`; computed in float32, returned in x's dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * factors).flatten(-2).to(x.dtype)


def place(x: Tensor, height: int, width: int) -> Tensor:
    """Rotate x [B, F * height * width, N, D] by the row and column of each token, not by its frame."""
    frames = x.shape[1] // (height * width)
    return rotate(x, rotation((0,) * frames, height, width, x.shape[-1], x.device))


def turn(x: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Rotate x [B, F * L, N, D] by the positions of its F frames, not by places. Rotations act on separate pairs, so
    turn(place(x)) is :func:`rotate`, in either order; L tokens of a frame may have any places."""
    factors = rotation(positions, 1, 1, x.shape[-1], x.device)
    return rotate(x, factors.repeat_interleave(x.shape[1] // len(positions), 0))
