"""What a rollout leaves behind for an update, and the walk that rebuilds each chunk's context from it.

Keys and values are never kept between iterations: the clean latents are, and refreshing them in order gives back
exactly the context the sampler had.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.denoiser import Denoiser, Script
from samplers.randomness import Key


@dataclass(frozen=True)
class Record:
    """A batch of finished branches. Shape letters: B branches, F frames (whole chunks), K chunks."""

    latents: Tensor  # [B, F, C, H, W] clean
    script: Script  # prompts in force and actions
    keys: list[Key]  # names every draw of every branch
    groups: Tensor  # [B] int64 group ids

    def rows(self, rows: slice) -> Record:
        """Part of the batch."""
        return replace(
            self, latents=self.latents[rows], script=self.script.rows(rows), keys=self.keys[rows],
            groups=self.groups[rows],
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.keys)


def walk(denoiser: Denoiser, latents: Tensor, writer) -> Iterator[tuple[int, int, int, Context]]:
    """Yield (chunk index, first frame, end frame, context) for each recorded chunk in order. Between chunks the
    recorded clean chunk is refreshed under the scoped policy ``writer()``, without gradient."""
    context = denoiser.start()
    bounds = denoiser.window.chunks(latents.shape[1])
    for index, (start, stop) in enumerate(bounds):
        with torch.no_grad(), writer():  # a prompt switch may run the network
            context = denoiser.enter(context)
        yield index, start, stop, context
        if index + 1 < len(bounds):
            with torch.no_grad(), writer():
                context = denoiser.refresh(latents[:, start:stop], context)


def context_gap(denoiser: Denoiser, latents: Tensor, one, other) -> float:
    """How far apart two policies' contexts are: relative L2 distance of all keys and values of the last context."""
    ends = []
    for writer in (one, other):
        for _, _, _, context in walk(denoiser, latents, writer):
            last = context
        ends.append([x for s in last.spans for x in (*s.keys, *s.values)])
    gap = sum((a - b).square().sum() for a, b in zip(*ends))
    size = sum(a.square().sum() for a in ends[0])
    return float((gap / size).sqrt()) if ends[0] else 0.0
