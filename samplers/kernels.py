"""Transition kernels: from level t to a cleaner level s. A kernel returns mean and std; the sampler draws."""

from __future__ import annotations

from torch import Tensor


def consistency(x0: Tensor, s: float) -> tuple[Tensor, float]:
    """Consistency-model transition: x_s ~ N((1 - s) x0, s^2 I), whatever the level before. In float32 maths.
    Source: samplers of CausVid, Self-Forcing and RAVEN."""
    return (1 - s) * x0.float(), s


def forward(x0: Tensor, noise: Tensor, t: Tensor | float) -> Tensor:
    """The forward process x_t = (1 - t) x0 + t noise; t is a number or broadcasts against x0."""
    return (1 - t) * x0 + t * noise
