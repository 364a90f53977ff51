"""One metric of one run as points to draw: thinned where there are many, with a smoothed line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MOST = 200  # points drawn of a series; longer ones are drawn as means of equal blocks, with their range
SMOOTH = 10  # the smoothed line is a moving mean over a tenth of the points
FEW = 8  # points below which nothing is smoothed


@dataclass(frozen=True)
class Series:
    """Points in the order of x. ``y`` is NaN where the value is missing or not finite: the line breaks there."""

    label: str
    slot: int  # which colour and dash
    x: list[float]
    y: list[float]
    low: list[float]  # smallest and largest value of the block a point stands for
    high: list[float]
    smooth: list[float]  # empty when there are too few points
    block: int  # iterations a point stands for
    lost: int  # values that are logged but not finite

    def finite(self) -> list[float]:
        """The values that can be drawn."""
        return [v for v in self.y if math.isfinite(v)]

    def words(self, clock: str) -> str:
        """The series in a sentence, for those who do not see it."""
        seen = [(x, y) for x, y in zip(self.x, self.y) if math.isfinite(y)]
        if not seen:
            return f"{self.label}: no finite value"
        (x0, y0), (x1, y1) = seen[0], seen[-1]
        if len(seen) == 1:
            return f"{self.label}: {y0:.4g} at {clock} {x0:g}"
        low, high = min(v for v in self.low if math.isfinite(v)), max(v for v in self.high if math.isfinite(v))
        ends = f"{y0:.4g} at {clock} {x0:g} to {y1:.4g} at {clock} {x1:g}"
        return f"{self.label}: from {ends}; lowest {low:.4g}, highest {high:.4g}"


def series(rows: list[dict[str, Any]], key: str, clock: str, label: str, slot: int) -> Series | None:
    """The metric ``key`` of a run's rows, or None where no row has it."""
    points = [(float(row[clock]), _number(row[key])) for row in rows if key in row]
    if not points:
        return None
    block = math.ceil(len(points) / MOST)
    parts = [points[i : i + block] for i in range(0, len(points), block)]
    x, y, low, high = [], [], [], []
    for part in parts:
        values = [v for _, v in part if math.isfinite(v)]
        x.append(sum(p for p, _ in part) / len(part))
        y.append(sum(values) / len(values) if values else math.nan)
        low.append(min(values, default=math.nan))
        high.append(max(values, default=math.nan))
    lost = sum(not math.isfinite(v) for _, v in points)
    return Series(label, slot, x, y, low, high, smoothed(y), block, lost)


def _number(value: object) -> float:
    """A logged value as a float; NaN for null, text and the like."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def smoothed(y: list[float]) -> list[float]:
    """Centred moving mean over a tenth of the points (3 or more), narrower at the ends, blind to NaN; [] for few."""
    if len(y) < FEW:
        return []
    reach = max(1, round(len(y) / SMOOTH / 2))
    out = []
    for i, here in enumerate(y):
        r = min(reach, i, len(y) - 1 - i)  # symmetric, so that a trend is not bent at the ends
        values = [v for v in y[i - r : i + r + 1] if math.isfinite(v)]
        out.append(sum(values) / len(values) if values and math.isfinite(here) else math.nan)
    return out
