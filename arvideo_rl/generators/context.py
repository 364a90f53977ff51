"""Context: everything the next chunk attends to besides itself, as an immutable value.

A forward pass only reads a context. A refresh (t = 0) makes a :class:`Span`, and :meth:`Window.commit` returns a *new*
context that holds it, so noisy keys never enter, recomputation under activation checkpointing reads the same tensors,
and a fork costs nothing (two contexts share their spans). Keys are kept un-rotated; they are rotated once per chunk
when read. Rotary attention sees only differences of positions, so this equals the official rotate-then-store.

Shape letters: B batch, L tokens per frame, N heads, D head dim. A frame is a latent frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Rotate = Callable[[Tensor, tuple[int, ...]], Tensor]


@dataclass(frozen=True)
class Span:
    """Clean keys and values of the consecutive frames [start, stop), one pair per layer."""

    start: int
    stop: int
    keys: tuple[Tensor, ...]  # each [B, (stop - start) * L, N, D], normalised but not rotated
    values: tuple[Tensor, ...]

    def crop(self, start: int, stop: int) -> Span | None:
        """The part inside [start, stop) as views, or None when nothing is left."""
        a, b = max(start, self.start), min(stop, self.stop)
        if a >= b:
            return None
        if (a, b) == (self.start, self.stop):
            return self
        tokens = self.keys[0].shape[1] // (self.stop - self.start)
        cut = slice((a - self.start) * tokens, (b - self.start) * tokens)
        return Span(a, b, tuple(k[:, cut] for k in self.keys), tuple(v[:, cut] for v in self.values))

    def rows(self, rows: slice) -> Span:
        """The same span for part of the batch."""
        return replace(self, keys=tuple(k[rows] for k in self.keys), values=tuple(v[rows] for v in self.values))

    def detach(self) -> Span:
        """The same span without autograd history."""
        return replace(self, keys=tuple(k.detach() for k in self.keys), values=tuple(v.detach() for v in self.values))


@dataclass(frozen=True)
class Context:
    """What the chunk that starts at frame ``position`` may read: spans, oldest first, and its condition."""

    spans: tuple[Span, ...] = ()
    position: int = 0
    text: Tensor | None = None  # [B, tokens, text dim], zeros past the true length
    actions: Tensor | None = None  # [B, chunk] int64
    adjacent: bool = False  # sinks sit right before the recent frames instead of at their own positions
    read: dict | None = field(default=None, repr=False, compare=False)  # the text's keys and values, if remembered
    _rotated: dict = field(default_factory=dict, repr=False, compare=False)

    def condition(self, text: Tensor, actions: Tensor | None, read: dict | None = None) -> Context:
        """The same past with the prompt and actions in force for the next chunk. ``read`` is where a forward without
        gradient leaves what it computes of the text alone, for the next; it must belong to one text and one policy."""
        return replace(self, text=text, actions=actions, read=read)

    def held(self) -> tuple[int, ...]:
        """Absolute indices of the frames held, oldest first."""
        return tuple(f for s in self.spans for f in range(s.start, s.stop))

    def positions(self) -> tuple[int, ...]:
        """Positions at which the held frames are read."""
        frames = self.held()
        if not self.adjacent:
            return frames
        return tuple(range(self.position - len(frames), self.position))

    def view(self, rotate: Rotate) -> tuple[tuple[Tensor, Tensor], ...]:
        """Per layer the rotated keys and the values [B, held * L, N, D] of the past; made once, then remembered."""
        if not self.spans:
            return ()
        if "view" not in self._rotated:
            positions = self.positions()
            layers = range(len(self.spans[0].keys))
            self._rotated["view"] = tuple(
                (
                    rotate(torch.cat([s.keys[i] for s in self.spans], 1), positions),
                    torch.cat([s.values[i] for s in self.spans], 1),
                )
                for i in layers
            )
        return self._rotated["view"]


@dataclass(frozen=True)
class Window:
    """How much past a chunk reads. ``size`` frames in all (sinks and the chunk itself included; None = unbounded),
    of which the first ``sink`` frames of the stream are never dropped. ``positions`` places the sinks: ``absolute``
    (their own indices, the gap grows) or ``adjacent`` (right before the recent frames)."""

    chunk: int = 3
    size: int | None = 12
    sink: int = 3
    positions: str = "adjacent"

    def __post_init__(self) -> None:
        if self.positions not in ("absolute", "adjacent"):
            raise ValueError(f"window positions {self.positions!r} is unknown; choose absolute or adjacent")
        if self.chunk < 1 or self.sink < 0:
            raise ValueError(f"chunk must be at least 1 and sink at least 0, not chunk={self.chunk} sink={self.sink}")
        if self.size is not None and self.size < self.sink + self.chunk:
            raise ValueError(
                f"window of {self.size} frames cannot hold sink {self.sink} + chunk {self.chunk}; "
                f"set window to {self.sink + self.chunk} or more"
            )

    def start(self) -> Context:
        """An empty context."""
        return Context(adjacent=self.positions == "adjacent")

    def commit(self, context: Context, span: Span) -> Context:
        """A new context that also holds ``span``, without what the next chunk may no longer read."""
        if span.start != context.position:
            raise ValueError(f"cannot commit frames {span.start}..{span.stop - 1} to a context at {context.position}")
        spans: list[Span | None] = [*context.spans, span]
        if self.size is not None:
            oldest = span.stop - (self.size - self.sink - self.chunk)
            spans = [p for s in spans if s for p in self._keep(s, oldest)]
        return replace(context, spans=tuple(s for s in spans if s), position=span.stop, _rotated={})

    def _keep(self, span: Span, oldest: int) -> list[Span | None]:
        if oldest <= self.sink:
            return [span]
        return [span.crop(0, self.sink), span.crop(oldest, span.stop)]

    def chunks(self, frames: int) -> list[tuple[int, int]]:
        """Chunk bounds [(start, stop), ...] that cover ``frames``; the last chunk is whole, callers trim."""
        if frames < 1:
            raise ValueError(f"frames must be at least 1, not {frames}")
        return [(a, a + self.chunk) for a in range(0, frames, self.chunk)]
