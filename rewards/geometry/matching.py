"""SIFT matches between two frames, and a fundamental matrix or homography fitted so that outliers do not bend it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewards.geometry.cameras import diagonal
from rewards.geometry.epipolar import homogeneous, sampson
from rewards.geometry.flow import opencv

RATIO = 0.75
BLOCK = 1024  # descriptors compared with all others at once
FEW = 20  # fewer matches say nothing
SAME_PLANE = 0.9  # a homography with this share of the fundamental matrix's inliers explains the pair as well
STILL = 0.002  # median displacement, in diagonals, below which any fundamental matrix fits


def sift(images: np.ndarray) -> list[tuple[Tensor, np.ndarray]]:
    """Keypoints (u, v) [N, 2] and descriptors [N, 128] of each grey uint8 image [F, H, W]."""
    finder, out = opencv().SIFT_create(contrastThreshold=0.02), []
    for image in images:
        points, descriptors = finder.detectAndCompute(image, None)
        xy = torch.tensor([p.pt for p in points], dtype=torch.float32).reshape(-1, 2)
        out.append((xy + 0.5, descriptors if descriptors is not None else np.zeros((0, 128), np.float32)))
    return out  # OpenCV puts pixel centres at integers


def match(first: tuple[Tensor, np.ndarray], second: tuple[Tensor, np.ndarray]) -> tuple[Tensor, Tensor]:
    """Matching points [N, 2], [N, 2]: best both ways and clearly better than the second best."""
    (xy1, d1), (xy2, d2) = first, second
    if len(d1) < 2 or len(d2) < 2:
        return xy1[:0], xy2[:0]
    forth, back = _nearest(torch.from_numpy(d1), torch.from_numpy(d2))
    best = (forth >= 0) & (back[forth] == torch.arange(len(forth)))
    return xy1[best], xy2[forth[best]]


def _nearest(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """For each descriptor of ``first`` [N, 128] the index of the nearest of ``second`` [M, 128], -1 where another is
    nearly as near; for each of ``second`` that of the nearest of ``first`` [M]. SIFT's are whole numbers whose products
    add up below 2^24, so that this is exact and needs no pair to be visited by itself, as OpenCV's matcher does."""
    squares = second.square().sum(1)
    forth: list[Tensor] = []
    least: list[Tensor] = []
    back: list[Tensor] = []
    for rows in first.split(BLOCK):
        distance = rows.square().sum(1)[:, None] + squares - 2 * rows @ second.T
        found = distance.min(0)
        least.append(found.values)
        back.append(found.indices + BLOCK * len(back))
        near, at = distance.min(1)
        after = distance.scatter_(1, at[:, None], torch.inf).min(1).values
        forth.append(torch.where(near.sqrt() < RATIO * after.sqrt(), at, -1))
    block = torch.stack(least).argmin(0)
    return torch.cat(forth), torch.stack(back).gather(0, block[None])[0]


def robust(fit: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[np.ndarray | None, np.ndarray]:
    """Matrix [3, 3], or None when none fits, and inliers of one of OpenCV's robust fits."""
    try:
        matrix, inlier = fit(*args, **kwargs)
    except opencv().error as error:
        if "empty" not in str(error):  # OpenCV 5 says so, instead of giving none, when no sample yields a model
            raise
        matrix = None
    if matrix is None or matrix.shape != (3, 3):
        return None, np.zeros(1, np.uint8)
    return matrix, inlier


def pair_errors(
    first: Tensor, second: Tensor, height: int, width: int, *, cap: float = 0.01
) -> tuple[Tensor, str | None]:
    """Epipolar error of each match [N] in diagonals, in [0, cap], or none of them and a reason.

    The fundamental matrix is MAGSAC++'s, but *all* matches count, each capped: an average over the inliers would
    hide what is looked for. Where a homography explains the pair as well (turning camera, flat scene) the fundamental
    matrix is arbitrary, and the homography's transfer error is taken.
    """
    nothing, size = torch.empty(0, dtype=torch.float64), diagonal(height, width)
    if len(first) < FEW:
        return nothing, "content:few_matches"
    if float((second - first).norm(dim=-1).median()) < STILL * size:
        return nothing, "content:no_parallax"
    cv2, a, b = opencv(), first.double().numpy(), second.double().numpy()
    reach = max(0.002 * size, 0.5)
    f, f_in = robust(cv2.findFundamentalMat, a, b, cv2.USAC_MAGSAC, reach, 0.999, 2000)
    h, h_in = robust(cv2.findHomography, a, b, cv2.USAC_MAGSAC, reach, maxIters=2000, confidence=0.999)
    if h is not None and h_in.sum() >= SAME_PLANE * f_in.sum():
        moved = homogeneous(first.double()) @ torch.from_numpy(h).T
        error = (moved[:, :2] / moved[:, 2:] - second).norm(dim=-1)
    elif f is not None:
        error = sampson(first.double(), second.double(), torch.from_numpy(f))
    else:
        return nothing, "content:degenerate"
    return (error / size).nan_to_num(nan=cap, posinf=cap).clamp_max(cap), None


def pair_error(
    first: Tensor, second: Tensor, height: int, width: int, *, cap: float = 0.01
) -> tuple[float, str | None]:
    """Mean of :func:`pair_errors`, NaN where there is a reason."""
    errors, reason = pair_errors(first, second, height, width, cap=cap)
    return float(errors.mean()) if reason is None else float("nan"), reason


def clip_error(images: np.ndarray, *, cap: float = 0.01) -> tuple[float, str | None, int, int]:
    """Mean of :func:`pair_error` over neighbouring grey uint8 ``images`` [F, H, W]; the reason when no pair can be
    measured; pairs measured; matches."""
    found = sift(images)
    pairs = [match(a, b) for a, b in zip(found[:-1], found[1:])]
    results = [pair_error(a, b, *images.shape[1:], cap=cap) for a, b in pairs]
    good = [error for error, reason in results if reason is None]
    matches = sum(len(a) for a, _ in pairs)
    if not good:
        return float("nan"), results[0][1] if results else "content:one_frame", 0, matches
    return sum(good) / len(good), None, len(good), matches
