"""Geometry of a line chart: series in, coordinates of an SVG out. The template draws it, so that it escapes too."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from arvideo_rl.report.series import Series

WIDTH, HEIGHT = 360, 208
LEFT, RIGHT, TOP, BOTTOM = 46, 352, 24, 178  # of the plot inside
SLOTS = 6  # colours; a further run gets the first colour again, dashed


@dataclass(frozen=True)
class Chart:
    """What is drawn: one metric, a series per run, and marks (x, slot, text) of events."""

    key: str
    title: str
    axis: str
    clock: str
    series: list[Series]
    marks: list[tuple[float, int, str]] = field(default_factory=list)
    about: str = ""


def view(chart: Chart) -> dict[str, Any]:
    """Everything the template needs, in SVG units."""
    x_ticks, y_ticks = _ticks_x(chart.series), _ticks_y(chart.series)
    (x0, x1), (y0, y1) = _span_x(chart.series), (y_ticks[0], y_ticks[-1]) if y_ticks else (0.0, 1.0)

    def at_x(x: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * (x - x0) / (x1 - x0), 1)

    def at_y(y: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (y - y0) / (y1 - y0), 1)

    lines = []
    for s in chart.series:
        px = [at_x(x) for x in s.x]
        py = [at_y(y) if math.isfinite(y) else math.nan for y in s.y]
        dense = s.block > 1
        lines.append({
            "label": s.label, "slot": s.slot % SLOTS, "dashed": s.slot >= SLOTS,
            "points": [] if dense else [
                (x, y, f"{s.label}, {chart.clock} {at:g}: {value:.4g}")
                for x, y, at, value in zip(px, py, s.x, s.y) if math.isfinite(y)
            ],
            "band": _band(px, [at_y(v) for v in s.low], [at_y(v) for v in s.high]) if dense else "",
            "raw": path(px, py),
            "smooth": path(px, [at_y(v) if math.isfinite(v) else math.nan for v in s.smooth]),
        })  # fmt: skip
    notes = []
    for s in chart.series:
        if s.lost:
            notes.append(f"{s.label}: {s.lost} {'value is' if s.lost == 1 else 'values are'} not finite, not drawn.")
    blocks = sorted({s.block for s in chart.series if s.block > 1})
    if blocks:
        notes.append(f"Points are means of {' or '.join(map(str, blocks))} {chart.clock}s; the band is their range.")
    return {
        "key": chart.key, "title": chart.title, "axis": chart.axis, "clock": chart.clock, "about": chart.about,
        "lines": lines, "notes": notes, "empty": not y_ticks,
        "x_ticks": [(at_x(t), f"{t:,.0f}") for t in x_ticks],
        "y_ticks": [(at_y(t), tick_text(t, y_ticks)) for t in y_ticks],
        "marks": [(at_x(x), slot % SLOTS, text) for x, slot, text in chart.marks if x0 <= x <= x1],
        "alt": f"{chart.title}, {chart.axis}. " + ". ".join(s.words(chart.clock) for s in chart.series) + ".",
    }  # fmt: skip


def path(xs: list[float], ys: list[float]) -> str:
    """An SVG path through the points, broken where y is NaN."""
    out, pen = [], "M"
    for x, y in zip(xs, ys):
        if not math.isfinite(y):
            pen = "M"
            continue
        out.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(out)


def _band(xs: list[float], low: list[float], high: list[float]) -> str:
    """A closed path between two lines, over the points where both are finite."""
    kept = [(x, a, b) for x, a, b in zip(xs, low, high) if math.isfinite(a) and math.isfinite(b)]
    if len(kept) < 2:
        return ""
    there = path([x for x, _, _ in kept], [b for _, _, b in kept])
    back = path([x for x, _, _ in reversed(kept)], [a for _, a, _ in reversed(kept)])
    return f"{there}L{back[1:]}Z"


def _span_x(all_series: list[Series]) -> tuple[float, float]:
    xs = [x for s in all_series for x in s.x]
    low, high = min(xs), max(xs)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks_x(all_series: list[Series]) -> list[float]:
    low, high = _span_x(all_series)
    return [t for t in nice(low, high, 5, whole=True) if low <= t <= high]


def _ticks_y(all_series: list[Series]) -> list[float]:
    values = [v for s in all_series for v in (*s.low, *s.high) if math.isfinite(v)]
    return nice(min(values), max(values), 4) if values else []


def nice(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """About ``count`` round numbers from at most ``low`` to at least ``high``; never fewer than two."""
    if high - low <= 1e-9 * max(abs(low), abs(high)):  # a constant: some air around it
        air = 0.5 if low == 0 else 0.1 * abs(low)
        low, high = low - air, high + air
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def tick_text(value: float, ticks: list[float]) -> str:
    """A tick's label with as many decimals as the distance of ticks needs."""
    step = ticks[1] - ticks[0]
    largest = max(abs(t) for t in ticks)
    if largest >= 1e5 or largest < 1e-3:
        return "0" if value == 0 else f"{value:.2g}"
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    if round(step * 10**decimals, 6) % 1:  # a step of 2.5
        decimals += 1
    return f"{value:,.{decimals}f}"
