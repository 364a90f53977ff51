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
class Steps:
    """What the data policy did at every step of P consecutive chunks, S steps each."""

    x: Tensor  # [B, P, S, frames, C, H, W] noisy inputs; step j + 1 holds where the transition of step j led
    x0: Tensor  # [B, P, S, frames, C, H, W] predicted clean chunks
    first: Tensor  # [B] int64: index of the first of the chunks; in a fork, the pivot

    def rows(self, rows: slice) -> Steps:
        """Part of the batch."""
        return Steps(self.x[rows], self.x0[rows], self.first[rows])

    def one_first(self) -> int:
        """The first chunk, where all rows have the same."""
        if (self.first != self.first[0]).any():
            seen = sorted(set(self.first.tolist()))
            raise ValueError(f"branches that fork at different chunks, {seen}, are to be taken group by group")
        return int(self.first[0])


@dataclass(frozen=True)
class Record:
    """A batch of finished branches. Shape letters: B branches, F frames (whole chunks), K chunks."""

    latents: Tensor  # [B, F, C, H, W] clean
    script: Script  # prompts in force and actions
    keys: list[Key]  # names every draw of every branch
    groups: Tensor  # [B] int64 group ids
    steps: Steps | None = None  # where the objective asked for them
    towards: Tensor | None = None  # [B, F, C, H, W] what teacher and critic take off the clean latents (matching.py)
    map: Tensor | None = None  # [B, F, H, W] how much each place counts
    gates: Tensor | None = None  # [B] weight of each branch's pull to the reference; None = 1

    def pull(self, kl: Tensor, branches: slice | list[int] = slice(None)) -> Tensor:
        """Divergences ``kl`` [..., B] from the reference, each times its branch's weight; of some ``branches`` alone
        where those are given."""
        return kl if self.gates is None else kl * self.gates[branches]

    def rows(self, rows: slice) -> Record:
        """Part of the batch."""
        return replace(
            self, latents=self.latents[rows], script=self.script.rows(rows), keys=self.keys[rows],
            groups=self.groups[rows], steps=self.steps and self.steps.rows(rows),
            towards=None if self.towards is None else self.towards[rows],
            map=None if self.map is None else self.map[rows],
            gates=None if self.gates is None else self.gates[rows],
        )  # fmt: skip

    @classmethod
    def cat(cls, parts: list[Record], script: Script) -> Record:
        """Batches one after the other, under the ``script`` of all."""
        steps = [p.steps for p in parts if p.steps is not None]
        together = Steps(*(torch.cat([getattr(s, n) for s in steps]) for n in ("x", "x0", "first"))) if steps else None
        return cls(
            torch.cat([p.latents for p in parts]), script, [k for p in parts for k in p.keys],
            torch.cat([p.groups for p in parts]), together,
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


def walk_to(denoiser: Denoiser, latents: Tensor, writer, chunk: int) -> tuple[int, int, Context]:
    """(first frame, end frame, context) of one recorded chunk."""
    for index, start, stop, context in walk(denoiser, latents, writer):
        if index == chunk:
            return start, stop, context
    raise ValueError(f"there is no chunk {chunk} in {latents.shape[1]} frames")


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
