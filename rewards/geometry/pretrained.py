"""What backends by large pretrained networks share: where weights are, how they are loaded, what becomes of the answer.

Such a network is written and published by others and imported only when it is used. Its weights are looked for in a
folder or among what the Hugging Face hub has left on this disk; nothing is ever fetched here. Each adapter says in
``see`` how its network is called, and :func:`as_geometry` turns what it saw into our conventions.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.functional import interpolate

from rewards.contract import Clips
from rewards.geometry.backends import of_files
from rewards.geometry.cameras import Geometry
from rewards.geometry.flow import Flow
from rewards.preference import weights as of

PATCH = 14  # pixels a side of what both networks take for one token
ENLARGED = 4  # a frame enlarged by more shows the network nothing that it knows
UNSTATED = "unstated here: see where the weights come from"


class Pretrained:
    """What such backends share. ``weights``: a folder, a file or a name on the hub; ``size``: pixels of the long side
    at which the network sees frames, a multiple of 14."""

    kind, module, install = "pretrained", "", ""  # short name; what is imported, and the command that installs it
    known: Mapping[str, tuple[str, tuple[str, ...]]] = {}  # name on the hub -> licence, files that are read
    reads: tuple[str, ...] = ()  # files of any other name on the hub
    optional = True  # what it needs is fetched by those who want it

    def __init__(self, weights: str | Path, size: int):
        if isinstance(size, bool) or not isinstance(size, int) or size < 2 * PATCH or size % PATCH:
            raise ValueError(f"geometry {self.kind}: size is {size!r}; it is a whole multiple of {PATCH}, e.g. 504")
        self.weights, self.size = weights, size
        self.licence, wanted = self.known.get(str(weights), (UNSTATED, self.reads))
        self.name = f"{self.kind} {Path(str(weights)).name}"
        self.settings = {"size": size} | of_files(
            Path(str(weights)).expanduser()
        )  # calibrations of others are not ours
        self.modules = {self.module: self.install}
        self.hub = {} if Path(str(weights)).expanduser().exists() else {str(weights): wanted}

    def prepare(self) -> None:
        """Read the weights now; ValueError saying what to do when package or weights are missing or do not fit."""
        self.network  # noqa: B018

    @cached_property
    def network(self) -> Any:
        """The network, frozen."""
        wanted = self.hub.get(str(self.weights), self.reads)
        if self.module not in sys.modules and importlib.util.find_spec(self.module) is None:  # before the large files
            raise ValueError(
                f"geometry {self.kind} needs {self.module}: {self.install}; and the weights {self.weights}"
            )
        try:
            with redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):  # first weights are drawn
                made = self.load(of.located(f"geometry {self.kind}", self.weights, wanted, fetch=False))
        except ImportError as error:
            said = " ".join(str(error).split())
            raise ValueError(f"geometry {self.kind} cannot import {self.module} ({said}): {self.install}") from None
        except (RuntimeError, OSError, LookupError, SafetensorError) as error:  # of loading strictly
            said = " ".join(str(error).split())[:300]
            raise ValueError(f"geometry {self.kind}: cannot load {self.weights}: {said}") from None
        if not self.licence.startswith("Apache"):
            warnings.warn(f"geometry {self.kind} uses {self.weights}, licence: {self.licence}", stacklevel=2)
        return made.eval().requires_grad_(False)

    def load(self, path: Path) -> nn.Module:
        """The network with exactly the weights in ``path``."""
        raise NotImplementedError

    def see(self, frames: Tensor) -> dict[str, Any]:
        """What :func:`as_geometry` takes, but for the size, of ``frames`` [F, 3, H, W] in [0, 1]."""
        raise NotImplementedError

    @torch.no_grad()
    def geometry(self, clips: Clips, index: int, flow: Flow | None = None) -> Geometry | str:
        """Geometry of all frames of clip ``index``, or system:not_finite; ``flow`` is not used. It is computed where
        the frames lie. ValueError for frames that are too small."""
        frames = clips.frames[index].detach().float().clamp(0, 1)
        height, width = frames.shape[2:]
        if ENLARGED * max(height, width) < self.size:
            raise ValueError(f"geometry {self.kind}: frames are {height}x{width}; the network would see them more than "
                             f"{ENLARGED} times enlarged, at {self.size}: give larger ones or size=N")  # fmt: skip
        self.network.to(frames.device)
        with repeatable(frames.device):
            return as_geometry(**self.see(frames), height=height, width=width)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Random numbers drawn within, on the CPU or on ``device``, are the same each time and leave no trace."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(0)
        for one in cuda:
            with torch.cuda.device(one):
                torch.cuda.manual_seed(0)
        yield


def as_geometry(*, depth: Any, surety: Any, w2c: Any, intrinsics: Any, height: int, width: int,
                metric: bool = False) -> Geometry | str:  # fmt: skip
    """Geometry of frames of ``height`` x ``width`` from what a network saw of them at another size.

    Arrays or tensors: ``depth`` [F, h, w] along z; ``surety`` [F, h, w] of 1 + exp(x), which becomes sigmoid(x) in
    [0, 1]; ``w2c`` [F, 3 or 4, 4] with OpenCV axes; ``intrinsics`` [F, 3, 3] in pixels of depth, (w/2, h/2) being the
    middle. Depth is resized as its inverse, which is linear over a plane. The answer is on the CPU, with NaN where
    depth is not positive; the string system:not_finite when cameras are not finite. ValueError for other shapes.
    """
    z, sure, pose, k = (torch.as_tensor(x).detach().float().cpu() for x in (depth, surety, w2c, intrinsics))
    count = len(z)
    if z.ndim != 3 or sure.shape != z.shape or pose.shape[1:] not in ((3, 4), (4, 4)) or k.shape != (count, 3, 3) \
            or len(pose) != count:  # fmt: skip
        seen = ", ".join(f"{n} {tuple(x.shape)}" for n, x in (("depth", z), ("surety", sure), ("w2c", pose), ("K", k)))
        raise ValueError(f"the network's answer has {seen}; expected [F, h, w] twice, [F, 3 or 4, 4] and [F, 3, 3]")
    if not bool(pose.isfinite().all() & k.isfinite().all()):
        return "system:not_finite"
    last = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(count, 1, 4)
    inverse = torch.where(z > 0, 1 / z, torch.nan)
    maps = torch.stack([inverse, 1 - 1 / sure.clamp_min(1)], 1)
    h, w = z.shape[1:]
    if (h, w) != (height, width):
        maps = interpolate(maps, (height, width), mode="bilinear", antialias=True)
        k = k * torch.tensor([width / w, height / h, 1.0])[:, None]
    near, trust = maps.unbind(1)
    known = (near > 0) & near.isfinite()
    return Geometry(torch.where(known, 1 / near, torch.nan), torch.cat([pose[:, :3], last], 1), k,
                    torch.where(known, trust, 0.0), metric)  # fmt: skip
