"""The geometry backend ``vggt`` (arXiv 2503.11651), through the package of its authors, who publish it on GitHub only.

Two checkpoints of one network. facebook/VGGT-1B is not for commercial use. facebook/VGGT-1B-Commercial is, military
use and the rest of its acceptable-use policy aside, and is given out on application. The licence is said when it is
loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import InterpolationMode, resize

from rewards.geometry.pretrained import PATCH, Pretrained
from rewards.preference import weights as of

CODE = "code VGGT License v1 (no military use)"
HUB = {
    "facebook/VGGT-1B": (f"{CODE}, weights CC BY-NC 4.0: not for commercial use", ("model.safetensors",)),
    "facebook/VGGT-1B-Commercial": (
        f"{CODE}, weights under its acceptable-use policy: commercial but not military use", ("vggt_1B_commercial.pt",)
    ),
}  # fmt: skip


class VGGT(Pretrained):
    """Depth and cameras of any clip. Scale is relative. The long side is at ``size`` (518, as published), both sides
    multiples of 14; a landscape is so seen as in the authors' own preparation, a portrait whole, which they crop."""

    kind, module = "vggt", "vggt"
    install = "pip install 'arvideo-rl[geometry]' && pip install --no-deps git+https://github.com/facebookresearch/vggt"
    known, reads = HUB, ("model.safetensors",)

    def __init__(self, weights: str | Path = "facebook/VGGT-1B", size: int = 518):
        super().__init__(weights, size)

    def load(self, path: Path) -> nn.Module:
        from vggt.models.vggt import VGGT as Network

        file = of.one_of("geometry vggt", path, ("model.safetensors", "vggt_1B_commercial.pt", "model.pt"))
        network: Any = of.fit("geometry vggt", Network(), of.read("geometry vggt", file), file)
        network.point_head = network.track_head = None  # not asked for
        return network

    def see(self, frames: Tensor) -> dict[str, Any]:
        from vggt.utils.pose_enc import pose_encoding_to_extri_intri

        longest = max(frames.shape[2:])
        sides = [max(1, round(side * self.size / longest / PATCH)) * PATCH for side in frames.shape[2:]]
        small = resize(frames, sides, InterpolationMode.BICUBIC, antialias=True).clamp(0, 1)  # it normalises them
        half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        with torch.autocast(frames.device.type, half, enabled=frames.device.type == "cuda"):
            found = self.network(small[None])
        w2c, intrinsics = pose_encoding_to_extri_intri(found["pose_enc"].float(), sides)
        return {"depth": found["depth"][0, ..., 0], "surety": found["depth_conf"][0], "w2c": w2c[0],
                "intrinsics": intrinsics[0]}  # fmt: skip
