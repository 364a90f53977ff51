"""The same past as a Context, in buffers made once: the chunk in work is written in place and nothing is ever moved.

For one stream that is only watched: a ring cannot be forked or trained through. Keys are stored rotated by place and
by time, as they are read; each layer's buffer holds ``size`` frames. What a chunk overwrites is what it may no longer
read. The order of frames in the buffer does not matter to attention, so a slot is freed and taken again. Only adjacent
sinks stand elsewhere in time for every chunk: they are turned once per chunk, from the originals.

Shape letters: B batch, L tokens per frame, N heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context, KeyShape
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span, crop
from arvideo_rl.generators.window import Window

FREE = -1


class Slots:
    """One layer's buffers for the chunk in work: ``used`` tokens are read, the chunk's own at ``where``."""

    def __init__(self, keys: Tensor, values: Tensor, where: Tensor, used: int) -> None:
        self.keys, self.values, self.where, self.used = keys, values, where, used

    def join(self, keys: Tensor, values: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        """Write the chunk's keys and values, and return all there is to attend to."""
        if copies != 1 or torch.is_grad_enabled():
            raise RuntimeError("a ring is for watching one stream: no stacked levels, no gradients")
        self.keys.index_copy_(1, self.where, keys)
        self.values.index_copy_(1, self.where, values)
        return self.keys[:, : self.used], self.values[:, : self.used]


class Ring:
    """A past in place. ``state`` is everything of it but the spans; it reads like a :class:`Context`."""

    sums, linear = "", None

    def __init__(self, window: Window, context: Context) -> None:
        if fault := unfit(window):
            raise ValueError(fault)
        self.window, self.state = window, context
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.sinks: Span | None = None  # not turned
        self.frames: list[int] = []  # the frame in each slot in use
        self.tokens = 0  # of a frame
        self.taken: list[int] = []  # slots of the chunk in work
        self._open: list[Slots] = []
        self._loaded: Context | None = None  # taken over, and put into the buffers by the next forward

    @property
    def position(self) -> int:
        """First frame of the next chunk."""
        return self.state.position

    @property
    def time(self) -> int:
        """Position at which the next chunk reads."""
        return self.state.position + self.state.gap

    @property
    def text(self) -> Tensor | None:
        """As in a context; so are the next two."""
        return self.state.text

    @property
    def actions(self) -> Tensor | None:  # noqa: D102
        return self.state.actions

    @property
    def read(self) -> dict | None:  # noqa: D102
        return self.state.read

    def held(self) -> tuple[int, ...]:
        """Absolute indices of the frames held, oldest first."""
        return tuple(sorted(f for f in self.frames if f != FREE))

    def bias(self, tokens: int, chunk: int, like: Tensor) -> None:
        """A ring weakens nothing."""

    def change(self, **fields) -> Ring:
        """Set fields of ``state``; returns self."""
        self.state = replace(self.state, **fields)
        return self

    def past(self, shape: KeyShape, frames: int) -> list[Slots]:
        """Room for a chunk of ``frames`` frames in every layer; the same until the chunk is committed."""
        if not self.keys:
            size = self.window.size
            assert size is not None
            self.tokens = shape.tokens
            full = (shape.batch, size * shape.tokens, shape.heads, shape.dim)
            self.keys, self.values = (
                [torch.zeros(full, dtype=shape.dtype, device=shape.device) for _ in range(shape.layers)]
                for _ in range(2)
            )
        if self._loaded is not None:
            self._fill(self._loaded)
        if not self._open:
            slots = [i for i, f in enumerate(self.frames) if f == FREE]
            slots += range(len(self.frames), len(self.frames) + frames - len(slots))
            used = max(len(self.frames), slots[-1] + 1)
            if len(slots) != frames or used * self.tokens > self.keys[0].shape[1]:
                raise RuntimeError(f"{frames} frames do not fit a ring of {self.window.size} with {self.frames}")
            self._turn_sinks()
            where = self._where(slots)
            self._open = [Slots(k, v, where, used * self.tokens) for k, v in zip(self.keys, self.values)]
            self.taken = slots
        return self._open

    def commit(self) -> Ring:
        """The chunk in work is clean: keep it, and free what the next chunk may not read. Returns self."""
        start, stop = self.position, self.position + len(self.taken)
        self.frames += [FREE] * (max(self.taken) + 1 - len(self.frames))
        for slot, frame in zip(self.taken, range(start, stop)):
            self.frames[slot] = frame
        if self.state.gap:  # it read from further away than it will stand
            where = self._where(self.taken)
            for keys in self.keys:
                keys.index_copy_(1, where, turn(keys[:, where], (-self.state.gap,) * len(self.taken)))
        w = self.window
        assert w.size is not None
        middle = self.state.origin + w.sink
        oldest = max(middle, stop - (w.size - w.sink - w.chunk))
        if w.sink and w.positions == "adjacent" and start < middle:
            self.sinks = self._span(self.state.origin, min(middle, stop))
        if w.fold is not None and stop >= middle:
            assert self.sinks is not None
            leaving, newest = self._span(middle, oldest), self._span(start, stop)
            assert newest is not None
            self.sinks = w.fold(self.sinks, leaving, newest)
        self.frames = [FREE if middle <= f < oldest else f for f in self.frames]
        self._open = []
        return self.change(position=stop, gap=0)

    def context(self) -> Context:
        """The same past as spans, for what a ring cannot do."""
        if self._loaded is not None:
            return replace(self.state, spans=self._loaded.spans, _rotated={})
        sinks, origin = self.sinks, self.state.origin
        if sinks is None:
            sinks = self._span(origin, origin + self.window.sink)
        rest = self._span(origin + self.window.sink, self.position)
        return replace(self.state, spans=tuple(s for s in (sinks, rest) if s is not None), _rotated={})

    def load(self, context: Context) -> Ring:
        """Take over the past of a context; buffers that are there stay. Returns self."""
        self.state, self._open = replace(context, spans=(), _rotated={}), []
        sinks = Span.join(crop(context.spans, context.origin, context.origin + self.window.sink))
        self.sinks = sinks if self.window.positions == "adjacent" else None
        self.frames = list(context.held())
        self._loaded = context if context.spans else None
        return self

    def _fill(self, context: Context) -> None:
        """Write a context's keys, turned, and values into the first slots, in the buffers' dtype."""
        for buffers, name in ((self.keys, "keys"), (self.values, "values")):
            for i, buffer in enumerate(buffers):
                part = torch.cat([getattr(s, name)[i] for s in context.spans], 1)
                buffer[:, : part.shape[1]] = turn(part, context.held()) if name == "keys" else part
        self._loaded = None

    def _turn_sinks(self) -> None:
        """Put adjacent sinks right before the recent frames, from the originals."""
        held = self.held()
        if self.sinks is None or self.window.positions != "adjacent":
            return
        count = self.sinks.stop - self.sinks.start
        first = self.position - len(held)
        where = self._where([self.frames.index(f) for f in range(self.sinks.start, self.sinks.stop)])
        for buffer, keys in zip(self.keys, self.sinks.keys):
            buffer.index_copy_(1, where, turn(keys, tuple(range(first, first + count))).to(buffer.dtype))
        if self.window.fold is not None:
            for buffer, values in zip(self.values, self.sinks.values):
                buffer.index_copy_(1, where, values.to(buffer.dtype))

    def _span(self, start: int, stop: int) -> Span | None:
        """Frames [start, stop) that are held where they stand at their own time, as a span."""
        frames = tuple(f for f in range(start, stop) if f in self.frames)
        if not frames:
            return None
        where = self._where([self.frames.index(f) for f in frames])
        back = tuple(-f for f in frames)
        keys = tuple(turn(k[:, where], back) for k in self.keys)
        return Span(frames[0], frames[-1] + 1, keys, tuple(v[:, where] for v in self.values))

    def _where(self, slots: list[int]) -> Tensor:
        """Tokens of the slots."""
        device = self.keys[0].device
        first = torch.tensor(slots, device=device)[:, None] * self.tokens
        return (first + torch.arange(self.tokens, device=device)).flatten()


def unfit(window: Window) -> str:
    """Why a window cannot be kept in a ring, or nothing."""
    for name, used in (("an unbounded window", window.size is None), ("compress", window.compress),
                       ("linear", window.linear), ("recompute", window.recompute),
                       ("past_weight", window.past_weight < 1)):  # fmt: skip
        if used:
            return f"{name} cannot be kept in a ring; stream it with contexts"
    return ""
