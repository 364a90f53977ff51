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
from itertools import pairwise

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.spans import Span, crop
from arvideo_rl.generators.window import Window

FLUSHED = 2  # frames that stay besides the sinks
CUT = 42  # so that a chunk after one sink and two frames stands at 45, as in Infinity-RoPE


def newest(window: Window, recent: Tensor | None, x0: Tensor) -> Tensor | None:
    """The ``recent`` clean latents with the chunk ``x0`` [B, F, C, H, W] added, as far as they may be run again."""
    if not (window.recompute or window.at_switch.startswith("recache")):
        return None
    recent = x0 if recent is None else torch.cat([recent, x0], 1)
    return recent if window.size is None else recent[:, -window.size :]


@torch.no_grad()
def switch(model: Callable, window: Window, context: Context, text: Tensor, actions: Callable) -> Context:
    """The context of the first chunk under the new prompt ``text``; ``actions(start, stop)`` gives past frames'."""
    if window.at_switch == "keep":
        return context
    if window.at_switch == "cut":
        return replace(context, gap=CUT, _rotated={})
    sinks = tuple(crop(context.spans, context.origin, context.origin + window.sink))
    if window.at_switch == "flush":
        oldest = max(context.origin + window.sink, context.position - FLUSHED)
        recent = crop(context.spans, oldest, context.position)
        return replace(context, spans=(*sinks, *recent), linear=None, _rotated={})
    keep = sinks if window.keep_sinks else ()
    return recache(model, window, context, text, actions, keep, joint=window.at_switch == "recache_joint")


@torch.no_grad()
def recache(
    model: Callable,
    window: Window,
    context: Context,
    text: Tensor,
    actions: Callable,
    keep: tuple[Span, ...] = (),
    joint: bool = False,
) -> Context:
    """The newest clean latents run again after the spans ``keep``, as many as the window holds, an odd piece first
    where they are no whole chunks. Attention to the past has its full weight then."""
    assert context.recent is not None
    held = sum(s.stop - s.start for s in keep)
    room = context.position if window.size is None else window.size - (window.chunk if window.recompute else 0)
    frames = min(context.recent.shape[1], room - held, context.position - held)
    first = context.position - frames
    whole = [] if joint else range(first + frames % window.chunk, context.position, window.chunk)
    bounds = pairwise(sorted({first, *whole, context.position}))
    origin, weight = context.origin if keep else first, context.past_weight
    new = replace(context, spans=keep, position=first, origin=origin, past_weight=1.0, _rotated={})
    for start, stop in bounds:
        x0 = context.recent[:, start - context.position :][:, : stop - start]
        new = new.condition(text, actions(start, stop))
        new = window.commit(new, model(x0, torch.zeros(len(x0), device=x0.device), new, write=True).span)
    return replace(new, past_weight=weight)
