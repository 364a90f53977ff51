"""The held-out comparison as rows: numbers as summary.json has them, and an interval to look at."""

from __future__ import annotations

import math
from typing import Any

SPAN = 0.5  # the interval picture reaches from -50 to +50 % of the value before


def number(value: Any, sign: bool = False) -> str:
    """Four decimals, or words where nothing was measured."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "not measured"
    return f"{value:+.4f}" if sign else f"{value:.4f}"


def rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for the trained reward and one a verifier; [] when the summary holds no comparison."""
    gain, verifiers = summary.get("trained"), summary.get("verifiers")
    if not isinstance(gain, dict) or not isinstance(verifiers, list):
        return []
    learned = summary.get("learned")
    verdict = {True: "up, beyond 3 se", False: "no gain shown"}.get(learned, "not judged")  # type: ignore[arg-type]
    out = [_row(gain, True, "3 se" if "margin" not in gain else number(gain["margin"]), learned, verdict)]
    for v in verifiers:
        if isinstance(v, dict):
            ok = v.get("ok")
            verdict = {True: "kept", False: "LOST"}.get(ok, "not judged")  # type: ignore[arg-type]
            margin = v.get("margin")
            shown = f"{margin:.0%}" if isinstance(margin, (int, float)) and math.isfinite(margin) else "not stated"
            out.append(_row(v, False, shown, ok, verdict))
    return out


def _row(r: dict[str, Any], trained: bool, margin: str, ok: Any, verdict: str) -> dict[str, Any]:
    return {
        "name": str(r.get("name", "?")), "trained": trained, "lower": r.get("better") == "lower",
        "before": number(r.get("before")), "after": number(r.get("after")), "delta": number(r.get("delta"), True),
        "se": number(r.get("se")), "n": r.get("n", "?"), "margin": margin, "verdict": verdict,
        "tone": {True: "good", False: "open" if trained else "bad"}.get(ok, "open"), "interval": interval(r),
    }  # fmt: skip


def interval(r: dict[str, Any]) -> dict[str, Any] | None:
    """The 95 % interval of the change as shares of the value before, better to the right, cut to +-SPAN; positions are
    percent of the picture's width. None when something is not a number or the value before is 0."""
    try:
        before, delta, se = (float(r[k]) for k in ("before", "delta", "se"))
    except (KeyError, TypeError, ValueError):
        return None
    if not all(map(math.isfinite, (before, delta, se))) or before == 0:
        return None
    sign = -1 if r.get("better") == "lower" else 1
    middle, reach = sign * delta / abs(before), 1.96 * se / abs(before)

    def at(share: float) -> float:
        return round(50 + 50 * max(-1.0, min(1.0, share / SPAN)), 1)

    margin = r.get("margin") if "better" in r else None
    limit = at(-margin) if isinstance(margin, (int, float)) and math.isfinite(margin) else None
    return {"low": at(middle - reach), "middle": at(middle), "high": at(middle + reach), "limit": limit,
            "text": f"{middle:+.1%} ± {reach:.1%} of the value before"}  # fmt: skip
