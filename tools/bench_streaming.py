"""Frames per second of a generator when streaming: one stream and many, repeated, with the spread.

    python tools/bench_streaming.py [generator] [--frames 48] [--streams 1 32] [--threads 1 2] [--repeats 5]

Prints a table and one JSON line. Settings alternate within the run, so that a busy machine hits all of them alike;
compare the ratios, not the absolute figures of two runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Denoiser
from samplers.randomness import Key
from samplers.stream import draw_from, stream


def seconds(generator: Generator, streams: int, frames: int) -> float:
    """Wall time to stream ``frames`` frames of ``streams`` videos, decoding included."""
    settings = generator.streaming
    actions = torch.ones(streams, frames, dtype=torch.long)
    takes_actions = generator.transformer.action_embedding is not None
    window = settings.attention_window()
    begun = time.perf_counter()
    script = generator.script(["a red ball rolls left"] * streams, actions if takes_actions else None)
    draw = draw_from([Key(0, branch=i) for i in range(streams)], generator.latent_shape)
    denoiser = Denoiser(generator.transformer, window, script, fixed=True)
    for chunk in stream(denoiser, window.chunks(frames), settings.levels, draw):
        generator.codec.decode(chunk.latents)
    return time.perf_counter() - begun


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", nargs="?", default="tiny")
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    generator = Generator.load(args.generator)
    cases = [(t, s) for t in args.threads for s in args.streams]
    found: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    for repeat in range(args.repeats + 1):
        for threads, streams in cases:
            torch.set_num_threads(threads)
            rate = streams * args.frames / seconds(generator, streams, args.frames)
            if repeat:  # the first round warms up
                found[threads, streams].append(rate)
    print(f"{args.generator}, {args.frames} frames a stream, {args.repeats} repeats: median frames/s [least, most]")
    rows = []
    for (threads, streams), rates in found.items():
        row = {
            "threads": threads,
            "streams": streams,
            "median": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
        }
        rows.append(row)
        spread = f"[{row['least']:.1f}, {row['most']:.1f}]"
        print(f"  {threads} thread(s), {streams:>3} stream(s): {row['median']:7.1f} {spread}")
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
