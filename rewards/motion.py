"""Motion without weights, from DIS optical flow: how much moves, how evenly, and whether brightness stays with it.

All of it is measured where flow can be trusted: on texture, and where forward and backward flow agree. ``flicker`` and
``motion_smoothness`` are multiplied by the motion gate of geometry/base.py, because a frozen clip has neither fault.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips
from rewards.geometry import pictures
from rewards.geometry.base import GeometricReward, Part, Unmeasurable, positive
from rewards.geometry.cameras import diagonal, pixel_centres
from rewards.geometry.flow import Flow, sample

TOP = 0.05  # share of the pixels whose speed VBench calls the motion of a pair
VBENCH_FPS, VBENCH_PIXELS, VBENCH_PAIRS = 8, 6 / 256, 4 / 16  # its frame rate; px a short side; share of pairs
COST = "about 0.2 s a clip of 17 frames at 96 x 96, 0.8 s at 256 x 448, on one CPU thread"
ENOUGH = 0.092  # diagonals a second: what VBench asks of a pair, in a picture of 16:9
TEXTURE = 2.5e-3  # least smaller eigenvalue of the structure tensor that can be followed, over the clip's variance
DARKEST = 4e-4  # variance taken at least: below it there is little but rounding
FEWEST = 0.01  # share of the pixels that must be followed


class DynamicDegree(GeometricReward):
    """1 - exp(-v / tau), v the speed in image diagonals a second of the fastest 5 % of the pixels, untrusted pixels
    counting as still, mean over steps. Made continuous, and free of units, from VBench's dynamic_degree."""

    name = "dynamic_degree"
    formula = "1 - exp(-v / tau), v the speed of the fastest 5 % of the pixels in diagonals a second"
    needs = frozenset({"fps"})
    hacked_by = "shaking, melting, cuts, strong noise: pair it with motion_smoothness, or make it a gate"
    claims = Claims(
        notices=("frozen", "half_frozen"),
        withstands=("darkened", "flickering", "reversed", "resized", "mirrored", "half_rate"),
        blind_to=("noisy", "jittered", "melted", "shuffled", "looped"),
    )
    cost = COST

    def __init__(self, tau: float = ENOUGH):
        super().__init__(motion_floor=0.0)
        self.tau = positive(self.name, tau)

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        height, width = frames.shape[-2:]
        fps, speed = _rate(clips, index), _speed(frames, flow).flatten(1)
        fastest = speed.topk(max(1, round(TOP * speed.shape[1]))).values.mean(1) * fps
        v = float(fastest.mean()) / diagonal(height, width)
        dynamic = (fastest / VBENCH_FPS > VBENCH_PIXELS * min(height, width)).float().mean()
        return {"value": -math.expm1(-v / self.tau), "diagonals_per_second": v,
                "vbench_dynamic": float(dynamic >= VBENCH_PAIRS)}  # fmt: skip

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """``speed``: brightest from four times ``tau`` on."""
        speed = _speed(frames, flow) * _rate(clips, index) / diagonal(*frames.shape[-2:])
        return {"speed": pictures.under(frames, pictures.heat(speed, 4 * self.tau))}


def _rate(clips: Clips, index: int) -> float:
    return float(torch.as_tensor(clips.fps).expand(len(clips))[index])


def _speed(frames: Tensor, flow: Flow) -> Tensor:
    """Pixels a frame [F-1, H, W], 0 where the flow cannot be trusted."""
    return trust(flow, frames) * flow.forward.norm(dim=-1)


class MotionSmoothness(GeometricReward):
    """1 - E with E the change of each followed pixel's velocity over the sum of both speeds: 0 for even motion, 1 for
    motion that turns round at every frame or stops at every other."""

    name = "motion_smoothness"
    formula = "gate * (1 - sum |v' - v| / sum (|v'| + |v|)), v and v' a pixel's velocity in two steps"
    hacked_by = "a steady pan or drift of anything, however wrong the picture"
    claims = Claims(
        notices=("frozen", "half_frozen", "texture_free", "jittered", "melted", "shuffled", "looped"),
        withstands=("darkened", "flickering", "reversed", "resized", "mirrored"),
    )
    cost = COST
    fewest = 3

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        weight, change, speeds = self._velocities(frames, flow)
        change, speeds = (weight * change).sum(), (weight * speeds).sum()
        if float(weight.sum()) < FEWEST * weight.numel():
            raise Unmeasurable("content:few_followed")
        return {"value": float(1 - change / speeds.clamp_min(1e-12)), "followed": float(weight.mean())}

    @staticmethod
    def _velocities(frames: Tensor, flow: Flow) -> tuple[Tensor, Tensor, Tensor]:
        """Of every pixel of two steps [F-2, H, W]: how far it is followed, change of its velocity, sum of speeds."""
        there = pixel_centres(*frames.shape[-2:]) + flow.forward[:-1]
        now, sure = flow.forward[:-1], trust(flow, frames)
        later = sample(torch.cat([flow.forward, sure[..., None]], -1)[1:], there)  # of the same point one step on
        (u, v), (u2, v2) = now.unbind(-1), later[..., :2].unbind(-1)  # norm(dim=-1) over two numbers is slow
        change, speeds = torch.hypot(u2 - u, v2 - v), torch.hypot(u2, v2) + torch.hypot(u, v)
        return sure[:-1] * later[..., 2], change, speeds

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """``change`` of velocity, as a share of both speeds; grey where nothing is followed."""
        weight, change, speeds = self._velocities(frames, flow)
        share = (change / speeds.clamp_min(1e-6)).masked_fill(weight < 0.5, math.nan)
        return {"change": pictures.under(frames, pictures.heat(share, 1.0))}


class Flicker(GeometricReward):
    """exp(-E / tau) with E the change of a followed point's colour from frame to frame, over the clip's contrast, so
    that darkening does not pay. VBench's temporal_flickering, which is for still scenes, is in ``raw``."""

    name = "flicker"
    formula = "gate * exp(-E / tau), E colour change along the flow, over contrast"
    hacked_by = "blur and flat colour, which have nothing to flicker; strong colours; soft fades"
    claims = Claims(
        notices=("frozen", "half_frozen", "flickering", "noisy"),
        withstands=("darkened", "reversed", "mirrored"),
        blind_to=("blurred", "resized", "saturated", "jittered", "melted"),
    )
    cost = COST

    def __init__(self, tau: float = 0.1, motion_floor: float = 0.001):
        super().__init__(motion_floor)
        self.tau = positive(self.name, tau)

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        change, weight = self._change(frames, flow), flow.confidence
        if float(weight.sum()) < FEWEST * weight.numel():
            raise Unmeasurable("content:few_followed")
        contrast = float(frames.std((2, 3)).mean())
        error = float((weight * change).sum() / weight.sum()) / max(contrast, 1e-6)
        vbench = 1 - float(frames.diff(dim=0).abs().mean())
        return {"value": math.exp(-error / self.tau), "error": error, "vbench_temporal_flickering": vbench}

    @staticmethod
    def _change(frames: Tensor, flow: Flow) -> Tensor:
        """Mean absolute change of colour along the flow [F-1, H, W]."""
        colours = frames.permute(0, 2, 3, 1)
        return (sample(colours[1:], pixel_centres(*frames.shape[-2:]) + flow.forward) - colours[:-1]).abs().mean(-1)

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """``change`` of colour over contrast, brightest from five times ``tau`` on; grey where nothing is followed."""
        change = self._change(frames, flow) / max(float(frames.std((2, 3)).mean()), 1e-6)
        change = change.masked_fill(flow.confidence < 0.5, math.nan)
        return {"change": pictures.under(frames, pictures.heat(change, 5 * self.tau))}


def trust(flow: Flow, frames: Tensor) -> Tensor:
    """How far each pixel's forward flow is to be trusted [F-1, H, W] in [0, 1]: 0 without texture, which is judged
    against the contrast of ``frames`` [F, 3, H, W], so that a darker picture moves as much."""
    texture = TEXTURE * frames.mean(1).var().clamp_min(DARKEST)
    return flow.confidence * (flow.corners[:-1] > texture)
