"""Frames per second of a generator when streaming, and what its cache and torch.compile are worth.

    python tools/bench_streaming.py [generator] [--frames 48] [--streams 1 64] [--threads 1 2] [--repeats 5] [--compile]
    python tools/bench_streaming.py [generator] --history 12 48 192 [--threads 1 2] [--repeats 5]

The first form streams; with --compile the blocks are also run through torch.compile (needs a C++ compiler; compiling is
not in the times). The second times one chunk after so many frames, all of them attended to: with the cache, and with
every frame computed again at every step, as generators without a cache do (place embedding left out, since that knows
one chunk only). Cases alternate within the run, so that a busy machine hits all of them alike: trust the ratios (each
to the first case of its round), not the absolute figures. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from arvideo_rl.generators import transformer as module
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.window import Window
from samplers.randomness import Key
from samplers.stream import draw_from, stream


def alternate(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every case, ``repeats`` times in turn after one round that warms up."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            seconds = case()
            if repeat:
                found[name].append(seconds)
    return found


def report(title: str, found: dict[str, list[float]], frames: dict[str, int]) -> None:
    """Median seconds [least, most], frames/s where frames are counted, and the median ratio to the first case."""
    print(f"{title}: median seconds [least, most], frames/s, seconds over those of the first case [least, most]")
    first = next(iter(found.values()))
    rows = []
    for name, seconds in found.items():
        median, ratios = statistics.median(seconds), [s / f for s, f in zip(seconds, first)]
        rows.append({"case": name, "seconds": seconds, "median": median, "ratio": statistics.median(ratios)})
        speed = f"{frames[name] / median:8.1f}" if name in frames else " " * 8
        print(f"  {name:<38}{median:8.3f} [{min(seconds):.3f}, {max(seconds):.3f}] {speed}   "
              f"{rows[-1]['ratio']:6.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")  # fmt: skip
    print(json.dumps(rows))


def stream_seconds(generator: Generator, streams: int, frames: int, threads: int = 1, block: Callable | None = None):
    """Wall time to stream ``frames`` frames of ``streams`` videos, decoding included."""
    torch.set_num_threads(threads)
    eager, module._block = module._block, block or module._block  # type: ignore[assignment]
    settings, window = generator.streaming, generator.streaming.attention_window()
    takes_actions = generator.transformer.action_embedding is not None
    actions = torch.ones(streams, frames, dtype=torch.long) if takes_actions else None
    begun = time.perf_counter()
    script = generator.script(["a red ball rolls left"] * streams, actions)
    draw = draw_from([Key(0, branch=i) for i in range(streams)], generator.latent_shape)
    denoiser = Denoiser(generator.transformer, window, script, fixed=True)
    for chunk in stream(denoiser, window.chunks(frames), settings.levels, draw, to_continue=False):
        generator.codec.decode(chunk.latents)
    module._block = eager
    return time.perf_counter() - begun


def without_places(generator: Generator) -> CausalWan:
    """The same transformer with no place embedding, so that it takes any number of frames."""
    network = CausalWan.from_config({**generator.transformer.config, "places": None})
    network.load_state_dict({k: v for k, v in generator.transformer.state_dict().items() if k != "place_embedding"})
    return network.eval()


@torch.no_grad()
def chunk_seconds(generator: Generator, network: CausalWan, history: int, threads: int, cache: bool) -> float:
    """Wall time of one chunk (all denoising steps, and the refresh a cache needs) after ``history`` frames."""
    torch.set_num_threads(threads)
    chunk, shape = generator.streaming.chunk, generator.latent_shape
    script = Script(generator.script(["a red ball rolls left"]).texts)
    denoiser = Denoiser(network, Window(chunk, None, 0), script, fixed=True)
    x, past = torch.zeros(1, *shape), torch.zeros(1, history, *shape[1:])
    context = denoiser.enter(denoiser.start())
    if cache:
        for start in range(0, history, chunk):
            context = denoiser.enter(denoiser.refresh(past[:, start : start + chunk], context))
    begun = time.perf_counter()
    for level in generator.streaming.levels:
        if cache:
            denoiser.denoise(x, level, context)
        else:
            levels = torch.cat([torch.zeros(1, history), torch.full((1, chunk), level)], 1)
            network(torch.cat([past, x], 1), levels, context)
    if cache:
        denoiser.refresh(x, context)
    return time.perf_counter() - begun


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", nargs="?", default="tiny")
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--history", type=int, nargs="+")
    args = parser.parse_args()
    generator = Generator.load(args.generator)
    if args.history:
        network = without_places(generator)
        for n in args.threads:
            for history in args.history:
                cases = {name: partial(chunk_seconds, generator, network, history, n, name == "cache")
                         for name in ("cache", "every frame again")}  # fmt: skip
                found = alternate(cases, args.repeats)
                report(f"one chunk after {history} frames, {n} thread(s)", found, dict.fromkeys(found, 3))
        return
    torch._dynamo.config.recompile_limit = 64  # thread counts, batches and first chunks each compile again
    blocks = {"": None, ", compiled": torch.compile(module._block)} if args.compile else {"": None}
    for streams in args.streams:
        cases = {f"{n} thread(s){how}": partial(stream_seconds, generator, streams, args.frames, n, block)
                 for n in args.threads for how, block in blocks.items()}  # fmt: skip
        found = alternate(cases, args.repeats)
        title = f"{args.generator}, {streams} stream(s) of {args.frames} frames"
        report(title, found, dict.fromkeys(found, streams * args.frames))


if __name__ == "__main__":
    main()
