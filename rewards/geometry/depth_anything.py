"""The geometry backend ``depth_anything_3`` (arXiv 2511.10647), through the package of its authors.

Package and weights are not ours: pip's depth-anything-3 and depth-anything/DA3-* on the hub. Its ``inference`` takes
RGB uint8 pictures, resizes them (long side at ``process_res``, both to multiples of 14) and normalises them itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rewards.geometry.pretrained import Pretrained

FREE, BOUND = "Apache-2.0 (code and weights)", "code Apache-2.0, weights CC BY-NC 4.0: not for commercial use"
FILES = ("config.json", "model.safetensors")
HUB = {f"depth-anything/DA3{name}": (licence, FILES) for licence, names in {
    FREE: ("-SMALL", "-BASE"),
    BOUND: ("-LARGE", "-LARGE-1.1", "-GIANT", "-GIANT-1.1", "NESTED-GIANT-LARGE", "NESTED-GIANT-LARGE-1.1"),
}.items() for name in names}  # fmt: skip


class DepthAnything3(Pretrained):
    """Depth and cameras of any clip by one transformer. Scale is relative, but metres from the nested sizes; these give
    the sky the lowest surety, which becomes a confidence of 0. The monocular sizes know no cameras and are refused."""

    kind, module = "depth_anything_3", "depth_anything_3"
    install = "pip install 'arvideo-rl[geometry]' && pip install --no-deps depth-anything-3"  # it pins numpy<2
    known, reads = HUB, FILES

    def __init__(self, weights: str | Path = "depth-anything/DA3-BASE", size: int = 504):
        super().__init__(weights, size)

    def load(self, path: Path) -> nn.Module:
        from depth_anything_3.api import DepthAnything3 as Network
        from depth_anything_3.utils.logger import logger

        logger.level = 0  # only errors: it would print three lines a clip
        if lacks := [name for name in FILES if not (path / name).is_file()]:
            raise ValueError(f"geometry depth_anything_3: {path} is no folder with {' and '.join(lacks)}")
        # not strict by itself: what does not fit would stay random
        return Network.from_pretrained(str(path), strict=True, local_files_only=True)

    def see(self, frames: Tensor) -> dict[str, Any]:
        pictures = frames.permute(0, 2, 3, 1).mul(255).round().to(torch.uint8).cpu().numpy()
        self.network.device = frames.device  # it keeps the first it met
        found = self.network.inference(list(pictures), process_res=self.size)
        if found.extrinsics is None or found.intrinsics is None or found.conf is None:
            raise ValueError(f"geometry depth_anything_3: {self.weights} gives no cameras; choose of {', '.join(HUB)}")
        sky = np.zeros_like(found.depth, bool) if found.sky is None else found.sky
        return {"depth": np.where(sky, np.nan, found.depth), "surety": found.conf, "w2c": found.extrinsics,
                "intrinsics": found.intrinsics, "metric": bool(found.is_metric)}  # fmt: skip
