"""Context: everything the next chunk attends to besides itself, as an immutable value.

A forward pass only reads a context. A refresh (t = 0) makes a :class:`Span`, and :meth:`Window.commit` returns a *new*
context that holds it, so noisy keys never enter, recomputation under activation checkpointing reads the same tensors,
and a fork costs nothing (two contexts share their spans). Keys are kept rotated by their place in the frame but not by
time; that happens once per chunk, when they are read. Rotary attention sees only differences of positions, so this
equals the official rotate-then-store.

Shape letters: B batch, L tokens per frame, N heads, D head dim. A frame is a latent frame.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arvideo_rl.generators.rope import turn

AT_SWITCH = ("keep", "recache", "recache_joint", "flush", "cut")
Fold = Callable[["Span", "Span | None", "Span"], "Span"]  # (sinks, frames that leave, newest chunk) -> sinks


@dataclass(frozen=True)
class Span:
    """Clean keys and values of the consecutive frames [start, stop), one pair per layer."""

    start: int
    stop: int
    keys: tuple[Tensor, ...]  # each [B, (stop - start) * L, N, D], normalised, rotated by place but not by time
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

    @classmethod
    def join(cls, spans: list[Span]) -> Span | None:
        """Consecutive spans as one, or None for none."""
        if len(spans) < 2:
            return spans[0] if spans else None
        layers = range(len(spans[0].keys))
        return cls(
            spans[0].start, spans[-1].stop, tuple(torch.cat([s.keys[i] for s in spans], 1) for i in layers),
            tuple(torch.cat([s.values[i] for s in spans], 1) for i in layers),
        )  # fmt: skip

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
    origin: int = 0  # first frame of the sinks: 0, or later after a recache
    text: Tensor | None = None  # [B, tokens, text dim], zeros past the true length
    actions: Tensor | None = None  # [B, chunk] int64
    adjacent: bool = False  # sinks sit right before the recent frames instead of at their own positions
    gap: int = 0  # positions left free between the past and the next chunk, for that chunk only
    recent: Tensor | None = None  # [B, frames, C, H, W] newest clean latents, where a prompt switch will need them
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
        return tuple(range(self.position - self.gap - len(frames), self.position - self.gap))

    def view(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Per layer the rotated keys and the values [B, held * L, N, D] of the past; made once, then remembered."""
        if not self.spans:
            return ()
        if "view" not in self._rotated:
            positions = self.positions()
            layers = range(len(self.spans[0].keys))
            self._rotated["view"] = tuple(
                (
                    turn(torch.cat([s.keys[i] for s in self.spans], 1), positions),
                    torch.cat([s.values[i] for s in self.spans], 1),
                )
                for i in layers
            )
        return self._rotated["view"]


@dataclass(frozen=True)
class Window:
    """How much past a chunk reads. ``size`` frames in all (sinks and the chunk itself included; None = unbounded),
    of which the first ``sink`` frames of the stream are never dropped. ``positions`` places the sinks: ``absolute``
    (their own indices, the gap grows) or ``adjacent`` (right before the recent frames). ``fold`` says what becomes of
    the sinks as the stream goes on (sinks.py; None: nothing), ``at_switch`` what happens to the past when the prompt
    changes (switching.py), and ``keep_sinks`` whether a recache leaves the first prompt's sinks in place."""

    chunk: int = 3
    size: int | None = 12
    sink: int = 3
    positions: str = "adjacent"
    fold: Fold | None = None
    at_switch: str = "keep"
    keep_sinks: bool = True
    first_alone: bool = False  # the first frame is a chunk of its own (image-to-video), chunks follow from frame 1

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
        if self.at_switch not in AT_SWITCH:
            raise ValueError(f"window at_switch {self.at_switch!r} is unknown; choose one of {', '.join(AT_SWITCH)}")
        if self.at_switch == "cut" and self.positions != "adjacent":
            raise ValueError("window at_switch cut needs adjacent positions")
        if self.fold is not None and (self.sink == 0 or self.size is None or self.positions == "absolute"):
            raise ValueError(
                f"sinks that change need sinks, a window and adjacent positions, not sink={self.sink} "
                f"window={self.size} positions={self.positions}"
            )

    def start(self) -> Context:
        """An empty context."""
        return Context(adjacent=self.positions == "adjacent")

    def commit(self, context: Context, span: Span) -> Context:
        """A new context that also holds ``span``, without what the next chunk may no longer read."""
        if span.start != context.position:
            raise ValueError(f"cannot commit frames {span.start}..{span.stop - 1} to a context at {context.position}")
        spans = [*context.spans, span]
        if self.size is not None:
            first, middle = context.origin, context.origin + self.sink
            oldest = max(middle, span.stop - (self.size - self.sink - self.chunk))
            sinks = _crop(spans, first, middle)
            if self.fold is not None and span.start >= middle:
                whole = Span.join(sinks)
                assert whole is not None
                sinks = [self.fold(whole, Span.join(_crop(spans, middle, oldest)), span)]
            spans = [*sinks, *_crop(spans, oldest, span.stop)]
        return replace(context, spans=tuple(spans), position=span.stop, gap=0, _rotated={})

    def chunks(self, frames: int) -> list[tuple[int, int]]:
        """Chunk bounds [(start, stop), ...] that cover ``frames``; the last chunk is whole, callers trim."""
        if frames < 1:
            raise ValueError(f"frames must be at least 1, not {frames}")
        first = [(0, 1)] if self.first_alone else []
        return first + [(a, a + self.chunk) for a in range(len(first), frames, self.chunk)]

    def end_of(self, start: int) -> int:
        """Where the chunk that begins at frame ``start`` ends."""
        return 1 if self.first_alone and start == 0 else start + self.chunk


def _crop(spans: list[Span], start: int, stop: int) -> list[Span]:
    """The parts of ``spans`` inside [start, stop)."""
    return [part for s in spans if (part := s.crop(start, stop)) is not None]
