"""Several rewards into one advantage: what each of them does in the mixture, and how they are brought together.

    advantages   A = sum_k w_k A_k, A_k the advantage of reward k     RAVEN, MixGRPO, DanceGRPO; the default
    gdpo         the same, over its std in the whole batch            GDPO
    zsum         the advantage of R = sum_k w_k z_k, z in the group
    sum          the advantage of R = sum_k w_k r_k                   flow_grpo, World-R1: the widest scale rules
    rank         the advantage of R = sum_k w_k win rate_k            blind to outliers
    product      the advantage of R = prod_k r_k^w_k, r in [0, 1]     Stream4D's motion: no factor can be bought off

Weights are divided by sum_k |w_k|, but for product. Before that, a reward with a ``floor`` counts up to it and no
further, and branches that a ``gate`` shuts fall to one standard deviation below the worst of their group: what they
are worth otherwise does not matter, and no branch that passes is worth less. Where a whole group has no value of a
reward, that reward says nothing about it. Shape letters: B branches, K chunks; NaN = leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError, check_choice, check_ranges
from arvideo_rl.objectives.advantages import NO_SPREAD, advantages
from arvideo_rl.objectives.selective import win_rates

MODES = ("advantages", "gdpo", "zsum", "sum", "rank", "product")
Compare = Callable[[Tensor, float], tuple[Tensor, dict[str, float]]]  # values, least_std -> advantages, statistics


@dataclass(kw_only=True)
class Axis:
    """What one reward does in the mixture, besides its weight."""

    gate: float | None = None  # no term of the mixture: branches below this value fall to the worst of their group
    soft: float = 0.0  # width of the gate: passes sigmoid((value - gate) / soft); 0 = all or nothing
    floor: float | None = None  # should be reached; what is above it does not count
    least_std: float = 0.0  # a group's spread below this is not blown up to 1, e.g. .05 of the base model's spread


PLAIN = Axis()


def check_mix(
    mode: str, weights: Mapping[str, float], axes: Mapping[str, Axis], ranges: Mapping[str, tuple[float, float]]
) -> None:
    """ConfigError for a mixture that means nothing. By name: ``weights`` as terms (0 for what is no term), what else
    they do, and the ranges of the rewards."""
    check_choice("mix", mode, MODES)
    if "mix" in axes:
        raise ConfigError("rewards.mix: that name is the mixture's in the metrics; choose another")
    for name, axis in axes.items():
        where, weight = f"rewards.{name}", weights[name]
        check_ranges(axis, {"soft": "[0, inf)", "least_std": "[0, inf)"}, f"{where}.")
        for key in ("gate", "floor"):
            value = getattr(axis, key)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{where}.{key}={value}: use a finite number")
        if axis.soft and axis.gate is None:
            raise ConfigError(f"{where}.soft={axis.soft} is the width of a gate: set {where}.gate too")
        if axis.gate is not None and axis.floor is not None:
            raise ConfigError(f"{where} has both gate and floor; name the reward twice to use it for both")
        if axis.floor is not None and weight <= 0:
            raise ConfigError(f"{where}.floor={axis.floor} needs a weight above 0, with which a lack counts")
        low, high = ranges[name]
        if mode == "product" and weight and not (weight > 0 and 0 <= low and high <= 1):
            raise ConfigError(f"mix=product takes rewards in [0, 1] with weights above 0; {name} has weight {weight:g} "
                              f"and range {low:g} to {high:g}: use mix=zsum")  # fmt: skip


def combine(
    values: Mapping[str, Tensor], weights: Mapping[str, float], groups: Tensor, compare: Compare,
    mode: str = "advantages", axes: Mapping[str, Axis] | None = None,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Advantages [B, K] of several rewards [B, K] of branches with group ids [B], and statistics: ``NAME/STATISTIC`` of
    the rewards with a weight, ``mix/STATISTIC`` of the mixture. ``compare`` gives the advantages of one reward."""
    check_choice("mix", mode, MODES)
    axes = {name: (axes or {}).get(name, PLAIN) for name in values}
    terms = {name: _up_to(value, axes[name].floor) for name, value in values.items() if weights[name]}
    size = sum(abs(weights[name]) for name in terms)
    if not size:
        raise ValueError(f"the weights of {', '.join(values) or 'no rewards'} are all 0")
    gate = passing(values, axes)
    stats = {} if gate is None else {"mix/passing": gate.nanmean().item()}
    if mode in ("advantages", "gdpo"):
        total = torch.zeros_like(next(iter(terms.values())))
        for name, value in terms.items():
            sign = math.copysign(1.0, weights[name])
            adv, seen = compare(sign * shut(sign * value, gate, groups), axes[name].least_std)
            total, stats = total + weights[name] * adv, stats | {f"{name}/{k}": v for k, v in seen.items()}
        total = total / size
        return (total / total.std(correction=0).clamp_min(NO_SPREAD) if mode == "gdpo" else total), stats
    parts = []
    for name, value in terms.items():
        z, seen = advantages(value, groups, floor=axes[name].least_std)
        stats |= {f"{name}/{k}": v for k, v in seen.items()}
        term = _said(_in_units_of(mode, value, z, groups), value, groups, 1.0 if mode == "product" else 0.0)
        parts.append(term.pow(weights[name]) if mode == "product" else weights[name] / size * term)
    mixture = torch.stack(parts).prod(0) if mode == "product" else torch.stack(parts).sum(0)
    adv, seen = compare(shut(mixture, gate, groups), 0.0)
    return adv, stats | {f"mix/{k}": v for k, v in seen.items()}


def passing(values: Mapping[str, Tensor], axes: Mapping[str, Axis]) -> Tensor | None:
    """How far all gates let each branch through [B, K], in [0, 1]; None without a gate."""
    shares = []
    for name, axis in axes.items():
        if axis.gate is not None:
            above = values[name].double() - axis.gate
            open_ = torch.sigmoid(above / axis.soft) if axis.soft else (above >= 0).double()
            shares.append(open_.masked_fill(above.isnan(), math.nan))
    return torch.stack(shares).prod(0).float() if shares else None


def shut(values: Tensor, gate: Tensor | None, groups: Tensor) -> Tensor:
    """``values`` [B, K] where the gate [B, K] is open; where it is shut one standard deviation of the group (1 where
    it has none) below the group's worst; in proportion between."""
    if gate is None:
        return values
    out = values.clone()
    for g in groups.unique():
        rows = groups == g
        for column in range(values.shape[1]):
            v, passes = values[rows, column], gate[rows, column]
            known = v[~v.isnan()]
            if len(known) and not passes.isnan().all():  # a gate without a value says nothing about the group
                std = known.std(correction=0)
                low = known.min() - (std if std >= NO_SPREAD else 1.0)
                out[rows, column] = v - (1 - passes) * (v - low)
    return out


def _up_to(values: Tensor, floor: float | None) -> Tensor:
    return values if floor is None else values.clamp_max(floor)  # which keeps NaN


def _in_units_of(mode: str, values: Tensor, z: Tensor, groups: Tensor) -> Tensor:
    """A term of the mixture [B, K] in the units in which ``mode`` adds or multiplies."""
    if mode == "zsum":
        return z
    if mode == "rank":
        rates = torch.stack([win_rates(column, groups) for column in values.unbind(1)], 1).float()
        return torch.where(rates.isnan(), 0.5, rates)  # no mate to beat
    outside = (values < 0) | (values > 1)
    if mode == "product" and bool(outside.any()):
        raise ValueError(f"mix=product takes rewards in [0, 1]; one is {values[outside][0].item():.4g}")
    return values


def _said(term: Tensor, values: Tensor, groups: Tensor, nothing: float) -> Tensor:
    """``term`` [B, K] with NaN where ``values`` has it, but ``nothing`` where it has it for a whole group."""
    out = term.masked_fill(values.isnan(), math.nan)
    for g in groups.unique():
        rows = groups == g
        silent = values[rows].isnan().all(0)
        out[rows] = torch.where(silent, nothing, out[rows])
    return out
