"""What a search at test time tries, and what that costs: known before it begins.

| kind   | candidates                                                      | forwards                  | scores      |
|--------|-----------------------------------------------------------------|---------------------------|-------------|
| best   | N whole videos                                                  | N K (S + 1)               | N           |
| first  | N first chunks, the rest is streamed as always                  | N S + 1 + (K - 1) (S + 1) | N           |
| greedy | N of every chunk, from the one context there is                 | K (N S + 1)               | K N         |
| path   | N re-noise draws at every level inside a chunk, previews of x0  | K (1 + (S - 1) N + 1)     | K (S - 1) N |
| beam   | N of every chunk from each of M contexts, M with the best score | K M (N S + 1)             | K M N       |


A forward is one chunk of one candidate through the network once; the refresh is one, and only what is kept pays it. The
last refresh is saved where nothing continues.

N candidates, M beams, K chunks, S levels. Source of the procedures: VIGOR (arXiv 2603.16271).
"""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("best", "first", "greedy", "path", "beam")


@dataclass(frozen=True)
class Plan:
    """What is searched. ``window`` chunks are scored, the candidate's own included, fewer where there are fewer yet;
    ``best`` scores the whole video. ``batch`` candidates are denoised at once; 0: all of one context."""

    kind: str = "greedy"
    candidates: int = 8
    beams: int = 2  # of kind beam
    window: int = 2
    batch: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"search {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        for name, least in (("candidates", 1), ("beams", 1), ("window", 1), ("batch", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"search {name}={getattr(self, name)}: use {least} or more")

    @property
    def width(self) -> int:
        """Contexts that are kept."""
        return self.beams if self.kind == "beam" else 1


@dataclass(frozen=True)
class Cost:
    """What a search takes."""

    forwards: int
    scores: int


def cost(plan: Plan, chunks: int, levels: int, to_continue: bool = False) -> Cost:
    """The cost of a search over K ``chunks`` with S ``levels``, before it is begun. Forwards that a prompt switch or a
    window that recomputes adds are not counted."""
    n, m, k, s, saved = plan.candidates, plan.width, chunks, levels, int(not to_continue)
    if plan.kind == "best":
        return Cost(n * (k * (s + 1) - saved), n)
    if plan.kind == "first":
        return Cost(n * s + 1 + (k - 1) * (s + 1) - saved, n)
    if plan.kind == "path":
        return Cost(k * (1 + (s - 1) * n + 1) - saved, k * (s - 1) * n)
    return Cost(m * (k * (n * s + 1) - saved), k * m * n)
