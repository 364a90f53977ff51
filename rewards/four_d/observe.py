"""Measure one clip: everything that the 4D reward judges, in units of its own, before any constant is applied.

arvideo rewards calibrate measures the same on clips that are known to be good, so that what is natural is found by the
code that later judges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rewards.four_d import terms
from rewards.geometry.base import Unmeasurable
from rewards.geometry.cameras import Geometry, diagonal
from rewards.geometry.flow import Flow
from rewards.motion import FEWEST, trust

STILL = 0.005  # diagonals a step; a pixel that lies nearer to where the camera alone would put it is background
FREE = 0.2  # share of the trusted pixels that may move by themselves; beyond it the world is not solid
FEATURES = ("saturation", "contrast", "fine", "medium", "coarse")


@dataclass(frozen=True)
class Settings:
    """What is measured; constants fit only measurements made with the same."""

    motion: str = "residual"  # optical flow minus rigid flow; scene: the backend's scene flow
    step: float = 0.125  # seconds between the frames that are compared
    window: float = 0.5  # seconds over which motion is judged as one
    share: float = (
        0.05  # of a window's pixels, the fastest, that counts as moving; published 0.2, more than objects fill
    )
    eulerian: bool = False  # the published comparison of velocities at the same pixel


@dataclass(frozen=True)
class Observed:
    """Measurements of one clip, one for each window [W]."""

    m: Tensor  # speed of what moves by itself, diagonals a second (scene: median depths a second)
    change: Tensor  # of its velocity over one step, in the unit of m
    stretch: Tensor  # |dv/dx| + |dv/dy|, 1/s
    flow_speed: Tensor  # of the fastest in the picture, whatever moves them, diagonals a second
    camera_speed: Tensor  # of the flow that the camera alone makes, diagonals a second
    camera_change: Tensor  # of it over one step
    recon_error: Tensor  # colour difference of frames drawn from the next ones, over contrast
    unexplained: Tensor  # share of the trusted pixels that move without the camera and are not the fastest fifth
    background: Tensor  # share of the trusted pixels that only the camera moves
    followed: Tensor  # mean trust in the flow
    features: Tensor  # [len(FEATURES)] of appearance; darkening changes none


def stride_of(fps: float, step: float) -> int:
    """Frames from one compared frame to the next."""
    return max(1, round(fps * step))


def observe(frames: Tensor, flow: Flow, camera: Tensor, rate: float, settings: Settings,
            scene: Tensor | None = None) -> Observed:  # fmt: skip
    """Measure ``frames`` [F, 3, H, W], F >= 3, ``rate`` of them a second, with the ``flow`` between them and that part
    of it that the ``camera`` alone makes [S, H, W, 2], NaN where unknown. ``scene`` [S, H, W, 3], in median depths a
    second, NaN where unknown, is taken for the velocity when it is given. Raises Unmeasurable."""
    unit = rate / diagonal(*frames.shape[2:])
    trusted = trust(flow, frames)
    weight = trusted * camera.isfinite().all(-1)
    camera, residual = camera.nan_to_num(), flow.forward - camera.nan_to_num()
    apart = residual.norm(dim=-1)
    still = apart < STILL * diagonal(*frames.shape[2:])
    velocity, sure = residual * unit, weight
    if scene is not None:
        velocity, sure = scene.nan_to_num(), scene.isfinite().all(-1).float()
    change, change_sure = terms.acceleration(velocity, flow.forward, sure, eulerian=settings.eulerian)
    stretch, stretch_sure = terms.stretching(velocity, sure)
    camera_change, camera_sure = terms.acceleration(camera * unit, flow.forward, weight)
    speed = flow.forward.norm(dim=-1, keepdim=True) * unit
    model = torch.where(still[..., None], camera, flow.forward)
    error = terms.redrawn(frames, model, weight)
    moves, rows = torch.zeros_like(weight), []
    for steps in windows(len(flow.forward), rate, settings.window):
        if min(float(weight[steps].mean()), float(sure[steps].mean())) < FEWEST:
            continue
        pairs = steps[steps < len(change)]
        free = terms.moving(residual[steps], weight[steps], FREE * float((weight[steps] > 0).float().mean())) > 0
        chosen = terms.moving(velocity[steps], sure[steps], settings.share)
        moves[steps] = (chosen > 0).float()
        rows.append(torch.stack([
            terms.weighted(velocity[steps].norm(dim=-1), chosen),
            terms.weighted(change[pairs], moves[pairs] * change_sure[pairs]),
            terms.weighted(stretch[steps], moves[steps] * stretch_sure[steps]),
            terms.weighted(speed[steps, ..., 0], terms.moving(speed[steps], weight[steps], settings.share)),
            terms.weighted(camera[steps].norm(dim=-1) * unit, weight[steps]),
            terms.weighted(camera_change[pairs], camera_sure[pairs]),
            terms.weighted(error[steps], weight[steps]),
            terms.weighted((~still[steps] & ~free).float(), weight[steps]),
            terms.weighted(still[steps].float(), weight[steps]),
            trusted[steps].mean(),
        ]))  # fmt: skip
    if 2 * len(rows) < len(windows(len(flow.forward), rate, settings.window)):
        raise Unmeasurable("content:few_followed")
    parts: list[Tensor] = [*torch.stack(rows, 1), appearance(frames)]
    return Observed(*parts)


def windows(steps: int, rate: float, seconds: float) -> tuple[Tensor, ...]:
    """Steps of each window; every window but a lone one has two or more."""
    return torch.arange(steps).tensor_split(max(1, min(steps // 2, round(steps / rate / seconds))))


def camera_flow(geometry: Geometry, flow: Flow, frames: Tensor) -> Tensor:
    """The part of the ``flow`` between ``frames`` that the camera makes [S, H, W, 2] in pixels. Where depth is not
    metric its scale is fitted to what is seen."""
    if geometry.depth is None:
        unknown = torch.full((len(frames), *frames.shape[2:]), torch.nan)
        geometry = Geometry(unknown, geometry.w2c, geometry.intrinsics)
    camera, far = terms.rigid_flow(geometry)
    if geometry.metric:
        return camera
    scale = terms.fitted_scale(flow.forward, trust(flow, frames), camera, far)
    return terms.rigid_flow(geometry, scale)[0]


def appearance(frames: Tensor) -> Tensor:
    """What pictures look like [len(FEATURES)], mean over ``frames`` [F, 3, H, W]: saturation, log of contrast over
    brightness, and logs of the detail in three octaves over contrast. Unchanged when a clip is darkened."""
    bright = frames.amax(1)
    saturation = ((bright - frames.amin(1)) / bright.clamp_min(0.02)).mean()
    grey = frames.mean(1, keepdim=True)
    spread = grey.std((2, 3)).mean().clamp_min(1e-4)
    out = [saturation, (spread / grey.mean().clamp_min(1e-4)).log()]
    for _ in range(3):
        small = torch.nn.functional.avg_pool2d(grey, 2)
        smooth = torch.nn.functional.interpolate(small, grey.shape[2:], mode="bilinear", align_corners=False)
        out.append(((grey - smooth).std((2, 3)).mean() / spread).clamp_min(1e-4).log())
        grey = small
    return torch.stack(out)
