"""How a long stream holds up: the same few numbers for every segment, so that drift shows as a trend.

Brightness and contrast say whether the picture fades or burns in, edge energy whether it blurs or breaks up, action
accuracy whether commands are still obeyed, and the seam whether the picture jumps where chunks meet.
Shape letters: B streams, T pixel frames, C H W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.progress import hidden
from arvideo_rl.training.judges import shows_world
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import appearance
from arvideo_rl.world.scene import sample_actions
from rewards.contract import Clips
from rewards.inverse_dynamics import InverseDynamics
from samplers.randomness import Key
from samplers.stream import Chunk, draw_from

PICTURE = ("brightness", "contrast", "edges")  # what must not drift
SEED = 77_000_002


def long_actions(streams: int, frames: int, style: str) -> Tensor:
    """Commands [streams, frames] for as long as the stream runs, the same for every call."""
    return torch.from_numpy(np.stack([sample_actions(np.random.default_rng(i), frames, style) for i in range(streams)]))


def segments(
    generator: Generator,
    model: Callable,
    prompts: Prompts,
    actions: Tensor,
    segment: int,
    watch: Callable[[Chunk, Tensor], None] | None = None,
) -> list[dict[str, Tensor]]:
    """Stream every prompt under its actions [B, F] and measure each ``segment`` frames as they come (memory does not
    grow with F). Returns one dict per segment of values [B]: brightness (mean luma, 0 to 1), contrast (its standard
    deviation over a frame), saturation (largest minus smallest channel), edges (mean difference of neighbouring
    pixels), motion (mean change between frames), seam (change into the first frame of a chunk over the change into the
    others; 1 = no jump) and, where the generator shows the world, actions (accuracy of the held-out judge). ``watch``
    is shown every chunk with its pixels [B, T, 3, H, W]. ValueError unless segments are whole chunks, two at least."""
    settings = generator.streaming
    if segment % settings.chunk or segment < 2 * settings.chunk:
        raise ValueError(
            f"segment of {segment} frames: use a multiple of {settings.chunk}, {2 * settings.chunk} or more"
        )
    judge = InverseDynamics("idm_heldout", score="accuracy") if shows_world(generator) else None
    takes_actions = generator.transformer.action_embedding is not None
    script = generator.script(list(prompts.texts), actions if takes_actions else None)
    keys = [Key(SEED, 0, p) for p in prompts.ids]
    draw = draw_from(keys, generator.latent_shape, generator.transformer.device)
    frames = actions.shape[1]
    out, held, decode = [], [], generator.codec.decoder()
    if settings.first_alone:
        raise ValueError("streaming.first_alone=true: segments are whole chunks of one size here; measure it without")
    chunks = generator.stream(model, script, draw, frames, in_place=True)
    for chunk in track(chunks, "streaming", frames // settings.chunk, disable=hidden()):
        held.append(decode(chunk.latents).float().cpu())
        if watch is not None:
            watch(chunk, held[-1])
        done = chunk.start + settings.chunk
        if done % segment == 0 or done >= frames:
            starts = list(accumulate([piece.shape[1] for piece in held[:-1]], initial=0))
            first = done - settings.chunk * len(held)
            out.append(measure(torch.cat(held, 1), actions[:, first:done], starts, judge, settings.fps))
            held = []
    return out


def measure(
    pixels: Tensor, actions: Tensor, starts: Sequence[int], judge: InverseDynamics | None, fps: float
) -> dict[str, Tensor]:
    """One segment: pixels [B, T, 3, H, W] in [0, 1], the frames ``starts`` at which its chunks begin, and for the
    ``judge`` actions [B, T] into each frame."""
    look = appearance(pixels)
    across = (pixels[..., 1:] - pixels[..., :-1]).abs().mean((1, 2, 3, 4))
    down = (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean((1, 2, 3, 4))
    change = (pixels[:, 1:] - pixels[:, :-1]).abs().mean((2, 3, 4))  # [B, T-1], into frames 1 ..
    into_first = torch.isin(torch.arange(1, pixels.shape[1]), torch.tensor(starts))
    found = {
        "brightness": look["brightness"],
        "contrast": look["contrast"],
        "saturation": look["saturation"],
        "edges": (across + down) / 2,
        "motion": change.mean(1),
        "seam": change[:, into_first].mean(1) / change[:, ~into_first].mean(1).clamp_min(1e-6),
    }
    if judge is not None:
        clips = Clips(pixels, fps, [""] * len(pixels), actions[:, 1 : pixels.shape[1]].contiguous())
        found["actions"] = judge(clips).value
    return found


def verdict(found: list[dict[str, Tensor]], tolerance: float = 0.15, obeyed: float = 0.8) -> list[str]:
    """What drifted, as sentences; empty = nothing. Pictures: every segment's mean over streams within ``tolerance`` of
    the first's. Actions: the last segment's accuracy at least ``obeyed`` times the first's."""
    out = []
    for name in PICTURE:
        first = found[0][name].mean()
        ratios = [(s[name].mean() / first).item() for s in found]
        worst = max(range(len(ratios)), key=lambda i: abs(ratios[i] - 1) if math.isfinite(ratios[i]) else math.inf)
        if not abs(ratios[worst] - 1) <= tolerance:
            out.append(f"{name} of segment {worst} is {ratios[worst]:.2f} of the first")
    kept = (found[-1]["actions"].mean() / found[0]["actions"].mean()).item()
    if not kept >= obeyed:
        out.append(f"actions of the last segment are {kept:.2f} of the first")
    return out
