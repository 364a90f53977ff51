"""Chunk-fork GRPO: the action is which neighbour a chunk became, its policy a softmax over distances.

A group has one past. At the pivot chunk its branches start from neighbouring noise and share every other draw, so that
what differs is due to that noise alone. At each step j, with x_i the clean chunk that branch i had predicted, and a_k
the one that the trained policy predicts from anchor branch k's input,

    d_ik = mean (x_i - a_k)^2,   pi(i | k) = softmax_i(-d_ik / tau),   rho = pi / pi_old
    loss = -mean_{k, j, i} min(rho A_i, clip(rho, 1 - low, 1 + high) A_i)

Sources: Neighbor GRPO (arXiv 2511.16955), AR-CoPO (2603.17461); from the papers, there is no official code. Unpublished
and chosen here: tau is the median distance between the branches of the group at the step; all steps are trained; the
context is the clean cache that the branches had, shared by all of them. At the first update the baseline cancels and
d loss / d a = -(2 / (G tau M)) sum_i A_i x_i per anchor and step.

Needs: advantages, every step of the pivot chunk, the start policy when kl_weight > 0.
Shape letters: G branches, N anchors, S steps, F C H W a chunk's latent, M its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError, check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.ratio import clipped_loss
from arvideo_rl.objectives.record import Record, walk
from samplers.exploration import Exploration
from samplers.randomness import generator, shared


@dataclass
class ChunkFork:
    """Options of the objective; see docs/objectives/chunk_fork.md."""

    sigma: float = 0.5  # how far the branches' noise lies from the common one
    neighbours: str = "init"  # which of the pivot's draws differ: the initial noise, as published, or all
    anchors: int = 4  # branches from whose inputs the trained policy predicts, drawn anew in every update
    tau: float | None = None  # of the softmax; null = the median distance between branches, per group and step
    clip_low: float = 0.2  # of the ratio of two probabilities over the group
    clip_high: float = 0.2
    adv_clip: float = 5.0  # advantages are clipped to +- this
    kl_weight: float = 0.0  # pull towards the start point, mean (v - v_start)^2 at the anchors' inputs
    train_steps: int | None = None  # only the first, noisiest so many steps; null = all
    from_chunk: int = 0  # chunks before this one are never the pivot
    credit: str = "sequence"  # the reward from the pivot on, or that of the pivot "chunk" alone
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current

    def __post_init__(self) -> None:
        check_choice("objective.args.neighbours", self.neighbours, ("init", "all"))
        check_choice("objective.args.credit", self.credit, ("sequence", "chunk"))
        check_choice("objective.args.context_writer", self.context_writer, ("old", "current"))
        above, count = "(0, inf)", "[1, inf)"
        check_ranges(self, {"sigma": "(0, 1]", "anchors": count, "tau": above, "clip_low": "(0, 1]",
                            "clip_high": above, "adv_clip": above, "kl_weight": "[0, inf)", "train_steps": count,
                            "from_chunk": "[0, inf)"}, "objective.args.")  # fmt: skip

    @property
    def exploration(self) -> Exploration:
        """How a group is drawn."""
        return Exploration("fork", self.sigma, self.neighbours, steps=True)

    @property
    def needs(self) -> frozenset[str]:
        """What the trainer must provide."""
        return frozenset({"steps"} | ({"start"} if self.kl_weight > 0 else set()))

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to fork at."""
        if self.from_chunk >= chunks:
            raise ConfigError(f"objective.args.from_chunk={self.from_chunk} leaves no pivot: a rollout has {chunks}")

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
        chosen = _anchors(record, min(self.anchors, group)).to(adv.device)
        steps, n = self.levels_trained(levels)[0], len(chosen)
        old = record.steps.x0[:, 0, :steps].transpose(0, 1)  # [S, G, F, C, H, W]
        x = record.steps.x[chosen, 0, :steps].transpose(0, 1).flatten(0, 1)  # [S * N, F, C, H, W]
        t = torch.tensor(levels[:steps], device=adv.device).repeat_interleave(n)
        one = replace(denoiser, script=denoiser.script.rows(slice(0, 1)))  # the branches have one past
        for k, _, _, past in walk(one, record.latents[:1], lambda: policies.using(self.context_writer)):
            if k == pivot:
                context = past
                break
        ref = None
        if self.kl_weight > 0:
            with torch.no_grad(), policies.using("start") as model:
                ref = model(x, t, context)
        with policies.using("current") as model:
            cur = model(x, t, context)
        log_p, log_old = (
            neighbours(old, a, self.tau) for a in (cur.x0.unflatten(0, (steps, n)), old[:, chosen])
        )  # fmt: skip
        a = adv[:, pivot].clamp(-self.adv_clip, self.adv_clip).double()
        log_r = (log_p - log_old.detach()).clamp(-10, 10)  # [S, N, G]
        loss, metrics = clipped_loss(log_r, a, self.clip_low, self.clip_high)
        loss = loss.mean()
        metrics |= {
            "pivot": float(pivot),
            "own_probability": _own(log_old, chosen),
            "x0_moved": (cur.x0.detach().unflatten(0, (steps, n)) - old[:, chosen]).square().mean().item(),
        }
        if ref is not None:
            kl = (cur.v - ref.v).square().mean()
            loss, metrics["kl"] = loss + self.kl_weight * kl, kl.item()
        yield loss.float(), metrics


def neighbours(branches: Tensor, anchors: Tensor, tau: float | None = None) -> Tensor:
    """log pi(i | k) [S, N, G] in float64 of clean chunks ``branches`` [S, G, ...] seen from ``anchors`` [S, N, ...].
    Without ``tau`` it is the median distance between different branches, per step."""
    x, a = branches.flatten(2).double(), anchors.flatten(2).double()
    scale = torch.full((len(x), 1, 1), tau or 0.0, dtype=torch.float64, device=x.device)
    if tau is None:
        off = ~torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        scale = (_distances(x, x)[:, off].median(1).values[:, None, None]).clamp_min(1e-12)
    return (-_distances(x, a) / scale).log_softmax(-1)


def _distances(x: Tensor, a: Tensor) -> Tensor:
    """Mean squared differences [S, N, G] of x [S, G, M] and a [S, N, M]."""
    return torch.stack([(x - one[:, None]).square().mean(-1) for one in a.unbind(1)], 1)


def _anchors(record: Record, count: int) -> Tensor:
    """Which branches are anchors: ``count`` different ones, by the group's key."""
    return torch.tensor(generator(shared(record.keys[:1])[0], 0, 0, "t").permutation(len(record))[:count].copy())


def _own(log_old: Tensor, chosen: Tensor) -> float:
    """Mean probability of an anchor's own branch under the data policy: 1/G when tau is too large, 1 when too small."""
    return log_old[:, torch.arange(len(chosen)), chosen].exp().mean().item()
