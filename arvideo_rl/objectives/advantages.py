"""Advantages by explicit group id: how much better a branch did than its group-mates.

    centre       R - mean                                     FDFO's raw pair (R_1 - R_2)/2 is a group of two
    group_z      (R - mean) / (group std + 1e-8)              DanceGRPO, MixGRPO; UniRL with correction=1
    global_std   (R - mean) / (std of all groups + 1e-4)      Flow-GRPO, DiffusionNFT, Astrolabe, TempAct
    quasi_norm   sqrt(G) (R - mean) / |R - mean|_p, p = .8    Neighbor GRPO; p = 2 is group_z
    raw          R                                            reward-weighted regression
    best         1 for the best and its equals, else 0        fine-tuning on the best
    best_worst   1 for the first best, -1 the first worst     preference pairs

Population standard deviations unless told; a group without spread, or with one valid member, gets zero and is counted
(``raw`` and ``best`` do not compare: they give it its reward, and 1). What differs from public code: UniRL gives NaN
to a lone member, flow_grpo makes a preference pair of equal rewards, RAVEN's sum_then_normalize does not normalise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

FORMS = ("group_z", "global_std", "centre", "quasi_norm", "raw", "best", "best_worst")
EPSILON = {"group_z": 1e-8, "global_std": 1e-4}  # added to the std
NO_SPREAD = 1e-6


def advantages(
    values: Tensor,
    groups: Tensor,
    form: str = "group_z",
    *,
    correction: int = 0,
    epsilon: float | None = None,
    floor: float = 0.0,
    power: float = 0.8,
) -> tuple[Tensor, dict[str, float]]:
    """Advantages [B, K] of rewards ``values`` [B, K] (NaN = leave out) whose group ids are ``groups`` [B].

    Columns (chunks) are independent: a branch's chunk is compared with the same chunk of its group-mates.
    A form that divides by a std divides by max(std, ``floor``) + ``epsilon``: 0 is a population std, 1 a sample std
    (``correction``); ``epsilon`` None is the form's own. RAVEN: floor 1e-4, epsilon 1e-5. ``power`` is quasi_norm's p.
    Returns zeros where the reward is NaN, and how many groups had no spread.
    """
    if form not in FORMS:
        raise ValueError(f"advantage form {form!r} is unknown; choose one of {', '.join(FORMS)}")
    if power <= 0:
        raise ValueError(f"power={power}: use a number above 0")
    values = values.double()
    epsilon = EPSILON.get(form, 0.0) if epsilon is None else epsilon
    out = torch.zeros_like(values)
    flat = 0
    spreads: list[float] = []
    for column in range(values.shape[1]):
        v = values[:, column]
        used = ~v.isnan()
        overall = _std(v[used], correction)
        for g in groups.unique():
            rows = used & (groups == g)
            mine, std = v[rows], _std(v[rows], correction)
            spreads.append(std.item())
            if std < NO_SPREAD:
                flat += 1
                if form not in ("raw", "best"):
                    continue
            scale = (overall if form == "global_std" else std).clamp_min(floor) + epsilon
            out[rows, column] = _compare(mine, form, scale, power)
    stats = {"zero_spread_share": flat / max(1, len(spreads)), "group_std": sum(spreads) / max(1, len(spreads))}
    return out.float(), stats


def _std(v: Tensor, correction: int) -> Tensor:
    return v.std(correction=correction) if len(v) > 1 else v.new_zeros(())


def _compare(v: Tensor, form: str, scale: Tensor, power: float) -> Tensor:
    """One group's advantages from its valid rewards."""
    if form == "raw" or not len(v):
        return v
    if form == "best":
        return (v == v.max()).double()
    if form == "best_worst":
        pair = torch.zeros_like(v)
        pair[v.argmax()], pair[v.argmin()] = 1, -1
        return pair
    d = v - v.mean()
    if form == "quasi_norm":
        return len(v) ** 0.5 * d / d.abs().pow(power).sum().pow(1 / power)
    return d if form == "centre" else d / scale


def anchor_relative(
    values: Tensor, groups: Tensor, anchors: Tensor, epsilon: float = 1e-8
) -> tuple[Tensor, dict[str, float]]:
    """KVPO: (R - R_anchor) / (sample std of branches and anchor + epsilon), [B, K], zero in the anchors' own rows.

    ``values`` [B, K] holds the anchors' rewards too, in the rows that ``anchors`` [B] (bool) marks, one per group.
    It does not sum to zero over a group, and one branch is enough. A column whose anchor is NaN gives zeros.
    """
    values, out = values.double(), torch.zeros_like(values, dtype=torch.float64)
    flat, better, spreads = 0, [], []
    for g in groups.unique():
        rows, anchor = groups == g, anchors & (groups == g)
        if anchor.sum() != 1:
            raise ValueError(
                f"group {g.item()} has {int(anchor.sum())} anchors in {int(rows.sum())} rows; it needs one"
            )
        for column in range(values.shape[1]):
            base = values[anchor, column]
            used = rows & ~values[:, column].isnan() & ~base.isnan()
            std = _std(values[used, column], 1)
            spreads.append(std.item())
            if std < NO_SPREAD:
                flat += 1
                continue
            out[used, column] = (values[used, column] - base) / (std + epsilon)
            better.append((out[used & ~anchor, column] > 0).double().mean().item())
    share = {"zero_spread_share": flat / max(1, len(spreads)), "group_std": sum(spreads) / max(1, len(spreads))}
    return out.float(), share | {"better_than_anchor": sum(better) / max(1, len(better))}


def diversity_bonus(adv: Tensor, groups: Tensor, features: Tensor) -> Tensor:
    """GARDO: advantages [B, K] that are not negative times d / mean d of the group, d = how far (1 - cosine) a
    branch's ``features`` [B, D] lie from the nearest group-mate's; a lone member keeps its advantage."""
    f, out = normalize(features.double(), dim=1), adv.clone()
    for g in groups.unique():
        rows = groups == g
        apart = (1 - f[rows] @ f[rows].T).fill_diagonal_(torch.inf).amin(1)
        apart = torch.where(apart.isinf(), 1.0, apart)
        factor = (apart / (apart.mean() + 1e-8))[:, None].to(adv.dtype)
        out[rows] = torch.where(adv[rows] >= 0, adv[rows] * factor, adv[rows])
    return out


def extremes(values: Tensor, groups: Tensor, best: int, worst: int) -> Tensor:
    """DanceGRPO's best of n: which entries [B, K] are among the ``best`` highest or ``worst`` lowest of their group
    (ties by row; NaN never is). ValueError when a group has fewer than best + worst valid members."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    for g in groups.unique():
        for column in range(values.shape[1]):
            rows = ((groups == g) & ~values[:, column].isnan()).nonzero()[:, 0]
            if len(rows) < best + worst:
                raise ValueError(
                    f"group {g.item()} has {len(rows)} valid members, fewer than {best} best + {worst} worst"
                )
            order = rows[values[rows, column].argsort(stable=True)]
            chosen[order[:worst], column] = True
            chosen[order[len(order) - best :], column] = True
    return chosen


def worst_of_group(values: Tensor, content: Tensor, groups: Tensor) -> Tensor:
    """Give entries of ``values`` [B, K] flagged in ``content`` (unmeasurable by the clip's own fault) the lowest
    valid value of their group and column, so that breaking a clip never pays; a group with no valid entry keeps NaN."""
    out = values.clone()
    for g in groups.unique():
        rows = groups == g
        filled = torch.where(values[rows].isnan(), torch.inf, values[rows]).amin(0)
        filled = torch.where(filled.isinf(), torch.nan, filled).expand(int(rows.sum()), -1)
        out[rows] = torch.where(content[rows], filled, out[rows])
    return out
