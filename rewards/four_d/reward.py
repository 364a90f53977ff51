"""The 4D reward: Stream4D's reconstruction, motion prior and anchor, without networks (arXiv 2608.19556)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips
from rewards.four_d import terms
from rewards.four_d.calibration import BY_HAND, UNCALIBRATED, Calibration, read
from rewards.four_d.observe import Observed, Settings, camera_flow, observe, stride_of, windows
from rewards.geometry.backends import Choice, identity
from rewards.geometry.base import BackendReward, Part, Unmeasurable
from rewards.geometry.cameras import Cameras, Geometry
from rewards.geometry.flow import Flow, clip_flow

PARTS = ("all", "recon", "motion", "anchor")
MOTIONS = ("residual", "scene")
STIRS = 0.01  # diagonals a second; where nothing in the picture is faster there is nothing to reconstruct


class FourD(BackendReward):
    """recon * motion * anchor, each in [0, 1], window by window: frames can be drawn from their neighbours in one solid
    world; what moves by itself moves as much as is natural, evenly, and keeps its shape; pictures look as they did. A
    clip in which nothing moves by itself gets 0. ``part`` chooses one of the three. The anchor needs a ``calibration``,
    which arvideo rewards calibrate makes; ``constants`` (m_nat, sigma, k, tau, loose) may be given by hand instead."""

    name = "four_d"
    formula = "recon * motion * anchor, motion = gate * smooth * rigid * steady of what moves by itself"
    needs = frozenset({"fps"})
    hacked_by = "an object that glides evenly for ever, whatever it is; the constants of other videos"
    claims = Claims(
        notices=("frozen", "half_frozen", "texture_free", "noisy", "jittered", "melted", "shuffled"),
        withstands=("reversed", "mirrored"),
        blind_to=("saturated", "blurred", "looped"),  # the first two are seen by the anchor alone
    )
    cost = "about 1.5 s a clip of 16 frames at 96 x 96 on one CPU thread"
    fewest = 3
    parts = ("recon", "motion", "anchor", "gate", "smooth", "rigid", "steady")

    def __init__(self, backend: Choice = "classical", part: str = "all", calibration: str = "",
                 motion: str = "residual", step: float = 0.125, window: float = 0.5, share: float = 0.05,
                 eulerian: bool = False, steady: bool = True,
                 constants: Mapping[str, float] | None = None):  # fmt: skip
        super().__init__(backend, 0.0)
        for key, value, known in (("part", part, PARTS), ("motion", motion, MOTIONS)):
            if value not in known:
                raise ValueError(f"four_d: {key} is {value!r}; choose {', '.join(known)}")
        for key, number in (("step", step), ("window", window)):
            if not 0 < number < 1e3:
                raise ValueError(f"four_d: {key} is {number}; it is in seconds, above 0")
        if not 0 < share <= 1:
            raise ValueError(f"four_d: share is {share}; it is above 0 and at most 1")
        self.part, self.steady = part, bool(steady)
        self.settings = Settings(motion, float(step), float(window), float(share), bool(eulerian))
        self.constants = self._constants(calibration, dict(constants or {}))
        if part == "anchor" and not self.constants.features:
            raise ValueError("four_d: part=anchor needs a calibration; make one with arvideo rewards calibrate")

    def _constants(self, path: str, by_hand: dict[str, Any]) -> Calibration:
        if unknown := sorted(set(by_hand) - set(BY_HAND)):
            raise ValueError(f"four_d: constants has {', '.join(unknown)}; it takes {', '.join(BY_HAND)}")
        if not path:
            self.uncalibrated = len(by_hand) < len(BY_HAND)
            try:
                return replace(UNCALIBRATED, **by_hand)
            except ValueError as error:
                raise ValueError(f"four_d: {error}") from None
        if by_hand:
            raise ValueError(f"four_d: calibration={path} and constants are both given; leave one out")
        self.uncalibrated, found = False, read(path)
        try:
            found.check_reward(identity(self.backend), self.settings)
        except ValueError as error:
            raise ValueError(f"four_d: calibration {path}: {error}") from None
        return found

    def _one(self, clips: Clips, index: int) -> tuple[Part, str | None]:
        if self.uncalibrated:
            said = "constants are those of the embedded world; arvideo rewards calibrate measures yours"
            warnings.warn(f"four_d is not calibrated: its {said}", stacklevel=2)
        try:
            return self.judge(self.observe(clips, index)), None
        except Unmeasurable as error:
            return {"value": math.nan}, str(error)

    def check(self, clips: Clips) -> None:
        rates, frames = torch.as_tensor(clips.fps).expand(len(clips)).tolist(), clips.frames.shape[1]
        for rate in sorted(set(rates)):
            stride = stride_of(rate, self.settings.step)
            if frames < 2 * stride + 1:
                need = f"{2 * stride + 1} or more at {rate:g} a second and step={self.settings.step:g}"
                raise ValueError(f"four_d: clips have {frames} frames; it needs {need}")
            try:
                self.constants.check_clips(min(clips.frames.shape[-2:]), stride / rate)
            except ValueError as error:
                raise ValueError(f"four_d: the calibration was {error}") from None

    def observed(self, clips: Clips) -> list[Observed | str]:
        """What is measured of each clip, or the reason why nothing is."""
        self.ready(clips)
        out: list[Observed | str] = []
        for i in range(len(clips)):
            try:
                out.append(self.observe(clips, i))
            except Unmeasurable as error:
                out.append(str(error))
        return out

    def observe(self, clips: Clips, index: int) -> Observed:
        """What is measured of clip ``index``; Unmeasurable with a reason."""
        frames = clips.frames[index].detach().float().cpu()
        fps = float(torch.as_tensor(clips.fps).expand(len(clips))[index])
        stride = stride_of(fps, self.settings.step)
        few, rate = frames[::stride].contiguous(), fps / stride
        between = clip_flow(few)
        if getattr(self.backend, "short", False):
            own = _path(clips.cameras, index, slice(None, None, stride))
            camera, scene = self._piecewise(few, between, rate, own), None
        else:
            found = self.geometry(clips, index, clip_flow(frames) if stride > 1 else between, depth=False)
            chosen = _every(found, stride)
            camera, scene = camera_flow(chosen, between, few), _velocity(chosen, rate)
        if self.settings.motion == "residual":
            scene = None
        elif scene is None:
            raise Unmeasurable("system:no_scene_flow")
        return observe(few, between, camera, rate, self.settings, scene)

    def _piecewise(self, frames: Tensor, flow: Flow, rate: float, cameras: Any) -> Tensor:
        """The camera's flow [S, H, W, 2] from a backend that loses sight of long clips: window by window, NaN where it
        found nothing. Scales may differ from piece to piece, which a flow does not show."""
        pieces, reasons = [], []
        for steps in windows(len(flow.forward), rate, self.settings.window):
            at, to = int(steps[0]), int(steps[-1]) + 1
            some = Flow(flow.forward[at:to], flow.backward[at:to], flow.confidence[at:to], flow.confidence_back[at:to],
                        flow.corners[at : to + 1])  # fmt: skip
            piece = Clips(frames[None, at : to + 1], fps=rate, cameras=_path(cameras, 0, slice(at, to + 1)))
            found = self.backend.geometry(piece, 0, some)
            if isinstance(found, str):
                reasons.append(found)
                pieces.append(torch.full_like(some.forward, torch.nan))
            else:
                pieces.append(camera_flow(found, some, frames[at : to + 1]))
        if 2 * len(reasons) > len(pieces):
            raise Unmeasurable(reasons[0])
        return torch.cat(pieces)

    def judge(self, seen: Observed) -> Part:
        """Value and parts of what was measured."""
        c = self.constants
        gate = terms.gate(seen.m, c.m_nat, c.sigma) * (seen.flow_speed >= STIRS)
        smooth, rigid = terms.smooth(seen.change, seen.m), terms.rigid(seen.stretch, c.k)
        steady = terms.steady(seen.camera_change, seen.camera_speed, c.m_nat)
        motion = gate * smooth * rigid * (steady if self.steady else 1)
        recon = terms.recon(seen.recon_error, seen.unexplained, c.tau, c.loose) * (seen.flow_speed >= STIRS)
        parts: Part = {"recon": float(terms.whole(recon)), "motion": float(terms.whole(motion))}
        if c.features:
            away = (seen.features - torch.tensor(c.features)) / torch.tensor(c.spread)
            parts["anchor"] = float(terms.anchor(away))
        together = float(terms.whole(recon * motion)) * parts.get("anchor", 1.0)
        value = together if self.part == "all" else parts[self.part]
        outside = ((seen.m < c.m_range[0]) | (seen.m > c.m_range[1])).float().mean()
        means = {"gate": gate, "smooth": smooth, "rigid": rigid, "steady": steady, "m": seen.m, "change": seen.change,
                 "stretch": seen.stretch, "flow_speed": seen.flow_speed, "camera_speed": seen.camera_speed,
                 "recon_error": seen.recon_error, "unexplained": seen.unexplained, "background": seen.background,
                 "followed": seen.followed}  # fmt: skip
        averaged = {name: float(values.mean()) for name, values in means.items()}
        return {"value": value, **parts, **averaged, "outside_calibration": float(outside)}


def _path(cameras: Any, index: int, frames: slice) -> Any:
    """Target ``cameras`` of clip ``index`` alone, in some of its ``frames``; None of none."""
    return replace(cameras, c2w=cameras.c2w[index, None, frames]) if isinstance(cameras, Cameras) else cameras


def _every(found: Geometry, stride: int) -> Geometry:
    """The geometry of every ``stride``-th frame; scene flow is carried on at its speed."""
    chosen = found.at(slice(None, None, stride))
    moved = None if found.scene_flow is None else (found.scene_flow[::stride] * stride)[: len(chosen.w2c) - 1]
    return replace(chosen, scene_flow=moved)


def _velocity(found: Geometry, rate: float) -> Tensor | None:
    """Scene flow [S, H, W, 3] in median depths a second, NaN where depth is unknown; None without."""
    if found.scene_flow is None or found.depth is None:
        return None
    known = found.depth[: len(found.scene_flow)].isfinite()[..., None]
    return torch.where(known, found.scene_flow * rate / found.depth.nanmedian(), torch.nan)
