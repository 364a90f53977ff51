"""Self-rollout: the network's own stream with the gradient of one step per chunk, for distribution matching.

Steps before ``exit_step`` run without gradient; that step runs with it, its prediction is the chunk's output, and is
refreshed and committed without. Context is detached, so no gradient crosses chunks; that is what the paper describes.
Public code leaks it all the same: its cache is written in place, so that later chunks reach the exit step's keys and
values with the refresh's numbers. ``through_context`` is that straight-through estimate exactly,

    key = key_exit + sg(key_clean - key_exit),   values alike,

which released weights were trained with. Source: Self-Forcing (guandeh17/Self-Forcing), pipeline/self_forcing_training.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.generators.spans import Span, crop
from samplers.stream import CONSISTENCY, Draw


def self_rollout(
    denoiser: Denoiser,
    chunks: list[tuple[int, int]],
    levels: tuple[float, ...],
    draw: Draw,
    exit_step: int,
    through_context: bool = False,
) -> Tensor:
    """Clean latents [B, F, C, H, W] of ``chunks`` with their graph. ``exit_step`` is the step, from 0, that every chunk
    leaves at (published: drawn anew per rollout, the same for all chunks)."""
    if not 0 <= exit_step < len(levels):
        raise ValueError(f"exit_step={exit_step}: the sampler has steps 0 to {len(levels) - 1}")
    outputs, context = [], denoiser.start()
    for start, stop in chunks:
        index = -(-start // (stop - start))
        context = denoiser.enter(context)
        context.view()  # made here, with its graph: a forward without one would remember it without
        x = draw(index, 0, "init")[:, : stop - start]
        for step, t in enumerate(levels[:exit_step]):
            with torch.no_grad():
                x0 = denoiser.denoise(x, t, context)
            mean, std = CONSISTENCY.from_x0(x, x0, t, levels[step + 1])
            x = mean + std * draw(index, step + 1, "renoise")[:, : stop - start]
        at = torch.full(x.shape[:1], levels[exit_step], device=x.device)
        out = denoiser.model(x, at, context, write=through_context)
        outputs.append(out.x0)
        with torch.no_grad():
            after = denoiser.refresh(out.x0.detach(), context)
        if through_context:
            clean = Span.join(crop(after.spans, start, stop))
            assert out.span is not None and clean is not None and (clean.start, clean.stop) == (start, stop)
            mixed = denoiser.window.commit(context, straight_through(out.span, clean))
            after = replace(mixed, recent=after.recent)
        context = after
    return torch.cat(outputs, 1)


def straight_through(noisy: Span, clean: Span) -> Span:
    """The clean span's numbers with the noisy one's gradient."""

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        return a + (b - a).detach()

    pairs = (zip(noisy.keys, clean.keys), zip(noisy.values, clean.values))
    keys, values = (tuple(mixed(a, b) for a, b in pair) for pair in pairs)
    return Span(clean.start, clean.stop, keys, values)
