"""Noise levels of few-step students. Source: guandeh17/Self-Forcing (nominal lists and the shift map)."""

from __future__ import annotations


def shift_level(u: float, shift: float) -> float:
    """Warp u in [0, 1] by w(u) = shift * u / (1 + (shift - 1) * u)."""
    return shift * u / (1 + (shift - 1) * u)


def warped_levels(nominal: tuple[float, ...], shift: float) -> tuple[float, ...]:
    """Levels t in (0, 1] a sampler visits, from nominal steps of 1000; strictly falling. E.g. 1000 750 500 250 with
    shift 5 gives 1, .9375, .8333, .625. A trailing 0 is implied: the last prediction is the output."""
    levels = tuple(shift_level(n / 1000, shift) for n in nominal)
    falling = all(a > b for a, b in zip(levels, levels[1:]))
    if not levels or not falling or levels[0] > 1 or levels[-1] <= 0:
        raise ValueError(f"steps {list(nominal)} must fall strictly within (0, 1000]")
    return levels
