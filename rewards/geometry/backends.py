"""Where depth and cameras come from: one protocol, ground truth, and classical two-view geometry without weights."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rewards.contract import Clips
from rewards.geometry.cameras import Cameras, Geometry, diagonal, in_pixels, pinhole, pixel_centres, rays
from rewards.geometry.flow import Flow, agreement, grey, opencv, pair_flow, track
from rewards.geometry.matching import robust
from rewards.geometry.reprojection import salient_points
from rewards.registry import check_arguments, resolve

Answer = Geometry | str  # a string is the reason why there is none: content:* or system:*


class Backend(Protocol):
    """Gives the geometry of clips. An optional ``prepare()`` loads what is loaded late; an optional ``short = True``
    asks for pieces of a clip, which may have other scales. What it needs it may declare as a reward does: ``modules``,
    ``files``, ``hub``, ``optional`` (rewards/describe.py)."""

    name: str
    licence: str  # beside them, what a calibration is bound to besides the name may be said in ``settings``, by name

    def geometry(self, clips: Clips, index: int, flow: Flow) -> Answer:
        """Geometry of all frames of clip ``index``, whose optical ``flow`` has been computed already."""


def identity(backend: Backend) -> str:
    """A backend by name and by those of its settings that are not the usual ones: what a calibration belongs to."""
    settings = getattr(backend, "settings", {})
    return " ".join([backend.name, *(f"{k}={v}" for k, v in sorted(settings.items()))])


def of_files(path: Path) -> dict[str, str]:
    """What tells the files at ``path`` from others of that name without reading them; nothing where there are none."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path] * path.is_file()
    told = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    return {"files": hashlib.sha256(repr(told).encode()).hexdigest()[:8]} if told else {}


class GroundTruth:
    """Known geometry, one for each clip of the batch in its order: for measuring rewards, not for training."""

    name, licence = "ground_truth", "the package's own"

    def __init__(self, known: Sequence[Geometry]):
        self.known = list(known)

    def geometry(self, clips: Clips, index: int, flow: Flow) -> Answer:
        if len(self.known) != len(clips):
            raise ValueError(f"ground truth of {len(self.known)} clips was given, but {len(clips)} clips are scored")
        return self.known[index]


class Classical:
    """Essential matrix from tracks, triangulation, then pose by pose (PnP), then depth from flow. No weights.

    ``field_of_view`` in degrees, horizontal, is used where the clips carry no intrinsics. Scale is relative. A camera
    that only turns gives poses without depth.
    """

    name, licence = "classical", "Apache-2.0 (OpenCV), no weights"
    short = True  # tracks leave the picture sooner or later: a reward that can should ask for short pieces of a clip

    def __init__(self, field_of_view: float = 50.0, parallax: float = 0.006, gap: int = 4):
        if not 0 < field_of_view < 170:
            raise ValueError(f"classical geometry: field_of_view is {field_of_view}; it is in degrees, in (0, 170)")
        self.field_of_view, self.parallax, self.gap = float(field_of_view), float(parallax), int(gap)
        own, usual = vars(self), inspect.signature(Classical).parameters
        self.settings = {k: v for k, v in own.items() if v != usual[k].default}

    def prepare(self) -> None:
        """Raise ValueError now when OpenCV is missing."""
        opencv()

    def geometry(self, clips: Clips, index: int, flow: Flow) -> Answer:
        frames = clips.frames[index]
        height, width = frames.shape[2:]
        known = clips.cameras.intrinsics if isinstance(clips.cameras, Cameras) else None
        k = pinhole(height, width, self.field_of_view)
        if known is not None:
            k = in_pixels(known.float().cpu(), height, width)
        middle = len(frames) // 2
        points = salient_points(flow.corners[middle], torch.ones(height, width, dtype=torch.bool))
        xy, sure = track(flow, points, middle)
        good = sure > 0.3
        if int(good.sum(0).min()) < 24:
            return "content:few_matches"
        poses, turning = self._poses(xy, good, middle, k, diagonal(height, width))
        if isinstance(poses, str):
            return poses
        if turning:
            return Geometry(None, poses, k)
        depth, confidence = self._depth(frames, poses, k)
        return Geometry(depth, poses, k, confidence)

    def _poses(self, xy: Tensor, good: Tensor, middle: int, k: Tensor, size: float) -> tuple[Tensor | str, bool]:
        """World-to-camera [F, 4, 4], the middle frame at the origin, and whether the camera only turned."""
        cv2, count = opencv(), xy.shape[1]
        view = rays(xy, k)
        turned = torch.stack([_turn(view[good[:, j], middle], view[good[:, j], j]) for j in range(count)])
        left = torch.zeros(count)  # what turning alone leaves unexplained
        for j in range(count):
            moved = view[:, middle] @ turned[j].T @ k.T
            gap = (moved[:, :2] / moved[:, 2:] - xy[:, j]).norm(dim=-1)
            left[j] = gap[good[:, j]].median() / size
        w2c = torch.eye(4).repeat(count, 1, 1)
        if float(left.max()) < self.parallax:
            w2c[:, :3, :3] = turned
            return w2c, True
        other = int(left.argmax())
        both = good[:, other]
        a, b, matrix = xy[both, middle].double().numpy(), xy[both, other].double().numpy(), k.double().numpy()
        reach = max(0.002 * size, 0.3)
        essential, inlier = robust(cv2.findEssentialMat, a, b, matrix, cv2.USAC_MAGSAC, 0.999, reach)
        if essential is None:
            return "content:degenerate", False
        _, r, t, front, solid = cv2.recoverPose(essential, a, b, matrix, distanceThresh=1000.0, mask=inlier)
        if (front > 0).sum() < 16:
            return "content:degenerate", False
        w2c[other, :3, :3], w2c[other, :3, 3] = torch.from_numpy(r).float(), torch.from_numpy(t[:, 0]).float()
        points = torch.full((len(xy), 3), torch.nan)
        points[both] = torch.from_numpy((solid[:3] / solid[3]).T).float()
        firm = torch.zeros(len(xy), dtype=torch.bool)
        firm[both] = torch.from_numpy(front[:, 0] > 0)
        for j in range(count):
            if j in (middle, other):
                continue
            use = firm & good[:, j] & points.isfinite().all(-1)
            if int(use.sum()) < 12:
                return "content:few_matches", False
            found, turn, move, _ = cv2.solvePnPRansac(
                points[use].double().numpy(), xy[use, j].double().numpy(), matrix, None,
                reprojectionError=max(0.004 * size, 0.5), iterationsCount=200, flags=cv2.SOLVEPNP_ITERATIVE,
            )  # fmt: skip
            if not found:
                return "content:degenerate", False
            w2c[j, :3, :3] = torch.from_numpy(cv2.Rodrigues(turn)[0]).float()
            w2c[j, :3, 3] = torch.from_numpy(move[:, 0]).float()
        return w2c, False

    def _depth(self, frames: Tensor, w2c: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Depth and confidence [F, H, W]: every pixel triangulated with the frame ``gap`` away."""
        images, count = grey(frames), len(frames)
        depth, confidence = [], []
        for i in range(count):
            j = i + self.gap if i + self.gap < count else max(i - self.gap, 0)
            if j == i:
                j = count - 1 if i == 0 else 0
            there, back = pair_flow(images[i], images[j]), pair_flow(images[j], images[i])
            grid = pixel_centres(*there.shape[:2])
            z, sharp = triangulate(grid, grid + there, w2c[j] @ torch.linalg.inv(w2c[i]), k)
            sure = agreement(there[None], back[None])[0] * sharp
            depth.append(z)
            confidence.append(torch.where(z.isfinite(), sure, 0.0))
        return torch.stack(depth), torch.stack(confidence)


def triangulate(first: Tensor, second: Tensor, relative: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Depth [...] in the first camera of pixels ``first`` seen at ``second`` [..., 2] by a camera ``relative`` [4, 4]
    to it, NaN behind either; and how well it is determined [...] in [0, 1], 0 without parallax."""
    a, b = rays(first, k), rays(second, k)
    turned, move = a @ relative[:3, :3].T, relative[:3, 3]
    lever = torch.linalg.cross(b, turned)  # b x (z R a + t) = 0
    weight = lever.square().sum(-1)
    z = -(lever * torch.linalg.cross(b, move.expand_as(b))).sum(-1) / weight.clamp_min(1e-12)
    ahead = (z > 0) & (z * turned[..., 2] + move[2] > 0)
    sine = (weight / (turned.square().sum(-1) * b.square().sum(-1))).sqrt()
    return torch.where(ahead, z, torch.nan), 1 - torch.exp(-((sine / 0.01) ** 2))


def _turn(first: Tensor, second: Tensor) -> Tensor:
    """Rotation [3, 3] that takes the directions ``first`` [N, 3] to ``second``, refitted without the worst fifth."""
    a, b = (torch.nn.functional.normalize(v.double(), dim=-1) for v in (first, second))
    keep = torch.ones(len(a), dtype=torch.bool)
    for _ in range(3):
        u, _, v = torch.linalg.svd(b[keep].T @ a[keep])
        sign = torch.ones(3, dtype=torch.float64)
        sign[2] = torch.linalg.det(u @ v).sign()
        rotation = (u * sign) @ v
        gap = (a @ rotation.T - b).norm(dim=-1)
        keep = gap <= gap.quantile(0.8)
    return rotation.float()


BACKENDS = {
    "classical": "rewards.geometry.backends:Classical",
    "network": "rewards.geometry.network:Network",
    "depth_anything_3": "rewards.geometry.depth_anything:DepthAnything3",
    "vggt": "rewards.geometry.vggt:VGGT",
}
Choice = str | Mapping[str, Any] | Backend


def backend(choice: Choice) -> Backend:
    """The backend called ``choice`` (of BACKENDS, or module:attribute), that of ``{"target": name, "args": {...}}``, or
    ``choice`` itself when it is one. ValueError for anything else."""
    args: Mapping[str, Any] = {}
    if isinstance(choice, Mapping):
        if "target" not in choice or choice.keys() - {"target", "args"}:
            raise ValueError(
                f"geometry backend has {', '.join(choice) or 'nothing'}; give it target, and args if needed"
            )
        args = choice.get("args") or {}
        choice = choice["target"]
    found: Any = resolve(choice, BACKENDS, "geometry backend") if isinstance(choice, str) else choice
    if isinstance(found, type):
        check_arguments(str(choice), inspect.signature(found), args, "geometry backend")
        found = found(**args)
    elif args:
        raise ValueError(f"geometry backend {choice!r} is built already and takes no args; got {', '.join(args)}")
    made: Backend = found
    if lacks := [part for part in ("name", "licence", "geometry") if not hasattr(made, part)]:
        raise ValueError(f"geometry backend {choice!r} lacks {', '.join(lacks)}; choose {', '.join(BACKENDS)}, or "
                         "module:attribute for your own")  # fmt: skip
    return made
