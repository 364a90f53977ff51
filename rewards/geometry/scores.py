"""The geometric rewards. Each is a measurement on one clip, turned into a value in [0, 1] and gated by motion.

A frozen clip has no geometric error at all, so each value is multiplied by min(1, motion / motion_floor), motion being
the mean optical displacement a frame over textured pixels, in image diagonals. ``motion_floor=0`` turns the gate off.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rewards.contract import Clips, Scores, check_needs
from rewards.geometry.backends import Backend, backend
from rewards.geometry.cameras import NEAR, Cameras, Geometry
from rewards.geometry.flow import Flow, clip_flow, grey, motion, opencv, track
from rewards.geometry.matching import clip_error
from rewards.geometry.reprojection import rerender, reprojection, salient_points
from rewards.geometry.trajectory import following, smoothness

SMALLEST = 32  # pixels; below it neither flow nor keypoints mean anything
Part = dict[str, float]  # of one clip: "value" in [0, 1] before the gate, other names go to raw


class Unmeasurable(Exception):
    """Carries the reason, content:*, why a clip cannot be measured."""


class GeometricReward:
    """What the geometric rewards share: the gate, the loop over clips, failures."""

    name = "geometric"
    needs: frozenset[str] = frozenset()
    granularity = "clip"
    value_range = (0.0, 1.0)
    licence = "the package's own; OpenCV Apache-2.0, no weights"
    hacked_by = "a camera over a dead scene; smooth, texture-free pictures"
    fewest = 2  # frames

    def __init__(self, motion_floor: float = 0.001):
        if not 0 <= motion_floor < 1:
            raise ValueError(
                f"{self.name}: motion_floor is {motion_floor}; it is in image diagonals a frame, in [0, 1)"
            )
        self.motion_floor = float(motion_floor)

    def prepare(self) -> None:
        """Find now what is missing."""
        opencv()

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)
        count, frames, _, height, width = clips.frames.shape
        if min(height, width) < SMALLEST:
            raise ValueError(
                f"{self.name}: frames are {height}x{width}; geometry needs {SMALLEST} pixels or more a side"
            )
        if frames < self.fewest:
            raise ValueError(f"{self.name}: clips have {frames} frames; it needs {self.fewest} or more")
        self.check(clips)
        rows = [self._one(clips, i) for i in range(count)]
        table = {k: torch.tensor([row.get(k, math.nan) for row, _ in rows]) for row, _ in rows for k in row}
        reasons = [reason for _, reason in rows]
        value = table.pop("value").to(clips.frames.device)
        gate = table["gate"].to(clips.frames.device)
        raw = {k: v for k, v in table.items() if k not in ("gate", "before_gate")}
        components = {"gate": gate, "before_gate": table["before_gate"].to(gate)}
        return Scores(value, value.isfinite(), reasons, components, raw)

    def _one(self, clips: Clips, index: int) -> tuple[Part, str | None]:
        frames = clips.frames[index].detach().float().cpu()
        flow = clip_flow(frames)
        moved = float(motion(flow))
        gate = min(1.0, moved / self.motion_floor) if self.motion_floor else 1.0
        part: Part = {"motion": moved, "gate": gate, "before_gate": math.nan, "value": math.nan}
        if gate < 0.05:  # nothing moves: the worst score, whatever the geometry may be
            return part | {"value": 0.0}, None
        try:
            found = self.measure(clips, index, frames, flow)
        except Unmeasurable as error:
            return part, str(error)
        before = found.pop("value")
        return part | found | {"before_gate": before, "value": before * gate}, None

    def check(self, clips: Clips) -> None:
        """Raise ValueError for clips that cannot be scored at all."""

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        """Value before the gate and raw numbers of clip ``index``; Unmeasurable with a reason."""
        raise NotImplementedError


class Epipolar(GeometricReward):
    """exp(-E / tau) with E the mean Sampson distance of SIFT matches between sampled frames, in diagonals, each match
    capped at ``cap``; arXiv 2510.21615 with a robust fit. ``frames`` are spread over the clip."""

    name = "epipolar"

    def __init__(self, frames: int = 8, tau: float = 0.002, cap: float = 0.01, motion_floor: float = 0.001):
        super().__init__(motion_floor)
        self.frames, self.tau, self.cap = _at_least(self.name, "frames", frames, 2), _positive(self.name, tau), cap

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        error, reason, pairs, matches = clip_error(grey(frames[spread(len(frames), self.frames)]), cap=self.cap)
        if reason is not None:
            raise Unmeasurable(reason)
        return {"value": math.exp(-error / self.tau), "error_diag": error, "pairs": pairs, "matches": matches}


class _WithBackend(GeometricReward):
    fewest = 3

    def __init__(self, backend_choice: str | Backend, motion_floor: float):
        super().__init__(motion_floor)
        self.backend = backend(backend_choice)
        self.licence = f"the package's own; {self.backend.name}: {self.backend.licence}"

    def prepare(self) -> None:
        super().prepare()
        load = getattr(self.backend, "prepare", None)
        if load is not None:
            load()

    def geometry(self, clips: Clips, index: int, flow: Flow, *, depth: bool = True) -> Geometry:
        """Geometry of clip ``index``; Unmeasurable when there is none, or no depth though it is wanted."""
        found = self.backend.geometry(clips, index, flow)
        if isinstance(found, str):
            raise Unmeasurable(found)
        if depth and found.depth is None:
            raise Unmeasurable("content:no_parallax")
        return found


class Reprojection(_WithBackend):
    """exp(-E / tau) with E the mean distance, in diagonals, between where depth and cameras put salient points and where
    the flow finds them (VIGOR, arXiv 2603.16271); each distance capped at ``cap``. ``references``: frames from which
    points are followed."""

    name = "reprojection"

    def __init__(self, backend: str | Backend = "classical", references: int = 4, tau: float = 0.01, cap: float = 0.05,
                 motion_floor: float = 0.001):  # fmt: skip
        super().__init__(backend, motion_floor)
        self.references, self.tau, self.cap = (
            _at_least(self.name, "references", references, 1),
            _positive(self.name, tau),
            cap,
        )

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        geometry = self.geometry(clips, index, flow)
        assert geometry.depth is not None
        errors, followed = [], 0
        for i in spread(len(frames), self.references).tolist():
            known = geometry.depth[i] > NEAR
            trust = torch.cat([flow.confidence, flow.confidence_back[-1:]])[i]
            if geometry.confidence is not None:
                known = known & (geometry.confidence[i] >= 0.1)
            points = salient_points(flow.corners[i] * trust, known)
            error = reprojection(points, i, *track(flow, points, i), geometry)
            followed += error.shape[0] * (error.shape[1] - 1)
            errors.append(error[error.isfinite()])
        every = torch.cat(errors)
        if len(every) < 64 or len(every) < 0.1 * followed:
            raise Unmeasurable("content:low_coverage")
        error = float(every.clamp_max(self.cap).mean())
        share = len(every) / followed
        return {"value": math.exp(-error / self.tau), "error_diag": error, "coverage": share, "compared": len(every)}


class Rerender(_WithBackend):
    """exp(-E / tau) with E the mean colour difference, in [0, 1], between a frame and the same frame drawn from the
    points of all others (leave-one-out). ``frames`` are spread over the clip."""

    name = "rerender"

    def __init__(self, backend: str | Backend = "classical", frames: int = 6, tau: float = 0.05,
                 motion_floor: float = 0.001):  # fmt: skip
        super().__init__(backend, motion_floor)
        self.frames, self.tau = _at_least(self.name, "frames", frames, 2), _positive(self.name, tau)

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        found, at = self.geometry(clips, index, flow), spread(len(frames), self.frames)
        assert found.depth is not None
        sure = None if found.confidence is None else found.confidence[at]
        chosen = Geometry(found.depth[at], found.w2c[at], found.intrinsics, sure)
        error, coverage = rerender(frames[at], chosen)
        enough = coverage >= 0.5
        if not enough.any():
            raise Unmeasurable("content:low_coverage")
        mean = float(error[enough].mean())
        return {"value": math.exp(-mean / self.tau), "error": mean, "coverage": float(coverage.mean())}


class CameraSmoothness(_WithBackend):
    """Half the smoothness of the camera's translation plus half that of its rotation (VGGRPO, arXiv 2603.26599); of the
    rotation alone where the camera only turns."""

    name = "camera_smoothness"

    def __init__(self, backend: str | Backend = "classical", motion_floor: float = 0.001):
        super().__init__(backend, motion_floor)

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        geometry = self.geometry(clips, index, flow, depth=False)
        move, turn = (float(v) for v in smoothness(geometry.w2c))
        return {"value": turn if geometry.depth is None else (move + turn) / 2, "translation": move, "rotation": turn}


class CameraFollowing(_WithBackend):
    """How well the camera follows ``Clips(cameras=Cameras(c2w))`` (S_traj of World-R1, arXiv 2604.24764, free of scale).
    The gate is off, since a target may stand still; a still camera earns what the formula gives it."""

    name = "camera_following"
    needs = frozenset({"cameras"})
    hacked_by = "a moving camera over any scene: it says nothing about what is seen"

    def __init__(self, backend: str | Backend = "classical", motion_floor: float = 0.0):
        super().__init__(backend, motion_floor)

    def check(self, clips: Clips) -> None:
        expected = (*clips.frames.shape[:2], 4, 4)
        if not isinstance(clips.cameras, Cameras) or tuple(clips.cameras.c2w.shape) != expected:
            seen = getattr(getattr(clips.cameras, "c2w", None), "shape", type(clips.cameras).__name__)
            raise ValueError(
                f"camera_following: cameras is {seen}; pass rewards.geometry.cameras.Cameras(c2w {expected})"
            )

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        found = self.geometry(clips, index, flow, depth=False)
        unit = 1.0 if found.depth is None else float(found.depth.nanmedian())
        target = torch.linalg.inv(clips.cameras.c2w[index].float().cpu())
        parts = {k: float(v) for k, v in following(found.w2c, target, unit=unit, metric=found.metric).items()}
        return {"value": parts.pop("following")} | parts


def spread(count: int, wanted: int) -> Tensor:
    """Indices of at most ``wanted`` of ``count`` frames, evenly spread, both ends among them."""
    return torch.linspace(0, count - 1, min(count, wanted)).round().long()


def _positive(name: str, tau: Any) -> float:
    if not 0 < float(tau) < math.inf:
        raise ValueError(f"{name}: tau is {tau}; it is a positive number")
    return float(tau)


def _at_least(name: str, what: str, value: int, least: int) -> int:
    if int(value) < least:
        raise ValueError(f"{name}: {what} is {value}; it is {least} or more")
    return int(value)
