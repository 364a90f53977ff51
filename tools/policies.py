"""What the cache policies do to a generator: one long stream per policy, or one prompt switch per way of taking it.

    python tools/policies.py [generator | run | checkpoint] [--policies plain ema_99 ...] [--frames 2001] [--streams 4]
    python tools/policies.py [generator | run | checkpoint] --switch [--policies keep cut ...] [--frames 240] [--at 120]
    python tools/policies.py [generator | run | checkpoint] --cost

All get the same prompts, commands and noise. The first form writes to --out, per policy, NAME.json (numbers of every
segment as in tools/long_stream.py) and NAME.png (nine frames of every stream), and drift.svg with the curves of all. A
policy whose NAME.json is there is not streamed again. The second streams to frame --at, changes the prompt there and
goes on from that one past in every way, with the camera still; it writes switch.json, switch.png and switch.svg: the
share of the new and of the old prompt's colours that are seen, frame by frame, and beside them what the rendered world
shows. The third streams all policies in turn, chunk by chunk, and writes cost.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
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
from arvideo_rl.training.drift import SEED, long_actions, segments
from arvideo_rl.training.following import continuations, jump, seen, switch_scenes
from arvideo_rl.training.prompts import held_out_prompts
from arvideo_rl.training.rundir import read_json, write_json, write_text
from samplers.randomness import Key
from samplers.stream import Chunk, draw_from

STYLE = "joystick"
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
        "weakened": replace(pinned, past_weight=0.3),
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


def under(generator: Generator, settings: Streaming) -> Generator:
    """The generator streamed with other settings."""
    network = with_linear_state(generator.transformer) if settings.linear else generator.transformer
    return replace(generator, transformer=network, streaming=settings)


def long_stream(generator: Generator, streams: int, frames: int, segment: int) -> tuple[list[dict], list[Tensor]]:
    """(numbers of every segment, nine frames of every stream)."""
    prompts = held_out_prompts(streams, 18, STYLE, skip=1000)
    marks = range(0, frames, max(1, frames // 8))
    shown: list[Tensor] = []

    def watch(chunk: Chunk, pixels: Tensor) -> None:
        shown.extend(pixels[:, f - chunk.start] for f in marks if chunk.start <= f < chunk.start + pixels.shape[1])

    actions = long_actions(streams, frames, STYLE)
    with torch.no_grad():
        found = segments(generator, generator.transformer, prompts, actions, segment, watch)
    return [{k: v.tolist() for k, v in values.items()} for values in found], list(torch.stack(shown, 1))


def drift(generator: Generator, names: list[str], args: argparse.Namespace) -> None:
    """Stream every policy that has not been, print a line for each, and draw the curves of all."""
    table = policies(generator.streaming)
    found = {}
    print(f"{'policy':<14}" + "".join(f"{key:>18}" for key in CURVES) + "   first -> last quarter")
    for name in names:
        asked = {"generator": args.generator, "loaded": generator.said, "streams": args.streams, "frames": args.frames,
                 "segment": args.segment, "streaming": json.loads(json.dumps(asdict(table[name])))}  # fmt: skip
        path = args.out / f"{name}.json"
        if path.exists():
            if read_json(path, "asked", "segments")["asked"] != asked:
                raise ValueError(f"{path} was measured with other settings; choose another --out")
            found[name] = read_json(path)["segments"]
        else:
            found[name], videos = long_stream(under(generator, table[name]), args.streams, args.frames, args.segment)
            write_sheet(args.out / f"{name}.png", contact_sheet(videos, scale=2))
            write_json(path, {"asked": asked, "segments": found[name]})
        means = {key: [statistics.fmean(s[key]) for s in found[name]] for key in CURVES}
        some = -(-len(found[name]) // 4)
        ends = [f"{statistics.fmean(x[:some]):.4f} -> {statistics.fmean(x[-some:]):.4f}" for x in means.values()]
        print(f"{name:<14}" + "".join(f"{x:>18}" for x in ends), flush=True)
    panels = {
        key: {name: [(i * args.segment, statistics.fmean(s[key])) for i, s in enumerate(one)]
              for name, one in found.items()}
        for key in CURVES
    }  # fmt: skip
    write_text(args.out / "drift.svg", curves(panels))


def costs(generator: Generator, names: list[str], args: argparse.Namespace) -> None:
    """Advance a stream of every policy by a chunk in turn, so that a busy machine hits all alike. Chunks count once the
    widest window is full; ratios are to the first policy's chunk of the same round."""
    table = policies(generator.streaming)
    full = 1 + max(s.window or 0 for s in table.values()) // generator.streaming.chunk
    prompts = held_out_prompts(args.streams, 18, STYLE, skip=1000)
    actions = long_actions(args.streams, args.frames, STYLE)
    running: dict[str, Iterator[Chunk]] = {}
    for name in names:
        one = under(generator, table[name])
        takes_actions = one.transformer.action_embedding is not None
        draw = draw_from([Key(SEED, 0, p) for p in prompts.ids], one.latent_shape, one.transformer.device)
        script = one.script(list(prompts.texts), actions if takes_actions else None)
        running[name] = one.stream(one.transformer, script, draw, args.frames, to_continue=True)
    rounds = len(table[names[0]].attention_window().chunks(args.frames))
    if rounds < full + 2:
        raise ValueError(
            f"--frames {args.frames}: use {(full + 2) * generator.streaming.chunk} or more, to fill windows"
        )
    times: dict[str, list[float]] = {name: [] for name in names}
    held = dict.fromkeys(names, 0)
    for k in range(rounds):
        for name, chunks in running.items():
            begun = time.perf_counter()
            context = next(chunks).context
            if k >= full:
                times[name].append(time.perf_counter() - begun)
                held[name] = max(held[name], bytes_of(context) // args.streams)
    print(f"{args.streams} streams; median ms/chunk, seconds over the first's [quartiles], KB of context a stream")
    found = {}
    for name in names:
        ratios = [a / b for a, b in zip(times[name], times[names[0]])]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] = {"seconds": times[name], "ratio": middle, "bytes": held[name]}
        print(f"{name:<14}{1000 * statistics.median(times[name]):8.0f}{middle:8.2f} [{low:.2f}, {high:.2f}]"
              f"{held[name] / 1e3:9.0f}")  # fmt: skip
    write_json(args.out / "cost.json", {"generator": args.generator, "streams": args.streams, "policies": found})


def switches(generator: Generator, names: list[str], args: argparse.Namespace) -> None:
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
    write_json(
        args.out / "switch.json", {"generator": args.generator, "streams": args.streams, "switch": at, "seen": found}
    )
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
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--switch", action="store_true", help="a prompt switch instead of long streams")
    mode.add_argument("--cost", action="store_true", help="time and memory instead of long streams")
    parser.add_argument("--frames", type=int, help="default 2001, with --switch 240, with --cost 120")
    parser.add_argument("--at", type=int, help="frame of the switch; default the middle")
    parser.add_argument("--segment", type=int, default=87)
    parser.add_argument("--streams", type=int, help="default 4, with --switch 32")
    parser.add_argument("--policies", nargs="+", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("policies"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    usual = {"frames": 240 if args.switch else 120 if args.cost else 2001, "streams": 32 if args.switch else 4}
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
        (switches if args.switch else costs if args.cost else drift)(generator, names, args)
    except (ValueError, OSError) as error:
        sys.exit(f"policies: {error}")


if __name__ == "__main__":
    main()
