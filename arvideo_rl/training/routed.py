"""Roll out a KV-routing group: one past, branches that read different older frames for some chunks, and an anchor."""

from __future__ import annotations

import torch
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.routing import Routed, routed_span
from arvideo_rl.generators.spans import Span, crop
from arvideo_rl.objectives.record import Record, Steps
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import script_of, steps_of
from samplers.randomness import Key, shared
from samplers.routes import Memory, fork_frame, route
from samplers.stream import draw_from, stream


@torch.no_grad()
def roll_out_routed(
    generator: Generator, model, prompts: Prompts, keys: list[Key], frames: int, groups: Tensor, memory: Memory,
    batch: int | None = None,
) -> Record:  # fmt: skip
    """Rows of one group: branches, at most ``batch`` at once, and the anchor in the last row, which reads its ordinary
    past. All draws are shared, so that only what they read tells the rows apart. Steps are recorded for the routed
    chunks."""
    branches = len(keys) - 1
    start = fork_frame(keys[0], memory, frames, branches)
    sets = route(keys[0], memory, start, branches)
    window, levels = generator.streaming.attention_window(), generator.streaming.levels
    draw = draw_from(shared(keys[:1]), generator.latent_shape, generator.transformer.device)
    one = script_of(generator, prompts.take([0]))
    archive: list[Span] = []
    past = []
    for chunk in generator.stream(model, one, draw, start, to_continue=True):
        archive += crop(chunk.context.spans, chunk.start, chunk.start + chunk.latents.shape[1])
        past.append(chunk)
    context = past[-1].context
    stop = start + memory.chunks * memory.chunk
    chunks = [c for c in window.chunks(frames) if c[0] >= start]
    rows, first = [], start // memory.chunk
    blocks = [sets[i : i + (batch or branches)] for i in range(0, branches, batch or branches)]
    for some in (*blocks, None):  # None: the anchor
        count = len(some) if some else 1
        seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

        def keep(chunk: int, step: int, x: Tensor, x0: Tensor, seen=seen) -> None:
            if chunk < first + memory.chunks:
                seen.setdefault(chunk, []).append((x, x0))

        def draw_rows(chunk: int, step: int, purpose: str, count=count) -> Tensor:
            return draw(chunk, step, purpose).expand(count, -1, -1, -1, -1)

        script = script_of(generator, prompts.take([0] * count))
        denoiser = generator.denoiser(model, script, draw_rows, fixed=True)
        if some:
            span = routed_span(archive, some, start - memory.nearest, context.adjacent)
            denoiser = Routed(denoiser, span, memory.nearest, start, stop)  # type: ignore[assignment]
        tail = stream(denoiser, chunks, levels, draw_rows, context=context.fork(count), to_continue=False, seen=keep)
        latents = torch.cat([c.latents for c in tail], 1)
        rows.append((latents, *steps_of(seen)))
    latents, x, x0 = (torch.cat(part) for part in zip(*rows))
    before = torch.cat([c.latents for c in past], 1).expand(len(keys), -1, -1, -1, -1)
    steps = Steps(x, x0, torch.full((len(keys),), first))
    return Record(torch.cat([before, latents], 1), script_of(generator, prompts), keys, groups, steps)
