"""What the cache policies do to a generator: one long stream per policy, or one prompt switch per way of taking it.

    python tools/policies.py [generator | run | checkpoint] [--policies plain ema_99 ...] [--frames 2001] [--streams 4]
    python tools/policies.py [generator | run | checkpoint] --switch [--policies keep cut ...] [--frames 240] [--at 120]

All get the same prompts, commands and noise. The first form writes to --out, per policy, NAME.json (numbers of every
segment as in tools/long_stream.py, seconds a chunk, bytes of context a stream) and NAME.png (nine frames of every
stream), and drift.svg with the curves of all. A policy whose NAME.json is there is not streamed again. The second
streams to frame --at, changes the prompt there and goes on from that one past in every way, with the camera still; it
writes switch.json, switch.png and switch.svg: the share of the new and of the old prompt's colours that are seen, frame
by frame, and beside them what the rendered world shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.context import Context
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.window import AT_SWITCH
from arvideo_rl.media import contact_sheet, write_sheet
from arvideo_rl.report.curves import curves
from arvideo_rl.training.aligned import load_any
from arvideo_rl.training.drift import long_actions, segments
from arvideo_rl.training.following import continuations, jump, seen, switch_scenes
from arvideo_rl.training.prompts import held_out_prompts
from arvideo_rl.training.rundir import read_json, write_json, write_text
from samplers.stream import Chunk

CURVES = ("edges", "contrast", "saturation", "motion", "actions")


def policies(own: Streaming) -> dict[str, Streaming]:
    """Settings by name, in the generator's own window and chunk unless the policy has a window of its own. Unbounded is
    not among them: its cost grows with every chunk."""
    chunk, size = own.chunk, own.window or 4 * own.chunk
    plain = Streaming(window=size, sink=0)
    pinned = replace(plain, sink=chunk)
    table = {
        "plain": plain,
        "absolute": replace(pinned, positions="absolute"),
        "adjacent": pinned,
        "ema_999": replace(pinned, sinks="ema", alpha=0.999),
        "ema_99": replace(pinned, sinks="ema", alpha=0.99),
        "adaptive": replace(pinned, sinks="adaptive", threshold=0.2),
        "compress": replace(plain, sink=size // 2, compress=2),  # Deep Forcing: 10 of 21, 2, the rest recent
        "linear": replace(pinned, linear=True),
        "recompute": replace(plain, window=2 * chunk, recompute=True, past_weight=0.3),  # Krea
        "motionstream": replace(pinned, window=3 * chunk),
        "infinity_rope": replace(plain, window=2 * chunk, sink=1),
    }
    kept = {k: getattr(own, k) for k in ("chunk", "steps", "shift", "fps", "size", "width", "trained_frames",
                                         "refresh_level", "first_alone")}  # fmt: skip
    return {name: replace(settings, **kept) for name, settings in table.items()}


def with_linear_state(network: CausalWan) -> CausalWan:
    """The same network with a projection of zeros for the linear state, where it was trained without."""
    if network.config.linear_state:
        return network
    wide = CausalWan.from_config({**network.config, "linear_state": True})
    missing, unexpected = wide.load_state_dict(network.state_dict(), strict=False, assign=True)  # shares the weights
    if unexpected or any(".linear_proj." not in k for k in missing):
        raise ValueError("linear: adapters are attached; merge them first with arvideo convert format=merged")
    for block in wide.blocks:
        block.attn1.linear_proj.to(block.attn1.to_q.weight)
    return wide.eval()


def bytes_of(context: Context) -> int:
    """Bytes that a context keeps alive between two chunks."""
    parts = [part for s in context.spans for part in (s.keys, s.values, s.sums)]
    parts += [context.linear.relu, context.linear.kv] if context.linear else []
    parts += [(context.recent,)] if context.recent is not None else []
    storages = (x.untyped_storage() for part in parts for x in part)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


def long_stream(generator: Generator, streams: int, frames: int, segment: int) -> tuple[dict, list[Tensor]]:
    """(numbers, nine frames of every stream) under the settings that the generator has now."""
    prompts = held_out_prompts(streams, 18, "joystick", skip=1000)
    shown: list[Tensor] = []
    times, held = [time.perf_counter()], [0]

    def watch(chunk: Chunk, pixels: Tensor) -> None:
        marks = range(0, frames, max(1, frames // 8))
        shown.extend(pixels[:, f - chunk.start] for f in marks if chunk.start <= f < chunk.start + pixels.shape[1])
        times.append(time.perf_counter())
        held.append(bytes_of(chunk.context))

    found = segments(generator, generator.transformer, prompts, long_actions(streams, frames, "joystick"), segment,
                     watch)  # fmt: skip
    seconds = sorted(b - a for a, b in zip(times, times[1:]))
    numbers = {
        "seconds_per_chunk": seconds[len(seconds) // 10],  # what other work on the machine leaves alone
        "context_bytes_per_stream": max(held) // streams,
        "segments": [{k: v.tolist() for k, v in values.items()} for values in found],
    }
    return numbers, list(torch.stack(shown, 1))


def drift(generator: Generator, source: str, names: list[str], args: argparse.Namespace) -> None:
    """Stream every policy that has not been, print a line for each, and draw the curves of all."""
    table, network = policies(generator.streaming), generator.transformer
    found = {}
    print(f"{'policy':<14}{'ms/chunk':>9}{'KB/stream':>10}   first -> last segment: {', '.join(CURVES)}")
    for name in names:
        asked = {"generator": source, "loaded": generator.said, "streams": args.streams, "frames": args.frames,
                 "segment": args.segment, "streaming": json.loads(json.dumps(asdict(table[name])))}  # fmt: skip
        path = args.out / f"{name}.json"
        if path.exists():
            found[name] = read_json(path, "asked", "segments")
            if found[name]["asked"] != asked:
                raise ValueError(f"{path} was measured with other settings; choose another --out")
        else:
            generator.streaming = table[name]
            generator.transformer = with_linear_state(network) if table[name].linear else network
            numbers, videos = long_stream(generator, args.streams, args.frames, args.segment)
            write_sheet(args.out / f"{name}.png", contact_sheet(videos, scale=2))
            found[name] = {"asked": asked, **numbers}
            write_json(path, found[name])
        means = [{k: statistics.fmean(s[k]) for k in CURVES} for s in found[name]["segments"]]
        trend = "  ".join(f"{means[0][k]:.3f} -> {means[-1][k]:.3f}" for k in CURVES)
        print(f"{name:<14}{1000 * found[name]['seconds_per_chunk']:9.0f}"
              f"{found[name]['context_bytes_per_stream'] / 1e3:10.0f}   {trend}", flush=True)  # fmt: skip
    panels = {
        key: {name: [(i * args.segment, statistics.fmean(s[key])) for i, s in enumerate(one["segments"])]
              for name, one in found.items()}
        for key in CURVES
    }  # fmt: skip
    write_text(args.out / "drift.svg", curves(panels))


def switches(generator: Generator, source: str, names: list[str], args: argparse.Namespace) -> None:
    """Stream one past and its continuations; print and write what is seen after the switch."""
    at, after_it = args.at, args.frames - args.at
    before, after = switch_scenes(args.streams, args.frames, at)
    videos = continuations(generator, before, after, at, names)
    edges = [a for a in (0, 3, 12, 24, 60, 120) if a < after_it] + [after_it]
    spans = list(zip(edges, edges[1:]))
    print("colours of the new prompt seen / of the old one, by frames since the switch; jump at the switch")
    print(f"{'policy':<15}" + "".join(f"{f'{a}-{b - 1}':>13}" for a, b in spans) + f"{'jump':>7}")
    found: dict[str, dict] = {}
    for name, pixels in videos.items():
        new, old = seen(pixels, after.captions), seen(pixels, before.captions)
        found[name] = {"new": new.mean(0).tolist(), "old": old.mean(0).tolist(), "jump": jump(pixels, at)}
        cells = [f"{new[:, at + a : at + b].mean():.2f} / {old[:, at + a : at + b].mean():.2f}" for a, b in spans]
        print(f"{name:<15}" + "".join(f"{c:>13}" for c in cells) + f"{found[name]['jump']:7.1f}")
    write_json(args.out / "switch.json", {"generator": source, "streams": args.streams, "switch": at, "seen": found})
    shown = range(max(0, at - 12), min(args.frames, at + 60))
    panels = {f"{key} prompt's colours seen": {n: [(f - at, one[key][f]) for f in shown] for n, one in found.items()}
              for key in ("new", "old")}  # fmt: skip
    write_text(args.out / "switch.svg", curves(panels))
    marks = [at + f for f in (-12, -1, 0, 2, 5, 8, 11, 17, 23, 35, 47, 59) if 0 <= at + f < args.frames]
    rows = {f"{before.captions[b]} | {after.captions[b]}: {name}": pixels[b, marks]
            for b in range(min(args.streams, 3)) for name, pixels in videos.items()}  # fmt: skip
    write_sheet(args.out / "switch.png", contact_sheet(list(rows.values()), list(rows), scale=2))


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", nargs="?", default="tiny")
    parser.add_argument("--switch", action="store_true", help="a prompt switch instead of a long stream")
    parser.add_argument("--frames", type=int, help="default 2001, with --switch 240")
    parser.add_argument("--at", type=int, help="frame of the switch; default the middle")
    parser.add_argument("--segment", type=int, default=87)
    parser.add_argument("--streams", type=int, help="default 4, with --switch 32")
    parser.add_argument("--policies", nargs="+", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("policies"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    usual = {"frames": 240, "streams": 32} if args.switch else {"frames": 2001, "streams": 4}
    for key, value in usual.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    args.at = args.frames // 2 if args.at is None else args.at
    try:
        for key in ("frames", "streams", "segment", "threads"):
            if getattr(args, key) < 1:
                raise ValueError(f"--{key} {getattr(args, key)}: use 1 or more")
        torch.set_num_threads(args.threads)
        generator, _, _ = load_any(args.generator)
        known = list(AT_SWITCH) if args.switch else list(policies(generator.streaming))
        names = args.policies or known
        for name in names:
            if name not in known:
                raise ValueError(f"policy {name!r} is unknown; choose from: {', '.join(known)}")
        (switches if args.switch else drift)(generator, args.generator, names, args)
    except (ValueError, OSError) as error:
        sys.exit(f"policies: {error}")


if __name__ == "__main__":
    main()
