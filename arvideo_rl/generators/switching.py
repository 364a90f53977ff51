"""What happens to the past when the prompt changes while a stream runs.

- ``keep``: nothing; the new prompt reaches the picture chunk by chunk.
- ``recache``: the newest clean latents are run again at t = 0 under the new prompt, chunk by chunk, causally.
- ``recache_joint``: the same in one forward in which they all see each other. Released LongLive weights saw this
  form, because the mask that its code builds is never used.
- ``flush``: only the sinks and the last two frames stay. Source: Infinity-RoPE, for a new action.
- ``cut``: for one chunk the past stands CUT positions further away. Source: Infinity-RoPE, for a new scene.

Source of recaching: LongLive (NVlabs/LongLive v1.0). Its cached text is dropped too, which here needs nothing: a
context holds the text of its next chunk only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context, Span, Window

FLUSHED = 2  # frames that stay besides the sinks
CUT = 42  # so that a chunk after one sink and two frames stands at 45, as in Infinity-RoPE


def remember(window: Window, context: Context, x0: Tensor) -> Context:
    """``context`` with the clean chunk ``x0`` [B, F, C, H, W] kept for a later recache, if there may be one."""
    if not window.at_switch.startswith("recache"):
        return context
    recent = x0 if context.recent is None else torch.cat([context.recent, x0], 1)
    return replace(context, recent=recent if window.size is None else recent[:, -window.size :])


@torch.no_grad()
def switch(model: Callable, window: Window, context: Context, text: Tensor, actions: Callable) -> Context:
    """The context of the first chunk under the new prompt ``text``; ``actions(start, stop)`` gives past frames'."""
    if window.at_switch == "keep":
        return context
    if window.at_switch == "cut":
        return replace(context, gap=CUT, _rotated={})
    sinks = _held(context, context.origin, context.origin + window.sink)
    if window.at_switch == "flush":
        oldest = max(context.origin + window.sink, context.position - FLUSHED)
        return replace(context, spans=(*sinks, *_held(context, oldest, context.position)), _rotated={})
    assert context.recent is not None
    keep = sinks if window.keep_sinks else ()
    held = sum(s.stop - s.start for s in keep)
    frames = min(context.recent.shape[1], (window.size or context.position) - held, context.position - held)
    joint = window.at_switch == "recache_joint"
    chunk = frames if joint else window.chunk
    first = context.position - frames // chunk * chunk
    new = replace(context, spans=keep, position=first, origin=context.origin if keep else first, _rotated={})
    for start in range(first, context.position, chunk):
        x0 = context.recent[:, start - context.position :][:, :chunk]
        new = new.condition(text, actions(start, start + chunk))
        new = window.commit(new, model(x0, torch.zeros(len(x0), device=x0.device), new, write=True).span)
    return new


def _held(context: Context, start: int, stop: int) -> tuple[Span, ...]:
    return tuple(part for s in context.spans if (part := s.crop(start, stop)) is not None)
