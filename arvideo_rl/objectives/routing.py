"""KV-routing policy optimisation (KVPO): branches differ in the memory they read; the unrouted policy is trained.

The trained policy is run, under its ordinary context, at the noisy inputs of every branch. How far its predictions are
from what the branch did is the branch's energy, and the policy over branches is a Gibbs distribution:

    E_g = sum over routed chunks and steps of mean (x0_g - x0_cur)^2 / (2 max(t, floor)^2);  pi = softmax_g(-E_g / tau)
    loss = mean_g max(-A_g r_g, -A_g clip(r_g, .9, 1.2)) + 10 KL(pi || pi_start),  r = pi / pi_old

With velocities that is (w/2) mean (v_g - v_cur)^2, w = t^2 for the published floor 1 (no level matters), 1 for 0.
Advantages are relative to an unrouted anchor, do not sum to zero, and are fused from the routed clip's and the rest's.

Source: Richard-Zhang-AI/KVPO. What differs here: levels are exact (there truncated to whole timesteps); the protection
``scale`` sees the energies (there the branch logits are normalised first, which makes the anchor's probability 1/2
whatever happened, and halves the loss); tau may follow the energies.
Shape letters: G branches of one group, without the anchor; T transitions (routed chunks x steps).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arvideo_rl.objectives.advantages import NO_SPREAD
from arvideo_rl.objectives.categorical import categorical_kl, clipped_surrogate, log_policy, typical_gap

PROTECTIONS = ("none", "drop", "scale")


def trajectory_energy(current: Tensor, recorded: Tensor, t: Tensor, floor: float = 1.0) -> Tensor:
    """Energies [G], float64, of clean predictions [G, T, ...] at levels ``t`` [T]; gradient through ``current``.

    A sum over T: energies of parts of a trajectory add up, so that chunks and branches may be computed one by one.
    """
    if current.shape != recorded.shape or t.shape != current.shape[1:2]:
        raise ValueError(f"energy of {list(current.shape)} from {list(recorded.shape)} at levels {list(t.shape)}")
    sigma = t.double().clamp_min(floor)
    if (sigma <= 0).any():
        raise ValueError(f"energy at level 0 with floor {floor}: use levels or a floor above 0")
    error = (recorded.detach() - current).square().flatten(2).mean(2).double()
    return (error / (2 * sigma.to(error.device) ** 2)).sum(1)


def temperature(energy: Tensor) -> float:
    """The median |E_i - E_j| of two branches, from the old policy's energies [G]."""
    return typical_gap((energy[:, None] - energy).abs())


def fuse(
    local: Tensor, overall: Tensor, weights: tuple[float, float] = (1.0, 0.5), clip: float = 2.5, by_std: bool = True
) -> Tensor:
    """One advantage per branch [G] from those of the routed clip and of all from its start, clipped to +- ``clip``.

    ``by_std``: each is divided by its own population std first, no mean subtracted; one that is the same for all
    branches then counts nothing.
    """
    total = torch.zeros_like(local, dtype=torch.float64)
    for adv, weight in zip((local.double(), overall.double()), weights):
        std = adv.std(correction=0)
        total += weight * (adv if not by_std else adv / std if std > NO_SPREAD else 0 * adv)
    return total.clamp(-clip, clip).float()


def protection(energy: Tensor, tau: float, mode: str, safe: bool) -> float:
    """What to multiply a group's loss with, KL included, when nothing beats its anchor (not ``safe``).

    ``drop``: 0. ``scale``: 1 - pi_anchor, the anchor being one more choice of energy 0, which is what the policy
    that made it gives it. A constant, no gradient.
    """
    if mode not in PROTECTIONS:
        raise ValueError(f"protection {mode!r} is unknown; choose one of {', '.join(PROTECTIONS)}")
    if safe or mode == "none":
        return 1.0
    if mode == "drop":
        return 0.0
    return 1 - log_policy(torch.cat([energy.detach(), energy.new_zeros(1)]), tau)[-1].exp().item()


def routing_loss(
    energy: Tensor,
    old: Tensor,
    start: Tensor | None,
    adv: Tensor,
    *,
    tau: float = 1.0,
    clip: tuple[float, float] = (0.1, 0.2),
    limit: float = 20.0,
    kl_weight: float = 10.0,
    factor: float = 1.0,
) -> tuple[Tensor, dict[str, float]]:
    """The loss, a number, and statistics of one group: energies [G] under the trained, the old and the start policy
    (None without KL), advantages [G], and the ``factor`` of :func:`protection`. Gradient through ``energy``."""
    if start is None and kl_weight:
        raise ValueError(f"kl_weight={kl_weight} needs the start policy's energies; give them or use 0")
    now = log_policy(energy, tau)
    policy, stats = clipped_surrogate(now - log_policy(old.detach(), tau), adv, *clip, limit)
    loss, kl = policy.mean(), now.new_zeros(())
    if start is not None:
        kl = categorical_kl(now, log_policy(start, tau))
        loss = loss + kl_weight * kl
    entropy = -(now.detach().exp() * now.detach()).sum().item()
    return factor * loss, stats | {"kl": kl.item(), "entropy": entropy, "energy": energy.mean().item(), "tau": tau}


def by_energy(energy: Tensor, loss: Callable[[Tensor], tuple[Tensor, dict]]) -> tuple[Tensor, Tensor, dict]:
    """Loss, its gradient [G] with respect to the energies, and statistics, from energies computed without graph.

    Second pass: one branch at a time, run it with a graph and call backward on gradient[g] * energy_g. The gradient is
    that of the whole loss, and one branch's graph is held.
    """
    leaf = energy.detach().requires_grad_()
    value, stats = loss(leaf)
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach(), gradient, stats
