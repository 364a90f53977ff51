"""What the geometric rewards share: the motion gate, the loop over clips, the treatment of failures.

A frozen clip has no geometric error at all, so each value in [0, 1] is multiplied by the mean over steps of
min(1, motion / motion_floor), motion being the mean optical displacement of one step over textured pixels, in image
diagonals. A clip frozen for half its length so loses half. ``motion_floor=0`` turns the gate off.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rewards.contract import Clips, Scores, check_needs
from rewards.geometry import pictures
from rewards.geometry.backends import Choice, backend
from rewards.geometry.cameras import Geometry
from rewards.geometry.flow import Flow, clip_flow, motion, opencv

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
    cost = "about 0.9 s a clip of 18 frames at 96 x 96, 6 to 10 s of 16 frames at 256 x 448, on one CPU thread"
    modules = {"cv2": "pip install opencv-python-headless"}
    fewest = 2  # frames
    parts: tuple[str, ...] = ("gate", "before_gate")  # components; what else is measured goes to raw

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
        self.ready(clips)
        count = len(clips)
        rows = [self._one(clips, i) for i in range(count)]
        table = {k: torch.tensor([row.get(k, math.nan) for row, _ in rows]) for row, _ in rows for k in row}
        reasons = [reason for _, reason in rows]
        value = table.pop("value").to(clips.frames.device)
        unknown = torch.full((count,), math.nan)
        components = {k: table.get(k, unknown).to(value) for k in self.parts}
        raw = {k: v for k, v in table.items() if k not in ("gate", "before_gate", *self.parts)}
        return Scores(value, value.isfinite(), reasons, components, raw)

    def _one(self, clips: Clips, index: int) -> tuple[Part, str | None]:
        frames = clips.frames[index].detach().float().cpu()
        flow = clip_flow(frames)
        moved = motion(flow)
        gate = float((moved / self.motion_floor).clamp_max(1).mean()) if self.motion_floor else 1.0
        part: Part = {"motion": float(moved.mean()), "gate": gate, "before_gate": math.nan, "value": math.nan}
        if gate < 0.05:  # nothing moves: the worst score, whatever the geometry may be
            return part | {"value": 0.0}, None
        try:
            found = self.measure(clips, index, frames, flow)
        except Unmeasurable as error:
            return part, str(error)
        before = found.pop("value")
        return part | found | {"before_gate": before, "value": before * gate}, None

    def ready(self, clips: Clips) -> None:
        """Raise ValueError for clips that are too small, too short, or lack what is needed."""
        check_needs(self, clips)
        frames, _, height, width = clips.frames.shape[1:]
        if min(height, width) < SMALLEST:
            raise ValueError(f"{self.name}: frames are {height}x{width}; it needs {SMALLEST} pixels or more a side")
        if frames < self.fewest:
            raise ValueError(f"{self.name}: clips have {frames} frames; it needs {self.fewest} or more")
        self.check(clips)

    def maps(self, clips: Clips) -> dict[str, Tensor]:
        """What was seen of the clips, to look at, by name: pictures [B, F, 3, H, W] in [0, 1], as large as what they
        show. Always ``flow``; what cannot be measured of a clip is not there."""
        check_needs(self, clips)
        drawn = [self._pictures(clips, i) for i in range(len(clips))]
        return {k: torch.stack([d[k] for d in drawn]) for k in drawn[0] if all(k in d for d in drawn)}

    def _pictures(self, clips: Clips, index: int) -> dict[str, Tensor]:
        frames = clips.frames[index].detach().float().cpu()
        flow = clip_flow(frames)
        out = {"flow": pictures.under(frames, pictures.flow_colours(flow.forward, flow.confidence))}
        try:
            return out | self.draw(clips, index, frames, flow)
        except Unmeasurable:
            return out

    def check(self, clips: Clips) -> None:
        """Raise ValueError for clips that cannot be scored at all."""

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        """Value before the gate and raw numbers of clip ``index``; Unmeasurable with a reason."""
        raise NotImplementedError

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """Pictures [F, 3, H, W] by name of what :meth:`measure` looks at in clip ``index``; Unmeasurable for none."""
        return {}


class BackendReward(GeometricReward):
    """A geometric reward that needs cameras, and mostly depth, from a backend."""

    fewest = 3

    def __init__(self, backend_choice: Choice, motion_floor: float):
        super().__init__(motion_floor)
        self.backend = backend(backend_choice)
        self.licence = f"the package's own; {self.backend.name}: {self.backend.licence}"
        self.files = getattr(self.backend, "files", {})
        self.hub = getattr(self.backend, "hub", {})

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

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        found = self.geometry(clips, index, flow, depth=False)
        return {} if found.depth is None else {"depth": pictures.under(frames, pictures.nearness(found))}


def spread(count: int, wanted: int) -> Tensor:
    """Indices of at most ``wanted`` of ``count`` frames, evenly spread, both ends among them."""
    return torch.linspace(0, count - 1, min(count, wanted)).round().long()


def positive(name: str, tau: Any) -> float:
    """``tau`` as a float; ValueError unless it is positive."""
    if not 0 < float(tau) < math.inf:
        raise ValueError(f"{name}: tau is {tau}; it is a positive number")
    return float(tau)


def at_least(name: str, what: str, value: int, least: int) -> int:
    """``value`` as an int; ValueError below ``least``."""
    if int(value) < least:
        raise ValueError(f"{name}: {what} is {value}; it is {least} or more")
    return int(value)
