"""The terms of Stream4D (arXiv 2608.19556) as functions of depth, cameras, flow and confidence.

A velocity is in image diagonals a second, or in median depths a second where a backend gives the scene flow itself, and
positions are in diagonals, so that nothing changes with resolution or with the scale of the depth.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewards.geometry.cameras import NEAR, Geometry, diagonal, inside, pixel_centres, rays
from rewards.geometry.flow import sample


def rigid_flow(geometry: Geometry, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Displacement in pixels [S, H, W, 2] of still points from each frame to the next, and of points infinitely far,
    which only the turning of the camera moves. ``scale`` multiplies the translations.

    Where depth is unknown (the sky, a camera that only turns) a point counts as far. NaN behind the next camera.
    """
    depth, k = geometry.depth, geometry.lenses[:, None]
    if depth is None:
        raise ValueError("rigid_flow needs depth; give NaN where it is unknown")
    grid = pixel_centres(*depth.shape[1:])
    relative = geometry.w2c[1:] @ torch.linalg.inv(geometry.w2c[:-1])
    turned = torch.einsum("sij,shwj->shwi", relative[:, :3, :3], rays(grid, k[:-1]))
    inverse = (1 / depth[:-1]).nan_to_num(nan=0.0, posinf=0.0) * (depth[:-1] > NEAR)
    moved = turned + scale * inverse[..., None] * relative[:, None, None, :3, 3]
    return _pixels(moved, k[1:]) - grid, _pixels(turned, k[1:]) - grid


def _pixels(points: Tensor, k: Tensor) -> Tensor:
    seen = points @ k.mT
    return torch.where(points[..., 2:] > NEAR, seen[..., :2] / seen[..., 2:], torch.nan)


def fitted_scale(observed: Tensor, weight: Tensor, rigid: Tensor, far: Tensor, rounds: int = 4) -> float:
    """The one factor between depth and translations with which ``rigid`` flow best explains the ``observed`` one, both
    [S, H, W, 2] in pixels; least squares over ``weight`` [S, H, W], each round without the worst third, which moves.
    1 where the camera only turns."""
    parallax, rest = rigid - far, observed - far
    usable = (weight > 0) & parallax.isfinite().all(-1)
    a, b, w = parallax[usable], rest[usable], weight[usable]
    if not len(a) or float((w * a.norm(dim=-1)).sum() / w.sum()) < 0.05:  # pixels: nothing to fit to
        return 1.0
    keep, scale = torch.ones_like(w, dtype=torch.bool), 1.0
    for _ in range(rounds):
        ww = w * keep
        scale = float((ww * (a * b).sum(-1)).sum() / (ww * (a * a).sum(-1)).sum().clamp_min(1e-12))
        gap = (b - scale * a).norm(dim=-1)
        keep = gap <= gap.kthvalue(max(1, 2 * len(gap) // 3)).values
    return scale if scale > 0 else 1.0


def moving(velocity: Tensor, weight: Tensor, share: float) -> Tensor:
    """Weights [S, H, W] of the dynamic set: ``weight`` on the fastest ``share`` of all entries of ``velocity``
    [S, H, W, C], 0 elsewhere. What is not trusted counts as still when the fastest are chosen."""
    speed = (velocity.norm(dim=-1) * weight).flatten()
    chosen = torch.zeros_like(speed)
    chosen[speed.topk(max(1, round(share * speed.numel()))).indices] = 1
    return weight * chosen.reshape(weight.shape)


def weighted(values: Tensor, weight: Tensor) -> Tensor:
    """Mean of ``values`` by ``weight``, both of one shape; 0 where there is no weight at all."""
    return (values * weight).sum() / weight.sum().clamp_min(1e-12)


def acceleration(velocity: Tensor, flow: Tensor, weight: Tensor, *, eulerian: bool = False) -> tuple[Tensor, Tensor]:
    """Change of velocity [S-1, H, W] over one step, and how far to trust it [S-1, H, W].

    Of the same point, found one step on by ``flow`` [S, H, W, 2] in pixels; ``eulerian``, as published, of the same
    pixel, where the edge of whatever moves counts as a change.
    """
    now, height, width = velocity[:-1], *velocity.shape[1:3]
    if eulerian:
        return (velocity[1:] - now).norm(dim=-1), weight[1:] * weight[:-1]
    there = pixel_centres(height, width) + flow[:-1]
    later = sample(torch.cat([velocity, weight[..., None]], -1)[1:], there)
    sure = torch.where(inside(there, height, width), later[..., -1], 0.0)
    return (later[..., :-1] - now).norm(dim=-1), weight[:-1] * sure


def stretching(velocity: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """|dv/dx| + |dv/dy| [S, H, W] in 1/s of ``velocity`` [S, H, W, C], positions in diagonals, by differences to the
    right and downwards (0 at the last column and row); and how far to trust it [S, H, W]."""
    unit = diagonal(*velocity.shape[1:3])
    out, sure = torch.zeros_like(weight), weight.clone()
    for axis in (1, 2):
        inner = [slice(None)] * 3
        inner[axis] = slice(0, -1)
        shifted = [slice(None)] * 3
        shifted[axis] = slice(1, None)
        out[tuple(inner)] += velocity.diff(dim=axis).norm(dim=-1) * unit
        sure[tuple(inner)] *= weight[tuple(shifted)]
    return out, sure


def gate(m: Tensor, m_nat: float, sigma: float) -> Tensor:
    """exp(-(m - m_nat)^2 / 2 sigma^2), and 0 below m_nat - 2 sigma or a tenth of m_nat: a clip in which nothing moves
    gets nothing, where the published form still gives it exp(-2)."""
    floor = max(m_nat - 2 * sigma, 0.1 * m_nat)
    return torch.exp(-((m - m_nat) ** 2) / (2 * sigma**2)) * (m >= floor)


def recon(error: Tensor, unexplained: Tensor, tau: float, loose: float) -> Tensor:
    """exp(-error / tau) exp(-excess / 0.1), the excess being that of the ``unexplained`` share of the picture over the
    share ``loose`` that is natural: frames look like their neighbours, and one solid world explains where all but the
    fastest fifth goes."""
    return torch.exp(-error / tau - (unexplained - loose).clamp_min(0) / 0.1)


def smooth(change: Tensor, m: Tensor) -> Tensor:
    """exp(-change / m): 1 where whatever moves keeps its velocity."""
    return torch.exp(-change / m.clamp_min(1e-6))


def rigid(stretch: Tensor, k: float) -> Tensor:
    """exp(-k/2 stretch), ``k`` in seconds: 1 where whatever moves keeps its shape."""
    return torch.exp(-0.5 * k * stretch)


def steady(change: Tensor, speed: Tensor, m_nat: float) -> Tensor:
    """exp(-change / (speed + m_nat)) of the flow that the camera alone makes: 1 for an even path. Not in Stream4D,
    whose terms do not see a shaking camera, because whoever estimates the camera subtracts its shaking."""
    return torch.exp(-change / (speed + m_nat))


def anchor(away: Tensor) -> Tensor:
    """exp(-a^2 / 18) with a the farthest of the features ``away`` [N] from natural, in their natural spreads: .95 at
    one, .61 at three, .01 at nine."""
    return torch.exp(-(away.abs().max() ** 2) / 18)


def whole(windows: Tensor) -> Tensor:
    """One value of those of the windows [W]: (2 mean + mean of the lowest quarter) / 3, so that a late freeze shows."""
    lowest = windows.sort().values[: max(1, -(-len(windows) // 4))]
    return (2 * windows.mean() + lowest.mean()) / 3


def redrawn(frames: Tensor, flow: Tensor, weight: Tensor) -> Tensor:
    """Colour difference [S, H, W], over the clip's contrast, of each frame but the last to the next one looked up where
    the ``flow`` [S, H, W, 2] in pixels leads. ``frames`` [S + 1, 3, H, W]; ``weight`` [S, H, W]. Frames are brought to
    one exposure first: neither a flicker nor darkening changes it."""
    grid = pixel_centres(*frames.shape[2:])
    colours = frames.permute(0, 2, 3, 1)
    here, there = colours[:-1], sample(colours[1:], grid + flow)
    w = weight[..., None]
    both, own = ((w * x * there).sum((1, 2, 3), keepdim=True) for x in (here, there))
    gain = both / own.clamp_min(1e-9)
    return (gain * there - here).abs().mean(-1) / frames.std((2, 3)).mean().clamp_min(1e-3)
