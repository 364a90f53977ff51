"""Transition kernels: from level t to a cleaner level s. A kernel returns mean and std; the sampler draws.

Every kernel in use is Gaussian, or a point, of one family (samplers read x0 = x - t v and eps = x + (1 - t) v off the
predicted velocity v):

    x_s ~ N(mean, q^2),   mean = (1 - s) x0 + c eps,   d mean / d v = J = -(1 - s) t + c (1 - t)

| name       | c                   | q               | g                    | source                                   |
|------------|---------------------|-----------------|----------------------|------------------------------------------|
| ode        | s                   | 0               |                      | Euler, DDIM                              |
| cm         | 0                   | s               |                      | CausVid, Self-Forcing, RAVEN, TempAct    |
| cps        | s cos(eta pi/2)     | s sin(eta pi/2) |                      | FlowCPS                                  |
| flow_sde   | s - g^2 (t-s)/(2t)  | g sqrt(t - s)   | eta sqrt(t/(1 - t))  | flow_grpo                                |
| dance_sde  | same                | same            | eta                  | DanceGRPO                                |
| linear_sde | same                | same            | eta t                | FlowCPS's Wan pipeline; eta: its level 2 |

The first three keep c^2 + q^2 = s^2, so x_s stays on the marginals that the network was trained on; the SDEs exceed it
by a term of second order in t - s, which is large on four steps. Levels and coefficients are float64, latents float32.
Shape letters: B rows; a latent is [B, ...]; a level is one number or [B].
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

NAMES = ("ode", "cm", "cps", "flow_sde", "dance_sde", "linear_sde")
PUBLISHED_ETA = {"cps": 0.8, "flow_sde": 0.7, "dance_sde": 0.3, "linear_sde": 0.9375}
Level = float | Tensor


def consistency(x0: Tensor, s: float) -> tuple[Tensor, float]:
    """Consistency-model transition: x_s ~ N((1 - s) x0, s^2 I), whatever the level before. In float32 maths.
    Source: samplers of CausVid, Self-Forcing and RAVEN."""
    return (1 - s) * x0.float(), s


def forward(x0: Tensor, noise: Tensor, t: Tensor | float) -> Tensor:
    """The forward process x_t = (1 - t) x0 + t noise; t is a number or broadcasts against x0."""
    return (1 - t) * x0 + t * noise


@dataclass(frozen=True)
class Transition:
    """The numbers of a kernel from level t to s: float64, all [] or all [B]."""

    t: Tensor
    s: Tensor
    c: Tensor  # weight of eps in the mean
    q: Tensor  # standard deviation
    jacobian: Tensor  # d mean / d v, the same for every element; negative

    def stochastic(self) -> Transition:
        """Itself, or a ValueError where q = 0: a point has no density, hence no log-probability and no ratio."""
        if (self.q <= 0).any():
            where = f"t = {_first(self.t, self.q <= 0)} to s = {_first(self.s, self.q <= 0)}"
            raise ValueError(f"the transition from {where} is a point (q = 0) without density: leave this step out")
        return self


@dataclass(frozen=True)
class Kernel:
    """One of NAMES with its noise ``eta``. ``at_one`` is the level that stands for t = 1 in the 1 - t under flow_sde's
    root: "next" takes s (flow_grpo), a number is taken as it is (UniRL: .99). RAVEN's Euler-Maruyama sampler, which
    has 2 - t' over 1 - t' there, is ``at_one = 1/(2 - t')``. Elsewhere in the formulas t stays 1."""

    name: str = "cm"
    eta: float | None = None
    at_one: float | str = "next"

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"kernel {self.name!r} is unknown; choose one of {', '.join(NAMES)}")
        published = PUBLISHED_ETA.get(self.name)
        if published is None and self.eta is not None:
            raise ValueError(f"kernel {self.name!r} has no eta, but eta={self.eta}: remove it or choose another kernel")
        if published is not None and self.eta is None:
            raise ValueError(f"kernel {self.name!r} needs eta (published: {published})")
        most = 1.0 if self.name == "cps" else 1e3
        if self.eta is not None and not 0 <= self.eta <= most:
            raise ValueError(f"kernel {self.name!r} with eta={self.eta}: use 0 to {most:g}")
        level = isinstance(self.at_one, (int, float)) and 0 < self.at_one < 1
        if self.at_one != "next" and not level:
            raise ValueError(f"kernel at_one={self.at_one!r}: use next or a level in (0, 1)")
        if self.at_one != "next" and self.name != "flow_sde":
            raise ValueError(f"kernel {self.name!r} has no at_one, but at_one={self.at_one}: only flow_sde does")

    def coefficients(self, t: Level, s: Level) -> Transition:
        """What the kernel is between two levels, 0 <= s < t <= 1, each a number or one per row [B]."""
        t, s = _levels(t, s)
        if self.name.endswith("_sde"):
            g = self._diffusion(t, s)
            c, q = s - g**2 * (t - s) / (2 * t), g * (t - s).sqrt()
        else:
            turn = self.eta if self.eta is not None else float(self.name == "cm")
            c, q = s * _cos_turn(turn), s * _cos_turn(1 - turn)
        return Transition(t, s, c, q, -(1 - s) * t + c * (1 - t))

    def step(self, x: Tensor, v: Tensor, t: Level, s: Level) -> tuple[Tensor, Tensor]:
        """Mean [B, ...] of x_s given x_t and the velocity, and std, shaped to multiply noise of x's shape: float32."""
        k = self.coefficients(t, s)
        x, v = x.float(), v.float()
        x0, eps = x - rows(k.t, x) * v, x + rows(1 - k.t, x) * v
        return rows(1 - k.s, x) * x0 + rows(k.c, x) * eps, rows(k.q, x)

    def from_x0(self, x: Tensor, x0: Tensor, t: float, s: float) -> tuple[Tensor, float]:
        """The same from the predicted clean latents, at one level for all rows; ``cm`` is :func:`consistency`."""
        mean, _ = consistency(x0, s)
        k = self.coefficients(t, s)
        if k.c != 0:
            mean = mean + k.c.item() * (x.float() - (1 - t) * x0.float()) / t
        return mean, k.q.item()

    def _diffusion(self, t: Tensor, s: Tensor) -> Tensor:
        """g of the SDEs."""
        assert self.eta is not None
        if self.name == "flow_sde":
            start = s if self.at_one == "next" else torch.full_like(t, float(self.at_one))
            return self.eta * (t / (1 - torch.where(t == 1, start, t))).sqrt()
        return self.eta * (t if self.name == "linear_sde" else torch.ones_like(t))


def log_prob(x_next: Tensor, mean: Tensor, std: Tensor | float, form: str = "gaussian") -> Tensor:
    """Log-probability [B] in float64 of x_next [B, ...], **averaged** over elements as in every public trainer: clip
    ranges of 1e-5 to 1e-3 belong to the mean. ``std`` is one number or one per row, as :meth:`Kernel.step` gives it.

    ``gaussian`` is the full density; ``squared`` is FlowCPS's -(x_next - mean)^2, no density: 2 q^2 times the former
    but for a constant, so the clip ranges of the two do not compare. Either refuses points (std = 0).
    """
    if form not in ("gaussian", "squared"):
        raise ValueError(f"log-probability form {form!r} is unknown; choose gaussian or squared")
    q = torch.as_tensor(std, dtype=torch.float64)
    q = q.flatten() if q.ndim else q
    if (q <= 0).any():
        raise ValueError("a transition with std 0 is a point and has no log-probability: leave this step out")
    square = mean_over((x_next.float() - mean.float()).square())
    return -square if form == "squared" else -square / (2 * q**2) - q.log() - 0.5 * math.log(2 * math.pi)


def mean_over(x: Tensor) -> Tensor:
    """Mean [B] of x [B, ...] over all but rows, summed in float64."""
    return x.flatten(1).mean(1, dtype=torch.float64)


def rows(level: Tensor, x: Tensor) -> Tensor:
    """A number per row, [] or [B], in float32 and shaped to broadcast against x [B, ...]."""
    level = level.to(x.device, torch.float32)
    return level.reshape(-1, *[1] * (x.ndim - 1)) if level.ndim else level


def _cos_turn(u: float) -> float:
    """cos(u pi/2), exact at both ends, so that cm and cps(1) have c = 0 and ode and cps(0) have q = 0."""
    return 0.0 if u == 1 else math.cos(u * math.pi / 2)


def _levels(t: Level, s: Level) -> tuple[Tensor, Tensor]:
    """Both in float64 and of one shape, or a ValueError with the first pair that is no step down."""
    a, b = torch.broadcast_tensors(*(torch.as_tensor(x, dtype=torch.float64) for x in (t, s)))
    if not (ok := (b >= 0) & (b < a) & (a <= 1)).all():
        raise ValueError(f"no transition from t = {_first(a, ~ok)} to s = {_first(b, ~ok)}: use 0 <= s < t <= 1")
    return a, b


def _first(values: Tensor, where: Tensor) -> float:
    return round(values[where][0].item() if values.ndim else values.item(), 6)
