"""A small benchmark of streaming, one table for a generator: quality, drift, response to a prompt switch, obedience,
speed. Everything in it is measured elsewhere (compare.py, drift.py, following.py); here it is put side by side.

What only the embedded world can tell (colours, directions, commands, switches) is left out for other generators.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError, check_ranges
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.drift import SEED, long_actions, segments
from arvideo_rl.training.following import continuations, jump, seen, switch_scenes
from arvideo_rl.training.judges import shows_world
from arvideo_rl.training.prompts import Prompts
from samplers.randomness import Key
from samplers.stream import draw_from

Numbers = dict[str, Any]  # value, and se and n where there are several
RESPONSE = (1, 3, 6)  # seconds after a switch


@dataclass
class StreamingConfig:
    """Sizes of the streaming benchmark."""

    streams: int = 16  # held-out prompts that are streamed, from the first
    frames: int = 240  # of each stream
    segment: int = 60  # frames that are measured together
    switch_at: int = 12  # frame at which the prompt changes in the streams of the switch; 0 = no switch
    timed: int = 60  # frames of the one stream that is timed


def check(config: StreamingConfig, generator: Generator) -> None:
    """ConfigError for sizes that ``generator`` cannot stream."""
    limits = {"streams": "[1, inf)", "frames": "[1, inf)", "segment": "[1, inf)", "switch_at": "[0, inf)"}
    check_ranges(config, limits | {"timed": "[1, inf)"}, "streaming.")
    own, chunk = generator.streaming, generator.streaming.chunk
    if own.joint or own.first_alone:
        raise ConfigError("benchmark=streaming wants chunks of one size that follow each other; not joint, first_alone")
    for key, least in (("segment", 2), ("frames", 2), ("timed", 3), ("switch_at", 0)):
        value = getattr(config, key)
        if value % chunk or value < least * chunk:
            near = max(least, round(value / chunk)) * chunk
            raise ConfigError(f"streaming.{key}={value}: use a multiple of {chunk} frames, a chunk, e.g. {near}")
    if config.frames < 2 * config.segment:
        raise ConfigError(f"streaming.frames={config.frames}: drift wants two segments of {config.segment} or more")


@torch.no_grad()
def stream_benchmark(
    generator: Generator, model: Callable, prompts: Prompts, config: StreamingConfig, style: str
) -> dict[str, Any]:
    """``drift``: numbers by segment; ``switch``: share of colours seen (the world only, else None); ``speed``."""
    some = prompts.take(list(range(min(config.streams, len(prompts)))))
    actions = long_actions(len(some), config.frames, style)
    found = segments(generator, model, some, actions, config.segment)
    drift = [{k: summary(v) for k, v in values.items()} for values in found]
    told: dict[str, Any] = {"streams": len(some), "frames": config.frames, "segment": config.segment, "drift": drift}
    asks = shows_world(generator) and config.switch_at > 0
    told["switch"] = switch(generator, len(some), config.switch_at) if asks else None
    return told | {"speed": speed(generator, model, some.take([0]), config.timed)}


def summary(values: Tensor) -> Numbers:
    """Mean, standard error and count of values [B]; NaN is left out."""
    good = values[values.isfinite()].double()
    se = good.std().item() / math.sqrt(len(good)) if len(good) > 1 else math.nan
    return {"value": good.mean().item(), "se": se, "n": len(good)}


def switch(generator: Generator, streams: int, at: int) -> dict[str, Any]:
    """After the prompt changes at frame ``at``: share of the new caption's colours that are seen so many seconds later,
    of the old one's that still are at the end, and the jump into the first new frame; with the same of the rendered
    world, where the new objects stand at once and may leave the picture."""
    own = generator.streaming
    last = at + math.ceil((RESPONSE[-1] * own.fps + 1) / own.chunk) * own.chunk
    before, after = switch_scenes(streams, last, at)
    out: dict[str, Any] = {"way": own.at_switch}
    for who, pixels in continuations(generator, before, after, at, [own.at_switch]).items():
        new, old = seen(pixels, after.captions), seen(pixels, before.captions)
        rows = {f"new_after_{s}_s": summary(new[:, at + round(s * own.fps)]) for s in RESPONSE}
        rows |= {"old_at_end": summary(old[:, at + round(RESPONSE[-1] * own.fps)])}
        out["world" if who == "(world)" else "stream"] = rows | {"jump": {"value": jump(pixels, at)}}
    return out


def speed(generator: Generator, model: Callable, prompt: Prompts, frames: int) -> dict[str, Any]:
    """One stream, decoded as it comes: seconds to the first pixels, and pixel frames a second once the window is full
    (median chunk), by the wall clock of this machine at this moment."""
    own, codec = generator.streaming, generator.codec
    script = generator.script(
        list(prompt.texts),
        torch.zeros(1, frames, dtype=torch.long) if generator.transformer.action_embedding is not None else None,
    )
    draw = draw_from([Key(SEED, 0, prompt.ids[0])], generator.latent_shape, generator.transformer.device)
    for _ in range(2):  # the first time round things are loaded and compiled
        seconds, decode, began = [], codec.decoder(), time.perf_counter()
        for chunk in generator.stream(model, script, draw, frames, in_place=True):
            decode(chunk.latents).float().cpu()
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
    full = min(math.ceil((own.window or 0) / own.chunk), len(seconds) - 1)
    rate = (codec.pixel_frames(frames) - codec.pixel_frames(frames - own.chunk)) / statistics.median(seconds[full:])
    device = generator.transformer.device
    count = torch.get_num_threads()
    cpu = f"CPU, {count} thread{'s' * (count > 1)}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    told: dict[str, Any] = {"first_seconds": seconds[0], "frames_per_second": rate, "real_time": rate / own.fps}
    return told | {"device": name}


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """A table to paste: one column for each generator, by name."""
    rows: list[tuple[str, list[str]]] = [("", list(found)), ("---", ["---"] * len(found))]

    def add(label: str, cells: Sequence[str | None]) -> None:
        if any(cells):
            rows.append((label, [cell or "-" for cell in cells]))

    every = list(found.values())
    streams = [one["stream"] for one in every]
    sizes = ["{streams} streams of {frames} frames, segments of {segment}".format(**s) for s in streams]
    add("sizes", [f"{next(iter(one['held_out'].values()))['n']} prompts, {size}" for one, size in zip(every, sizes)])
    for key in dict.fromkeys(k for one in every for k in one["held_out"]):
        label = f"{key.replace('reward/', 'reward ')}{' (lower is better)' if key == 'frechet' else ''}"
        add(f"quality: {label}", [_cell(one["held_out"].get(key)) for one in every])
    for key in dict.fromkeys(k for s in streams for k in s["drift"][0]):
        ends = [(s["drift"][0].get(key), s["drift"][-1].get(key)) for s in streams]
        add(f"drift: {key}, first -> last segment", [f"{_cell(a)} -> {_cell(b)}" if a else None for a, b in ends])
    switches = [s["switch"] or {} for s in streams]
    add("switch: taken by", [s.get("way") for s in switches])
    for seconds in RESPONSE:
        key = f"new_after_{seconds}_s"
        add(f"switch: new colours seen after {seconds} s (world)", [_against(s, key) for s in switches])
    add(f"switch: old colours still seen after {RESPONSE[-1]} s (world)", [_against(s, "old_at_end") for s in switches])
    add("switch: jump into the new prompt, 1 = none (world)", [_against(s, "jump") for s in switches])
    speeds = [s["speed"] for s in streams]
    add("speed: frames/s of one stream", [f"{s['frames_per_second']:.1f}" for s in speeds])
    add("speed: times real time", [f"{s['real_time']:.2f}" for s in speeds])
    add("speed: seconds to the first frame", [f"{s['first_seconds']:.3f}" for s in speeds])
    add("speed: on", [s["device"] for s in speeds])
    return "\n".join(f"| {label} | {' | '.join(cells)} |" for label, cells in rows)


def _cell(numbers: Numbers | None) -> str | None:
    if numbers is None:
        return None
    error = numbers.get("se", math.nan)
    return f"{numbers['value']:.3f}" + (f" ± {error:.3f}" if math.isfinite(error) else "")


def _against(found: dict[str, Any], key: str) -> str | None:
    return f"{_cell(found['stream'][key])} ({found['world'][key]['value']:.2f})" if found else None
