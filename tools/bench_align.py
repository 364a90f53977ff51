"""Seconds of an alignment iteration: rollout, reward, update.

    python tools/bench_align.py [recipe] [key=value ...] [--threads 1 2] [--repeats 3]

Runs real iterations of the recipe (align/tiny_nft) on the CPU, writes nothing. Thread counts alternate within the run:
trust the ratios. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
from accelerate import Accelerator

from arvideo_rl.config import load
from arvideo_rl.training.align import Run
from arvideo_rl.training.settings import AlignConfig

PARTS = ("rollout", "reward", "update")


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="align/tiny_nft")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    run = Run(load(AlignConfig, args.recipe, args.overrides), Accelerator(cpu=True))
    found: dict[int, list[dict[str, float]]] = {n: [] for n in args.threads}
    for repeat in range(args.repeats + 1):
        for threads in args.threads:
            torch.set_num_threads(threads)
            metrics = run.step()
            if repeat:  # the first round warms up; from the second iteration on the old policy lags where lag says so
                found[threads].append({k: metrics[f"seconds/{k}"] for k in PARTS})
    branches = run.config.prompts_per_step * run.config.group
    print(f"{args.recipe}: {branches} branches of {run.config.frames} frames; median seconds [least, most], over 1st")
    for threads, rows in found.items():
        for part in PARTS:
            seconds, first = ([r[part] for r in x] for x in (rows, found[args.threads[0]]))
            ratio = statistics.median(s / f for s, f in zip(seconds, first))
            print(f"  {threads} thread(s) {part:<8}{statistics.median(seconds):8.2f} "
                  f"[{min(seconds):.2f}, {max(seconds):.2f}] {ratio:6.2f}")  # fmt: skip
    print(json.dumps({str(k): v for k, v in found.items()}))


if __name__ == "__main__":
    main()
