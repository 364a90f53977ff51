"""Selective regularisation: only branches whose reward is not to be believed are pulled to the reference.

A branch is suspected when the trained reward likes it more than independent judges do. In units that any two rewards
share, the win rate among the branches of its prompt,

    w_j(g) = mean over g' != g of [R_j(g) > R_j(g')], ties count half
    u_g    = w_trained(g) - mean over auxiliary j of w_j(g)        in [-1, 1]
    gate   = the fraction b of the branches with u > 0 whose u is highest
    pull   = (1/B) sum_g gate_g KL_g                               B: all branches of the update

Source: GARDO (tinnerhrhe/GARDO, scripts/train_sd3_nft_gardo.py; copied by franklinz233/Astrolabe). Different here: its
ranks count from the best, so that the difference of ranks it gates on is -u (n - 1), and it pulls the branches that the
trained reward *under*rates; it ranks over all prompts, which mixes in how hard a prompt is; it averages over the gated
part of each micro-batch, so that one gated branch weighs more in a batch without another.

The reference moves: it becomes the current policy when the pulled branches have gone far from it, or after a while.
Shape letter: B branches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

LEAST, MOST = 0.02, 0.2  # of the share gated
CHANGE, REMEMBERED = 0.1, 20  # by how much the share moves, and how many means it is compared with


def win_rates(values: Tensor, groups: Tensor) -> Tensor:
    """Share [B] of its valid group-mates that a branch beats, from rewards ``values`` [B] and group ids [B]; a tie is
    half a win. NaN for a branch whose reward is NaN or that has no valid mate."""
    valid = ~values.isnan()
    mates = (groups[:, None] == groups) & valid & valid[:, None]
    mates.fill_diagonal_(False)
    wins = (values[:, None] > values).double() + (values[:, None] == values).double() / 2
    return torch.where(mates, wins, 0.0).sum(1) / mates.sum(1)


def overrated(values: dict[str, Tensor], weights: dict[str, float], groups: Tensor) -> Tensor:
    """u [B] of rewards [B] by name. Those of weight 0 are the auxiliary judges; of several trained ones the win rates
    are averaged by weight, and a negative weight turns them round. NaN where any reward has none."""
    rates = {name: win_rates(value, groups) for name, value in values.items()}
    size = sum(abs(w) for w in weights.values())
    judges = [rates[name] for name in values if weights[name] == 0]
    if not size or not judges:
        raise ValueError(f"of {', '.join(values)}, at least one reward must be trained and one have weight 0")
    trained = [abs(w) / size * (rates[n] if w > 0 else 1 - rates[n]) for n, w in weights.items() if w]
    return torch.stack(trained).sum(0) - torch.stack(judges).mean(0)


def gate(u: Tensor, share: float) -> Tensor:
    """Which branches [B] are pulled: of those with u > 0 the fraction ``share`` with the highest, rounded up, the first
    of equals; none where none has."""
    suspects = int((u > 0).sum())
    out = torch.zeros_like(u, dtype=torch.bool)
    out[u.nan_to_num(-1.0).argsort(descending=True, stable=True)[: math.ceil(share * suspects - 1e-9)]] = True
    return out


@dataclass
class Share:
    """The fraction gated: more when suspicion is higher than it lately was, less when it is lower."""

    value: float = 0.1
    recent: list[float] = field(default_factory=list)  # mean positive u, newest last

    def see(self, u: Tensor) -> None:
        """Take in an iteration's u [B]; iterations without suspects count as 0."""
        positive = u[u > 0]
        mean = positive.double().mean().item() if len(positive) else 0.0
        if self.recent:
            rise = (mean > max(self.recent)) - (mean < min(self.recent))
            self.value = min(max(self.value * (1 + CHANGE * rise), LEAST), MOST)
        self.recent = [*self.recent, mean][-REMEMBERED:]


@dataclass
class MovingReference:
    """When the reference is to become the current policy, and a threshold that follows how often that is.

    Published: threshold .15, 15 iterations, moves of .01. The public code lets the threshold fall to .05 after a short
    gap, where it should rise; here it stays between a third and five thirds of where it began: .05 and .25."""

    threshold: float = 0.15  # mean KL of the pulled branches
    every: int = 15  # iterations after which the reference moves in any case
    since: int = 0  # iterations since it did
    now: float | None = None  # the threshold as it has become

    def see(self, kl: float | None) -> bool:
        """Take in an iteration's mean KL of the pulled branches, None where none was; returns whether to move."""
        self.since += 1
        now = self.threshold if self.now is None else self.now
        late = self.since >= self.every
        if not late and not (kl is not None and kl > now):
            return False
        step = self.threshold / 15 * ((3 * self.since < self.every) - late)  # early: the threshold is too low
        self.now = min(max(now + step, self.threshold / 3), self.threshold * 5 / 3)
        self.since = 0
        return True
