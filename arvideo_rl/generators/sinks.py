"""What becomes of the sinks when frames leave the window. Keys are rotated by place only, so tokens of one place mix.

Shape letters: B batch, L tokens per frame, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Fold


def ema(alpha: float) -> Fold:
    """Moving average: sink <- alpha sink + (1 - alpha) frame, keys and values, token by token, for every frame that
    leaves; frame f goes to sink f mod s, so sink and chunk sizes may differ (the official code folds only equal sizes
    and overwrites otherwise). Half-life in chunks: ln 2 / (1 - alpha). Sinks become float32: in bfloat16, where the
    official code keeps them, steps of .001 are mostly rounded away. Source: Reward-Forcing, where alpha = 0.999."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}: a moving average takes 0 to 1")

    def fold(sinks: Span, leaving: Span | None, newest: Span) -> Span:
        if leaving is None:
            return sinks
        size, frames = sinks.stop - sinks.start, range(leaving.start, leaving.stop)

        def mixed(old: Tensor, new: Tensor) -> Tensor:
            slots = list(_frames(old, size).float().unbind(1))
            for frame, value in zip(frames, _frames(new, len(frames)).unbind(1)):
                slot = (frame - sinks.start) % size
                slots[slot] = slots[slot].lerp(value.float(), 1 - alpha)
            return torch.stack(slots, 1).flatten(1, 2)

        return _map(sinks, leaving, mixed)

    return fold


def adaptive(threshold: float) -> Fold:
    """A sink unlike the video by now is replaced: sink j is compared with frame j mod c of the newest chunk, and
    where their mean cosine similarity (of token means, over layers, keys and values) is below ``threshold``, that frame
    takes its place. Source: StreamDiffusionV2, threshold 0.2, with chunks of one frame."""

    def fold(sinks: Span, leaving: Span | None, newest: Span) -> Span:
        size, count = sinks.stop - sinks.start, newest.stop - newest.start
        partner = [j % count for j in range(size)]
        like = torch.stack([
            torch.cosine_similarity(_frames(a, size).float().mean(2).flatten(2),
                                    _frames(b, count)[:, partner].float().mean(2).flatten(2), dim=-1)
            for a, b in zip((*sinks.keys, *sinks.values), (*newest.keys, *newest.values))
        ]).mean(0)  # fmt: skip
        stays = (like >= threshold)[:, :, None, None, None]  # [B, sinks, 1, 1, 1]

        def chosen(old: Tensor, new: Tensor) -> Tensor:
            return torch.where(stays, _frames(old, size), _frames(new, count)[:, partner]).flatten(1, 2)

        return _map(sinks, newest, chosen)

    return fold


def _frames(x: Tensor, count: int) -> Tensor:
    """[B, count * L, N, D] -> [B, count, L, N, D]."""
    return x.unflatten(1, (count, -1))


def _map(sinks: Span, other: Span, rule: Callable[[Tensor, Tensor], Tensor]) -> Span:
    keys = tuple(rule(a, b) for a, b in zip(sinks.keys, other.keys))
    values = tuple(rule(a, b) for a, b in zip(sinks.values, other.values))
    return Span(sinks.start, sinks.stop, keys, values)
