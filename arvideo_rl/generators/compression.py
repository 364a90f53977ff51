"""Which of the tokens that leave the window stay: those that the newest frames attend to most.

Source: Deep Forcing (arXiv 2512.05081), "participative compression", from the paper alone; its code is not public.
Where the paper leaves room: the tokens are chosen per layer, for all heads together, after every chunk and by its clean
frames (the paper: when the cache is full, by the first noisy forward of the next); and they are read, in order of
time, as the frames right before the recent ones (the paper shifts them as it shifts the sinks).

Shape letters: B batch, L tokens per frame, N heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span

LOOKS = 4  # newest frames whose queries decide, as in the paper


def compress(leaving: Span, looking: list[Tensor], frames: int) -> Span:
    """The ``frames`` frames' worth of tokens of ``leaving`` with the largest phi_j = sum over queries q . k_j, as the
    frames that end where ``leaving`` ends. ``looking`` are each layer's sums of the queries of the newest LOOKS frames
    [B, frames, N, D] (transformer.py)."""
    if leaving.stop - leaving.start <= frames:
        return leaving
    keys, values = [], []
    for k, v, queries in zip(leaving.keys, leaving.values, looking):
        seen = turn(k, tuple(range(leaving.start, leaving.stop))).float()
        scores = torch.einsum("bnd,btnd->bt", queries.sum(1).float(), seen)
        count = frames * (k.shape[1] // (leaving.stop - leaving.start))
        best = scores.topk(count, dim=1).indices.sort(1).values  # in order of time
        keys.append(_take(k, best))
        values.append(_take(v, best))
    return Span(leaving.stop - frames, leaving.stop, tuple(keys), tuple(values))


def _take(x: Tensor, tokens: Tensor) -> Tensor:
    """x [B, T, N, D] at ``tokens`` [B, C] of each row."""
    return x.gather(1, tokens[:, :, None, None].expand(-1, -1, *x.shape[2:]))
