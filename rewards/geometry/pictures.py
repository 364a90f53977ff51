"""What geometric rewards saw, as pictures to look at: heat maps, flow, matches, points. Each is drawn over the frame
that it belongs to, or under it. Nothing here is measured.

Shape letters: F pictures, N points, H W pixels. Pictures are float32 [F, 3, H, W] in [0, 1].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rewards.geometry.cameras import NEAR, Geometry
from rewards.geometry.flow import opencv

UNKNOWN = 0.5  # grey where nothing is known
BEHIND = 0.35  # how much of a frame is seen behind what is drawn over it


def heat(values: Tensor, most: float) -> Tensor:
    """Colours of ``values`` [F, H, W]: black at 0 through violet and orange to yellow at ``most`` and beyond; grey
    where NaN."""
    level = (values / most).nan_to_num(0.0).clamp(0, 1).mul(255).round().to(torch.uint8).numpy()
    cv2 = opencv()
    painted = [cv2.applyColorMap(np.ascontiguousarray(x), cv2.COLORMAP_INFERNO)[..., ::-1].copy() for x in level]
    colours = torch.from_numpy(np.stack(painted)).permute(0, 3, 1, 2).float() / 255
    return torch.where(values.isnan()[:, None], UNKNOWN, colours)


def nearness(geometry: Geometry) -> Tensor:
    """Heat of 1 / depth, near is bright, on the scale of the clip's nearest twentieth; grey where depth is not known
    well."""
    assert geometry.depth is not None
    sure = geometry.depth > NEAR
    near = 1 / geometry.depth.where(
        sure if geometry.confidence is None else sure & (geometry.confidence >= 0.1), torch.nan
    )
    known = near[near.isfinite()]
    return heat(near, float(known.quantile(0.95)) if len(known) else 1.0)


def flow_colours(forward: Tensor, confidence: Tensor) -> Tensor:
    """Displacements [F, H, W, 2] as colours: hue is the direction (right red, down lime, left cyan, up violet),
    brightness the speed, up to the clip's fastest hundredth (at least one pixel a frame); grey where the ``confidence``
    [F, H, W] is below a half."""
    speed = forward.norm(dim=-1)
    most = max(float(speed[:, ::2, ::2].flatten().sort().values[-max(1, speed[:, ::2, ::2].numel() // 100)]), 1.0)
    turn = torch.atan2(forward[..., 1], forward[..., 0]) / (2 * torch.pi) % 1
    hsv = torch.stack([turn * 360, torch.ones_like(turn), (speed / most).clamp(0, 1)], -1).numpy()
    cv2 = opencv()
    colours = torch.from_numpy(np.stack([cv2.cvtColor(x, cv2.COLOR_HSV2RGB) for x in hsv])).permute(0, 3, 1, 2)
    return torch.where((confidence < 0.5)[:, None], UNKNOWN, colours)


def under(frames: Tensor, pictures: Tensor) -> Tensor:
    """Each of ``pictures`` [F, 3, H, W] under its frame, of which there may be more: [F, 3, 2 H, W]."""
    return torch.cat([frames[: len(pictures)], pictures], 2)


def dots(frame: Tensor, xy: Tensor, errors: Tensor, most: float) -> Tensor:
    """A dimmed ``frame`` [3, H, W] with a dot at each of ``xy`` [N, 2], green without error, red from ``most`` on."""
    canvas = _canvas(frame)
    for (x, y), colour in zip(xy.tolist(), _traffic(errors, most)):
        opencv().circle(canvas, (int(x), int(y)), max(1, min(canvas.shape[:2]) // 128), colour, -1)
    return _picture(canvas)


def lines(first: Tensor, second: Tensor, a: Tensor, b: Tensor, errors: Tensor, most: float) -> Tensor:
    """Two frames [3, H, W] side by side, points ``a`` [N, 2] of the one joined to ``b`` of the other, green without
    error, red from ``most`` on, white where it is NaN: [3, H, 2 W]. The worst lie on top."""
    canvas = _canvas(torch.cat([first, second], 2))
    order = errors.argsort().tolist()
    colours = _traffic(errors, most)
    for i in order:
        (x, y), (u, v) = a[i].tolist(), b[i].tolist()
        opencv().line(canvas, (int(x), int(y)), (int(u) + first.shape[2], int(v)), colours[i], 1)
    return _picture(canvas)


def _traffic(errors: Tensor, most: float) -> list[tuple[int, int, int]]:
    share = (errors / most).clamp(0, 1).tolist()
    return [(int(255 * min(1, 2 * s)), int(255 * min(1, 2 - 2 * s)), 0) if s == s else (255, 255, 255) for s in share]


def _canvas(frame: Tensor) -> np.ndarray:
    seen = (UNKNOWN * (1 - BEHIND) + BEHIND * frame).clamp(0, 1) * 255
    return np.ascontiguousarray(seen.round().to(torch.uint8).permute(1, 2, 0).numpy())


def _picture(canvas: np.ndarray) -> Tensor:
    return torch.from_numpy(canvas).permute(2, 0, 1).float() / 255
