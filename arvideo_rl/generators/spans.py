"""Clean keys and values of consecutive frames: what contexts are made of.

Shape letters: B batch, L tokens per frame, N heads, D head dim. A frame is a latent frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Clean keys and values of the consecutive frames [start, stop), one pair per layer."""

    start: int
    stop: int
    keys: tuple[Tensor, ...]  # each [B, (stop - start) * L, N, D], normalised, rotated by place but not by time
    values: tuple[Tensor, ...]
    sums: tuple[Tensor, ...] = ()  # each [B, stop - start, N, D]: what the window's policy asked for, per frame

    def crop(self, start: int, stop: int) -> Span | None:
        """The part inside [start, stop) as views, or None when nothing is left."""
        a, b = max(start, self.start), min(stop, self.stop)
        if a >= b:
            return None
        if (a, b) == (self.start, self.stop):
            return self
        tokens = self.keys[0].shape[1] // (self.stop - self.start)
        first, last = a - self.start, b - self.start
        cut = slice(first * tokens, last * tokens)
        sums = tuple(s[:, first:last] for s in self.sums)
        return Span(a, b, tuple(k[:, cut] for k in self.keys), tuple(v[:, cut] for v in self.values), sums)

    @classmethod
    def join(cls, spans: Sequence[Span]) -> Span | None:
        """Consecutive spans as one, or None for none. Sums stay where all have them."""
        if len(spans) < 2:
            return spans[0] if spans else None

        def together(name: str) -> tuple[Tensor, ...]:
            return tuple(torch.cat(parts, 1) for parts in zip(*(getattr(s, name) for s in spans)))

        return cls(spans[0].start, spans[-1].stop, together("keys"), together("values"), together("sums"))

    def map(self, function: Callable[[Tensor], Tensor]) -> Span:
        """The same frames with every tensor changed."""
        parts = (tuple(map(function, part)) for part in (self.keys, self.values, self.sums))
        return Span(self.start, self.stop, *parts)

    def alone(self) -> Span:
        """The same span without memory of frames that it no longer has: copied where it is a part of a larger one."""
        whole = self.keys[0].untyped_storage().nbytes() <= self.keys[0].nbytes or self.keys[0].requires_grad
        return self if whole or self.keys[0].stride(0) == 0 else self.map(torch.Tensor.clone)

    def rows(self, rows: slice) -> Span:
        """The same span for part of the batch."""
        return self.map(lambda x: x[rows])

    def detach(self) -> Span:
        """The same span without autograd history."""
        return self.map(torch.Tensor.detach)


def crop(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """The parts of ``spans`` inside [start, stop)."""
    return [part for s in spans if (part := s.crop(start, stop)) is not None]
