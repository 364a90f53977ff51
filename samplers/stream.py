"""The one streaming loop: denoise, refresh, commit, yield. A rollout, a file writer and a search all consume it.

It knows a denoiser only by contract (``start``, ``enter``, ``denoise``, ``refresh``), so it runs any generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from samplers.guidance import Guidance
from samplers.kernels import Kernel
from samplers.randomness import Key, normal

Seen = Callable[[int, int, Tensor, Tensor], None]  # (chunk, step, noisy input, predicted clean chunk)
Draw = Callable[[int, int, str], Tensor]  # (chunk, step, purpose) -> noise of the chunk's shape


CONSISTENCY = Kernel("cm")


class ChunkDenoiser(Protocol):
    """What the loop needs of a generator; contexts are opaque values here."""

    def start(self) -> Any:
        """The context of a stream that has not begun."""

    def enter(self, context: Any, stop: int | None = None) -> Any:
        """Put the condition of the next chunk in force, or of the frames up to ``stop`` when several chunks are read
        at once."""

    def denoise(self, x: Tensor, t: float | Tensor, context: Any) -> Tensor:
        """Noisy frames at level t (one number, or one per frame) -> predicted clean frames."""

    def refresh(self, x0: Tensor, context: Any) -> Any:
        """Clean chunk -> the context that also holds it."""


@dataclass(frozen=True)
class Chunk:
    """One finished chunk of the stream."""

    index: int
    start: int  # first frame
    latents: Tensor  # [B, F, C, H, W]; the last chunk of a request is trimmed to it
    context: Any  # what the next chunk will read


@torch.no_grad()
def stream(
    denoiser: ChunkDenoiser,
    chunks: list[tuple[int, int]],
    levels: tuple[float, ...],
    draw: Draw,
    *,
    frames: int | None = None,
    context: Any = None,
    to_continue: bool = True,
    kernel: Kernel | Sequence[Kernel] = CONSISTENCY,
    guidance: Guidance | None = None,
    seen: Seen | None = None,
) -> Iterator[Chunk]:
    """Generate ``chunks`` (bounds in frames) one after another and yield each as soon as it is clean.

    ``levels`` are the warped noise levels; ``draw`` gives all noise; ``frames`` trims the end; ``context`` continues
    a stream; ``kernel`` makes the transitions, one for all or one for each; ``guidance`` moves their means and
    ``seen`` is told of every step. S levels cost S + 1 forwards a chunk, the refresh included; ``to_continue=False``
    saves that of the last chunk, whose context then ends before it.
    """
    context = denoiser.start() if context is None else context
    before = None
    for start, stop in chunks:
        # A continued stream must not draw the first chunks' noise again; a first frame of its own is chunk 0.
        index = -(-start // (stop - start))
        context = denoiser.enter(context)
        x0 = denoise_chunk(denoiser, context, index, stop - start, levels, draw, kernel=kernel, guidance=guidance,
                           before=before, seen=seen)  # fmt: skip
        if to_continue or (start, stop) != chunks[-1]:
            context = denoiser.refresh(x0, context)
        keep = stop - start if frames is None else min(stop, frames) - start
        before = x0
        yield Chunk(index, start, x0[:, :keep], context)


@torch.no_grad()
def denoise_chunk(
    denoiser: ChunkDenoiser,
    context: Any,
    index: int,
    frames: int,
    levels: tuple[float, ...],
    draw: Draw,
    *,
    kernel: Kernel | Sequence[Kernel] = CONSISTENCY,
    guidance: Guidance | None = None,
    before: Tensor | None = None,
    seen: Seen | None = None,
) -> Tensor:
    """Chunk ``index`` of ``frames`` frames from noise to clean, in a context that it only reads: one row for every row
    that ``draw`` gives, which may be several candidates over a context of one stream. ``before`` is the clean chunk
    before it, which ``guidance`` may want to see."""
    kernels = (kernel,) * (len(levels) - 1) if isinstance(kernel, Kernel) else kernel
    if len(kernels) != len(levels) - 1:
        raise ValueError(f"{len(kernels)} kernels for {len(levels)} levels: give one, or one per transition")
    x = draw(index, 0, "init")[:, :frames]
    for step, t in enumerate(levels):
        x0 = denoiser.denoise(x, t, context)
        if seen is not None:
            seen(index, step, x, x0)
        if step + 1 < len(levels):
            mean, std = kernels[step].from_x0(x, x0, t, levels[step + 1])
            if guidance is not None and step in guidance.steps:
                denoise = partial(denoiser.denoise, t=t, context=context)
                mean = mean + guidance.shift(denoise, x, std, index, before)
            x = mean + std * draw(index, step + 1, "renoise")[:, :frames]
    return x0


@torch.no_grad()
def given(denoiser: ChunkDenoiser, latents: Tensor, chunks: list[tuple[int, int]]) -> Any:
    """The context after clean ``latents`` [B, F, C, H, W] that were not generated: an image or a video to continue.
    ``chunks`` are the bounds that cover exactly F frames."""
    if not chunks or chunks[-1][1] != latents.shape[1]:
        raise ValueError(f"{latents.shape[1]} given frames are not the whole chunks {chunks}")
    context = denoiser.start()
    for start, stop in chunks:
        context = denoiser.refresh(latents[:, start:stop], denoiser.enter(context))
    return context


def draw_from(keys: list[Key], shape: tuple[int, ...], device: torch.device | str = "cpu") -> Draw:
    """A ``draw`` for a batch of branches: chunk shape [F, C, H, W], one key per row, noise moved to ``device``."""

    def draw(chunk: int, step: int, purpose: str) -> Tensor:
        return normal(keys, chunk, step, purpose, shape).to(device)

    return draw
