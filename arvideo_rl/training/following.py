"""How soon the picture follows a prompt that changes while the stream runs, told by the colours that prompts name.

Shape letters: B streams, T pixel frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.context import Context
from arvideo_rl.training.prompts import HELD_OUT_SEED
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import Scenes, sample_scenes
from arvideo_rl.world.switch import switched
from arvideo_rl.world.verify import colour_present
from samplers.randomness import Key
from samplers.stream import draw_from

FIRST_SEED = HELD_OUT_SEED + 10_000
NOISE = 77_000_003
STAY = 1


def switch_scenes(streams: int, frames: int, at: int) -> tuple[Scenes, Scenes]:
    """Scenes [B] before and after a switch at frame ``at``: captions without a colour in common, joystick commands
    before and a camera that stands still from there on, so that what the new prompt names does not leave with it."""
    first: list[int] = []
    second: list[int] = []
    seed = FIRST_SEED
    while len(first) < streams:
        old, new = sample_scenes([seed, seed + 1], 2).objects
        if not {o.colour for o in old} & {o.colour for o in new}:
            first, second = [*first, seed], [*second, seed + 1]
        seed += 2
    before = sample_scenes(first, frames, style="joystick")
    moving = torch.arange(frames).clamp_max(at)
    actions = before.actions.clone()
    actions[:, at + 1 :] = STAY
    before = replace(before, actions=actions, yaw=before.yaw[:, moving], camera=before.camera[:, moving])
    return before, switched(before, sample_scenes(second, frames, style="joystick"), at)


@torch.no_grad()
def continuations(
    generator: Generator, before: Scenes, after: Scenes, at: int, ways: Sequence[str]
) -> dict[str, Tensor]:
    """Stream the captions and commands of ``before`` to frame ``at``, then from that one past on to the captions of
    ``after`` under each way of taking a switch (switching.py), all with the same noise. Returns pixels
    [B, T, 3, H, W] in [0, 1] by way, and of the rendered world under "(world)". ValueError unless ``at`` begins a
    chunk."""
    own, frames = generator.streaming, before.actions.shape[1]
    if at not in dict(own.attention_window().chunks(frames)) or at == 0:
        raise ValueError(f"switch at frame {at}: it must begin a chunk of {own.chunk}, after 0 and before {frames}")
    takes_actions = generator.transformer.action_embedding is not None
    texts = ((at, list(after.captions)),)
    script = generator.script(list(before.captions), before.actions if takes_actions else None, texts)
    draw = draw_from([Key(NOISE, 0, s) for s in before.seeds], generator.latent_shape, generator.transformer.device)

    def go_on(way: str, until: int, context: Context | None = None) -> tuple[Tensor, Context]:
        generator.streaming = replace(own, at_switch=way, positions="adjacent")
        chunks = list(generator.stream(generator.transformer, script, draw, until, context=context,
                                       start=context.position if context else 0, to_continue=True))  # fmt: skip
        return torch.cat([c.latents for c in chunks], 1), chunks[-1].context

    def pixels(latents: Tensor) -> Tensor:
        return generator.codec.decode(latents)[:, :frames].float().cpu().clamp(0, 1)

    try:
        past, context = go_on("recache", at)  # so that it keeps what a recache needs; nothing else differs
        out = {way: pixels(torch.cat([past, go_on(way, frames, context)[0]], 1)) for way in ways}
    finally:
        generator.streaming = own
    size = next(iter(out.values())).shape[-1]
    return out | {"(world)": torch.cat([render(_part(before, 0, at), size), render(_part(after, at, frames), size)], 1)}


def _part(scenes: Scenes, start: int, stop: int) -> Scenes:
    """The scenes in frames [start, stop)."""
    return replace(
        scenes, **{k: getattr(scenes, k)[:, start:stop] for k in ("actions", "camera", "yaw", "centre", "spin")}
    )


def seen(pixels: Tensor, captions: Sequence[str]) -> Tensor:
    """In every frame of [B, T, 3, H, W], the share of the caption's objects whose colour is there [B, T]."""
    frames = pixels.shape[1]
    texts = [c for c in captions for _ in range(frames)]
    return colour_present(pixels.flatten(0, 1)[:, None], texts, torch.empty(0)).unflatten(0, (-1, frames))


def jump(pixels: Tensor, at: int) -> float:
    """The change into frame ``at`` over the mean change into the frames before it."""
    change = (pixels[:, 1 : at + 1] - pixels[:, :at]).abs().mean((2, 3, 4))
    return (change[:, -1].mean() / change[:, :-1].mean()).item()
