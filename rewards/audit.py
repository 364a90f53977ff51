"""Does a reward fall where it should, stay where it should, and what would raise it wrongly? Measured on given clips.

Every clip is scored clean and changed in each way of :mod:`rewards.adversarial`; what the reward claims
(:mod:`rewards.claims`) then holds or does not. ``audit(reward, [clips]).findings`` is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rewards.adversarial import CHANGES, Change
from rewards.claims import Claims, claims_of
from rewards.contract import Clips, Reward, check_needs, score
from rewards.separation import Share, auroc, win_rate

Score = tuple[float, str | None]  # (value, or NaN, and the reason)
Values = list[Score | None]  # one a clip; None where the clip does not allow the change
NOTHING = (math.nan,) * 3


@dataclass(frozen=True)
class Finding:
    """How one reward took one change. ``passed`` is None where nothing was claimed."""

    change: str
    claim: str
    pairs: int  # clips whose clean copy has a value, and whose changed copy did not fail by the measuring's fault
    unmeasurable: int  # changed copies among them without a value by their own fault: they count as the lowest
    clean: float  # median of each
    changed: float
    win_rate: Share  # share of pairs in which the clean copy is higher
    auroc: Share  # the same over all pairs of a clean and a changed copy
    moved: float  # median distance between the copies, as a share of the largest move of any corruption
    verdict: str
    passed: bool | None


@dataclass(frozen=True)
class Audit:
    """One reward's findings with the values they come from (changes in the order given, "clean" first)."""

    reward: str
    findings: list[Finding]
    values: dict[str, Values]
    untested: list[str]  # what it claims something of, and these clips or changes do not test

    @property
    def failures(self) -> list[Finding]:
        """Findings against the reward's own claims."""
        return [f for f in self.findings if f.passed is False]


@dataclass(frozen=True)
class Limits:
    """From where on something counts."""

    noticed: float = 0.95  # AUROC
    stays: float = 0.1  # largest ``moved``


USUAL = Limits()


def audit(reward: Reward, batches: Iterable[Clips], changes: Mapping[str, Change] = CHANGES, *, name: str = "",
          seed: int = 0, limits: Limits = USUAL, device: str | torch.device = "cpu",
          tell: Callable[[], None] = lambda: None) -> Audit:  # fmt: skip
    """Score every clip clean and in each of ``changes``, on ``device``; ``tell`` is called when one change of one batch
    is done. ValueError when the clips lack what the reward needs, or are none that it can score."""
    claims = claims_of(reward, {**CHANGES, **changes})
    applied = {k: c for k, c in changes.items() if not c.of or c.of in reward.needs}
    values: dict[str, Values] = {"clean": [], **{k: [] for k in applied}}
    for clips in batches:
        first = seed + len(values["clean"])
        values["clean"] += _scored(reward, clips, device)
        tell()
        for change, c in applied.items():
            values[change] += _changed(reward, c.make(clips, first), device) or [None] * len(clips)
            tell()
    clean = values["clean"]
    falls = [abs(_median(v) - _median(clean)) for k, v in values.items() if k != "clean" and not changes[k].harmless]
    span = max((fall for fall in falls if math.isfinite(fall)), default=0.0)
    findings = [
        judge(k, values[k], clean, claims, c.harmless, span, limits) for k, c in applied.items() if any(values[k])
    ]
    tested = {f.change for f in findings if f.pairs}
    untested = [k for k in (*claims.notices, *claims.withstands) if k not in tested]
    return Audit(name or reward.name, findings, values, untested)


def _changed(reward: Reward, clips: Clips | None, device: str | torch.device) -> Values | None:
    """Values of changed clips; None where there are none, or the change took away what the reward needs. A reward may
    refuse a copy that is shorter than the clip."""
    if clips is None:
        return None
    try:
        check_needs(reward, clips)
    except ValueError:
        return None
    try:
        return _scored(reward, clips, device)
    except ValueError as error:
        return [(math.nan, f"system:refused {' '.join(str(error).split())}")] * len(clips)


def _scored(reward: Reward, clips: Clips, device: str | torch.device) -> Values:
    actions = None if clips.actions is None else clips.actions.to(device)
    fps = clips.fps.float().to(device) if isinstance(clips.fps, Tensor) else clips.fps  # mps has no float64
    found = score(reward, replace(clips, frames=clips.frames.to(device), actions=actions, fps=fps))
    return [(float(v), r) for v, r in zip(found.value, found.reasons)]


def judge(change: str, changed: Values, clean: Values, claims: Claims, harmless: bool, span: float,
          limits: Limits) -> Finding:  # fmt: skip
    """Compare the two copies of each clip; see :class:`Finding`. Verdicts: noticed (AUROC above the limit), stays
    (``moved`` within the limit), FOOLED (the changed copies score higher, beyond chance), falls (lower, beyond chance,
    but not told apart), unclear. Of what is harmless or to be withstood: stays, FOOLED, or moves."""
    pairs = [(a[0], b) for a, b in zip(clean, changed) if a and b and math.isfinite(a[0]) and not _failed(b)]
    claim = claims.on(change)
    if not pairs:
        return Finding(change, claim, 0, 0, math.nan, math.nan, NOTHING, NOTHING, math.nan, "not measured", None)
    good = [a for a, _ in pairs]
    bad = [b[0] if math.isfinite(b[0]) else -math.inf for _, b in pairs]
    wins, area = win_rate(good, bad), auroc(good, bad)
    shift = _middle([abs(a - b) for a, b in zip(good, bad)])
    moved = 0.0 if shift == 0 else shift / span if span > 0 else math.inf
    noticed, stays = area[0] >= limits.noticed, moved <= limits.stays
    fooled = wins[2] < 0.5
    if claim == "withstands" or (harmless and not claim):
        verdict = "stays" if stays else "FOOLED" if fooled else "moves"
    else:
        seen = {"noticed": noticed, "stays": stays, "FOOLED": fooled, "falls": wins[1] > 0.5, "unclear": True}
        verdict = next(k for k, holds in seen.items() if holds)
    passed = {"notices": noticed, "withstands": stays}.get(claim)
    if not claim and claims != Claims() and verdict == "FOOLED":
        passed = False  # something raises it that it does not warn of
    measured = [b for b in bad if math.isfinite(b)]
    return Finding(change, claim, len(pairs), len(bad) - len(measured), _middle(good), _middle(measured), wins, area,
                   moved, verdict, passed)  # fmt: skip


def _failed(found: Score) -> bool:
    return found[1] is not None and found[1].startswith("system:")


def _median(values: Values) -> float:
    return _middle([v[0] for v in values if v and math.isfinite(v[0])])


def _middle(values: list[float]) -> float:
    """The median; of an even number the higher of the two in the middle, since the mean of infinities is none."""
    return sorted(values)[len(values) // 2] if values else math.nan
