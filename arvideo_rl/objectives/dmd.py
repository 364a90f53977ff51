"""Reward-weighted distribution matching: pull the stream's own clips to a teacher, the well-scored ones harder.

The rollout is a self-rollout (self_rollout.py): in every iteration all chunks leave the sampler at one step, drawn
anew, and its prediction is the clip. Teacher and critic judge the whole clip at once; what they say of it, the
direction g, needs no graph (training/critic.py). So the update walks the chunks in the context of the stream, runs the
step that each left at with gradient, and moves it by g: one chunk's graph at a time, whatever the length. With
``through_context`` it takes the whole graph instead, with the gradient into earlier chunks' keys and values that public
code leaks and its released weights were trained with.

    loss = sum over elements of exp(beta A) W (x - sg(x - g))^2 / (2 numel)         matching.py

beta = 0 is DMD; A is the advantage in any form (Re-DMD: ``raw``), W Stream-R1's map, 1 without saliency. It re-weights
and never reverses: badly scored clips are pulled to the teacher too.
Needs: the rollout's steps, rewards, a teacher that reads whole clips, a critic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.config import check_choice, check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.matching import matching_loss, sample_weights
from arvideo_rl.objectives.record import Record, walk
from arvideo_rl.objectives.self_rollout import self_rollout
from samplers.exploration import Exploration, draws
from samplers.randomness import Key, generator, shared


@dataclass
class DMD:
    """Options of the objective; see docs/objectives/dmd.md."""

    teacher: str = ""  # a generator whose one chunk is a whole clip: a name, a folder or a YAML file
    guidance: float = 3.0  # of the teacher, cond + guidance (cond - uncond): a standard scale of 4
    negative: str = ""  # the prompt of uncond; empty = none
    score_shift: float = 5.0  # warps the levels that teacher and critic judge at
    lowest: float = 0.02  # of these levels
    highest: float = 0.98
    beta: float = 1.0  # how much harder well-scored clips are pulled; 0 = DMD, no reward counts
    weight_low: float = 0.2  # bounds of a clip's weight
    weight_high: float = 5.0
    normalise: bool = True  # weights are divided by their mean, so that the reward does not change the rate
    saliency: float = 0.0  # strength of Stream-R1's map in [0, 1]; needs rewards that can be differentiated
    saliency_patch: int = 8  # pixels of a patch whose gradient is one number
    balance: float = 0.0  # Stream-R1's lambda: takes the imbalance of several rewards off all of them
    critic_kind: str = "full"  # the critic starts as the teacher: a full copy, or a lora on it
    critic_rank: int = 64
    critic_lr: float = 4e-4
    critic_updates: int = 5  # of the critic before each of the generator
    warmup: int = 0  # iterations in which only the critic learns
    through_context: bool = False  # let the gradient into earlier chunks, as public code does
    credit: str = "sequence"  # a clip's weight, or one per "chunk"
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current

    from_chunk = 0
    exploration = Exploration(steps=True)

    def __post_init__(self) -> None:
        check_choice("objective.args.credit", self.credit, ("sequence", "chunk"))
        check_choice("objective.args.context_writer", self.context_writer, ("old", "current"))
        check_choice("objective.args.critic_kind", self.critic_kind, ("full", "lora"))
        above, least, count = "(0, inf)", "[0, inf)", "[1, inf)"
        check_ranges(self, {"guidance": least, "score_shift": above, "lowest": "(0, 1)", "highest": "(0, 1]",
                            "beta": least, "weight_low": least, "weight_high": above, "saliency": "[0, 1]",
                            "saliency_patch": count, "balance": least, "critic_rank": count, "critic_lr": above,
                            "critic_updates": count, "warmup": least}, "objective.args.")  # fmt: skip
        if self.lowest > self.highest or self.weight_low > self.weight_high:
            raise ValueError("objective.args: lowest must not exceed highest, nor weight_low weight_high")
        if not self.teacher:
            raise ValueError("objective.args.teacher is not given; name a generator that reads whole clips")
        if self.balance and self.normalise:
            raise ValueError("objective.args.balance is one factor for all clips, which normalise=true takes out "
                             "again; set one of them to its off value")  # fmt: skip

    def check_chunks(self, chunks: int) -> None:
        """Any number will do."""

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """All of the sampler's levels in turn, one in a forward."""
        return len(levels), 1

    def exit_step(self, seed: int, iteration: int, levels: tuple[float, ...]) -> int:
        """The step that all chunks of an iteration leave at, from 0."""
        key = shared([Key(seed, iteration)])[0]
        return int(generator(key, 0, 0, "t").integers(len(levels)))

    def weigh(self, adv: Tensor) -> Tensor:
        """Weights [B, K] from the advantages [B, K] of the whole batch."""
        return sample_weights(adv, self.beta, self.weight_low, self.weight_high, self.normalise)

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) per chunk, to be summed; backward on each before the next. ``adv`` [B, K] are the
        weights of :meth:`weigh`; ``record.towards`` says where to."""
        assert record.steps is not None and record.towards is not None
        latents, g, step = record.latents, record.towards, record.steps.x.shape[2] - 1
        chunks = denoiser.window.chunks(latents.shape[1])
        spread = adv[:, [k for k, (a, b) in enumerate(chunks) for _ in range(b - a)]]  # [B, F]
        weights = spread[:, :, None, None, None] * (1.0 if record.map is None else record.map[:, :, None])
        if self.through_context:
            draw = draws(self.exploration, record.keys, tuple(record.steps.x.shape[3:]), latents.device)
            with policies.using("current"):
                x = self_rollout(denoiser, chunks, levels, draw, step, through_context=True)
            yield self._one(x, latents, g, weights, 1.0)
            return
        t = torch.full((len(record),), levels[step], device=latents.device)
        for k, start, stop, context in walk(denoiser, latents, lambda: policies.using(self.context_writer)):
            with policies.using("current") as model:
                x = model(record.steps.x[:, k, step], t, context).x0
            part = slice(start, stop)
            share = (stop - start) / latents.shape[1]
            yield self._one(x, latents[:, part], g[:, part], weights[:, part], share)

    def _one(self, x, was, g, weights, share: float) -> tuple[Tensor, dict[str, float]]:
        loss = (weights * matching_loss(x, g)).mean() * share
        return loss.float(), {
            "x0_moved": (x.detach() - was).square().mean().item(),  # 0 at the first update
            "direction": g.abs().mean().item(),
        }
