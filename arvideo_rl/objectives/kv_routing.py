"""KV-routing GRPO (KVPO): explore by what is remembered, not by noise, and train the policy that remembers as always.

A group has one past. For some chunks each branch reads older frames of its own in place of the less recent ones
(generators/routing.py, samplers/routes.py); all noise is shared. The trained policy is run under its ordinary context
at the inputs of every branch, and its distance to what the branch predicted makes a distribution over branches; the
loss, its protection and what differs from the published code stand in routing.py.

The gradient is exact and holds one chunk's graph: energies of all branches are computed without one, the loss gives
its derivative with respect to each, and every chunk is run again with that as its weight, all branches at once or
``at_once`` of them. Differences besides
routing.py's: the context of a later routed chunk is refreshed from the branch's recorded clean latents (there from the
replaying policy's own prediction); whether a group is protected is read off the fused advantages.

Needs: advantages relative to an anchor, the steps of the routed chunks, old, and the reference when kl_weight > 0.
Shape letters: G branches, P routed chunks, S steps, F C H W a chunk's latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError, check_choice, check_ranges
from arvideo_rl.generators.context import Context
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.generators.window import Window
from arvideo_rl.objectives.advantages import anchor_relative
from arvideo_rl.objectives.record import Record, walk_to
from arvideo_rl.objectives.routing import (
    PROTECTIONS,
    by_energy,
    fuse,
    protection,
    routing_loss,
    temperature,
    trajectory_energy,
)
from samplers.exploration import Exploration
from samplers.routes import Memory


@dataclass
class KVRouting:
    """Options of the objective; see docs/objectives/kv_routing.md. A group is its branches and one anchor."""

    routed: int = 3  # older frames of a branch's own
    nearest: int = 3  # frames just before the fork that all keep
    chunks: int = 2  # routed one after another
    capacity: int = 33  # newest frames that are still at hand, sinks included
    tau: float | None = None  # of the distribution; null = the median difference of two energies (published: 1)
    floor: float = 1.0  # errors are divided by max(t, floor); 1 = no level matters, as published
    clip_low: float = 0.1  # of the ratio of two probabilities over the group
    clip_high: float = 0.2
    adv_clip: float = 2.5  # fused advantages are clipped to +- this
    kl_weight: float = 10.0  # of KL(pi || pi_reference) over the branches
    protect: str = "scale"  # when no branch beats the anchor: none, drop the group, or scale it by 1 - pi_anchor
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current
    at_once: int | None = None  # branches in one forward: with 1 a single branch's graph is held; null = all

    from_chunk = 0
    credit = "anchor"

    def __post_init__(self) -> None:
        check_choice("objective.args.protect", self.protect, PROTECTIONS)
        check_choice("objective.args.context_writer", self.context_writer, ("old", "current"))
        above, least, count = "(0, inf)", "[0, inf)", "[1, inf)"
        check_ranges(self, {"routed": count, "nearest": least, "chunks": count, "capacity": count, "tau": above,
                            "floor": least, "at_once": count, "clip_low": "(0, 1]", "clip_high": above,
                            "adv_clip": above, "kl_weight": least}, "objective.args.")  # fmt: skip

    @property
    def exploration(self) -> Exploration:
        """How a group is drawn."""
        return Exploration("route", steps=True)

    def memory(self, window: Window, frames: int) -> Memory:
        """What may be read and where a group may fork."""
        if window.recompute or window.size is None:
            raise ConfigError("objective kv_routing needs a window that is kept: no recompute, and not unbounded")
        past = window.size - window.sink - window.chunk  # frames a chunk reads besides sinks and itself
        if self.nearest > past:
            raise ConfigError(
                f"objective.args.nearest={self.nearest}: of its past a chunk reads {past} frames besides the sinks, "
                f"so use at most {past}"
            )
        block = (frames // window.chunk + 1) * window.chunk  # the whole video: no fork is ruled out by a block's end
        return Memory(window.sink, self.routed, self.nearest, window.chunk, self.chunks, self.capacity,
                      window.size, block)  # fmt: skip

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout without room for the routed chunks."""
        if self.chunks >= chunks:
            raise ConfigError(f"objective.args.chunks={self.chunks} leaves no past: a rollout has {chunks} chunks")

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many of the sampler's levels are trained, and stand in one forward."""
        return len(levels), len(levels)

    def advantages(
        self, values: Tensor, groups: Tensor, first: Tensor, anchors: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Advantages [B, K] of rewards ``values`` [B, K], relative to the anchors' that ``anchors`` [B] marks: of the
        routed chunks, and half as much of all from the fork on; fused per group (routing.py), one for all chunks."""
        at = torch.arange(values.shape[1]) - first[:, None]
        nan = torch.full_like(values, torch.nan)
        parts = torch.stack([torch.where((at >= 0) & (at < self.chunks), values, nan).nanmean(1),
                             torch.where(at >= 0, values, nan).nanmean(1)], 1)  # fmt: skip
        relative, stats = anchor_relative(parts, groups, anchors)
        out = torch.zeros(len(values))
        for g in groups.unique():
            rows = (groups == g) & ~anchors
            out[rows] = fuse(relative[rows, 0], relative[rows, 1], clip=self.adv_clip)
        return out[:, None].expand_as(values).clone(), stats

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) per routed chunk of ``at_once`` branches of one group, to be summed: their gradients
        are that of the loss, their values are not. The anchor is the last row. ``adv`` [G + 1, K]."""
        assert record.steps is not None
        if (record.groups != record.groups[0]).any():
            raise ValueError("a KV-routing group is trained by itself")
        first, group = record.steps.one_first(), len(record) - 1
        t, a = torch.tensor(levels, device=adv.device), adv[:group, first]
        size = self.at_once or group
        blocks = [record.rows(slice(i, min(i + size, group))) for i in range(0, group, size)]

        def energy(name: str, block: Record, chunk: int, context: Context) -> Tensor:
            assert block.steps is not None
            x, x0 = (y[:, chunk].transpose(0, 1).flatten(0, 1) for y in (block.steps.x, block.steps.x0))  # [S * g, ...]
            with policies.using(name) as model:
                predicted = model(x, t.repeat_interleave(len(block)), context).x0
            now, then = (y.unflatten(0, (len(t), len(block))).transpose(0, 1) for y in (predicted, x0))
            return trajectory_energy(now, then, t, self.floor)

        names = [name for name in ("reference", "old", "current") if name != "reference" or self.kl_weight > 0]
        with torch.no_grad():
            found: dict[str, list[Tensor]] = {name: [] for name in names}
            for block in blocks:
                contexts = self._contexts(policies, denoiser, block, first)
                for name in names:
                    found[name].append(torch.stack([energy(name, block, *of) for of in enumerate(contexts)]).sum(0))
        of = {name: torch.cat(parts) for name, parts in found.items()}
        tau = self.tau or temperature(of["old"])
        factor = protection(of["old"], tau, self.protect, bool((a > 0).any()))
        _, gradient, metrics = by_energy(
            of["current"],
            lambda e: routing_loss(e, of["old"], of.get("reference"), a, tau=tau, clip=(self.clip_low, self.clip_high),
                                   kl_weight=self.kl_weight, factor=factor),
        )  # fmt: skip
        metrics |= {"pull": metrics["kl"], "protected": float(factor < 1)}
        for block, weight in zip(blocks, gradient.split(size)):
            if len(blocks) > 1:  # made again: kept, they would be every branch's past at once
                contexts = self._contexts(policies, denoiser, block, first)
            for chunk, context in enumerate(contexts):
                yield (weight * energy("current", block, chunk, context)).sum().float(), metrics

    def _contexts(self, policies, denoiser: Denoiser, record: Record, first: int) -> list[Context]:
        """The ordinary contexts of the routed chunks; the common past is walked as one stream."""
        one = replace(denoiser, script=denoiser.script.rows(slice(0, 1)))
        rows = replace(denoiser, script=denoiser.script.rows(slice(0, len(record))))
        out: list[Context] = []
        start, stop, context = walk_to(one, record.latents[:1], lambda: policies.using(self.context_writer), first)
        with torch.no_grad(), policies.using(self.context_writer):
            context = rows.enter(context.fork(len(record)))
            for k in range(self.chunks):
                out.append(context)
                if k + 1 < self.chunks:
                    at = start + k * (stop - start)
                    context = rows.enter(rows.refresh(record.latents[:, at : at + stop - start], context))
        return out
