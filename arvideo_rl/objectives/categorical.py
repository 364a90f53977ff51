"""A policy over the branches of one group: pi = softmax(-distance / tau), its ratio to the old one and its KL.

Chunk forks (neighbour.py) and KV routing (routing.py) differ in what the distance is; the rest is here. Probabilities
are of G branches, not of elements: clip ranges are tenths, where those of transition densities are 1e-5 to 1e-3.
All results are float64: ratios are differences of near-equal numbers. Equal distances give a ratio of exactly 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_policy(distance: Tensor, tau: float) -> Tensor:
    """Log-probabilities [..., G] from distances [..., G]; ``tau`` above 0."""
    if not tau > 0:
        raise ValueError(f"tau={tau}: use a temperature above 0")
    return (-distance.double() / tau).log_softmax(-1)


def typical_gap(gaps: Tensor) -> float:
    """The temperature that suits gaps [G, G] between branches: their median off the diagonal."""
    others = ~torch.eye(len(gaps), dtype=torch.bool, device=gaps.device)
    return gaps.detach().double()[others].quantile(0.5).clamp_min(1e-12).item()


def clipped_surrogate(
    log_ratio: Tensor, adv: Tensor, low: float, high: float, limit: float
) -> tuple[Tensor, dict[str, float]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), elementwise, with log r held within +- ``limit``; and statistics."""
    ratio, adv = log_ratio.double().clamp(-limit, limit).exp(), adv.detach().double()
    loss = torch.maximum(-adv * ratio, -adv * ratio.clamp(1 - low, 1 + high))
    r = ratio.detach()
    return loss, {
        "ratio_mean": r.mean().item(),
        "ratio_std": r.std(correction=0).item(),
        "ratio_off": (r - 1).abs().max().item(),
        "clip_high": ((r > 1 + high) & (adv > 0)).double().mean().item(),
        "clip_low": ((r < 1 - low) & (adv < 0)).double().mean().item(),
    }


def categorical_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) [...] of log-probabilities [..., G]; gradient through p only."""
    return (log_p.exp() * (log_p - log_q.detach())).sum(-1)
