"""What a reward says of itself before it is audited, so that it can fail its own audit (:mod:`rewards.audit`):

class Mine:
    claims = Claims(notices=("frozen", "shuffled"), withstands=("grainy", "resized"), blind_to=("wrong_prompt",))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True)
class Claims:
    """Names of changes (:data:`rewards.adversarial.CHANGES`), no change in two of the three."""

    notices: tuple[str, ...] = ()  # it falls, so that clean and changed clips can be told apart by it
    withstands: tuple[str, ...] = ()  # it stays as it is
    blind_to: tuple[str, ...] = ()  # it may not fall, or even rise: something else must look

    def on(self, change: str) -> str:
        """The claim about ``change``: notices, withstands, blind_to, or "" for none."""
        return next((f.name for f in fields(self) if change in getattr(self, f.name)), "")


def claims_of(reward: Any, known: Iterable[str]) -> Claims:
    """What ``reward`` claims, nothing unless it says so. ValueError unless all of it is about ``known`` changes."""
    claims = getattr(reward, "claims", getattr(getattr(reward, "function", None), "claims", Claims()))
    name = getattr(reward, "name", "")
    if not isinstance(claims, Claims):
        raise ValueError(f"reward {name!r}: its claims are a {type(claims).__name__}; use rewards.claims.Claims")
    every = [change for f in fields(claims) for change in getattr(claims, f.name)]
    for change in every:
        if change not in known:
            raise ValueError(f"reward {name!r} claims something of {change!r}; known changes: {', '.join(known)}")
        if every.count(change) > 1:
            raise ValueError(f"reward {name!r} claims two things of {change!r}; leave it in one place")
    return claims
