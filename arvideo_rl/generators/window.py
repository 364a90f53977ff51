"""Cache policies: how much past a chunk reads, where it stands, and what becomes of what leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from arvideo_rl.generators.compression import LOOKS, compress
from arvideo_rl.generators.context import Context
from arvideo_rl.generators.linear import fold
from arvideo_rl.generators.spans import Span, crop

AT_SWITCH = ("keep", "recache", "recache_joint", "flush", "cut")
Fold = Callable[[Span, Span | None, Span], Span]  # (sinks, frames that leave, newest chunk) -> sinks


@dataclass(frozen=True)
class Window:
    """How much past a chunk reads. ``size`` frames in all (sinks and the chunk itself included; None = unbounded),
    of which the first ``sink`` frames of the stream are never dropped. ``positions`` places the sinks: ``absolute``
    (their own indices, the gap grows) or ``adjacent`` (right before the recent frames). ``fold`` says what becomes of
    the sinks as the stream goes on (sinks.py; None: nothing), ``at_switch`` what happens to the past when the prompt
    changes (switching.py), and ``keep_sinks`` whether a recache leaves the first prompt's sinks in place. Of the frames
    that leave, ``compress`` frames' worth of tokens can stay (compression.py), or all go into a ``linear`` state
    (linear.py). ``recompute`` runs the past again before every chunk; ``past_weight`` weakens attention to it. Both are
    Krea's."""

    chunk: int = 3
    size: int | None = 12
    sink: int = 3
    positions: str = "adjacent"
    fold: Fold | None = None
    at_switch: str = "keep"
    keep_sinks: bool = True
    first_alone: bool = False  # the first frame is a chunk of its own (image-to-video), chunks follow from frame 1
    compress: int = 0
    linear: bool = False
    recompute: bool = False
    past_weight: float = 1.0
    work: int = 0  # frames denoised together where that is several chunks (samplers/rolling.py); 0: one chunk

    def __post_init__(self) -> None:
        if self.positions not in ("absolute", "adjacent"):
            raise ValueError(f"window positions {self.positions!r} is unknown; choose absolute or adjacent")
        if self.chunk < 1 or self.sink < 0:
            raise ValueError(f"chunk must be at least 1 and sink at least 0, not chunk={self.chunk} sink={self.sink}")
        work = self.work or self.chunk
        least = self.sink + self.compress + work
        if self.size is not None and self.size < least:
            kept = f" + compress {self.compress}" if self.compress else ""
            raise ValueError(
                f"window of {self.size} frames cannot hold sink {self.sink}{kept} + "
                f"{'frames in work' if self.work else 'chunk'} {work}; "
                f"set window to {least} or more"
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
        if self.fold is not None and (self.compress or self.linear):
            raise ValueError("sinks that change go with neither compress nor linear: each uses what leaves")
        if (self.fold is not None or self.linear) and self.at_switch.startswith("recache"):
            raise ValueError(
                f"at_switch {self.at_switch} runs frames again that sinks which change or a linear state have taken in "
                "already; choose keep, flush or cut"
            )
        rolls = "compress" if self.compress else "linear" if self.linear else ""
        if rolls and (self.size is None or self.positions == "absolute"):
            raise ValueError(f"{rolls} needs a window and adjacent positions, not {self.size} and {self.positions}")
        if self.compress < 0 or (self.compress and self.linear):
            raise ValueError(f"compress={self.compress} linear={self.linear}: choose one of them, and not below 0")
        if self.recompute and (self.size is None or self.sink or rolls or self.at_switch != "keep"):
            raise ValueError("recompute needs a window, no sinks, no compress, no linear, and at_switch keep")
        if not 0 < self.past_weight <= 1:
            raise ValueError(f"past_weight={self.past_weight} must be above 0 and at most 1")

    def start(self) -> Context:
        """An empty context."""
        sums = "queries" if self.compress else "keys" if self.linear else ""
        return Context(adjacent=self.positions == "adjacent", sums=sums, past_weight=self.past_weight)

    def commit(self, context: Context, span: Span) -> Context:
        """A new context that also holds ``span``, without what the next chunk may no longer read."""
        if span.start != context.position:
            raise ValueError(f"cannot commit frames {span.start}..{span.stop - 1} to a context at {context.position}")
        spans, linear = [*context.spans, span], context.linear
        if self.size is not None:
            first, middle = context.origin, context.origin + self.sink
            oldest = max(middle, span.stop - (self.size - self.sink - self.compress - (self.work or self.chunk)))
            sinks, leaving = crop(spans, first, middle), Span.join(crop(spans, middle, oldest))
            if self.fold is not None and span.stop >= middle:
                whole = Span.join(sinks)
                assert whole is not None
                sinks = [self.fold(whole, leaving, span)]
            if self.linear and leaving is not None:
                linear = fold(linear, leaving, span.stop)
            kept = []
            if self.compress and leaving is not None:
                looking = [s for s in crop(spans, span.stop - LOOKS, span.stop) if s.sums]
                kept = [
                    compress(leaving, [torch.cat(layer, 1) for layer in zip(*(s.sums for s in looking))], self.compress)
                ]
            spans = [s.alone() for s in (*sinks, *kept, *crop(spans, oldest, span.stop))]
        return replace(context, spans=tuple(spans), position=span.stop, gap=0, linear=linear, _rotated={})

    def chunks(self, frames: int) -> list[tuple[int, int]]:
        """Chunk bounds [(start, stop), ...] that cover ``frames``; the last chunk is whole, callers trim."""
        if frames < 1:
            raise ValueError(f"frames must be at least 1, not {frames}")
        first = [(0, 1)] if self.first_alone else []
        return first + [(a, a + self.chunk) for a in range(len(first), frames, self.chunk)]

    def end_of(self, start: int) -> int:
        """Where the chunk that begins at frame ``start`` ends."""
        return 1 if self.first_alone and start == 0 else start + self.chunk
