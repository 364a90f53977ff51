"""Paired finite differences: two near-identical branches give a directional derivative of the reward.

A pair shares its past and, at the pivot chunk, takes antithetic noise in every draw or is churned; with R and x0 of its
two branches,

    dR = +-(R_1 - R_2)/2,  dx = +-(x0_1 - x0_2)/2,  u = dx / (mean dx^2 + 1e-6)
    s = -mean (v - sg(v_old - u))^2,  s_0 = -mean u^2,  rho = exp(s - s_0)
    loss = -dR rho + |dR| / (2 e) (rho - 1)^2 + kl_weight * mean (v - v_ref)^2

at every recorded step of both branches. At cur = old, rho = 1 and descent moves x0 by t dR u: uphill. dR u is the
minimum-norm gradient of R. Source: NVlabs/finite-difference-flow-optimization (arXiv 2603.12893), for images, whose
pairs are churned; here one chunk of a stream forks.

Needs: ``advantage: centre`` and groups of two, the steps of the pivot chunk, the reference when kl_weight > 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from arvideo_rl.config import check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.contract import check_from_chunk
from arvideo_rl.objectives.record import Record, walk_to
from samplers.exploration import Exploration
from samplers.forks import churn_kernel
from samplers.kernels import mean_over


@dataclass
class Pairs:
    """Options of the objective; see docs/objectives/pairs.md."""

    noise: str = "antithetic"  # or churn, as published: a little noise is replaced at the start and at every step
    apart: float = 0.1  # share of the noise in which the two differ, .05 to .3; churn published: .07
    width: float = 0.03  # e: how far the ratio may go
    limit: float = 5.0  # |s - s_0| is held within this: u grows as the pair comes closer
    kl_weight: float = 0.0  # pull towards the reference, mean (v - v_ref)^2
    from_chunk: int = 0  # chunks before this one are never the pivot
    credit: str = "sequence"  # the reward from the pivot on, or that of the pivot "chunk" alone
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current

    def __post_init__(self) -> None:
        check_choice("objective.args.noise", self.noise, ("antithetic", "churn"))
        check_choice("objective.args.credit", self.credit, ("sequence", "chunk"))
        check_choice("objective.args.context_writer", self.context_writer, ("old", "current"))
        above = "(0, inf)"
        check_ranges(self, {"apart": "(0, 1]", "width": above, "limit": above, "kl_weight": "[0, inf)",
                            "from_chunk": "[0, inf)"}, "objective.args.")  # fmt: skip

    @property
    def exploration(self) -> Exploration:
        """How a pair is drawn."""
        if self.noise == "churn":
            return Exploration("churn", self.apart, kernel=churn_kernel(self.apart), steps=True)
        return Exploration("pair", self.apart, steps=True)

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to fork at."""
        check_from_chunk(self.from_chunk, chunks)

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many of the sampler's levels are trained, and stand in one forward."""
        return len(levels), len(levels)

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) once, for the pivot chunk of one pair; ``adv`` [2, K] is reward less the mean."""
        assert record.steps is not None
        pivot, s = record.steps.one_first(), len(levels)
        one = replace(denoiser, script=denoiser.script.rows(slice(0, 1)))  # the two have one past
        _, _, context = walk_to(one, record.latents[:1], lambda: policies.using(self.context_writer), pivot)
        x, x0 = (y[:, 0].flatten(0, 1) for y in (record.steps.x, record.steps.x0))  # [2 * S, F, C, H, W]
        t = torch.tensor(levels, device=adv.device).repeat(2)
        wide = t[:, None, None, None, None]
        ends = record.steps.x0[:, 0, -1]
        ref = None
        if self.kl_weight > 0:
            with torch.no_grad(), policies.using("reference") as model:
                ref = (x - model(x, t, context).x0) / wide
        with policies.using("current") as model:
            v = (x - model(x, t, context).x0) / wide
        half = (ends[0] - ends[1]) / 2
        apart = torch.stack([half, -half]).repeat_interleave(s, 0)
        loss, metrics = pair_loss(v, (x - x0) / wide, apart, adv[:, pivot].repeat_interleave(s), self.width, self.limit)
        loss = loss.mean()
        metrics |= {"pivot": float(pivot), "apart": half.square().mean().sqrt().item()}
        if ref is not None:
            kl = mean_over((v - ref).square()).unflatten(0, (2, s))
            pull = record.pull(kl.T).mean()
            loss = loss + self.kl_weight * pull
            metrics |= {"kl": kl.mean().item(), "pull": pull.item()}
        yield loss.float(), metrics


def pair_loss(
    v: Tensor, v_old: Tensor, apart: Tensor, gain: Tensor, width: float, limit: float = 5.0
) -> tuple[Tensor, dict[str, float]]:
    """The loss per row [B] and statistics: velocities [B, ...] of the trained and the data policy, ``apart`` [B, ...]
    from the pair's middle to this branch's end, its ``gain`` [B] over the middle. Gradient through v only."""
    gain, apart = gain.detach().double(), apart.detach()
    size = mean_over(apart.square()) + 1e-6
    step = apart / size.to(apart.dtype).view(-1, *[1] * (apart.ndim - 1))
    moved = -mean_over((v - (v_old - step).detach()).square()) + mean_over(step.square())
    rho = moved.clamp(-limit, limit).exp()
    loss = -gain * rho + gain.abs() / (2 * width) * (rho - 1).square()
    r = rho.detach()
    return loss, {"ratio_mean": r.mean().item(), "ratio_std": r.std(correction=0).item(),
                  "ratio_off": (r - 1).abs().max().item(),
                  "held": (moved.detach().abs() >= limit).double().mean().item()}  # fmt: skip
