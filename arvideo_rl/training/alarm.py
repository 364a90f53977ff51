"""The alarm: the trained reward rises while something that is not trained falls.

At every look of the probe (probe.py) each verifier's paired change over prompts is tested for a fall by flipping signs,
which assumes nothing but that without an effect a rise is as likely as a fall. The alarm rings when, at two looks in a
row, a verifier is down beyond chance and beyond the margin stated for the comparison, while the trained reward is up.

Looking often must not ring often. A run's looks are alike, since its policy moves slowly, and two in a row are asked
for where they are not; the level of one test is LEVEL / (20 x verifiers). Simulated changes that mean nothing, whether
new at each look or wandering, ring in under 5 % of the runs: over 40 looks in tests/training/test_alarm.py, over up to
300 in docs/hack_alarm.md.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

LEVEL = 0.05  # of a false alarm in a whole run
FEWEST = 12  # prompts; with fewer a fall could never be beyond chance
EXACT = 16  # prompts up to which all signs are flipped; beyond, a quarter as many at random
ACTIONS = ("off", "warn", "stop")


def fall(change: Tensor) -> float:
    """Chance of a mean as low as that of ``change`` [prompts] (NaN left out) if signs were random; 1 for too few."""
    x = change[~change.isnan()].double()
    n = len(x)
    if n < FEWEST:
        return 1.0
    if n <= EXACT:
        signs = 1.0 - 2.0 * ((torch.arange(2**n)[:, None] >> torch.arange(n)) & 1)
    else:
        source = torch.Generator().manual_seed(n)
        signs = 1.0 - 2.0 * torch.randint(0, 2, (2 ** (EXACT - 2), n), generator=source)
        signs[0] = 1.0  # what was seen is one of the possibilities, so the chance is never 0
    sums = signs.double() @ x
    return (sums <= x.sum() + 1e-9 * x.abs().sum()).double().mean().item()


def suspects(metrics: dict[str, float], margins: dict[str, float], margin: float) -> set[str]:
    """Verifiers that one look shows down beyond chance and beyond their margin (a share of the value at the start)."""
    names = [k.removeprefix("probe/fall/") for k in metrics if k.startswith("probe/fall/")]
    out = set()
    for name in names:
        change = metrics[f"probe/change/{name}"]
        start = metrics[f"probe/{name}"] - change
        beyond = change < -margins.get(name, margin) * abs(start)
        if beyond and metrics[f"probe/fall/{name}"] < LEVEL / (20 * len(names)):
            out.add(name)
    return out


def parted(
    before: dict[str, float] | None, now: dict[str, float], gain: float, margins: dict[str, float], margin: float
) -> list[str]:
    """Verifiers to ring for: suspect at the look ``before`` and ``now`` (rows of metrics.jsonl), while the trained
    reward is up by ``gain``."""
    if before is None or not gain > 0:
        return []
    both = suspects(before, margins, margin) & suspects(now, margins, margin)
    return [k.removeprefix("probe/fall/") for k in now if k.removeprefix("probe/fall/") in both]


def sentence(names: list[str], now: dict[str, float], gain: float) -> str:
    """What has parted, in plain words."""
    falls = ", ".join(
        f"{n} fell from {now[f'probe/{n}'] - now[f'probe/change/{n}']:.3f} to {now[f'probe/{n}']:.3f}" for n in names
    )
    return (
        f"the trained reward is up by {gain:.3f} on held-out prompts while {falls}: the reward is being gamed. Look at "
        "the videos; add a reward that sees what is lost, pull harder to the start, or stop at an earlier checkpoint"
    )


def diagnose(rows: list[dict[str, float]]) -> list[tuple[str, str]]:
    """(kind, plain words with the way out) of what the newest metrics rows, oldest first, show to be wrong. Sources:
    what users of peer projects took days to find; see docs/lessons.md N4, N9, N14, N16."""
    out = []
    last = rows[-1]
    if len(rows) == 1 and last.get("iteration") == 0 and last.get("train/x0_moved", 0.0) > 1e-8:
        out.append((
            "policies differ",
            f"current and old policy differ by {last['train/x0_moved']:.1e} before the first update, though they hold "
            "the same weights: what is trained is not what was sampled",
        ))  # fmt: skip
    recent = rows[-3:]
    for key in (k for k in last if k.endswith("/zero_spread_share")):
        name = key.split("/")[1]
        if len(recent) == 3 and min(r.get(key, 0.0) for r in recent) > 0.5:
            out.append((
                f"no spread in {name}", f"more than half of the groups have no spread in reward {name}, and teach "
                "nothing: the reward is saturated, too coarse, or the branches are too alike",
            ))  # fmt: skip
    for key in (k for k in last if k.endswith("/invalid_share")):
        name = key.split("/")[1]
        if len(recent) == 3 and min(r.get(key, 0.0) for r in recent) > 0.2:
            out.append((f"invalid {name}", f"reward {name} could not score {last[key]:.0%} of the chunks: "
                        "arvideo score on samples of the run says why"))  # fmt: skip
    norms = [r["train/grad_norm"] for r in rows[-11:-1] if "train/grad_norm" in r]
    if len(norms) >= 5 and last.get("train/grad_norm", 0.0) > 10 * statistics.median(norms) > 0:
        out.append(("gradient spike", f"the gradient norm is {last['train/grad_norm']:.2g}, over ten times its usual "
                    f"{statistics.median(norms):.2g} (it is clipped): if it repeats, lower lr"))  # fmt: skip
    return out


def flat(changes: Tensor, prompts_per_step: int, rows: list[dict[str, Any]]) -> str | None:
    """What to look at when half of a run has shown no gain: from the trained reward's paired ``changes`` [prompts]."""
    x = changes[~changes.isnan()]
    if len(x) < 2:
        return None
    mean, se = x.mean().item(), x.std().item() / math.sqrt(len(x))
    if mean > se:
        return None
    spreads = [v for r in rows for k, v in r.items() if k.endswith("/group_std")]
    spread = statistics.mean(spreads) if spreads else math.nan
    kl = rows[-1].get("train/kl", 0.0)
    few = " (below 16 the gradient is mostly noise)" if prompts_per_step < 16 else ""
    return (
        f"no gain to be seen yet on held-out prompts, half way ({mean:+.3f} +- {se:.3f}): {prompts_per_step} "
        f"prompts an update{few}, spread inside groups {spread:.3g}, KL {kl:.2g}. Little spread: another reward or "
        "more branches; KL near 0: raise lr or lower kl_weight; else more iterations"
    )
