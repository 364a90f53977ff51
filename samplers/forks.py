"""How branches of a group come to differ: noise near to a shared one, antithetic pairs, churn, and the pivot chunk.

Every draw is keyed, so what branches share is equality of tensors and not a convention; exploration.py puts the draws
of a group together.

    neighbour    eps_g = sqrt(1 - sigma^2) eps* + sigma delta_g     corr(eps_g, eps_h) = 1 - sigma^2
    antithetic   eps_+- = sqrt(1 - a^2) eps +- a delta              the pair's mean and difference are independent
    churn        a share sigma of the noise is a branch's own, in what it starts from and again at every step

Sources: Neighbor GRPO and AR-CoPO (neighbour noise), TempAct (fresh fork), NVlabs/FDFO (churn). The antithetic pair is
the form of the last for one chunk of a causal stream.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from samplers.kernels import Kernel
from samplers.randomness import Key, generator, normal, shared


def neighbour_noise(
    keys: list[Key], chunk: int, step: int, purpose: str, shape: tuple[int, ...], sigma: float
) -> Tensor:
    """Standard normal noise [len(keys), *shape] at distance ``sigma`` in [0, 1] from one that a group shares:
    0 gives all the same, 1 each its own. Published: .3 for images, .5 for autoregressive video."""
    _check_share("sigma", sigma)
    centre, own = (normal(k, chunk, step, purpose, shape) for k in (shared(keys), keys))
    return math.sqrt(1 - sigma**2) * centre + sigma * own


def antithetic_noise(keys: list[Key], chunk: int, step: int, purpose: str, shape: tuple[int, ...], a: float) -> Tensor:
    """Standard normal noise [len(keys), *shape]: branches 2 p and 2 p + 1 lie at +a and -a of the pair's direction.
    Use a in .05 - .3: the difference of their rewards is a slope only while the pair stays close."""
    _check_share("a", a)
    if any(k.branch < 0 for k in keys):
        raise ValueError("a branch below 0 has no pair; pairs are branches 0 and 1, 2 and 3, ...")
    # below 0 and apart from -1, which all of a group share
    centre, direction = (
        normal([replace(k, branch=-2 - 2 * (k.branch // 2) - i) for k in keys], chunk, step, purpose, shape)
        for i in (0, 1)
    )
    sign = torch.tensor([1.0 - 2 * (k.branch % 2) for k in keys]).view(-1, *[1] * len(shape))
    return math.sqrt(1 - a**2) * centre + a * sign * direction


def pivot_of(key: Key, first: int, chunks: int) -> int:
    """The chunk to fork, uniform over ``first`` .. ``chunks`` - 1 and the same for all branches of a prompt."""
    if not 0 <= first < chunks:
        raise ValueError(f"no chunk to fork from {first} on in a video of {chunks} chunks")
    return int(generator(shared([key])[0], 0, 0, "routing").integers(first, chunks))


def churn_kernel(sigma: float) -> Kernel:
    """FDFO's step with churn gamma: overshoot to r = s / (1 + gamma - gamma s), then add noise back up to s. It keeps
    the data coefficient 1 - s and replaces the share sigma^2 = 1 - (1 + gamma)^-2 of the noise, hence is CPS with
    sin(eta pi/2) = sigma. Published gamma: exp(.0025) - 1, so sigma .0706."""
    _check_share("sigma", sigma)
    return Kernel("cps", math.asin(sigma) * 2 / math.pi)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: use a number from 0 (all branches the same) to 1")
