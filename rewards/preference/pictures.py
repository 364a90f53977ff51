"""From clips to what image models read: which frames, resized how, and one number out of theirs."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms.v2.functional import InterpolationMode, center_crop, pad, resize

MEAN = (0.48145466, 0.4578275, 0.40821073)  # of CLIP's training pictures, RGB in [0, 1]
STD = (0.26862954, 0.26130258, 0.27577711)
POOLS = ("mean", "low", "top")
BETWEEN = ("frozen", "half_frozen", "shuffled", "reversed", "looped", "jittered", "flickering")  # no frame shows these
SHARE = 0.3  # of the frames that low and top keep, as in Astrolabe (arXiv 2603.17051)


def spread(frames: Tensor, count: int) -> Tensor:
    """At most ``count`` of ``frames`` [T, ...], evenly spread, both ends among them."""
    total = len(frames)
    return frames[torch.linspace(0, total - 1, min(count, total)).round().long()]


def pool(values: Tensor, how: str) -> Tensor:
    """One number of those of the frames [F]: their mean, or that of the lowest or highest 30 %."""
    if how == "mean":
        return values.mean()
    ordered = values.sort(descending=how == "top").values
    return ordered[: max(1, round(SHARE * len(values)))].mean()


def cropped(frames: Tensor, size: int) -> Tensor:
    """``frames`` [F, 3, H, W] in [0, 1] with the short side at ``size`` (bicubic), centre crop, normalised for CLIP."""
    small = resize(frames, [size], InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)
    return _normal(center_crop(small, [size, size]))


def letterboxed(frames: Tensor, size: int) -> Tensor:
    """The same with the long side at ``size`` and black bars, as HPSv2 sees pictures."""
    h, w = frames.shape[-2:]
    new = [max(1, round(side * size / max(h, w))) for side in (h, w)]
    small = resize(frames, new, InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)
    top, left = (size - new[0]) // 2, (size - new[1]) // 2
    return _normal(pad(small, [left, top, size - new[1] - left, size - new[0] - top]))


def _normal(frames: Tensor) -> Tensor:
    mean, std = (frames.new_tensor(x)[:, None, None] for x in (MEAN, STD))
    return (frames - mean) / std
