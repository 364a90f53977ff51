"""How well a score tells two sets apart: area under the ROC curve, share of pairs won, and their intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Z95 = 1.959964
Share = tuple[float, float, float]  # a share and its 95 % interval


def auroc(good: Sequence[float], bad: Sequence[float]) -> Share:
    """Share of all pairs of one of ``good`` and one of ``bad`` in which the good one is higher, ties half; the interval
    takes the values for independent."""
    a, b = torch.tensor(good, dtype=torch.float64)[:, None], torch.tensor(bad, dtype=torch.float64)
    area = float(((a > b).double() + (a == b).double() / 2).mean())
    return area, *auroc_interval(area, len(good), len(bad))


def win_rate(good: Sequence[float], bad: Sequence[float]) -> Share:
    """Share of places at which ``good`` is higher than ``bad``, ties half."""
    rate = sum((a > b) + (a == b) / 2 for a, b in zip(good, bad)) / len(good)
    return rate, *wilson(rate, len(good))


def auroc_interval(area: float, good: int, bad: int) -> tuple[float, float]:
    """95 % interval of an AUROC from ``good`` and ``bad`` independent values (Newcombe 2006, method 5): the areas that
    lie no further from ``area`` than 1.96 of their own standard errors. Not of zero width at 1."""

    def near(x: float) -> bool:
        extra = (good + bad) / 2 - 1
        spread = x * (1 - x) * (1 + extra * ((1 - x) / (2 - x) + x / (1 + x))) / (good * bad)
        return abs(x - area) <= Z95 * math.sqrt(spread)

    return _edge(near, area, 0.0), _edge(near, area, 1.0)


def wilson(rate: float, count: int) -> tuple[float, float]:
    """95 % interval of a share ``rate`` of ``count`` (Wilson's)."""
    z = Z95**2 / count
    middle, half = rate + z / 2, Z95 * math.sqrt(rate * (1 - rate) / count + z / (4 * count))
    return (middle - half) / (1 + z), (middle + half) / (1 + z)


def _edge(near: Callable[[float], bool], inside: float, outside: float) -> float:
    """Where ``near`` ends between ``inside`` and ``outside``."""
    for _ in range(50):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if near(middle) else (inside, middle)
    return inside
