"""What many rows come to: mean and its error, quantiles, how many could not be scored and why; two sets in pairs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

Row = dict[str, Any]
QUANTILES = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}
Z95 = 1.959964


def summarise(rows: list[Row], rewards: list[str], compared: bool) -> dict[str, Any]:
    """For each reward its :func:`numbers`; with two sets those of each, and :func:`paired`."""
    out: dict[str, Any] = {}
    for name in rewards:
        mine = [r for r in rows if r["reward"] == name]
        if not compared:
            out[name] = numbers(mine)
            continue
        own, theirs = ([r for r in mine if r["set"] == which] for which in ("own", "compare"))
        out[name] = {"own": numbers(own), "compare": numbers(theirs), "paired": paired(own, theirs)}
    return out


def numbers(rows: list[Row]) -> dict[str, Any]:
    """Counts, mean, standard error (of the mean, None below two values), standard deviation, quantiles, the worst and
    best file, and the reasons of the rows without a value, most frequent first."""
    good = [r for r in rows if r["value"] is not None]
    reasons = Counter(r["reason"] for r in rows if r["value"] is None)
    out: dict[str, Any] = {"files": len(rows), "scored": len(good), "invalid": len(rows) - len(good)}
    out["invalid_by_reason"] = dict(reasons.most_common())
    if not good:
        return out
    values = np.array([r["value"] for r in good], dtype=np.float64)
    std = float(values.std(ddof=1)) if len(good) > 1 else None
    out |= {"mean": float(values.mean()), "se": None if std is None else std / math.sqrt(len(good)), "std": std}
    out |= {name: float(np.quantile(values, q)) for name, q in QUANTILES.items()}
    out |= {"worst": good[int(values.argmin())]["file"], "best": good[int(values.argmax())]["file"]}
    return out


def paired(own: list[Row], theirs: list[Row]) -> dict[str, Any]:
    """Differences, own - theirs, of clips with the same name: their mean, its standard error and 95 % interval, and
    the win rate, in which a tie counts half. Pairs of which one has no value, and clips alone, are counted."""
    partner = {r["pair"]: r["value"] for r in theirs}
    values = {r["pair"]: r["value"] for r in own}
    both = [k for k in values if k in partner]
    gaps = np.array([values[k] - partner[k] for k in both if values[k] is not None and partner[k] is not None])
    alone = len(values) + len(partner) - 2 * len(both)
    out: dict[str, Any] = {"pairs": len(gaps), "invalid_pairs": len(both) - len(gaps), "without_partner": alone}
    if not len(gaps):
        return out
    wins, ties = int((gaps > 0).sum()), int((gaps == 0).sum())
    mean, se = float(gaps.mean()), None
    if len(gaps) > 1:
        se = float(gaps.std(ddof=1) / math.sqrt(len(gaps)))
    rate = (wins + ties / 2) / len(gaps)
    out |= {"difference": mean, "se": se, "wins": wins, "ties": ties, "losses": len(gaps) - wins - ties}
    out |= {"low": None if se is None else mean - Z95 * se, "high": None if se is None else mean + Z95 * se}
    return out | {"win_rate": rate}
