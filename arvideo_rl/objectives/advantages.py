"""Advantages by explicit group id: how much better a branch did than its group-mates.

Population standard deviations; a group without spread, or with one valid member, gets zero and is counted.
Sources of the forms: flow_grpo (group mean, global std), DanceGRPO (group z-score).
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMS = ("group_z", "global_std", "centre")
NO_SPREAD = 1e-6


def advantages(values: Tensor, groups: Tensor, form: str = "group_z") -> tuple[Tensor, dict[str, float]]:
    """Advantages [B, K] of rewards ``values`` [B, K] (NaN = leave out) whose group ids are ``groups`` [B].

    Columns (chunks) are independent: a branch's chunk is compared with the same chunk of its group-mates.
    ``group_z`` divides by the group's std, ``global_std`` by the std of the whole column, ``centre`` by nothing.
    Returns zeros where the reward is NaN, and how many groups had no spread.
    """
    if form not in FORMS:
        raise ValueError(f"advantage form {form!r} is unknown; choose one of {', '.join(FORMS)}")
    values = values.double()
    out = torch.zeros_like(values)
    flat = 0
    spreads: list[float] = []
    for column in range(values.shape[1]):
        v = values[:, column]
        used = ~v.isnan()
        overall = v[used].std(correction=0) if used.any() else v.new_zeros(())
        for g in groups.unique():
            rows = used & (groups == g)
            std = v[rows].std(correction=0) if rows.any() else v.new_zeros(())
            spreads.append(std.item())
            if std < NO_SPREAD:
                flat += 1
                continue
            scale = {"group_z": std + 1e-8, "global_std": overall + 1e-4, "centre": torch.ones_like(std)}[form]
            out[rows, column] = (v[rows] - v[rows].mean()) / scale
    stats = {"zero_spread_share": flat / max(1, len(spreads)), "group_std": sum(spreads) / max(1, len(spreads))}
    return out.float(), stats


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
