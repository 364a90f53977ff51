"""Points, pixels and the camera between them; what a geometry backend returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NEAR = 1e-6  # a point nearer to the camera plane than this is not seen


@dataclass(frozen=True)
class Geometry:
    """Depth and cameras of one clip. Raises ValueError when shapes disagree."""

    depth: Tensor | None  # [F, H, W], NaN where unknown; None when nothing could be triangulated
    w2c: Tensor  # [F, 4, 4]
    intrinsics: Tensor  # [3, 3], or [F, 3, 3] one a frame, in pixels of depth (of the frames when there is no depth)
    confidence: Tensor | None = None  # [F, H, W] in [0, 1]; None = 1 wherever depth is known
    metric: bool = False  # whether depth and translation are in true units; otherwise known up to one factor
    scene_flow: Tensor | None = None  # [F-1, H, W, 3] displacement in the world of the point seen, until the next frame

    def __post_init__(self) -> None:
        frames = len(self.w2c)
        if self.w2c.shape != (frames, 4, 4) or self.intrinsics.shape not in ((3, 3), (frames, 3, 3)):
            seen = f"w2c {tuple(self.w2c.shape)}, intrinsics {tuple(self.intrinsics.shape)}"
            raise ValueError(f"geometry has {seen}; expected [F, 4, 4] and [3, 3] or [F, 3, 3]")
        for name in ("depth", "confidence"):
            part = getattr(self, name)
            if part is not None and (part.ndim != 3 or len(part) != frames):
                raise ValueError(f"{name} has shape {tuple(part.shape)}; expected [{frames}, H, W]")
        moved = self.scene_flow
        if moved is not None and (moved.ndim != 4 or len(moved) != frames - 1 or moved.shape[-1] != 3):
            raise ValueError(f"scene_flow has shape {tuple(moved.shape)}; expected [{frames - 1}, H, W, 3]")

    @property
    def lenses(self) -> Tensor:
        """Intrinsics of every frame [F, 3, 3]."""
        return self.intrinsics.expand(len(self.w2c), 3, 3)

    def at(self, frames: Tensor | slice) -> Geometry:
        """That of some ``frames``, without the scene flow, which leads to the next one."""
        depth, sure = (None if part is None else part[frames] for part in (self.depth, self.confidence))
        return Geometry(depth, self.w2c[frames], self.lenses[frames], sure, self.metric)


@dataclass(frozen=True)
class Cameras:
    """Target cameras, for ``Clips(cameras=...)``. Raises ValueError when shapes disagree."""

    c2w: Tensor  # [B, T, 4, 4] camera-to-world
    intrinsics: Tensor | None = None  # [3, 3], row 0 divided by W and row 1 by H, so that it survives resizing

    def __post_init__(self) -> None:
        if self.c2w.ndim != 4 or self.c2w.shape[2:] != (4, 4):
            raise ValueError(f"cameras has c2w {tuple(self.c2w.shape)}; expected [B, T, 4, 4], camera-to-world")
        if not bool(self.c2w.isfinite().all()):
            raise ValueError("cameras has a c2w with numbers that are not finite")
        k = self.intrinsics
        if k is None:
            return
        if k.shape != (3, 3):
            raise ValueError(f"cameras has intrinsics {tuple(k.shape)}; expected [3, 3]")
        if not bool((k.diagonal() > 0).all() & (k[:2, 2].abs() < 2).all()):  # in pixels the middle lies far beyond
            raise ValueError(f"cameras has intrinsics {k.tolist()}; row 0 must be divided by W and row 1 by H")


def in_pixels(intrinsics: Tensor, height: int, width: int) -> Tensor:
    """Intrinsics [3, 3] in pixels from normalised ones (row 0 divided by W, row 1 by H)."""
    return intrinsics * intrinsics.new_tensor([width, height, 1.0])[:, None]


def pinhole(height: int, width: int, field_of_view: float) -> Tensor:
    """Intrinsics [3, 3] in pixels of square pixels and a horizontal ``field_of_view`` in degrees."""
    focal = 0.5 * width / math.tan(math.radians(field_of_view) / 2)
    return torch.tensor([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1.0]])


def diagonal(height: int, width: int) -> float:
    """Length of the image diagonal in pixels."""
    return math.hypot(height, width)


def pixel_centres(height: int, width: int) -> Tensor:
    """(u, v) of all pixel centres [H, W, 2]."""
    v, u = torch.meshgrid(torch.arange(height) + 0.5, torch.arange(width) + 0.5, indexing="ij")
    return torch.stack([u, v], -1)


def rays(xy: Tensor, intrinsics: Tensor) -> Tensor:
    """Camera-axes directions [..., 3] with unit z of the pixels ``xy`` [..., 2]."""
    ones = torch.ones_like(xy[..., :1])
    return torch.cat([xy, ones], -1) @ torch.linalg.inv(intrinsics).mT


def lift(xy: Tensor, depth: Tensor, w2c: Tensor, intrinsics: Tensor) -> Tensor:
    """World points [..., 3] seen at pixels ``xy`` [..., 2] at ``depth`` [...] by the camera ``w2c`` [4, 4]."""
    return (rays(xy, intrinsics) * depth[..., None] - w2c[:3, 3]) @ w2c[:3, :3]


def project(points: Tensor, w2c: Tensor, intrinsics: Tensor) -> tuple[Tensor, Tensor]:
    """Pixels [..., 2] and depth [...] of world ``points`` [..., 3]; pixels are NaN behind the camera."""
    seen = points @ w2c[:3, :3].T + w2c[:3, 3]
    z = seen[..., 2]
    ahead = z > NEAR
    xy = (seen @ intrinsics.T)[..., :2] / torch.where(ahead, z, 1.0)[..., None]
    return torch.where(ahead[..., None], xy, torch.nan), z


def inside(xy: Tensor, height: int, width: int) -> Tensor:
    """Whether pixels ``xy`` [..., 2] lie in the image; False for NaN."""
    return (xy >= 0).all(-1) & (xy[..., 0] < width) & (xy[..., 1] < height)


def centres(w2c: Tensor) -> Tensor:
    """Camera centres [F, 3] in the world."""
    return -(w2c[:, :3, :3].transpose(-1, -2) @ w2c[:, :3, 3:])[..., 0]


def rotation_angle(rotation: Tensor) -> Tensor:
    """Angle [...] in radians of rotations [..., 3, 3]; accurate near 0, where an arc cosine is not."""
    skew = rotation - rotation.transpose(-1, -2)
    sine = 0.5 * torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], -1).norm(dim=-1)
    cosine = 0.5 * (rotation.diagonal(dim1=-2, dim2=-1).sum(-1) - 1)
    return torch.atan2(sine, cosine)


def rotation_vector(rotation: Tensor) -> Tensor:
    """Axis times angle [..., 3] of rotations [..., 3, 3] below half a turn."""
    skew = rotation - rotation.transpose(-1, -2)
    axis = 0.5 * torch.stack([skew[..., 2, 1], skew[..., 0, 2], skew[..., 1, 0]], -1)
    angle, sine = rotation_angle(rotation), axis.norm(dim=-1)
    return axis * torch.where(sine > 1e-7, angle / sine.clamp_min(1e-7), 1.0)[..., None]
