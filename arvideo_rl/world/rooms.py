"""Rooms: still, textured scenes with ground truth, for judging geometric rewards at sizes where a classical method can
see something. The world itself turns its camera about a point and moves its objects, both of which hide depth.

A room is the inside of a box with smaller boxes in it, all covered with random texture; the camera travels on a smooth
curve and looks at the middle. Axes and pixel centres as in scene.py. Shape letters: F frames, H W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FIELD_OF_VIEW = 60.0  # degrees


@dataclass(frozen=True)
class Room:
    """One clip and its truth."""

    frames: Tensor  # float32 [F, 3, H, W] in [0, 1]
    depth: Tensor  # [F, H, W] z-depth in metres
    w2c: Tensor  # [F, 4, 4]
    intrinsics: Tensor  # [3, 3] in pixels


@torch.no_grad()
def room(seed: int, frames: int = 12, size: int = 96, *, step: float = 0.09, supersample: int = 2) -> Room:
    """The room of ``seed``, ``size`` pixels square; the camera moves about ``step`` metres a frame."""
    rng = np.random.default_rng(seed)
    low, high = [torch.tensor([[-3.0, -1.6, -3.0]])], [torch.tensor([[3.0, 1.6, 4.5]])]
    for _ in range(4):
        middle = np.array([rng.uniform(-1.6, 1.6), rng.uniform(0.2, 1.2), rng.uniform(0.6, 3.0)])
        half = rng.uniform(0.25, 0.6, 3)
        low.append(torch.from_numpy(middle - half)[None].float())
        high.append(torch.from_numpy(middle + half)[None].float())
    textures = torch.from_numpy(np.stack([_texture(rng) for _ in range(5)])).float()
    w2c = _path(rng, frames, step)
    focal = 0.5 * size / np.tan(np.deg2rad(FIELD_OF_VIEW) / 2)
    intrinsics = torch.tensor([[focal, 0, size / 2], [0, focal, size / 2], [0, 0, 1]], dtype=torch.float32)
    colour, _ = _trace(w2c, intrinsics, size, supersample, torch.cat(low), torch.cat(high), textures)
    _, depth = _trace(w2c, intrinsics, size, 1, torch.cat(low), torch.cat(high), textures)
    image = colour.reshape(frames, size * supersample, size * supersample, 3).permute(0, 3, 1, 2)
    image = torch.nn.functional.avg_pool2d(image, supersample)
    return Room(image.clamp(0, 1), depth.reshape(frames, size, size), w2c, intrinsics)


def _texture(rng: np.random.Generator, size: int = 64) -> np.ndarray:
    """Blotches of two sizes in a random pair of colours, [size, size, 3], repeating at its borders."""
    fine, coarse = rng.random((size, size)), np.kron(rng.random((size // 4, size // 4)), np.ones((4, 4)))
    mix = np.clip(0.35 * fine + 0.65 * coarse, 0, 1)[..., None]
    dark, light = rng.uniform(0.05, 0.45, 3), rng.uniform(0.55, 0.95, 3)
    return dark + mix * (light - dark)


def _path(rng: np.random.Generator, frames: int, step: float) -> Tensor:
    """World-to-camera matrices [F, 4, 4] of a gentle arc."""
    time = np.arange(frames) - (frames - 1) / 2
    heading = rng.choice([-1.0, 1.0])
    bend, climb = rng.uniform(-0.006, 0.006), rng.uniform(-0.02, 0.02)
    centre = np.stack([heading * step * time, rng.uniform(-0.5, 0) + climb * time, -1.8 + bend * time**2], -1)
    ahead = np.array([rng.uniform(-0.4, 0.4), 0.3, 2.2]) - centre
    ahead /= np.linalg.norm(ahead, axis=-1, keepdims=True)
    right = np.cross([0, 1.0, 0], ahead)
    right /= np.linalg.norm(right, axis=-1, keepdims=True)
    rotation = np.stack([right, np.cross(ahead, right), ahead], 1)
    w2c = np.tile(np.eye(4), (frames, 1, 1))
    w2c[:, :3, :3], w2c[:, :3, 3] = rotation, -(rotation @ centre[..., None])[..., 0]
    return torch.from_numpy(w2c).float()


def _trace(w2c: Tensor, intrinsics: Tensor, size: int, supersample: int, low: Tensor, high: Tensor,
           textures: Tensor) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Colour [F, R, 3] and depth [F, R] of all rays; box 0 is seen from within, the others from outside."""
    at = (torch.arange(size * supersample) + 0.5) / supersample
    y, x = torch.meshgrid(at, at, indexing="ij")
    local = torch.stack([x, y, torch.ones_like(x)], -1).reshape(-1, 3) @ torch.linalg.inv(intrinsics).T
    rays = local @ w2c[:, :3, :3]
    rays = torch.where(rays.abs() < 1e-7, 1e-7, rays)
    origin = -(w2c[:, :3, :3].transpose(-1, -2) @ w2c[:, :3, 3:]).transpose(-1, -2)
    depth, colour = torch.full(rays.shape[:2], torch.inf), torch.zeros_like(rays)
    for box in range(len(low)):
        a, b = (low[box] - origin) / rays, (high[box] - origin) / rays
        near, enter = torch.minimum(a, b).max(-1)
        far, leave = torch.maximum(a, b).min(-1)
        distance, axis = (far, leave) if box == 0 else (near, enter)
        hit = (distance < depth) & (distance > 0.05) & (near < far)
        point = origin + distance.clamp(0.05, 50)[..., None] * rays
        uv = point.gather(-1, torch.stack([(axis + 1) % 3, (axis + 2) % 3], -1)) * 10 + 17.0 * axis[..., None]
        shade = 0.75 + 0.12 * axis[..., None]
        colour = torch.where(hit[..., None], shade * _look_up(textures[box], uv), colour)
        depth = torch.where(hit, distance, depth)
    return colour, depth


def _look_up(texture: Tensor, uv: Tensor) -> Tensor:
    """Bilinear colours [..., 3] of a repeating ``texture`` [S, S, 3] at ``uv`` [..., 2] in texels."""
    base = uv.floor()
    (fx, fy), (x, y), n = (uv - base).split(1, -1), base.long().unbind(-1), len(texture)
    rows = [torch.lerp(texture[(y + k) % n, x % n], texture[(y + k) % n, (x + 1) % n], fx) for k in (0, 1)]
    return torch.lerp(rows[0], rows[1], fy)
