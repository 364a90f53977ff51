"""Linear temporal state: what leaves the window is folded into a matrix per head, of one size however long the stream.

    relu <- mean of relu(k);   kv <- mean of R(k) v^T      over all tokens folded, k without rotation
    output of attention += W_lin [ R(q) kv / (relu(q) . relu + 1e-6) ]     no feature map in the numerator

R turns by a position that stops growing: the query's is min(position, CAP), a folded frame's lies as far before it as
the frame did when it left. Source: Hybrid Forcing (leeruibin/hybrid-forcing), where a window is 9 frames with 3 sinks.
Differences: it also folds the sinks once, when the second chunk is begun, and its window attention is block-sparse.

Shape letters: B batch, N heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span

CAP = 18  # position at which queries stop


@dataclass(frozen=True)
class LinearState:
    """Per layer the means of relu(k) [B, N, D] and of R(k) v^T [B, N, D, D] over ``count`` tokens; in float32."""

    count: int
    relu: tuple[Tensor, ...]
    kv: tuple[Tensor, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> LinearState:
        """The same state with every tensor changed."""
        return LinearState(self.count, tuple(map(function, self.relu)), tuple(map(function, self.kv)))


def place_of(position: int) -> int:
    """Where a query at frame ``position`` stands for the linear state."""
    return min(position, CAP)


def fold(state: LinearState | None, leaving: Span, position: int) -> LinearState:
    """``state`` with ``leaving`` added, as the chunk at frame ``position`` will read it. ``leaving.sums`` are the sums
    of relu(k) per frame (transformer.py)."""
    start = place_of(position) - (position - leaving.start)
    places = tuple(range(start, start + leaving.stop - leaving.start))
    new = leaving.keys[0].shape[1]
    n = state.count if state else 0
    relu, kv = [], []
    for i, (k, v, sums) in enumerate(zip(leaving.keys, leaving.values, leaving.sums)):
        outer = torch.einsum("btnd,btne->bnde", turn(k, places).float(), v.float())
        a, b = (state.relu[i], state.kv[i]) if state else (torch.zeros_like(outer[..., 0]), torch.zeros_like(outer))
        relu.append((n * a + sums.float().sum(1)) / (n + new))
        kv.append((n * b + outer) / (n + new))
    return LinearState(n + new, tuple(relu), tuple(kv))


def read(query: Tensor, turned: Tensor, relu: Tensor, kv: Tensor) -> Tensor:
    """What queries [B, T, N, D] (un-rotated, and ``turned``) find in one layer's state [B, T, N, D], before W_lin."""
    mass = torch.einsum("btnd,bnd->btn", query.float().relu(), relu)
    return torch.einsum("btnd,bnde->btne", turned.float(), kv) / (mass[..., None] + 1e-6)
