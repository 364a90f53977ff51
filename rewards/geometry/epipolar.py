"""Sampson epipolar distance (Epipolar-DPO, arXiv 2510.21615): how far matches are from fitting one rigid motion."""

from __future__ import annotations

import torch
from torch import Tensor


def homogeneous(xy: Tensor) -> Tensor:
    """[..., 2] -> [..., 3] with a one appended."""
    return torch.cat([xy, torch.ones_like(xy[..., :1])], -1)


def sampson(first: Tensor, second: Tensor, fundamental: Tensor) -> Tensor:
    """Sampson distance [N] in pixels, >= 0 and 0 for a perfect match, of matches ``first``, ``second`` [N, 2] under the
    ``fundamental`` matrix [3, 3] (x2' F x1 = 0). Its scale does not matter. NaN where both points are epipoles."""
    a, b = homogeneous(first), homogeneous(second)
    line2, line1 = a @ fundamental.T, b @ fundamental
    slope = line2[:, :2].square().sum(-1) + line1[:, :2].square().sum(-1)
    return (b * line2).sum(-1).abs() / slope.sqrt()


def eight_point(first: Tensor, second: Tensor) -> Tensor:
    """Fundamental matrix [3, 3], rank 2, unit Frobenius norm, of at least 8 matches [N, 2]: the normalised 8-point
    method on all of them, in float64. An outlier bends it; use a robust fit where outliers are to be measured."""
    if len(first) < 8 or first.shape != second.shape:
        raise ValueError(f"matches {tuple(first.shape)}, {tuple(second.shape)}: eight_point takes 8 or more pairs")
    (a, to_a), (b, to_b) = _normalise(first.double()), _normalise(second.double())
    rows = (b[:, :, None] * a[:, None, :]).flatten(1)
    f = torch.linalg.svd(rows, full_matrices=True)[2][-1].reshape(3, 3)
    u, s, v = torch.linalg.svd(f)
    f = to_b.T @ (u[:, :2] * s[:2] @ v[:2]) @ to_a
    return (f / f.norm()).to(first.dtype)


def _normalise(xy: Tensor) -> tuple[Tensor, Tensor]:
    """Homogeneous points moved to mean 0 and mean distance sqrt(2), and the matrix [3, 3] that does it."""
    mean = xy.mean(0)
    scale = 2**0.5 / (xy - mean).norm(dim=-1).mean().clamp_min(1e-12)
    move = torch.eye(3, dtype=xy.dtype) * torch.stack([scale, scale, scale.new_ones(())])
    move[:2, 2] = -scale * mean
    return homogeneous(xy) @ move.T, move


def fundamental_of_poses(w2c1: Tensor, w2c2: Tensor, intrinsics: Tensor) -> Tensor:
    """Fundamental matrix [3, 3] of two cameras [4, 4] that share ``intrinsics``; zero without translation."""
    relative = w2c2 @ torch.linalg.inv(w2c1)
    x, y, z = relative[:3, 3]
    zero = torch.zeros_like(x)
    cross = torch.stack([zero, -z, y, z, zero, -x, -y, x, zero]).reshape(3, 3)
    inverse = torch.linalg.inv(intrinsics)
    return inverse.T @ cross @ relative[:3, :3] @ inverse
