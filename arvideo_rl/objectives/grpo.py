"""GRPO on transitions: the action is a denoising step x_t -> x_s, the policy the Gaussian it was drawn from.

One objective, by its arguments the published ones (recipes in configs/align):

| method                   | kernel         | ratio      | trust | explores    |
|--------------------------|----------------|------------|-------|-------------|
| CM-GRPO (RAVEN)          | cm             | gaussian   | score | independent |
| Flow-GRPO, DanceGRPO     | flow/dance_sde | gaussian   | clip  | independent |
| CPS (FlowCPS)            | cps            | squared    | clip  | independent |
| Flow-DPPO (UniRL)        | flow_sde       | gaussian   | mask  | independent |
| executor of TempAct      | cm             | ratio_norm | clip  | fork_fresh  |
| MixGRPO                  | flow_sde       | gaussian   | clip  | shared_init, ``window`` of steps |
| Euphonium                | dance_sde      | gaussian   | clip  | independent, with a ``guide``    |

What differs here from all of them: the context is the clean rolling cache that the sampler had, at its own levels; and
``shared_init`` lets a group differ by re-noising alone, which is what is trained.

Needs: advantages, every step's input and prediction (recorded at rollout), the reference when kl_weight > 0.
Shape letters: B branches, M steps per chunk, F C H W a chunk's latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from arvideo_rl.config import check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.generators.packed import packed_forward
from arvideo_rl.objectives import ratio
from arvideo_rl.objectives.contract import check_from_chunk
from arvideo_rl.objectives.record import Record, walk
from samplers.exploration import Exploration
from samplers.guidance import Guide
from samplers.kernels import Kernel
from samplers.randomness import generator
from samplers.step_window import StepWindow


class Taken(NamedTuple):
    """Recorded transitions of one chunk, M steps of B branches stacked to rows [M * B, ...]."""

    x: Tensor
    x_next: Tensor
    x0: Tensor  # what the data policy predicted at x
    t: Tensor
    s: Tensor
    adv: Tensor

    def velocity(self, x0: Tensor) -> Tensor:
        """The velocity that a predicted clean chunk means at x."""
        return (self.x - x0) / self.t[:, None, None, None, None]


Predicted = tuple[int, Tensor, Tensor | None]  # (chunk, clean chunk that current predicts, and that start does)


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
    window: StepWindow | None = None  # only these transitions draw noise and are trained; null = all
    guide: Guide | None = None  # a reward whose gradient moves what is drawn (samplers/guidance.py); never the policy
    explore: str = "shared_init"  # independent, shared_init or fork_fresh (samplers/exploration.py)
    from_chunk: int = 0  # chunks before this one are not trained: they decide what the video shows
    credit: str = "chunk"  # a chunk's own reward, or that of the whole sequence from the first trained chunk on
    chunk_shape: float | None = None  # RAVEN's weights of chunks: -1 = later ones count more; null = all alike
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current
    packed: bool = False  # all chunks in one forward (generators/packed.py); the current policy writes the context
    context_gradient: bool = False  # of packed: through the keys and values of clean chunks as well

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
        if self.window is not None and self.train_steps is not None:
            raise ValueError("objective.args.train_steps and window both choose steps; remove train_steps")
        if self.packed and self.context_writer != "current":
            raise ValueError("objective.args.packed=true lets the current policy write; set context_writer=current")
        if self.packed and self.explore == "fork_fresh":
            raise ValueError("objective.args.packed=true packs all chunks, but fork_fresh trains one; set packed=false")
        if self.context_gradient and not self.packed:
            raise ValueError("objective.args.context_gradient=true needs packed=true: a cache has no gradient")

    @property
    def exploration(self) -> Exploration:
        """How a group is drawn."""
        return Exploration(self.explore, kernel=self._kernel, steps=True, window=self.window, guide=self.guide)

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to train."""
        check_from_chunk(self.from_chunk, chunks)

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many transitions can be trained, and how many are in one forward."""
        usable = len(self._trained(0, levels))
        return usable, min(self.steps_per_chunk, usable)

    def _trained(self, iteration: int, levels: tuple[float, ...]) -> range:
        """The transitions that can be trained; ValueError when the window does not fit."""
        return self.exploration.trained(iteration, len(levels) - 1)[: self.train_steps]

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) per trained chunk, to be summed; backward on each before the next. ``adv`` [B, K].
        Packed, all chunks are one loss."""
        assert record.steps is not None
        first = record.steps.one_first()
        bounds = denoiser.window.chunks(record.latents.shape[1])[first : first + record.steps.x.shape[1]]
        weights = torch.ones(len(bounds))
        if self.chunk_shape is not None:
            weights = ratio.chunk_weights([b - a for a, b in bounds], self.chunk_shape)
        weights /= len(bounds)
        trained = range(max(first, self.from_chunk), first + len(bounds))
        taken = {k: self._taken(record, k, adv[:, k], levels) for k in trained}
        predicted = (self._packed if self.packed else self._cached)(policies, denoiser, record.latents, taken)
        losses = (self._loss(record, taken[k], x0, ref, weights[k - first].item()) for k, x0, ref in predicted)
        if not self.packed:
            yield from losses
            return
        loss, metrics = zip(*losses)
        yield sum(loss), {name: sum(m[name] for m in metrics) / len(metrics) for name in metrics[0]}

    def _cached(self, policies, denoiser: Denoiser, latents: Tensor, taken: dict[int, Taken]) -> Iterator[Predicted]:
        """Chunk by chunk, each over its cache."""
        for k, _, _, context in walk(denoiser, latents, lambda: policies.using(self.context_writer)):
            if k in taken:
                ref, x, t = None, taken[k].x, taken[k].t
                if self.kl_weight > 0:  # before the current policy's forward: switching adapters later loses gradients
                    with torch.no_grad(), policies.using("reference") as model:
                        ref = model(x, t, context).x0
                with policies.using("current") as model:
                    yield k, model(x, t, context).x0, ref
            if k == max(taken):
                return

    def _packed(self, policies, denoiser: Denoiser, latents: Tensor, taken: dict[int, Taken]) -> Iterator[Predicted]:
        """All chunks from one forward of each policy, which thereby reads a past of its own."""
        states = {k: (step.x, step.t) for k, step in taken.items()}
        refs: dict[int, Tensor] = {}
        if self.kl_weight > 0:
            with torch.no_grad(), policies.using("reference") as model:
                refs = packed_forward(model, denoiser, latents, states)
        with policies.using("current") as model:
            found = packed_forward(model, denoiser, latents, states, self.context_gradient)
        return ((k, found[k], refs.get(k)) for k in taken)

    def _taken(self, record: Record, k: int, adv: Tensor, levels: tuple[float, ...]) -> Taken:
        """The transitions of chunk k that are trained."""
        assert record.steps is not None
        x, x0, row = record.steps.x, record.steps.x0, k - record.steps.one_first()
        trained = self._trained(record.keys[0].iteration, levels)
        j = _choose(record, k, trained, self.steps_per_chunk).to(adv.device)  # [M, B]
        batch = torch.arange(len(record), device=adv.device)
        t, s = (torch.tensor(levels, device=adv.device)[i.flatten()] for i in (j, j + 1))
        a = adv.clamp(-self.adv_clip, self.adv_clip).repeat(len(j)).double()
        here, after, clean = (y.flatten(0, 1) for y in (x[batch, row, j], x[batch, row, j + 1], x0[batch, row, j]))
        return Taken(here, after, clean, t, s, a)

    def _loss(
        self, record: Record, step: Taken, x0: Tensor, ref: Tensor | None, weight: float
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss and metrics of one chunk, from the predictions of the current policy and of the reference."""
        v, v_old = step.velocity(x0), step.velocity(step.x0)
        loss, metrics = self._policy_loss(v, v_old, step.x, step.x_next, step.adv, step.t, step.s)
        if ref is not None:
            kl = ratio.kl(self._kernel.coefficients(step.t, step.s), v, step.velocity(ref), self.kl_form)
            pull = record.pull(kl.unflatten(0, (-1, len(record)))).flatten()
            loss = loss + self.kl_weight * pull
            metrics |= {"kl": kl.mean().item(), "pull": pull.mean().item()}
        metrics["v_moved"] = (v.detach() - v_old).square().mean().item()
        return (loss.mean() * weight).float(), metrics

    def _policy_loss(self, v, v_old, x, x_next, adv, t, s) -> tuple[Tensor, dict[str, float]]:
        """Loss per row [M * B] without the pull to the start, and metrics."""
        if self.trust == "score":
            return ratio.score_loss(self._kernel, v, x, x_next, adv, t, s, self.ratio), {}
        log_r = ratio.log_ratio(self._kernel, v, v_old, x, x_next, t, s, self.ratio)
        if self.trust == "clip":
            return ratio.clipped_loss(log_r, adv, self.clip_low, self.clip_high)
        moved = ratio.kl(self._kernel.coefficients(t, s), v, v_old)
        return ratio.masked_loss(log_r, adv, moved, self.threshold)


def _choose(record: Record, chunk: int, usable: range, count: int) -> Tensor:
    """At most ``count`` of the usable steps of one chunk [M, B]: different ones per branch, drawn by its own key."""
    draws = [generator(key, chunk, 0, "t").permutation(usable)[:count] for key in record.keys]
    return torch.tensor(np.stack(draws)).T
