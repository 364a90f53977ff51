"""Sums and means over processes, by hand: an update runs many small backwards and needs one reduction."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


def sum_gradients(parameters: list, accelerator: Accelerator) -> None:
    """Add up gradients over processes; each process scaled its loss by the global number of branches."""
    if accelerator.num_processes == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in parameters])
    flat = accelerator.reduce(flat, "sum")
    at = 0
    for p in parameters:
        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
        at += p.numel()


def mean_over_processes(seen: dict[str, list[tuple[float, int]]], accelerator: Accelerator) -> dict[str, float]:
    """Mean of each metric over everything seen anywhere, as (value, branches that it is of); processes may have seen
    different names."""
    everything: dict[str, list[tuple[float, int]]] = {}
    for part in gather_object([seen]) if accelerator.num_processes > 1 else [seen]:
        for k, v in part.items():
            everything.setdefault(k, []).extend(v)
    return {f"train/{k}": sum(x * n for x, n in v) / sum(n for _, n in v) for k, v in sorted(everything.items())}
