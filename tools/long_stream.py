"""Does a long stream drift? Streams prompts under joystick commands and prints every segment's numbers.

    python tools/long_stream.py [generator | run | checkpoint] [--frames 4800] [--segment 300] [--streams 4]
        [--window 9 --sink 0] [--positions absolute]

The last three stream with another cache policy than the generator was made for, to see what it owes to its own.
Exits 1 when brightness, contrast or edge energy of a segment leave the first by more than 15 %, or action accuracy of
the last falls below 0.8 of the first. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

import torch

from arvideo_rl.training.aligned import load_any
from arvideo_rl.training.drift import long_actions, segments, verdict
from arvideo_rl.training.prompts import held_out_prompts


def main() -> None:
    """Parse, stream, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", nargs="?", default="tiny")
    parser.add_argument("--frames", type=int, default=4800)
    parser.add_argument("--segment", type=int, default=300)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--style", default="joystick", choices=["joystick", "smooth"])
    parser.add_argument("--window", type=int)
    parser.add_argument("--sink", type=int)
    parser.add_argument("--positions", choices=["adjacent", "absolute"])
    args = parser.parse_args()
    generator, model, loaded = load_any(args.generator)
    other = {k: getattr(args, k) for k in ("window", "sink", "positions") if getattr(args, k) is not None}
    generator.streaming = replace(generator.streaming, **other)
    prompts = held_out_prompts(args.streams, 18, args.style, skip=1000)
    actions = long_actions(args.streams, args.frames, args.style)
    with torch.no_grad():
        found = segments(generator, model, prompts, actions, args.segment)
    s = generator.streaming
    print(f"{loaded}; {args.streams} streams, window {s.window}, sink {s.sink} {s.positions}; means over streams")
    print(f"{'frames':>12}" + "".join(f"{name:>12}" for name in found[0]))
    for i, values in enumerate(found):
        span = f"{i * args.segment}-{min((i + 1) * args.segment, args.frames)}"
        print(f"{span:>12}" + "".join(f"{v.mean():12.4f}" for v in values.values()))
    drifted = verdict(found)
    print("; ".join(drifted) if drifted else "no drift: every segment within 15 % of the first, commands still obeyed")
    print(json.dumps([{k: v.tolist() for k, v in values.items()} for values in found]))
    sys.exit(1 if drifted else 0)


if __name__ == "__main__":
    main()
