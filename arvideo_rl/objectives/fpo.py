"""FPO: PPO with the flow-matching loss in place of a log-likelihood.

    l = mean (v - (eps - x0))^2 at x_t = (1 - t) x0 + t eps,   rho = exp(mean_i [l_old,i - l_cur,i]),
    loss = mean max(-A rho, -A clip(rho, 1 - clip, 1 + clip)) + kl_weight * mean (v - v_ref)^2

over ``draws`` of (t, eps), the same for both policies. At cur = old its gradient is A grad l_cur, NFT's direction;
what it adds is a trust region. Source: akanazawa/fpo, for control; there is no video code. Differences: means over
elements (sums would make the ratio meaningless), the sampler's levels, the context of the stream.

Needs: clean latents, advantages, the old policy, the reference when kl_weight > 0.
Shape letters: B branches, N draws, F C H W a chunk's latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.config import check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.contract import check_from_chunk
from arvideo_rl.objectives.nft import chunk_levels
from arvideo_rl.objectives.ratio import clipped_loss
from arvideo_rl.objectives.record import Record, walk
from samplers.exploration import Exploration
from samplers.kernels import forward, mean_over
from samplers.randomness import normal


@dataclass
class FPO:
    """Options of the objective; see docs/objectives/fpo.md."""

    draws: int = 4  # of level and noise per chunk; the sampler's levels in turn
    train_levels: int | None = None  # only the first, noisiest so many levels; null = all
    clip: float = 0.01  # of the ratio: compare with ratio_std in the log
    adv_clip: float = 5.0  # advantages are clipped to +- this
    kl_weight: float = 0.0  # pull towards the reference, mean (v - v_ref)^2
    from_chunk: int = 0  # chunks before this one are not trained
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current

    credit = "chunk"
    exploration = Exploration()

    def __post_init__(self) -> None:
        check_choice("objective.args.context_writer", self.context_writer, ("old", "current"))
        above, count = "(0, inf)", "[1, inf)"
        check_ranges(self, {"draws": count, "train_levels": count, "clip": "(0, 1]", "adv_clip": above,
                            "kl_weight": "[0, inf)", "from_chunk": "[0, inf)"}, "objective.args.")  # fmt: skip

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to train."""
        check_from_chunk(self.from_chunk, chunks)

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many of the sampler's levels are trained, and how many rows a branch has in one forward."""
        return min(self.train_levels or len(levels), len(levels)), self.draws

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) per trained chunk, to be summed; backward on each before the next. ``adv`` [B, K]."""
        usable, n = self.levels_trained(levels)
        chunks, b = adv.shape[1], len(record)
        for k, start, stop, context in walk(denoiser, record.latents, lambda: policies.using(self.context_writer)):
            if k < self.from_chunk:
                continue
            x0 = record.latents[:, start:stop]
            order = chunk_levels(record, k, usable, levels[:usable])  # every level once, in each branch's own order
            t = order.repeat(-(-n // usable), 1)[:n].to(x0.device)  # [N, B]
            eps = torch.stack([normal(record.keys, k, i, "forward", tuple(x0.shape[1:])) for i in range(n)])
            eps, rows = eps.to(x0.device).flatten(0, 1), t.flatten()
            wide = rows[:, None, None, None, None]
            clean = x0.repeat(n, 1, 1, 1, 1)
            x = forward(clean, eps, wide)

            def velocity(name: str, x=x, rows=rows, wide=wide, context=context) -> Tensor:
                with policies.using(name) as model:
                    return (x - model(x, rows, context).x0) / wide

            def flow_loss(v: Tensor, eps=eps, clean=clean) -> Tensor:
                return mean_over((v - (eps - clean)).square()).unflatten(0, (n, b))

            with torch.no_grad():  # before the current policy's forward: switching adapters after it loses gradients
                ref = velocity("reference") if self.kl_weight > 0 else None
                old = flow_loss(velocity("old"))
            v = velocity("current")
            a = adv[:, k].clamp(-self.adv_clip, self.adv_clip).double()
            loss, metrics = clipped_loss((old - flow_loss(v)).mean(0), a, self.clip)
            loss = loss.mean()
            if ref is not None:
                kl = mean_over((v - ref).square()).unflatten(0, (n, b))
                pull = record.pull(kl).mean()
                loss = loss + self.kl_weight * pull
                metrics |= {"kl": kl.mean().item(), "pull": pull.item()}
            yield (loss / chunks).float(), metrics
