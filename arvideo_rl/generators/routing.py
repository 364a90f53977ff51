"""A denoiser that reads older frames for a while: [sinks, the branch's routed frames, the nearest frames, the chunk].

Between frames ``start`` and ``stop`` this is what every forward of a chunk sees, its refresh included; what is
committed, and everything before and after, is the ordinary window. Source: KVPO (Richard-Zhang-AI/KVPO).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span, crop


@dataclass
class Routed:
    """``inner`` with the frames ``routed`` (one row per branch) in place of the older of the recent ones."""

    inner: Denoiser
    routed: Span
    nearest: int
    start_frame: int
    stop_frame: int
    _seen: tuple[Context, Context] | None = field(default=None, repr=False)

    def start(self) -> Context:
        """An empty context."""
        return self.inner.start()

    def enter(self, context: Context, stop: int | None = None) -> Context:
        """As the ordinary denoiser."""
        return self.inner.enter(context, stop)

    def denoise(self, x: Tensor, t: float | Tensor, context: Context) -> Tensor:
        """Predict the clean chunk from the routed past."""
        return self.inner.denoise(x, t, self.view(context))

    def refresh(self, x0: Tensor, context: Context) -> Context:
        """Write the clean chunk's keys and values under the routed past into the ordinary one."""
        return self.inner.refresh(x0, context, self.view(context))

    def view(self, context: Context) -> Context:
        """What a chunk at ``context.position`` reads; made once per chunk."""
        if not self.start_frame <= context.position < self.stop_frame:
            return context
        if self._seen is None or self._seen[0] is not context:
            sinks = crop(context.spans, context.origin, context.origin + self.inner.window.sink)
            near = crop(context.spans, context.position - self.nearest, context.position)
            self._seen = (context, replace(context, spans=(*sinks, self.routed, *near), _rotated={}))
        return self._seen[1]


def routed_span(archive: list[Span], sets: list[tuple[int, ...]], stop: int, adjacent: bool) -> Span:
    """The frames of every branch's set, taken from the spans of one stream: one row per branch, as the frames that end
    before ``stop``. Where positions are not adjacent, keys are turned so that they are read where they were."""
    count = len(sets[0])
    places = tuple(range(stop - count, stop))
    rows = []
    for chosen in sets:
        whole = Span.join([part for f in chosen for part in crop(archive, f, f + 1)])
        if whole is None or whole.keys[0].shape[1] % count:
            raise ValueError(f"frames {chosen} are no longer at hand")
        back = tuple(f - p for f, p in zip(chosen, places))
        rows.append((whole.keys if adjacent else tuple(turn(k, back) for k in whole.keys), whole.values))
    keys, values = (tuple(torch.cat(layer) for layer in zip(*(row[i] for row in rows))) for i in (0, 1))
    return Span(stop - count, stop, keys, values)
