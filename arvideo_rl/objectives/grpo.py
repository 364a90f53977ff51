"""GRPO on transitions: the action is a denoising step x_t -> x_s, the policy the Gaussian it was drawn from.

One objective, by its arguments the published ones (recipes in configs/align):

| method                   | kernel         | ratio      | trust | explores    |
|--------------------------|----------------|------------|-------|-------------|
| CM-GRPO (RAVEN)          | cm             | gaussian   | score | independent |
| Flow-GRPO, DanceGRPO     | flow/dance_sde | gaussian   | clip  | independent |
| CPS (FlowCPS)            | cps            | squared    | clip  | independent |
| Flow-DPPO (UniRL)        | flow_sde       | gaussian   | mask  | independent |
| executor of TempAct      | cm             | ratio_norm | clip  | fork_fresh  |

What differs here from all of them: the context is the clean rolling cache that the sampler had, at its own levels; and
``shared_init`` lets a group differ by re-noising alone, which is what is trained.

Needs: advantages, every step's input and prediction (recorded at rollout), the reference when kl_weight > 0.
Shape letters: B branches, M steps per chunk, F C H W a chunk's latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arvideo_rl.config import check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives import ratio
from arvideo_rl.objectives.contract import check_from_chunk
from arvideo_rl.objectives.record import Record, walk
from samplers.exploration import Exploration
from samplers.kernels import Kernel
from samplers.randomness import generator


@dataclass
class GRPO:
    """Options of the objective; see docs/objectives/grpo.md."""

    kernel: str = "cps"  # cm, cps, flow_sde, dance_sde or linear_sde (samplers/kernels.py)
    eta: float | None = 0.8  # its noise; null for cm
    ratio: str = "ratio_norm"  # ratio_norm (every step moves the policy alike), gaussian or squared
    trust: str = "clip"  # clip (PPO's surrogate), mask (Flow-DPPO) or score (no ratio, for one update a rollout)
    clip_low: float = 0.01  # of the ratio; ratios are of means over elements: compare with ratio_std in the log
    clip_high: float = 0.01
    threshold: float = 1e-5  # of mask: transition KL from which on a step that runs ahead is left out
    adv_clip: float = 5.0  # advantages are clipped to +- this
    kl_weight: float = 0.0  # pull towards the reference
    kl_form: str = "v"  # v, x0, transition, flow_grpo or flowcps
    steps_per_chunk: int = 1  # transitions trained per chunk, drawn without repetition
    train_steps: int | None = None  # only the first, noisiest so many transitions; null = all but the last, a point
    explore: str = "shared_init"  # independent, shared_init or fork_fresh (samplers/exploration.py)
    from_chunk: int = 0  # chunks before this one are not trained: they decide what the video shows
    credit: str = "chunk"  # a chunk's own reward, or that of the whole sequence from the first trained chunk on
    chunk_shape: float | None = None  # RAVEN's weights of chunks: -1 = later ones count more; null = all alike
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current

    def __post_init__(self) -> None:
        for name, known in (
            ("ratio", ratio.RATIOS), ("trust", ("clip", "mask", "score")), ("kl_form", ratio.KL_FORMS),
            ("explore", ("independent", "shared_init", "fork_fresh")), ("context_writer", ("old", "current")),
            ("credit", ("chunk", "sequence")),
        ):  # fmt: skip
            check_choice(f"objective.args.{name}", getattr(self, name), known)
        above, least, count = "(0, inf)", "[0, inf)", "[1, inf)"
        check_ranges(self, {"clip_low": "(0, 1]", "clip_high": above, "threshold": least, "adv_clip": above,
                            "kl_weight": least, "steps_per_chunk": count, "train_steps": count, "from_chunk": least},
                     "objective.args.")  # fmt: skip
        try:
            self._kernel = Kernel(self.kernel, self.eta)
        except ValueError as error:
            raise ValueError(f"objective.args.kernel: {error}") from None
        if self.kernel == "ode":
            raise ValueError("objective.args.kernel=ode draws nothing, so there is no transition to train; choose cps")

    @property
    def exploration(self) -> Exploration:
        """How a group is drawn."""
        return Exploration(self.explore, kernel=self._kernel, steps=True)

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to train."""
        check_from_chunk(self.from_chunk, chunks)

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many transitions can be trained, and how many are in one forward."""
        usable = min(self.train_steps or len(levels), len(levels) - 1)
        return usable, min(self.steps_per_chunk, usable)

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) per trained chunk, to be summed; backward on each before the next. ``adv`` [B, K]."""
        assert record.steps is not None
        steps, usable = record.steps, self.levels_trained(levels)
        chunks = steps.x.shape[1]
        frames = [stop - start for start, stop in denoiser.window.chunks(record.latents.shape[1])]
        first = steps.one_first()
        last = first + chunks
        weights = torch.ones(chunks) if self.chunk_shape is None else ratio.chunk_weights(
            frames[first:last], self.chunk_shape)  # fmt: skip
        for k, _, _, context in walk(denoiser, record.latents, lambda: policies.using(self.context_writer)):
            if k >= last:
                return
            if k < max(first, self.from_chunk):
                continue
            j = _choose(record, k, *usable).to(adv.device)  # [M, B]
            batch, row = torch.arange(len(record), device=adv.device), k - first
            x, x_next = steps.x[batch, row, j].flatten(0, 1), steps.x[batch, row, j + 1].flatten(0, 1)
            t, s = (torch.tensor(levels, device=adv.device)[i.flatten()] for i in (j, j + 1))
            wide = t[:, None, None, None, None]
            v_old = (x - steps.x0[batch, row, j].flatten(0, 1)) / wide
            ref = None
            if self.kl_weight > 0:  # before the current policy's forward: switching adapters after it loses gradients
                with torch.no_grad(), policies.using("reference") as model:
                    ref = (x - model(x, t, context).x0) / wide
            with policies.using("current") as model:
                v = (x - model(x, t, context).x0) / wide
            a = adv[:, k].clamp(-self.adv_clip, self.adv_clip).repeat(len(j)).double()
            loss, metrics = self._policy_loss(v, v_old, x, x_next, a, t, s)
            if ref is not None:
                kl = ratio.kl(self._kernel.coefficients(t, s), v, ref, self.kl_form)
                pull = record.pull(kl.unflatten(0, j.shape)).flatten()
                loss = loss + self.kl_weight * pull
                metrics |= {"kl": kl.mean().item(), "pull": pull.mean().item()}
            metrics["v_moved"] = (v.detach() - v_old).square().mean().item()
            yield (loss.mean() * weights[row].item() / chunks).float(), metrics

    def _policy_loss(self, v, v_old, x, x_next, adv, t, s) -> tuple[Tensor, dict[str, float]]:
        """Loss per row [M * B] without the pull to the start, and metrics."""
        if self.trust == "score":
            return ratio.score_loss(self._kernel, v, x, x_next, adv, t, s, self.ratio), {}
        log_r = ratio.log_ratio(self._kernel, v, v_old, x, x_next, t, s, self.ratio)
        if self.trust == "clip":
            return ratio.clipped_loss(log_r, adv, self.clip_low, self.clip_high)
        moved = ratio.kl(self._kernel.coefficients(t, s), v, v_old)
        return ratio.masked_loss(log_r, adv, moved, self.threshold)


def _choose(record: Record, chunk: int, usable: int, count: int) -> Tensor:
    """Steps [count, B] of one chunk: different ones per branch, drawn by the branch's own key."""
    draws = [generator(key, chunk, 0, "t").permutation(usable)[:count] for key in record.keys]
    return torch.tensor(np.stack(draws)).T
