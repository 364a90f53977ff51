"""DIS optical flow with a confidence, tracks chained from it, and how much of a picture can be followed at all."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewards.geometry.cameras import diagonal, pixel_centres

AGREE = 0.002  # standard deviation, in diagonals, of a forward and a backward flow that agree
LARGE = 192  # px of the short side from which DIS ends at half resolution: four times faster, as exact as half the size
KEPT = 2**29  # bytes; ten clips of 16 frames of 256 x 448
TEXTURE = 1e-4  # least smaller eigenvalue of the structure tensor (grey in [0, 1], per pixel) that can be followed


def opencv() -> Any:
    """The module cv2; ValueError saying what to install when it is missing."""
    try:
        import cv2
    except ImportError:
        raise ValueError("optical flow needs OpenCV; pip install opencv-python-headless") from None
    return cv2


@dataclass(frozen=True)
class Flow:
    """Displacements between neighbouring frames of one clip, in pixels, and how far to trust them."""

    forward: Tensor  # [F-1, H, W, 2] from i to i + 1
    backward: Tensor  # [F-1, H, W, 2] from i + 1 to i
    confidence: Tensor  # [F-1, H, W] of forward, in [0, 1]
    confidence_back: Tensor  # [F-1, H, W]
    corners: Tensor  # [F, H, W] smaller eigenvalue of the structure tensor

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return sum(part.nbytes for part in vars(self).values())


_last: dict[tuple, Flow] = {}  # by grey pictures, the one used last at the end
_lock = threading.Lock()


def grey(frames: Tensor) -> np.ndarray:
    """Grey uint8 [F, H, W] of ``frames`` [F, 3, H, W] in [0, 1]."""
    luma = frames.float().cpu() * torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return (luma.sum(1).clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def clip_flow(frames: Tensor) -> Flow:
    """Flow of ``frames`` [F, 3, H, W] in [0, 1], F >= 2, H and W of 16 or more. The last ones are kept, up to KEPT
    bytes, because several rewards look at the same clips; nobody may change what they get."""
    images = grey(frames)
    key = (images.shape, hashlib.sha256(images.tobytes()).digest())
    with _lock:
        found = _last.pop(key, None)
    found = found or _flow_of(images)
    with _lock:
        _last[key] = found
        while sum(flow.nbytes for flow in _last.values()) > KEPT:
            _last.pop(next(iter(_last)))
    return found


def _flow_of(images: np.ndarray) -> Flow:
    cv2 = opencv()
    corners = torch.stack([_corners(cv2, image) for image in images])
    pairs = list(zip(images[:-1], images[1:]))
    forward = torch.stack([pair_flow(a, b) for a, b in pairs])
    backward = torch.stack([pair_flow(b, a) for a, b in pairs])
    return Flow(forward, backward, agreement(forward, backward), agreement(backward, forward), corners)


def pair_flow(first: np.ndarray, second: np.ndarray) -> Tensor:
    """Displacement [H, W, 2] in pixels from ``first`` to ``second``, grey uint8 [H, W]."""
    cv2 = opencv()
    dis = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    dis.setFinestScale(int(min(first.shape) >= LARGE))
    return torch.from_numpy(dis.calc(first, second, None))


def agreement(forward: Tensor, backward: Tensor) -> Tensor:
    """Confidence [F, H, W] in [0, 1]: 1 where going forth and back [F, H, W, 2] ends where it began, 0 out of view."""
    height, width = forward.shape[1:3]
    there = pixel_centres(height, width) + forward
    gap = forward + sample(backward, there)
    score = torch.exp(-gap.square().sum(-1) / (2 * (AGREE * diagonal(height, width)) ** 2))
    return torch.where(_within(there, height, width), score, 0.0)


def sample(maps: Tensor, xy: Tensor) -> Tensor:
    """Bilinear values [F, ..., C] of ``maps`` [F, H, W, C] at pixels ``xy`` [F, ..., 2]; borders are repeated."""
    height, width = maps.shape[1:3]
    at = 2 * xy.reshape(len(maps), -1, 1, 2) / torch.tensor([width, height]) - 1
    out = torch.nn.functional.grid_sample(
        maps.permute(0, 3, 1, 2), at, padding_mode="border", align_corners=False
    )  # [F, C, N, 1]
    return out[..., 0].transpose(1, 2).reshape(*xy.shape[:-1], maps.shape[-1])


def track(flow: Flow, points: Tensor, source: int) -> tuple[Tensor, Tensor]:
    """Positions [N, F, 2] in all frames of the ``points`` (u, v) [N, 2] of frame ``source``, and confidence [N, F]: the
    least of the steps taken to get there."""
    frames = len(flow.forward) + 1
    xy, sure = points.new_zeros(len(points), frames, 2), points.new_zeros(len(points), frames)
    xy[:, source], sure[:, source] = points, 1.0
    for i in range(source, frames - 1):
        _step(xy, sure, i, i + 1, flow.forward[i], flow.confidence[i])
    for i in range(source, 0, -1):
        _step(xy, sure, i, i - 1, flow.backward[i - 1], flow.confidence_back[i - 1])
    return xy, sure


def _step(xy: Tensor, sure: Tensor, here: int, there: int, move: Tensor, confidence: Tensor) -> None:
    both = sample(torch.cat([move, confidence[..., None]], -1)[None], xy[None, :, here])[0]
    xy[:, there] = xy[:, here] + both[:, :2]
    sure[:, there] = torch.minimum(sure[:, here], both[:, 2]) * _within(xy[:, there], *move.shape[:2])


def _within(xy: Tensor, height: int, width: int) -> Tensor:
    return (xy >= 0).all(-1) & (xy[..., 0] <= width) & (xy[..., 1] <= height)


def motion(flow: Flow) -> Tensor:
    """Mean displacement [F-1] of each step, in diagonals, over textured pixels that are followed; 0 without any."""
    use = flow.confidence * (flow.corners[:-1] > TEXTURE)
    speed = flow.forward.norm(dim=-1) / diagonal(*flow.corners.shape[1:])
    return (use * speed).sum((1, 2)) / use.sum((1, 2)).clamp_min(1.0)


def _corners(cv2: Any, image: np.ndarray) -> Tensor:
    return torch.from_numpy(cv2.cornerMinEigenVal(image.astype(np.float32) / 255, 3, ksize=3))
