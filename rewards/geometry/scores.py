"""The geometric rewards: one measurement each. The motion gate and the treatment of failures are in base.py."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips
from rewards.geometry import pictures
from rewards.geometry.backends import Choice
from rewards.geometry.base import BackendReward, GeometricReward, Part, Unmeasurable, at_least, positive, spread
from rewards.geometry.cameras import NEAR, Cameras, Geometry
from rewards.geometry.flow import Flow, grey, track
from rewards.geometry.matching import clip_error, match, pair_errors, sift
from rewards.geometry.reprojection import redraw, reprojection, rerender, salient_points
from rewards.geometry.trajectory import following, smoothness

ERROR = 0.3  # colour difference that is drawn as the brightest
UNHARMED = ("darkened", "flickering", "reversed", "resized", "mirrored")  # geometry is the same


class Epipolar(GeometricReward):
    """exp(-E / tau) with E the mean Sampson distance of SIFT matches between sampled frames, in diagonals, each match
    capped at ``cap``; arXiv 2510.21615 with a robust fit. ``frames`` are spread over the clip."""

    name = "epipolar"
    formula = "gate * exp(-E / tau), E mean Sampson distance of matches, in diagonals"
    claims = Claims(
        notices=("frozen", "half_frozen", "texture_free", "noisy", "melted"),
        withstands=UNHARMED,
        blind_to=("jittered", "shuffled", "looped"),
    )

    def __init__(self, frames: int = 8, tau: float = 0.002, cap: float = 0.01, motion_floor: float = 0.001):
        super().__init__(motion_floor)
        self.frames, self.tau, self.cap = at_least(self.name, "frames", frames, 2), positive(self.name, tau), cap

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        error, reason, pairs, matches = clip_error(grey(frames[spread(len(frames), self.frames)]), cap=self.cap)
        if reason is not None:
            raise Unmeasurable(reason)
        return {"value": math.exp(-error / self.tau), "error_diag": error, "pairs": pairs, "matches": matches}

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """``matches``: neighbouring sampled frames side by side; white where no motion could be fitted."""
        some = frames[spread(len(frames), self.frames)]
        found, drawn = sift(grey(some)), []
        for i, (one, two) in enumerate(zip(found[:-1], found[1:])):
            a, b = match(one, two)
            errors, reason = pair_errors(a, b, *frames.shape[-2:], cap=self.cap)
            errors = errors if reason is None else torch.full((len(a),), math.nan)
            drawn.append(pictures.lines(some[i], some[i + 1], a, b, errors, self.cap))
        return {"matches": torch.stack(drawn)}


class Reprojection(BackendReward):
    """exp(-E / tau) with E the mean distance, in diagonals, between where depth and cameras put salient points and
    where the flow finds them (VIGOR, arXiv 2603.16271); each distance capped at ``cap``. ``references``: number of
    frames from which points are followed, ``reach``: frames either way over which they are (None: the whole clip, to
    which the flow's own drift adds up), ``patch``: pixels a side of the patches from which the points are chosen."""

    name = "reprojection"
    formula = "gate * exp(-E / tau), E mean distance from projected to tracked points, in diagonals"
    claims = Claims(
        notices=("frozen", "half_frozen", "texture_free", "noisy", "jittered", "melted"),
        withstands=UNHARMED,
        blind_to=("shuffled", "looped"),
    )

    def __init__(self, backend: Choice = "classical", references: int = 4, tau: float = 0.01, cap: float = 0.05,
                 motion_floor: float = 0.001, reach: int | None = None, patch: int = 4):  # fmt: skip
        super().__init__(backend, motion_floor)
        self.reach = None if reach is None else at_least(self.name, "reach", reach, 1)
        self.patch = at_least(self.name, "patch", patch, 1)
        self.references, self.tau, self.cap = (
            at_least(self.name, "references", references, 1),
            positive(self.name, tau),
            cap,
        )

    def check(self, clips: Clips) -> None:
        if self.patch > (least := min(clips.frames.shape[-2:])):
            raise ValueError(f"reprojection: patch is {self.patch}; frames are {least} pixels on the short side")

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        geometry = self.geometry(clips, index, flow)
        parts = [gaps for _, gaps in self._followed(geometry, frames, flow)]
        at = spread(len(frames), self.references).tolist()
        followed = sum(len(gaps) * int(self._near(i, len(frames)).sum() - 1) for i, gaps in zip(at, parts))
        every = torch.cat([gaps[gaps.isfinite()] for gaps in parts])
        if len(every) < 64 or len(every) < 0.1 * followed:
            raise Unmeasurable("content:low_coverage")
        error = float(every.clamp_max(self.cap).mean())
        share = len(every) / followed
        return {"value": math.exp(-error / self.tau), "error_diag": error, "coverage": share, "compared": len(every)}

    def _near(self, reference: int, count: int) -> Tensor:
        """Which of ``count`` frames the points of ``reference`` are followed to, itself among them: bool [F]."""
        return (torch.arange(count) - reference).abs() <= (count if self.reach is None else self.reach)

    def _followed(self, geometry: Geometry, frames: Tensor, flow: Flow) -> list[tuple[Tensor, Tensor]]:
        """For each reference the positions [N, F, 2] of its points and how far they are from where geometry puts them
        [N, F]."""
        assert geometry.depth is not None
        out = []
        for i in spread(len(frames), self.references).tolist():
            known = geometry.depth[i] > NEAR
            trust = torch.cat([flow.confidence, flow.confidence_back[-1:]])[i]
            if geometry.confidence is not None:
                known = known & (geometry.confidence[i] >= 0.1)
            points = salient_points(flow.corners[i] * trust, known, patch=self.patch)
            xy, sure = track(flow, points, i)
            sure = sure * self._near(i, len(frames))
            out.append((xy, reprojection(points, i, xy, sure, geometry)))
        return out

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """``points``: what is compared, where it is seen, in the colour of its error; and ``depth``."""
        geometry = self.geometry(clips, index, flow)
        xy, gaps = (torch.cat(part) for part in zip(*self._followed(geometry, frames, flow)))
        there = gaps.isfinite()
        drawn = [pictures.dots(f, xy[there[:, j], j], gaps[there[:, j], j], self.cap) for j, f in enumerate(frames)]
        return {"points": torch.stack(drawn), "depth": pictures.under(frames, pictures.nearness(geometry))}


class Rerender(BackendReward):
    """exp(-E / tau) with E the mean colour difference, in [0, 1], between a frame and the same frame drawn from the
    points of all others (leave-one-out). ``frames`` are spread over the clip."""

    name = "rerender"
    formula = "gate * exp(-E / tau), E mean colour difference to the frame drawn from all others' points"
    hacked_by = "dark and soft pictures, whose colours differ little; a camera over a dead scene"
    claims = Claims(
        notices=("frozen", "half_frozen", "texture_free", "noisy", "flickering", "jittered", "melted"),
        withstands=("reversed", "mirrored"),
        blind_to=("darkened", "blurred", "resized", "shuffled", "looped"),
    )

    def __init__(self, backend: Choice = "classical", frames: int = 6, tau: float = 0.05,
                 motion_floor: float = 0.001):  # fmt: skip
        super().__init__(backend, motion_floor)
        self.frames, self.tau = at_least(self.name, "frames", frames, 2), positive(self.name, tau)

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        error, coverage = rerender(*self._chosen(clips, index, frames, flow))
        enough = coverage >= 0.5
        if not enough.any():
            raise Unmeasurable("content:low_coverage")
        mean = float(error[enough].mean())
        return {"value": math.exp(-mean / self.tau), "error": mean, "coverage": float(coverage.mean())}

    def _chosen(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> tuple[Tensor, Geometry]:
        """The sampled frames and their geometry."""
        found, at = self.geometry(clips, index, flow), spread(len(frames), self.frames)
        return frames[at], found.at(at)

    def draw(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> dict[str, Tensor]:
        """``redrawn``: each sampled frame over what the others' points make of it; ``error``: their difference."""
        some, geometry = self._chosen(clips, index, frames, flow)
        drawn = redraw(some, geometry)
        error = pictures.heat((drawn - some).abs().mean(1), ERROR)
        both = {"redrawn": drawn.nan_to_num(pictures.UNKNOWN), "error": error}
        both |= {"depth": pictures.nearness(geometry)}
        return {k: pictures.under(some, picture) for k, picture in both.items()}


class CameraSmoothness(BackendReward):
    """Half the smoothness of the camera's translation plus half that of its rotation (VGGRPO, arXiv 2603.26599); of the
    rotation alone where the camera only turns."""

    name = "camera_smoothness"
    formula = "gate * (translation + rotation) / 2, each 1 / (1 + mean |acceleration| / speed)"
    claims = Claims(
        notices=("frozen", "half_frozen", "texture_free", "jittered", "melted", "shuffled", "looped"),
        withstands=UNHARMED,
    )

    def __init__(self, backend: Choice = "classical", motion_floor: float = 0.001):
        super().__init__(backend, motion_floor)

    def measure(self, clips: Clips, index: int, frames: Tensor, flow: Flow) -> Part:
        geometry = self.geometry(clips, index, flow, depth=False)
        move, turn = (float(v) for v in smoothness(geometry.w2c))
        return {"value": turn if geometry.depth is None else (move + turn) / 2, "translation": move, "rotation": turn}


class CameraFollowing(BackendReward):
    """How well the camera follows ``Clips(cameras=Cameras(c2w))`` (S_traj of World-R1, arXiv 2604.24764, free of
    scale). The gate is off, since a target may stand still; a still camera earns what the formula gives it."""

    name = "camera_following"
    formula = "weighted mean of exp(-error) of path, step and rotation to the target's"
    needs = frozenset({"cameras"})
    hacked_by = "a moving camera over any scene: it says nothing about what is seen"
    claims = Claims(
        notices=("wrong_cameras", "frozen", "half_frozen", "jittered", "melted", "shuffled", "reversed", "looped"),
        withstands=("darkened", "flickering", "resized", "mirrored"),
    )

    def __init__(self, backend: Choice = "classical", motion_floor: float = 0.0):
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
