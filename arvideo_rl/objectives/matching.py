"""Distribution matching as tensor functions: the direction of DMD, its loss, and how rewards weigh it.

    g = (fake - real) / mean |x - real|            per sample; the mean is over all elements
    L = 1/2 mean( w W (x - sg(x - g))^2 )          hence dL/dx = w W g / numel

``real`` is the teacher's prediction of the clean clip from x noised to t, guided; ``fake`` the critic's. w is one
number a sample, W a map over its frames and places. Sources: DMD2, Self-Forcing (guandeh17/Self-Forcing, model/dmd.py),
Re-DMD (Reward-Forcing: w = exp(beta r)), Stream-R1 (arXiv 2605.03849: W and the balance of several rewards).
Guidance follows that code: cond + g (cond - uncond), so that g = 3 is what others call a scale of 4.
Shape letters: B clips, F frames, C H W a latent; n steps, D rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from samplers.schedule import shift_level


def score_level(u: float, shift: float, low: float, high: float) -> float:
    """The noise level that teacher and critic judge at: u in [0, 1] warped by ``shift``, kept in [low, high].
    Published: u = 0, .001, .. .999, shift 5, .02 to .98."""
    return min(max(shift_level(u, shift), low), high)


def guided(cond: Tensor, uncond: Tensor, guidance: float) -> Tensor:
    """cond + guidance (cond - uncond); 0 is no guidance, and a standard scale s is guidance s - 1."""
    return cond + guidance * (cond - uncond)


def direction(x: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """g [B, F, C, H, W] without gradient; 0 where it is not a number (a teacher that agrees exactly)."""
    with torch.no_grad():
        size = (x - real).abs().mean((1, 2, 3, 4), keepdim=True)
        return ((fake - real) / size).nan_to_num(0.0, 0.0, 0.0)


def matching_loss(x: Tensor, g: Tensor, kept: Tensor | None = None) -> Tensor:
    """Squared distance of x to sg(x - g), halved, per element and in float64, for whoever weighs and averages it; with
    a mask ``kept`` only those elements, in one row."""
    half = 0.5 * (x.double() - (x - g).detach().double()).square()
    return half if kept is None else half[kept]


def critic_loss(v: Tensor, x0: Tensor, noise: Tensor) -> Tensor:
    """Flow matching on the generator's own clips: mean (v - (noise - x0))^2."""
    return (v - (noise - x0)).square().mean()


def sample_weights(
    adv: Tensor, beta: float, low: float = 0.0, high: float = float("inf"), mean: bool = False
) -> Tensor:
    """exp(beta adv) within [low, high], divided by their mean if ``mean`` says so. Re-DMD: beta 2 on the raw reward and
    no more, so that a reward of 3 weighs 403 times; with a baseline in ``adv``, bounds and ``mean`` the rate stays."""
    weights = (beta * adv.double()).exp().clamp(low, high)
    return (weights / weights.mean() if mean else weights).float()


def saliency_weights(
    saliency: Tensor,
    strength: float = 1.0,
    temporal_floor: float = 0.2,
    spatial_floor: float = 0.15,
    temporal_strength: float | None = None,
) -> Tensor:
    """Stream-R1's W [B, F, H, W], of mean 1 per clip, from how strongly a reward reacts to each place [B, F, H, W].

    With f(x) = max(1 - strength + strength minmax(x), floor), ones where x is constant: W is f of the frames' means
    times f within each frame, each divided by its mean.
    """
    over = strength if temporal_strength is None else temporal_strength
    over_frames = _floored(saliency.mean((2, 3)), (1,), over, temporal_floor)
    inside = _floored(saliency, (2, 3), strength, spatial_floor)
    weights = over_frames[:, :, None, None] * inside
    return weights / weights.mean((1, 2, 3), keepdim=True)


def _floored(x: Tensor, dims: tuple[int, ...], strength: float, floor: float) -> Tensor:
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    scaled = torch.where(high > low, (x - low) / (high - low).clamp_min(1e-30), 1.0)
    out = (1 - strength + strength * scaled).clamp_min(floor)
    return out / out.mean(dims, keepdim=True)


def joined_saliency(maps: Tensor, rewards: Tensor, temperature: float = 1.0) -> Tensor:
    """One map [B, ...] from those of D rewards [D, B, ...]: the reward that is worst off [D, B] counts most,
    sum_d softmax_d(-r_d / temperature) S_d."""
    share = torch.softmax(-rewards / temperature, 0)
    return (share.view(*share.shape, *[1] * (maps.ndim - 2)) * maps).sum(0)


def imbalance(history: Tensor, warmup: int = 50, window: int = 50, least: int = 4) -> float:
    """Sample std over D rewards of how much each rose within the last ``window`` steps: mean of the newer half minus
    mean of the older (the first n // 2). ``history`` [n, D] includes the present step; 0 before step ``warmup``.
    Stream-R1 takes lambda = .5 of it off the reward of everything at once."""
    n = len(history)
    recent = history[-window:]
    if n < max(warmup, least) or history.shape[1] < 2:
        return 0.0
    half = len(recent) // 2
    return float((recent[half:].mean(0) - recent[:half].mean(0)).std())
