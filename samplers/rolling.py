"""Joint denoising of several chunks, oldest cleanest: the window rolls on by one chunk per forward.

Source: Rolling Forcing (TencentARC/RollingForcing). With S levels up to S chunks are denoised in one forward, chunk i
at its level number w - i in forward w; then each is re-noised, fresh, to its next level, and the oldest is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from samplers.kernels import consistency
from samplers.stream import Chunk, ChunkDenoiser, Draw


@torch.no_grad()
def rolling(
    denoiser: ChunkDenoiser,
    chunks: list[tuple[int, int]],
    levels: tuple[float, ...],
    draw: Draw,
    *,
    frames: int | None = None,
    context: Any = None,
) -> Iterator[Chunk]:
    """Generate ``chunks`` of equal size as :func:`samplers.stream.stream` does, S chunks at a time. A chunk is yielded
    after S forwards in all and one per chunk from then on. With one chunk it is plain streaming. ``denoiser.enter``
    is asked for the condition of all frames in work; a prompt comes into force with the oldest of them."""
    context = denoiser.start() if context is None else context
    size = chunks[0][1] - chunks[0][0]
    if any(b - a != size for a, b in chunks):
        raise ValueError(f"joint denoising needs chunks of one size, not {chunks[:3]}")
    base = chunks[0][0] // size
    work: list[Tensor] = []  # noisy latents of the chunks in work, oldest first
    for w in range(len(chunks) + len(levels) - 1):
        oldest = max(0, w - len(levels) + 1)
        if w < len(chunks):
            work.append(draw(base + w, 0, "init"))
        steps = [w - i for i in range(oldest, oldest + len(work))]
        t = torch.tensor([levels[s] for s in steps]).repeat_interleave(size)
        entered = denoiser.enter(context, chunks[oldest + len(work) - 1][1])
        clean = denoiser.denoise(torch.cat(work, 1), t, entered).split(size, 1)
        done = steps[0] == len(levels) - 1
        for j, step in enumerate(steps):
            if step + 1 < len(levels):
                mean, std = consistency(clean[j], levels[step + 1])
                work[j] = mean + std * draw(base + oldest + j, step + 1, "renoise")
        if done:
            start, stop = chunks[oldest]
            context = denoiser.refresh(clean[0], denoiser.enter(context))
            work.pop(0)
            keep = size if frames is None else min(stop, frames) - start
            yield Chunk(base + oldest, start, clean[0][:, :keep], context)
