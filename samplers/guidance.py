"""Reward-gradient guidance: at chosen steps the mean of a transition is moved to where a reward rises.

    mean' = mean + a q sqrt(M) g / |g|,   g = gradient in x_t of R(predicted clean chunk)

q sqrt(M) is how far the step's own noise reaches (M elements of std q), so ``strength`` a says what share of it is
steered, whatever the reward's unit; above .1 samples leave what the network knows. In Euphonium's form, which adds
lambda (t - s) g, lambda is a q sqrt(M) / ((t - s) |g|). The policy is the kernel *without* guidance: a log-probability
takes the unguided mean at the recorded x_s, so that training on guided samples distils the shift into the network.
x_s - mean is then q e plus the shift: formulas take the recorded x_s and never the drawn e.

Source: Euphonium (zerzerzerz/Euphonium, 2602.04928), whose reward reads x_t itself. Here it reads the predicted clean
chunk, through the network: one more forward, and a backward, per guided step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

Judge = Callable[[int, Tensor, Tensor | None], Tensor]  # (its number, clean chunk, the one before it) -> rewards [B]
MOST = 0.1


@dataclass(frozen=True)
class Guide:
    """What an exploration asks for: ``reward`` by its name in the run, at the last ``steps`` transitions that draw."""

    reward: str = ""
    strength: float = 0.05  # length of the shift as a share of the noise's, 0 to .1
    steps: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.strength <= MOST:
            raise ValueError(f"guide strength={self.strength}: use 0 to {MOST}, a share of the noise's length")
        if self.steps < 1:
            raise ValueError(f"guide steps={self.steps}: use 1 or more")


@dataclass(frozen=True)
class Guidance:
    """A guide at work: ``judge`` gives rewards with gradient, NaN for rows it cannot judge, which are left alone."""

    judge: Judge
    strength: float
    steps: Collection[int]  # transitions of a chunk

    def shift(
        self, denoise: Callable[[Tensor], Tensor], x: Tensor, std: float, chunk: int, before: Tensor | None
    ) -> Tensor:
        """What is added to the mean [B, F, C, H, W] of a transition from x with ``std``. ``denoise`` predicts the clean
        chunk, number ``chunk``; ``before`` is the finished chunk before it, where there is one."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.judge(chunk, denoise(x), before).nansum(), x)
        if not slope.isfinite().all():
            raise ValueError(f"the guiding reward's gradient is not finite in chunk {chunk}")
        length = slope.flatten(1).norm(dim=1).view(-1, *[1] * (x.ndim - 1))
        return self.strength * std * math.sqrt(x[0].numel()) * slope / length.where(length > 0, 1)
