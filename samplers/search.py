"""Search at test time: draw several candidates, score them, go on from the best. plan.py has the kinds and their cost.

Candidates differ by the branch of their key: branch 0 everywhere is plain streaming, and the branches of the winner
stream it again without a search (:func:`draw_branches`). The candidates of a chunk are rows over one context that they
only read, so nothing of it is copied; the contexts of beams share their past.

Shape letters: n candidates, F frames. A context, a judge and a denoiser are opaque here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from samplers.kernels import consistency
from samplers.plan import Cost, Plan
from samplers.randomness import Key, normal
from samplers.stream import ChunkDenoiser, Draw, denoise_chunk, stream

Judge = Callable[[Tensor, int], Tensor]  # (clean latents [n, F, C, H, W], number of their first frame) -> scores [n]
Noise = Callable[[Sequence[int], int, int, str], Tensor]  # (branches, chunk, step, purpose) -> [n, F, C, H, W]
Branches = Mapping[int, Sequence[int]]  # chunk -> the branch of each step's noise


@dataclass
class Node:
    """One scored candidate."""

    id: int
    parent: int | None  # the candidate it goes on from
    chunk: int  # of a whole video the last
    step: int  # whose prediction was scored; the last but in a path
    branch: int
    score: float  # NaN where it could not be scored
    mean: float  # of the scores from the first chunk to here
    forwards: int  # that had been run when it was scored
    kept: bool = False


@dataclass(frozen=True)
class Found:
    """The winner, how to make it again, and how it was found."""

    latents: Tensor  # [1, F, C, H, W], without a past that was given
    context: Any  # after the last chunk, if it was to be continued
    branches: dict[int, tuple[int, ...]]
    reward: float  # mean score of the winner; NaN where nothing could be scored
    nodes: list[Node]
    curve: list[tuple[int, float]]  # (forwards, mean score of the best so far) at every choice
    cost: Cost  # counted


def branch_noise(key: Key, shape: tuple[int, ...], device: torch.device | str = "cpu") -> Noise:
    """The noise of candidates: those of chunk shape [F, C, H, W] that stand ``branches`` above ``key``."""

    def noise(branches: Sequence[int], chunk: int, step: int, purpose: str) -> Tensor:
        keys = [replace(key, branch=key.branch + b) for b in branches]
        return normal(keys, chunk, step, purpose, shape).to(device)

    return noise


def draw_branches(noise: Noise, branches: Branches) -> Draw:
    """The draw that streams a found video again. What refreshing draws, all candidates share."""

    def draw(chunk: int, step: int, purpose: str) -> Tensor:
        return noise((0 if purpose == "refresh" else branches[chunk][step],), chunk, step, purpose)

    return draw


@torch.no_grad()
def search(
    denoiser: ChunkDenoiser,
    chunks: list[tuple[int, int]],
    levels: tuple[float, ...],
    noise: Noise,
    judge: Judge,
    plan: Plan,
    *,
    frames: int | None = None,
    context: Any = None,
    past: Tensor | None = None,
    to_continue: bool = False,
    tick: Callable[[int], None] | None = None,
) -> Found:
    """Search the ``chunks`` of one stream as ``plan`` says. ``frames``, ``context`` and ``to_continue`` are those of
    :func:`samplers.stream.stream`; ``past`` [1, F, C, H, W] are the clean latents that ``context`` holds, for the
    judge to see; ``tick`` is told of forwards as they are made. A NaN score counts as the worst of those it is compared
    with; among equals the lowest branch is kept."""
    if plan.kind == "path" and len(levels) < 2:
        raise ValueError("search path chooses re-noise draws, and one level has none; choose another kind")
    origin = chunks[0][0] - (0 if past is None else past.shape[1])
    run = _Run(_Counted(denoiser, tick), chunks, levels, noise, judge, plan, frames, to_continue, origin)
    begun = _Line(denoiser.start() if context is None else context, past)
    line = run.best(begun) if plan.kind == "best" else run.by_chunk(begun)
    assert line.latents is not None
    latents = line.latents[:, chunks[0][0] - origin : None if frames is None else frames - origin]
    counted = Cost(run.denoiser.forwards, run.scores)
    return Found(latents, line.context, line.branches, line.mean, run.nodes, run.curve, counted)


class _Counted:
    """A denoiser that counts the rows that go through the network."""

    def __init__(self, denoiser: ChunkDenoiser, tick: Callable[[int], None] | None) -> None:
        self.start, self.enter, self.inner, self.tick = denoiser.start, denoiser.enter, denoiser, tick
        self.forwards = 0

    def denoise(self, x: Tensor, t: float | Tensor, context: Any) -> Tensor:
        self._count(len(x))
        return self.inner.denoise(x, t, context)

    def refresh(self, x0: Tensor, context: Any) -> Any:
        self._count(len(x0))
        return self.inner.refresh(x0, context)

    def _count(self, rows: int) -> None:
        self.forwards += rows
        if self.tick is not None:
            self.tick(rows)


@dataclass(frozen=True)
class _Line:
    """A stream in the search: a context and what led to it. A candidate is one too: it has ``x0``, which its context
    and latents do not hold yet."""

    context: Any
    latents: Tensor | None = None  # [1, F, C, H, W]
    branches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    total: float = 0.0  # of the scores that are numbers
    scored: int = 0  # how many those are
    node: int | None = None  # that it came from
    x0: Tensor | None = None  # [1, F, C, H, W] the candidate, a clean chunk or a preview of one
    score: float = math.nan
    forwards: int = 0  # that had been run when it was scored

    @property
    def mean(self) -> float:
        return self.total / self.scored if self.scored else math.nan


@dataclass
class _Run:
    """A search under way."""

    denoiser: _Counted
    chunks: list[tuple[int, int]]
    levels: tuple[float, ...]
    noise: Noise
    judge: Judge
    plan: Plan
    frames: int | None
    to_continue: bool
    origin: int  # frame of the first latents a line has
    scores: int = 0
    nodes: list[Node] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)

    def best(self, begun: _Line) -> _Line:
        """Whole videos, one after the other: the best of them."""
        found = []
        for branch in range(self.plan.candidates):
            branches = {_index(*c): (branch,) * len(self.levels) for c in self.chunks}
            parts, context, draw = [], begun.context, draw_branches(self.noise, branches)
            for made in stream(self.denoiser, self.chunks, self.levels, draw, context=begun.context,
                               to_continue=self.to_continue):  # fmt: skip
                parts.append(made.latents)
                context = made.context if self.to_continue else context  # of no use otherwise, and large
            latents = _join(begun.latents, torch.cat(parts, 1))
            (score,) = self._judge(latents, self.origin)
            found.append(replace(begun, context=context, latents=latents, branches=branches, score=score,
                                 forwards=self.denoiser.forwards))  # fmt: skip
        (winner,) = self._choose(found, 1, _index(*self.chunks[-1]), len(self.levels) - 1)
        best = math.nan
        for line in found:
            best = line.score if not best >= line.score else best  # either may be NaN
            self.curve.append((line.forwards, best))
        return winner

    def by_chunk(self, begun: _Line) -> _Line:
        """All other kinds: the best of the lines that are left at the end."""
        lines = [begun]
        for chunk in self.chunks:
            if self.plan.kind == "first" and chunk != self.chunks[0]:
                lines = self._whole(lines[0], [0], chunk, scored=False)
            else:
                find = self._path if self.plan.kind == "path" else self._whole
                n = self.plan.candidates
                each = n * self.plan.width // len(lines)  # the first chunk has one context for the beams of all
                found = [c for i, line in enumerate(lines) for c in find(line, range(i * n, i * n + each), chunk)]
                lines = self._choose(found, self.plan.width, _index(*chunk), len(self.levels) - 1)
                self.curve.append((self.denoiser.forwards, lines[0].mean))
            lines = [self._commit(line, chunk) for line in lines]
        return lines[0]

    def _commit(self, line: _Line, chunk: tuple[int, int]) -> _Line:
        """A candidate that was kept as a line that holds it."""
        assert line.x0 is not None
        latents = _join(line.latents, line.x0)
        if not self.to_continue and chunk == self.chunks[-1]:
            return replace(line, latents=latents)
        return replace(line, latents=latents, context=self.denoiser.refresh(line.x0, line.context))

    def _whole(
        self, line: _Line, branches: Sequence[int], chunk: tuple[int, int], *, scored: bool = True
    ) -> list[_Line]:
        """Candidates that differ in all their noise."""
        index, context = _index(*chunk), self.denoiser.enter(line.context)

        def make(some: Sequence[int]) -> Tensor:
            def draw(chunk: int, step: int, purpose: str) -> Tensor:
                return self.noise(some, chunk, step, purpose)

            return denoise_chunk(self.denoiser, context, index, chunk[1] - chunk[0], self.levels, draw)

        taken = [(b,) * len(self.levels) for b in branches]
        return self._candidates(replace(line, context=context), branches, taken, chunk, make, scored)

    def _path(self, line: _Line, branches: Sequence[int], chunk: tuple[int, int]) -> list[_Line]:
        """Candidates that differ in the last re-noise draw, after the best draw at every level before."""
        index, size, context = _index(*chunk), chunk[1] - chunk[0], self.denoiser.enter(line.context)
        line = replace(line, context=context)
        clean = self.denoiser.denoise(self.noise([0], index, 0, "init")[:, :size], self.levels[0], context)
        taken: tuple[int, ...] = (0,)
        for step, t in enumerate(self.levels[1:], 1):
            mean, std = consistency(clean, t)

            def make(some: Sequence[int], step=step, t=t, mean=mean, std=std) -> Tensor:
                return self.denoiser.denoise(
                    mean + std * self.noise(some, index, step, "renoise")[:, :size], t, context
                )

            found = self._candidates(line, branches, [(*taken, b) for b in branches], chunk, make)
            if step + 1 < len(self.levels):
                (chosen,) = self._choose(found, 1, index, step)
                assert chosen.x0 is not None
                clean, taken, line = chosen.x0, chosen.branches[index], replace(line, node=chosen.node)
        return found

    def _candidates(
        self, line: _Line, branches: Sequence[int], taken: list[tuple[int, ...]], chunk: tuple[int, int],
        make: Callable[[Sequence[int]], Tensor], scored: bool = True,
    ) -> list[_Line]:  # fmt: skip
        """What may follow ``line``: ``make`` gives clean chunks [n, F, C, H, W], or previews, of some branches."""
        (start, stop), n = chunk, len(branches)
        batch = self.plan.batch or n
        x0 = torch.cat([make(branches[i : i + batch]) for i in range(0, n, batch)])
        first = max(self.origin, start - (self.plan.window - 1) * (stop - start))
        past = None if line.latents is None else line.latents[:, first - self.origin :].expand(n, -1, -1, -1, -1)
        scores = self._judge(_join(past, x0), first) if scored else [math.nan] * n
        return [
            replace(line, branches={**line.branches, _index(start, stop): taken[i]}, x0=x0[i : i + 1],
                    score=scores[i], forwards=self.denoiser.forwards)
            for i in range(n)
        ]  # fmt: skip

    def _judge(self, latents: Tensor, first: int) -> list[float]:
        """Scores of latents [n, F, C, H, W] from frame ``first`` on, without what is made but not asked for."""
        self.scores += len(latents)
        scores = self.judge(latents if self.frames is None else latents[:, : self.frames - first], first)
        if scores.shape != (len(latents),):
            raise ValueError(f"the judge of a search gave {tuple(scores.shape)} scores for {len(latents)} candidates")
        return scores.tolist()

    def _choose(self, found: list[_Line], keep: int, chunk: int, step: int) -> list[_Line]:
        """The best of the candidates, best first; all of them are written down."""
        worst = min((c.score for c in found if not math.isnan(c.score)), default=None)
        made = []
        for c in found:
            total = c.total if worst is None else c.total + (worst if math.isnan(c.score) else c.score)
            line = replace(c, total=total, scored=c.scored + (worst is not None), node=len(self.nodes))
            branch = c.branches[chunk][-1]
            self.nodes.append(Node(len(self.nodes), c.node, chunk, step, branch, c.score, line.mean, c.forwards))
            made.append(line)
        kept = sorted(made, key=lambda x: -x.total)[:keep]
        for line in kept:
            assert line.node is not None
            self.nodes[line.node].kept = True
        return kept


def _index(start: int, stop: int) -> int:
    """The number of a chunk, as :func:`samplers.stream.stream` counts."""
    return -(-start // (stop - start))


def _join(past: Tensor | None, latents: Tensor) -> Tensor:
    """Frames one after the other."""
    return latents if past is None else torch.cat([past, latents], 1)
