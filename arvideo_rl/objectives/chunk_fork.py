"""Chunk-fork GRPO: the action is which neighbour a chunk became, its policy a softmax over distances.

A group has one past. At the pivot chunk its branches start from neighbouring noise and share every other draw, so that
what differs is due to that noise alone; neighbour.py has the policy over neighbours and its loss. Sources: Neighbor
GRPO (arXiv 2511.16955), AR-CoPO (2603.17461); from the papers, there is no official code. Chosen here, besides what
neighbour.py says: the context is the clean cache that the branches had, shared by all of them, and all anchors and
steps of a group are one forward over it.

Needs: advantages, every step of the pivot chunk, the reference when kl_weight > 0.
Shape letters: G branches, N anchors, S steps, F C H W a chunk's latent, M its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arvideo_rl.config import check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.contract import check_from_chunk
from arvideo_rl.objectives.neighbour import anchor_branches, neighbour_loss
from arvideo_rl.objectives.record import Record, walk_to
from samplers.exploration import Exploration
from samplers.kernels import mean_over


@dataclass
class ChunkFork:
    """Options of the objective; see docs/objectives/chunk_fork.md."""

    sigma: float = 0.5  # how far the branches' noise lies from the common one
    neighbours: str = "init"  # which of the pivot's draws differ: the initial noise, as published, or all
    anchors: int = 4  # branches from whose inputs the trained policy predicts, drawn anew in every iteration
    tau: float | None = None  # of the softmax; null = the median distance between branches, per group and step
    clip: float = 0.2  # of the ratio of two probabilities over the group
    adv_clip: float = 5.0  # advantages are clipped to +- this
    kl_weight: float = 0.0  # pull towards the reference, mean (v - v_ref)^2 at the anchors' inputs
    train_steps: int | None = None  # only the first, noisiest so many steps; null = all
    from_chunk: int = 0  # chunks before this one are never the pivot
    credit: str = "sequence"  # the reward from the pivot on, or that of the pivot "chunk" alone
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current

    def __post_init__(self) -> None:
        check_choice("objective.args.neighbours", self.neighbours, ("init", "all"))
        check_choice("objective.args.credit", self.credit, ("sequence", "chunk"))
        check_choice("objective.args.context_writer", self.context_writer, ("old", "current"))
        above, count = "(0, inf)", "[1, inf)"
        check_ranges(self, {"sigma": "(0, 1]", "anchors": count, "tau": above, "clip": "(0, 1]",
                            "adv_clip": above, "kl_weight": "[0, inf)", "train_steps": count,
                            "from_chunk": "[0, inf)"}, "objective.args.")  # fmt: skip

    @property
    def exploration(self) -> Exploration:
        """How a group is drawn."""
        return Exploration("fork", self.sigma, self.neighbours, steps=True)

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to fork at."""
        check_from_chunk(self.from_chunk, chunks)

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many of the sampler's levels are trained, and stand in one forward."""
        usable = min(self.train_steps or len(levels), len(levels))
        return usable, usable

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) once, for the pivot chunk of a record of one group. ``adv`` [G, K]."""
        assert record.steps is not None
        if (record.groups != record.groups[0]).any():
            raise ValueError("a chunk fork is trained group by group")
        pivot, group = record.steps.one_first(), len(record)
        anchors = anchor_branches(record.keys[0], pivot, group, min(self.anchors, group))
        steps, n = self.levels_trained(levels)[0], len(anchors)
        points = record.steps.x0[:, 0, :steps].transpose(0, 1)  # [S, G, F, C, H, W]
        x = record.steps.x[anchors, 0, :steps].transpose(0, 1).flatten(0, 1)  # [S * N, F, C, H, W]
        t = torch.tensor(levels[:steps], device=adv.device).repeat_interleave(n)
        one = replace(denoiser, script=denoiser.script.rows(slice(0, 1)))  # the branches have one past
        _, _, context = walk_to(one, record.latents[:1], lambda: policies.using(self.context_writer), pivot)
        ref = None
        if self.kl_weight > 0:
            with torch.no_grad(), policies.using("reference") as model:
                ref = model(x, t, context)
        with policies.using("current") as model:
            cur = model(x, t, context)
        a = adv[:, pivot].clamp(-self.adv_clip, self.adv_clip)
        found = [neighbour_loss(now, of_step, anchors, a, self.tau, self.clip)
                 for now, of_step in zip(cur.x0.unflatten(0, (steps, n)), points)]  # fmt: skip
        loss = torch.stack([one_step for one_step, _ in found]).mean()
        metrics = {key: sum(stats[key] for _, stats in found) / steps for key in found[0][1]}
        moved = cur.x0.detach().unflatten(0, (steps, n)) - points[:, anchors]
        metrics |= {"pivot": float(pivot), "x0_moved": moved.square().mean().item()}
        if ref is not None:
            kl = mean_over((cur.v - ref.v).square()).unflatten(0, (steps, n))
            pull = record.pull(kl, anchors).mean()
            loss = loss + self.kl_weight * pull
            metrics |= {"kl": kl.mean().item(), "pull": pull.item()}
        yield loss.float(), metrics
