"""Which older frames each branch of a KV-routing group reads: integer functions and one keyed permutation.

A routed chunk reads [sinks, routed, nearest, current] frames. Branches differ in the routed ones alone, taken from a
pool of older frames that are still at hand: they walk round one permutation of it from different starts.

Source: Richard-Zhang-AI/KVPO, rule ``published``: starts k max(1, |pool| // G). A pool no larger than a set makes all
branches equal there, one smaller than the group repeats some, and a pool of 14 for 8 branches leaves half of it to the
last few. Rule ``distinct`` (ours): starts k |pool| // G, all round the pool, refused when a branch would have no set of
its own. Frames are latent frames counted from the start of the video; ranges exclude their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from samplers.randomness import Key, generator, shared

RULES = ("distinct", "published")


@dataclass(frozen=True)
class Memory:
    """What a routed chunk may read, and where a group may fork. Defaults: LongLive; MemFlow has nearest 3, routed 6."""

    sinks: int = 3
    routed: int = 5  # frames of a branch's own, n
    nearest: int = 4  # frames just before the fork that every branch keeps, m
    chunk: int = 3
    chunks: int = 5  # routed one after another, P
    capacity: int = 33  # newest frames that are still at hand, sinks included
    first: int = 12  # no fork before this frame; published: the ordinary window
    block: int = 21  # all routed chunks lie within one block of so many frames (LongLive's streaming training chunk)

    def __post_init__(self) -> None:
        if min(self.sinks, self.nearest, self.first) < 0 or min(self.routed, self.chunk, self.chunks) < 1:
            raise ValueError(f"routing needs a routed frame, a chunk and no negative number, not {self}")
        if self.chunk * self.chunks > self.block:
            raise ValueError(
                f"{self.chunks} routed chunks of {self.chunk} frames do not fit into a block of {self.block}"
            )

    def pool(self, fork: int) -> range:
        """Frames that may be routed when the first routed chunk starts at frame ``fork``: those still at hand at the
        last routed chunk that are neither sinks nor nearest."""
        oldest = fork + self.chunk * (self.chunks - 1) - (self.capacity - self.sinks)
        return range(max(self.sinks, oldest), fork - self.nearest)

    def forks(self, frames: int, group: int, rule: str = "distinct") -> list[int]:
        """Frames of a video of ``frames`` at which ``group`` branches may fork."""
        span = self.chunk * self.chunks
        starts = range(-(-self.first // self.chunk) * self.chunk, frames - span + 1, self.chunk)
        fit = [a for a in starts if a % self.block + span <= self.block]
        return [a for a in fit if len(self.pool(a)) >= pool_needed(self.routed, group, rule)]


def pool_needed(routed: int, group: int, rule: str = "distinct") -> int:
    """The smallest pool that gives ``group`` branches sets of ``routed`` frames; under ``distinct`` a set each: as many
    starts as branches, and a set smaller than the pool."""
    if rule not in RULES:
        raise ValueError(f"routing rule {rule!r} is unknown; choose {' or '.join(RULES)}")
    return max(routed + 1, group) if rule == "distinct" and group > 1 else routed


def fork_frame(key: Key, memory: Memory, frames: int, group: int, rule: str = "distinct") -> int:
    """The frame where a prompt's branches fork, uniform over :meth:`Memory.forks` and the same for all of them;
    ValueError with the numbers when there is none."""
    forks = memory.forks(frames, group, rule)
    if not forks:
        m, largest = memory, max((len(memory.pool(a)) for a in range(0, frames, memory.chunk)), default=0)
        raise ValueError(
            f"no frame to fork at in {frames} frames: {m.chunks} routed chunks of {m.chunk} must fit from frame "
            f"{m.first} on into a block of {m.block}, with {pool_needed(m.routed, group, rule)} older frames "
            f"for {group} branches (largest pool: {largest}); use longer videos, fewer routed chunks or frames, or a "
            "smaller group"
        )
    return forks[generator(shared([key])[0], 0, 0, "routing").integers(len(forks))]


def permuted(key: Key, pool: Sequence[int], fork: int) -> list[int]:
    """The pool in the order that all branches of a prompt share at this fork."""
    order = generator(shared([key])[0], fork, 1, "routing").permutation(len(pool))
    return [pool[i] for i in order]


def branch_sets(order: Sequence[int], routed: int, group: int, rule: str = "distinct") -> list[tuple[int, ...]]:
    """Routed frames of each branch, sorted in time, from the permuted pool ``order``; ValueError with the numbers when
    the pool is too small."""
    pool, need = len(order), pool_needed(routed, group, rule)
    if pool < need:
        raise ValueError(
            f"a pool of {pool} frames gives no {group} {'different ' * (rule == 'distinct')}sets of {routed}: "
            f"it needs {need}; fork later, keep fewer nearest frames, route fewer frames or use a smaller group"
        )
    starts = [k * pool // group if rule == "distinct" else k * max(1, pool // group) for k in range(group)]
    return [tuple(sorted(order[(start + j) % pool] for j in range(routed))) for start in starts]


def route(key: Key, memory: Memory, fork: int, group: int, rule: str = "distinct") -> list[tuple[int, ...]]:
    """Routed frames of each of ``group`` branches when the first routed chunk starts at frame ``fork``."""
    return branch_sets(permuted(key, memory.pool(fork), fork), memory.routed, group, rule)
