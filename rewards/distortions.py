"""Frames made worse on purpose: functions of ``frames`` float [T, 3, H, W] in [0, 1], seeded where they draw.

Sizes are in pixels; :func:`diagonals` turns a share of the image diagonal into them. Nothing global is drawn from.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as images


def diagonals(frames: Tensor, share: float) -> float:
    """``share`` of the image diagonal of ``frames`` [..., H, W], in pixels."""
    return share * math.hypot(*frames.shape[-2:])


def freeze(frames: Tensor) -> Tensor:
    """The first frame throughout."""
    return frames[:1].expand_as(frames).clone()


def freeze_half(frames: Tensor) -> Tensor:
    """The second half repeats the last frame of the first."""
    return frames[torch.arange(len(frames)).clamp_max((len(frames) - 1) // 2)]


def loop(frames: Tensor) -> Tensor:
    """The first quarter, four times."""
    return frames[torch.arange(len(frames)) % math.ceil(len(frames) / 4)]


def shuffle(frames: Tensor, seed: int) -> Tensor:
    """An order that leaves no frame at its place."""
    order = torch.randperm(len(frames), generator=_source(seed))
    out = torch.empty_like(frames)
    out[order] = frames[order.roll(1)]
    return out


def blur(frames: Tensor, pixels: float) -> Tensor:
    """A Gaussian of standard deviation ``pixels``."""
    width = min(2 * math.ceil(3 * pixels) + 1, 2 * min(frames.shape[-2:]) - 1)
    return images.gaussian_blur(frames, [width, width], [pixels, pixels])


def halve(frames: Tensor) -> Tensor:
    """Half the size and back."""
    height, width = frames.shape[-2:]
    small = images.resize(frames, [max(1, height // 2), max(1, width // 2)], antialias=True)
    return images.resize(small, [height, width], antialias=True).clamp(0, 1)


def saturate(frames: Tensor, factor: float) -> Tensor:
    """Each colour ``factor`` times as far from its grey."""
    return images.adjust_saturation(frames, factor)


def flicker(frames: Tensor, seed: int, depth: float = 0.15) -> Tensor:
    """Every frame brighter or darker by a factor within 1 +- ``depth``."""
    gain = 1 + depth * (2 * torch.rand(len(frames), 1, 1, 1, generator=_source(seed)) - 1)
    return (frames * gain).clamp(0, 1)


def add_noise(frames: Tensor, seed: int, std: float) -> Tensor:
    """Normal noise of standard deviation ``std``."""
    return (frames + std * torch.randn(frames.shape, generator=_source(seed))).clamp(0, 1)


def jitter(frames: Tensor, seed: int, pixels: float = 3.0) -> Tensor:
    """Each frame shifted at random by about ``pixels``, borders repeated: a shaking camera."""
    shift = pixels * torch.randn(len(frames), 1, 1, 2, generator=_source(seed))
    return _warp(frames, shift.expand(-1, *frames.shape[2:], 2))


def melt(frames: Tensor, seed: int, pixels: float = 4.0) -> Tensor:
    """Content flows by a smooth random field that changes over time and grows to about ``pixels``."""
    count, _, height, width = frames.shape
    coarse = torch.randn(1, 2, max(2, count // 3), 5, 5, generator=_source(seed))
    field = torch.nn.functional.interpolate(coarse, (count, height, width), mode="trilinear")
    growth = torch.linspace(0, 1, count)[:, None, None, None]
    return _warp(frames, pixels * growth * field[0].permute(1, 2, 3, 0))


def _source(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _warp(frames: Tensor, shift: Tensor) -> Tensor:
    """``frames`` looked up at ``shift`` [T, H, W, 2] pixels away."""
    height, width = frames.shape[2:]
    v, u = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    at = 2 * (torch.stack([u, v], -1) + shift) / torch.tensor([width, height]) - 1
    return torch.nn.functional.grid_sample(frames, at, padding_mode="border", align_corners=False)
