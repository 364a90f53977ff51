"""Ratio methods: how likely the trained policy makes a recorded transition, and how far it may move.

One recorded transition x_t -> x_s is the action. With v and v_old the velocities of the trained and of the data policy
at x_t, dv = v - v_old, and x_s = mean_old + q e, any kernel of ``samplers/kernels.py`` gives per row

    log r  = (J/q) mean(e dv) - J^2/(2 q^2) mean dv^2      Gaussian; flow_grpo, DanceGRPO
    log r' = sign(J) mean(e dv)                            RatioNorm; TempAct for cm

so one stored v_old serves ratio, penalty and mask, nothing large cancels, and an unchanged policy has log r = 0
exactly.
``mean`` is over the elements of a row, never over the batch: sums would make the ratios exp(1e5), and all clip ranges
belong to means. Gradient goes through v only. Losses are per row, to be averaged by the caller, and minimised.

What differs here from public code: log-ratios are not differences of two stored log-probabilities; FlowCPS's
``squared`` form is offered but no default, since it is no likelihood; flow_grpo's KL, which is short of the step
length, is an option by that name; UniRL's mask clamps levels to .99 where its sampler does not, ours uses the std of
the sampler.
Shape letters: B rows (a branch's chunk at one step); latents [B, ...]; a transition's numbers [] or [B].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from samplers.kernels import Kernel, Level, Transition, mean_over

RATIOS = ("gaussian", "ratio_norm", "squared")
KL_FORMS = ("v", "x0", "transition", "flow_grpo", "flowcps")


def log_ratio(
    kernel: Kernel, v: Tensor, v_old: Tensor, x: Tensor, x_next: Tensor, t: Level, s: Level, form: str = "gaussian"
) -> Tensor:
    """Log-ratio [B], float64, of the transition from x at level t to the recorded x_next at s.

    ``gaussian``: of the two densities. ``ratio_norm``: free of mean and scale, so that every step moves the policy
    alike. ``squared``: FlowCPS's coded form, 2 q^2 times the first. A point (q = 0) is refused.
    """
    if form not in RATIOS:
        raise ValueError(f"ratio {form!r} is unknown; choose one of {', '.join(RATIOS)}")
    k = kernel.coefficients(t, s).stochastic()
    v_old, x, x_next = v_old.detach(), x.detach(), x_next.detach()
    mean, std = kernel.step(x, v_old, t, s)
    dv = v.float() - v_old.float()
    q, j = (n.to(v.device) for n in (k.q, k.jacobian))
    cross = mean_over((x_next.float() - mean) / std * dv)
    if form == "ratio_norm":
        return j.sign() * cross
    gaussian = j / q * cross - (j / q) ** 2 / 2 * mean_over(dv.square())
    return 2 * q**2 * gaussian if form == "squared" else gaussian


def clipped_loss(log_r: Tensor, adv: Tensor, low: float, high: float | None = None) -> tuple[Tensor, dict]:
    """PPO's surrogate max(-A r, -A clip(r, 1 - low, 1 + high)), elementwise; ``high`` is ``low`` unless given."""
    high = low if high is None else high
    ratio, adv = log_r.exp(), adv.detach()
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
    stats = {
        "clip_high": ((ratio > 1 + high) & (adv > 0)).double().mean().item(),
        "clip_low": ((ratio < 1 - low) & (adv < 0)).double().mean().item(),
    }
    return loss, ratio_stats(log_r) | stats


def masked_loss(log_r: Tensor, adv: Tensor, kl: Tensor, threshold: float) -> tuple[Tensor, dict]:
    """Flow-DPPO (UniRL): -A r, but 0 where the transition KL has reached ``threshold`` and the ratio has moved the way
    the advantage pushes it; a sample that moves back is always kept. No clip, no penalty. Elementwise."""
    adv, moved = adv.detach(), log_r.detach()
    drop = (kl.detach() >= threshold) & (((moved > 0) & (adv > 0)) | ((moved < 0) & (adv < 0)))
    # selected before exp too: the gradient of a dropped exp that overflows would be 0 * inf
    loss = torch.where(drop, 0.0, -adv * torch.where(drop, 0.0, log_r).exp())
    stats = {"kl_over": (kl >= threshold).double().mean().item(), "dropped": drop.double().mean().item()}
    return loss, ratio_stats(log_r) | stats


def score_loss(
    kernel: Kernel, v: Tensor, x: Tensor, x_next: Tensor, adv: Tensor, t: Level, s: Level, form: str = "gaussian"
) -> Tensor:
    """Consistency-model GRPO (RAVEN): -A log pi(x_next | x), without ratio, clip or old policy; [B].

    The gradient is -A (J/q) e / M at the current policy and that of RAVEN's squared score, which carries a factor 100
    more. The value is 0 by construction (RAVEN's, a squared score, means nothing either). ``ratio_norm`` makes the
    gradient -A sign(J) e / M: the published first to third transitions differ 9-fold in size without it.
    """
    return -adv.detach() * log_ratio(kernel, v, v, x, x_next, t, s, form)


def kl(k: Transition, v: Tensor, v_other: Tensor, form: str = "transition") -> Tensor:
    """Distance [B], float64, of two policies at one x_t: a multiple of mean (v - v_other)^2; gradient through v only.

    ``v``: 1. ``x0``: t^2. ``transition``: J^2/(2 q^2), the Gaussian KL. ``flow_grpo``: that times t - s, as its trainer
    codes it (it divides by 2 g^2 where the variance is g^2 (t - s)). ``flowcps``: J^2, of the means, no variance.
    A weight means nothing without the form.
    """
    if form not in KL_FORMS:
        raise ValueError(f"KL form {form!r} is unknown; choose one of {', '.join(KL_FORMS)}")
    if form in ("transition", "flow_grpo"):
        k = k.stochastic()
        factor = (k.jacobian / k.q) ** 2 / 2 * (k.t - k.s if form == "flow_grpo" else 1)
    else:
        factor = {"v": torch.ones_like(k.t), "x0": k.t**2, "flowcps": k.jacobian**2}[form]
    return factor.to(v.device) * mean_over((v.float() - v_other.detach().float()).square())


def chunk_weights(frames: list[int], shape: float) -> Tensor:
    """Weights [K] of chunks with so many frames; their mean over frames is 1. RAVEN, shape -1: later chunks count more.

    With p the share of frames from a chunk on: shape > 0 gives shape p/(1 + (shape - 1) p), shape < 0 the same with
    |shape| and p_last/p; 1 is p itself.
    """
    if shape == 0 or not math.isfinite(shape):
        raise ValueError(f"chunk weights of shape {shape}: use a number above or below 0")
    n = torch.tensor(frames, dtype=torch.float64)
    p = n.flip(0).cumsum(0).flip(0) / n.sum()
    p = p if shape > 0 else p[-1] / p
    w = abs(shape) * p / (1 + (abs(shape) - 1) * p)
    return (w * n.sum() / (w * n).sum()).float()


def ratio_stats(log_r: Tensor) -> dict[str, float]:
    """Mean, population std and extremes of the ratios; ``ratio_off``, the largest |r - 1|, is 0 at the first update."""
    ratio = log_r.detach().double().exp()
    return {
        "ratio_mean": ratio.mean().item(),
        "ratio_std": ratio.std(correction=0).item(),
        "ratio_min": ratio.min().item(),
        "ratio_max": ratio.max().item(),
        "ratio_off": (ratio - 1).abs().max().item(),
    }
