"""What the cache is worth: one chunk after so many frames with it, and with every frame computed again.

    python tools/bench_cache.py [generator] [--history 12 48 192] [--threads 1 2] [--repeats 5]

All frames are attended to; without a cache they are all computed again at every step, as generators without one do (the
place embedding left out: it knows one chunk only). Cases alternate within the run, so that a busy machine hits both
alike: trust the ratios, not the absolute figures. Prints a table and one JSON line per length.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.window import Window


def alternate(cases: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every case, ``repeats`` times in turn after one round that warms up."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, case in cases.items():
            seconds = case()
            if repeat:
                found[name].append(seconds)
    return found


def report(title: str, found: dict[str, list[float]]) -> None:
    """Median seconds [least, most], and the median ratio to the first case."""
    print(f"{title}: median seconds [least, most], seconds over those of the first case [least, most]")
    first = next(iter(found.values()))
    rows = []
    for name, seconds in found.items():
        median, ratios = statistics.median(seconds), [s / f for s, f in zip(seconds, first)]
        rows.append({"case": name, "seconds": seconds, "median": median, "ratio": statistics.median(ratios)})
        print(f"  {name:<38}{median:8.3f} [{min(seconds):.3f}, {max(seconds):.3f}]   "
              f"{rows[-1]['ratio']:6.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")  # fmt: skip
    print(json.dumps(rows))


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
    parser.add_argument("--history", type=int, nargs="+", default=[12, 48, 192])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    generator = Generator.load(args.generator)
    network = without_places(generator)
    for n in args.threads:
        for history in args.history:
            cases = {name: partial(chunk_seconds, generator, network, history, n, name == "cache")
                     for name in ("cache", "every frame again")}  # fmt: skip
            found = alternate(cases, args.repeats)
            report(f"one chunk after {history} frames, {n} thread(s)", found)


if __name__ == "__main__":
    main()
