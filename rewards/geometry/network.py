"""A small feed-forward network for depth and camera motion, trained on the embedded world: it works at 32 x 32 pixels.

Each frame gives depth and whether the still world is seen there; each pair of neighbouring frames gives the motion of
the camera between them. Nothing is fitted to the optical flow, so that the flow is left to judge it.
Shape letters: N frames or pairs, F frames of a clip, H W pixels, S the network's size.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.functional import interpolate

from rewards.contract import Clips
from rewards.geometry.backends import of_files
from rewards.geometry.cameras import Geometry, pinhole
from rewards.geometry.flow import Flow

WEIGHTS = Path(__file__).parents[1] / "weights" / "geometry_world.safetensors"
TRAIN = "arvideo rewards train-geometry"


class DepthPoseNet(nn.Module):
    """A U-Net on one frame and strided convolutions on two. Lengths are in heights of the camera over the ground: that
    is what pictures show, while a larger world walked through faster looks the same."""

    def __init__(self, size: int = 32, width: int = 24):
        super().__init__()
        self.size, self.width, w = size, width, width
        self.down = nn.ModuleList([
            nn.Sequential(_block(3, w, 2), _block(w, w)), nn.Sequential(_block(w, 2 * w, 2), _block(2 * w, 2 * w)),
            _block(2 * w, 2 * w, 2),
        ])  # fmt: skip
        self.whole = nn.Linear(2 * w * (size // 8) ** 2, 2 * w)  # where the horizon is, told to every place
        self.up = nn.ModuleList([_block(4 * w, 2 * w), _block(3 * w, w)])
        self.maps = nn.Sequential(nn.Conv2d(w, 8, 1), nn.PixelShuffle(2))
        self.pair = nn.Sequential(
            _block(9, w, 2), _block(w, 2 * w, 2), _block(2 * w, 4 * w, 2), nn.Flatten(),
            nn.Linear(4 * w * (size // 8) ** 2, 4 * w), nn.SiLU(), nn.Linear(4 * w, 6),
        )  # fmt: skip

    def depth(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Log depth [N, S, S] and the logit [N, S, S] of seeing the still world (not the sky, not an object, which may
        move) in ``frames`` [N, 3, S, S] in [0, 1]."""
        x, seen = frames - 0.5, []
        for layer in self.down:
            x = layer(x)
            seen.append(x)
        x = x + self.whole(x.flatten(1))[:, :, None, None]
        for layer, skip in zip(self.up, seen[-2::-1], strict=True):
            x = layer(torch.cat([interpolate(x, scale_factor=2), skip], 1))
        log_depth, still = self.maps(x).unbind(1)
        return log_depth.clamp(-3, 6), still

    def motion(self, first: Tensor, second: Tensor) -> Tensor:
        """World-to-camera of ``second`` times camera-to-world of ``first`` [N, 4, 4], frames [N, 3, S, S] in [0, 1].

        The exponential of a difference that changes sign with the order of the frames: equal frames give exactly no
        motion, and the way back is exactly the inverse.
        """
        a, b = first - 0.5, second - 0.5
        there, back = torch.cat([a, b, 4 * (b - a)], 1), torch.cat([b, a, 4 * (a - b)], 1)
        ahead, behind = self.pair(torch.cat([there, back])).chunk(2)
        return torch.linalg.matrix_exp(twist(0.1 * (ahead - behind)))


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.SiLU())


def twist(xi: Tensor) -> Tensor:
    """Generators [N, 4, 4] of rigid motions from rotation and translation ``xi`` [N, 6]."""
    out = xi.new_zeros(len(xi), 4, 4)
    for axis, (row, column) in enumerate(((2, 1), (0, 2), (1, 0))):
        out[:, row, column], out[:, column, row] = xi[:, axis], -xi[:, axis]
    out[:, :3, 3] = xi[:, 3:]
    return out


class Network:
    """The geometry backend ``network``: square clips of the embedded world, or of a generator trained on it.

    Other sizes are resized to the network's (32 x 32) and depth is resized back, so a larger picture is measured no
    better. The field of view is that of the world, whatever the clips say; scale is relative. Confidence is 0 on the
    sky and on objects, since these may move by themselves.
    """

    name, licence = "network", "the package's own (code and weights)"

    def __init__(self, weights: str | Path = WEIGHTS):
        self.path = Path(weights)
        self.files = {self.path: f"{TRAIN} out={self.path}"}
        self.settings = {} if self.path == WEIGHTS else of_files(self.path)

    def prepare(self) -> None:
        """Read the weights now; ValueError when they are missing or not exactly such a file."""
        self._loaded  # noqa: B018

    @cached_property
    def _loaded(self) -> tuple[DepthPoseNet, dict[str, Any]]:
        return load(self.path)

    @property
    def report(self) -> dict[str, Any]:
        """What was measured on held-out clips after training."""
        return self._loaded[1]

    @torch.no_grad()
    def geometry(self, clips: Clips, index: int, flow: Flow | None = None) -> Geometry:
        """Geometry of all frames of clip ``index``; ``flow`` is not used."""
        net, report = self._loaded
        frames = clips.frames[index].detach().float().cpu()
        height, width = frames.shape[2:]
        if height != width:
            raise ValueError(f"geometry network: frames are {height}x{width}; its weights want square ones")
        small = frames
        if height != net.size:
            small = interpolate(frames, (net.size, net.size), mode="bilinear", antialias=True)
        log_depth, still = net.depth(small)
        w2c = compose(net.motion(small[:-1], small[1:]))
        maps = torch.stack([log_depth, still], 1)
        if height != net.size:
            maps = interpolate(maps, (height, width), mode="bilinear")
        sure = (2 * maps[:, 1].sigmoid() - 1).clamp_min(0)
        return Geometry(maps[:, 0].exp(), w2c, pinhole(height, width, report["field_of_view"]), sure)


def compose(motions: Tensor) -> Tensor:
    """World-to-camera [F, 4, 4], the first camera at the origin, from the ``motions`` [F - 1, 4, 4] between frames."""
    w2c = [torch.eye(4)]
    for motion in motions:
        w2c.append(motion @ w2c[-1])
    return torch.stack(w2c)


def load(path: Path) -> tuple[DepthPoseNet, dict[str, Any]]:
    """Network, frozen, and report of ``path``; ValueError when it is missing or not exactly such a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key).float() for key in file.keys()}  # noqa: SIM118
            report = json.loads((file.metadata() or {}).get("report", "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"geometry network: cannot read weights {path} ({error}); '{TRAIN}' makes them") from None
    if not isinstance(report, dict) or not {"size", "width", "field_of_view"} <= report.keys():
        raise ValueError(f"geometry network: {path} is not such a file; make one with '{TRAIN}'")
    with torch.device("meta"):  # drawing initial weights would consume the global random state
        net = DepthPoseNet(report["size"], report["width"])
    try:
        net.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"geometry network: {path} does not fit: {' '.join(str(error).split())}") from None
    return net.eval().requires_grad_(False), report
