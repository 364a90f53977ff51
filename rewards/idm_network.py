"""The network of the inverse-dynamics reward and the file that holds one, or an ensemble.

A file says in its report what the actions are (``kind``: discrete, one of ``labels`` a change; continuous, numbers
called ``labels``), to which ``size`` frames are brought and how (``resize``: area, square frames alone, averaged; or
stretch, any frames, by bilinear samples, OpenCV's INTER_LINEAR), and what was measured on held-out clips.
Shape letters: B clips, T pixel frames, N pairs, D features, A actions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

KINDS, RESIZES = ("discrete", "continuous"), ("area", "stretch")
FRECHET = ("frechet.mean", "frechet.cov")  # of the features on held-out clips
BESIDE = {"discrete": ("class_frequency", *FRECHET), "continuous": ("action_mean", "action_std", *FRECHET)}
FEATURES = 64  # D
BLOCK = {"cpu": 128}  # pairs at once; on a CPU small blocks stay in its cache and run three times faster
LARGE_BLOCK = 8192  # elsewhere: bounds memory


class InverseDynamicsNet(nn.Module):
    """Logits of A actions, or A numbers, from two frames: strided convolutions on (a, b, b - a), then a small MLP."""

    def __init__(self, actions: int = 5, *, size: int = 32, width: int = 64, features: int = FEATURES):
        super().__init__()
        self.size = size
        self.convolutions = nn.Sequential(
            nn.Conv2d(9, width // 2, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1), nn.SiLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(),
        )  # fmt: skip
        flat = width * (size // 8) ** 2
        self.mlp = nn.Sequential(nn.Linear(flat, 72), nn.SiLU(), nn.Linear(72, features), nn.SiLU())
        self.head = nn.Linear(features, actions)

    def features(self, first: Tensor, second: Tensor) -> Tensor:
        """Penultimate features [N, D] of the pairs ``first``, ``second`` [N, 3, size, size] in [0, 1]."""
        a, b = first - 0.5, second - 0.5
        return self.mlp(self.convolutions(torch.cat([a, b, 4 * (b - a)], 1)))  # differences are small: scale them up

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Logits [N, A] of the pairs ``first``, ``second`` [N, 3, size, size] in [0, 1]."""
        return self.head(self.features(first, second))


@dataclass(frozen=True)
class Idm:
    """A file of weights, read."""

    nets: tuple[InverseDynamicsNet, ...]  # frozen
    beside: dict[str, Tensor]  # what goes with its kind
    report: dict[str, Any]

    @property
    def kind(self) -> str:
        return self.report.get("kind", "discrete")

    def outputs(self, frames: Tensor) -> Tensor:
        """Of each network M the A outputs [M, B, T-1, A] of ``frames`` [B, T, 3, H, W] in [0, 1]; differentiable."""
        small = self._resized(frames)
        return torch.stack([each_pair(net.to(frames.device), small) for net in self.nets])

    def features(self, frames: Tensor) -> Tensor:
        """Penultimate features [B, T-1, D] of the first network, for Frechet distances."""
        return each_pair(self.nets[0].to(frames.device).features, self._resized(frames))

    def _resized(self, frames: Tensor) -> Tensor:
        (h, w), size = frames.shape[-2:], self.report["size"]
        if h == w == size:
            return frames
        area = self.report.get("resize", "area") == "area"
        if area and (h != w or h < size):
            raise ValueError(f"inverse_dynamics: frames are {h}x{w}; its weights want square ones of {size} or more")
        flat = nn.functional.interpolate(frames.flatten(0, 1), (size, size), mode="bilinear", antialias=area)
        return flat.unflatten(0, frames.shape[:2])


def each_pair(function: Callable[[Tensor, Tensor], Tensor], frames: Tensor) -> Tensor:
    """``function`` of every two neighbours of ``frames`` [B, T, 3, S, S]: [B, T-1, ...]."""
    b, t = frames.shape[:2]
    first, second = frames[:, :-1].flatten(0, 1), frames[:, 1:].flatten(0, 1)
    with torch.autocast(frames.device.type, enabled=False):  # half precision would break batch invariance
        size = BLOCK.get(frames.device.type, LARGE_BLOCK)
        blocks = [function(x, y) for x, y in zip(first.split(size), second.split(size), strict=True)]
    return torch.cat(blocks).unflatten(0, (b, t - 1)) if t > 1 else blocks[0].reshape(b, 0, blocks[0].shape[-1])


def pack(nets: list[InverseDynamicsNet], beside: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file has them: of one network by their own names, of several as ``member.N.NAME``."""
    if len(nets) == 1:
        return nets[0].state_dict() | beside
    return {f"member.{i}.{k}": v for i, net in enumerate(nets) for k, v in net.state_dict().items()} | beside


def load(path: Path, known: str = "") -> Idm:
    """What ``path`` holds; ValueError, naming the ``known`` weights, when it is missing or not exactly such a file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
            report = json.loads((file.metadata() or {}).get("report", "{}"))
        if not isinstance(report, dict):
            report = {}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"inverse_dynamics: cannot read weights {path} ({error}); shipped: {known}") from None
    kind, resize = report.get("kind", "discrete"), report.get("resize", "area")
    wanted = BESIDE.get(kind, ())
    beside = {k: tensors.pop(k) for k in wanted if k in tensors}
    if (
        not wanted
        or resize not in RESIZES
        or not set(wanted) <= beside.keys()
        or not {"labels", "size"} <= report.keys()
    ):
        raise ValueError(f"inverse_dynamics: {path} is not such a file; make one with 'arvideo rewards train-idm'")
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        which, _, name = key.removeprefix("member.").partition(".") if key.startswith("member.") else ("", "", key)
        parts.setdefault(which, {})[name] = tensor
    return Idm(tuple(_net(path, part, report) for part in (parts or {"": {}}).values()), beside, report)


def _net(path: Path, tensors: dict[str, Tensor], report: dict[str, Any]) -> InverseDynamicsNet:
    with torch.device("meta"):  # drawing initial weights would consume the global random state
        net = InverseDynamicsNet(len(report["labels"]), size=report["size"])
    try:
        net.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        raise ValueError(f"inverse_dynamics: {path} does not fit the network: {' '.join(str(error).split())}") from None
    return net.eval().requires_grad_(False)
