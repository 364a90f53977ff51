"""Context: everything the next chunk attends to besides itself, as an immutable value.

A forward pass only reads a context. A refresh (t = 0) makes a :class:`Span`, and ``Window.commit`` returns a *new*
context that holds it, so noisy keys never enter, recomputation under activation checkpointing reads the same tensors,
and a fork costs nothing (two contexts share their spans). Keys are kept rotated by their place in the frame but not by
time; that happens once per chunk, when they are read. Rotary attention sees only differences of positions, so this
equals the official rotate-then-store.

Shape letters: B batch, L tokens per frame, N heads, D head dim. A frame is a latent frame.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from arvideo_rl.generators.linear import LinearState
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span


class KeyShape(NamedTuple):
    """What one chunk's keys look like, for whoever makes room for them."""

    batch: int
    tokens: int  # of a frame
    heads: int
    dim: int
    layers: int
    dtype: torch.dtype
    device: torch.device


class Past(NamedTuple):
    """One layer's past: keys as they are read, and values [B, held * L, N, D]."""

    keys: Tensor
    values: Tensor

    def join(self, keys: Tensor, values: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        """The past before a chunk's own keys and values, which may be ``copies`` stacked ones over one past."""
        return _cat(self.keys, keys, copies), _cat(self.values, values, copies)


def _cat(past: Tensor, here: Tensor, copies: int) -> Tensor:
    """Concatenate past [B, P, N, D] before here [copies * B, Q, N, D] without repeating the past first."""
    if copies == 1:
        return torch.cat([past, here], 1)
    here = here.unflatten(0, (copies, -1))
    return torch.cat([past.expand(copies, *past.shape), here], 2).flatten(0, 1)


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
    recent: Tensor | None = None  # [B, frames, C, H, W] newest clean latents, where they will be run again
    linear: LinearState | None = None  # what left the window, where the policy keeps it in this form
    sums: str = ""  # what a refresh must sum per frame for the policy: "queries", "keys" (relu of them) or nothing
    past_weight: float = 1.0  # factor on the attention weight of past frames but the first held
    read: dict | None = field(default=None, repr=False, compare=False)  # the text's keys and values, if remembered
    _rotated: dict = field(default_factory=dict, repr=False, compare=False)

    @property
    def time(self) -> int:
        """Position at which the next chunk reads."""
        return self.position

    def condition(self, text: Tensor, actions: Tensor | None, read: dict | None = None) -> Context:
        """The same past with the prompt and actions in force for the next chunk. ``read`` is where a forward without
        gradient leaves what it computes of the text alone, for the next; it must belong to one text and one policy."""
        return replace(self, text=text, actions=actions, read=read)

    def fork(self, count: int) -> Context:
        """The past of one stream as that of ``count`` branches, which share its memory."""

        def all_rows(x: Tensor) -> Tensor:
            if x.shape[0] != 1:
                raise ValueError(f"only the past of one stream can be forked, not of {x.shape[0]}")
            return x.expand(count, *x.shape[1:])

        spans = tuple(s.map(all_rows) for s in self.spans)
        recent = None if self.recent is None else all_rows(self.recent)
        linear = self.linear and self.linear.map(all_rows)
        return replace(self, spans=spans, recent=recent, linear=linear, text=None, actions=None, _rotated={})

    def held(self) -> tuple[int, ...]:
        """Absolute indices of the frames held, oldest first."""
        return tuple(f for s in self.spans for f in range(s.start, s.stop))

    def positions(self) -> tuple[int, ...]:
        """Positions at which the held frames are read."""
        frames = self.held()
        if not self.adjacent:
            return frames
        return tuple(range(self.position - self.gap - len(frames), self.position - self.gap))

    def bias(self, tokens: int, chunk: int, like: Tensor) -> Tensor | None:
        """What is added to the attention logits [1, 1, 1, keys] of the past and then the chunk, of ``chunk`` frames of
        ``tokens`` tokens; None for nothing."""
        past = len(self.held())
        if self.past_weight == 1 or past < 2:
            return None
        out = torch.zeros((past + chunk) * tokens, device=like.device, dtype=like.dtype)
        out[tokens : past * tokens] = math.log(self.past_weight)
        return out[None, None, None]

    def past(self, shape: KeyShape, frames: int) -> tuple[Past, ...]:
        """What every layer reads besides a chunk of ``frames`` frames; nothing at the start of a stream."""
        return self.view(shape.dtype)

    def view(self, dtype: torch.dtype | None = None) -> tuple[Past, ...]:
        """Per layer the rotated keys and the values [B, held * L, N, D] of the past, in ``dtype`` or that of the newest
        span; made once, then remembered."""
        if not self.spans:
            return ()
        if "view" not in self._rotated:
            positions, dtype = self.positions(), dtype or self.spans[-1].keys[0].dtype
            self._rotated["view"] = tuple(
                Past(
                    turn(torch.cat([s.keys[i].to(dtype) for s in self.spans], 1), positions),
                    torch.cat([s.values[i].to(dtype) for s in self.spans], 1),
                )
                for i in range(len(self.spans[0].keys))
            )
        return self._rotated["view"]
