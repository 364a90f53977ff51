"""What every objective costs on the tiny generator: seconds, shares, memory, and what its graphs hold.

    python tools/bench_objectives.py [--objectives nft pairs ...] [--prompts 1] [--repeats 2] [--json out.json]

Times are of real iterations of the recipes, on one thread, with ``--prompts`` groups each (the recipes have 8):
seconds per scored video (rollout, decoding, reward) and per update (with dmd's critic and teacher), the share of each
part, and the estimate of --dry-run over them. Bytes need no idle machine: those that one loss saves for its backward
(distinct tensors), for videos of 12, 24 and 48 frames; KV routing with all branches in one forward, and fewer at a
time; the most that is allocated in a rollout and an update (every allocation is followed) against the estimate. A fork
group of 8 is timed against 8 whole rollouts, in turn. Prints tables, and with --json writes the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import Tensor

from arvideo_rl.config import load
from arvideo_rl.objectives.record import Record
from arvideo_rl.training import cost, memory
from arvideo_rl.training.align import Run
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.settings import AlignConfig
from samplers.exploration import draws

RECIPES = {
    "nft": "tiny_nft", **{k: f"{k}_tiny" for k in ("cm_grpo", "flow_grpo", "dance_grpo", "cps_grpo", "flow_dppo",
                                                   "tempact", "chunk_fork", "kv_routing", "fpo", "pairs", "dmd")},
}  # fmt: skip
LENGTHS = (12, 24, 48)
SHORTEST = {"kv_routing": 18}  # a fork needs a full window and older frames
LONGEST = {"dmd": 18}  # what its teacher reads
GROUP = 8  # of the fork that is timed against whole rollouts


def run_of(recipe: str, *items: str) -> Run:
    """A run of a recipe that writes nothing."""
    return Run(load(AlignConfig, f"align/{recipe}", list(items)), Accelerator(cpu=True))


def rollouts(run: Run, rows: list[int]) -> tuple[Record, Prompts]:
    """Branches of so many groups as an update takes them; where teacher and critic would have to say something of
    them, they say nothing."""
    record, prompts = run._rollouts(rows)
    return (replace(record, towards=torch.zeros_like(record.latents)) if run.critic else record), prompts


def graph_bytes(run: Run, record: Record) -> list[int]:
    """Bytes of the distinct tensors that each loss of one micro-batch saves for its backward, weights left out."""
    config, objective = run.config, run.objective
    part = record.rows(slice(0, config.group if objective.exploration.forks else config.update_batch))
    pivot = part.steps.one_first() if objective.exploration.forks and part.steps is not None else None
    draw = draws(objective.exploration, part.keys, run.generator.latent_shape, part.latents.device, pivot)
    denoiser = run.generator.denoiser(run.policies, part.script, draw)
    chunks = config.frames // run.generator.streaming.chunk
    adv = torch.linspace(-1, 1, len(part))[:, None].expand(-1, chunks)
    weights = {p.untyped_storage().data_ptr() for p in run.generator.transformer.parameters()}
    held: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return x

    out = []
    losses = objective.losses(run.policies, denoiser, part, adv, run.generator.streaming.levels)
    while True:
        held.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            found = next(losses, None)
        if found is None:
            return out
        out.append(sum(held.values()))
        found[0].backward()
        run.optimizer.zero_grad(set_to_none=True)


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes allocated at one moment of ``work`` above those before it, and what it returns."""
    with torch.autograd.profiler.profile(profile_memory=True) as prof:
        result = work()
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.kineto_results.events() if e.name() == "[memory]")
    total = most = 0
    for _, change in events:
        total += change
        most = max(most, total)
    return most, result


def measured_memory(run: Run) -> dict[str, tuple[int, int]]:
    """(estimated, measured) bytes of the rollout and of the update, without pixels."""
    trainable = sum(p.numel() for p in run.policies.parameters().values())
    told = memory.phases(run.config, run.generator, trainable)
    rows = list(range(run.config.prompts_per_step))
    in_rollout, (record, prompts) = peak(lambda: rollouts(run, rows))
    adv = torch.randn(len(record), run.config.frames // run.generator.streaming.chunk)

    def update() -> None:
        if run.critic is not None:
            run.critic.learn(record, prompts, run.config.update_batch, run.accelerator)
        run._update(record, adv)

    update()  # the optimizer's moments are there from the second on
    in_update, _ = peak(update)
    critic = [] if run.critic is None else [run.critic]
    moments = [v for o in (run, *critic) for s in o.optimizer.state.values() for v in s.values() if v.ndim]
    policies = [run.policies, *(c.policies for c in critic)]
    networks = [n for p in policies for n in (p.model, *getattr(p, "_copies", {}).values())]
    static = sum(x.nbytes for x in [*(p for n in networks for p in n.parameters()), *moments])
    kept = record.latents.nbytes + sum(t.nbytes for _, t in record.script.texts)
    kept += 0 if record.steps is None else record.steps.x.nbytes + record.steps.x0.nbytes
    estimated = {k: sum(v for name, v in parts.items() if name != "pixels") for k, parts in told.items()}
    return {
        "rollout": (estimated["rollout"], static + in_rollout),
        "update": (estimated["update"], static + kept + in_update),
    }


def seconds(run: Run, repeats: int) -> dict[str, float]:
    """Median seconds of the parts of an iteration, the first left out."""
    rows = [run.step() for _ in range(repeats + 1)][1:]
    return {k: statistics.median(r[f"seconds/{k}"] for r in rows) for k in ("rollout", "reward", "update")}


def fork_ratio(frames: int, repeats: int) -> dict[str, float]:
    """A fork group's rollout over as many whole ones: of seconds, in turn, and of products (mean over pivots)."""
    items = [f"group={GROUP}", f"frames={frames}", f"rollout_batch={GROUP}", "prompts_per_step=4"]
    runs = [run_of(name, *items) for name in ("chunk_fork_tiny", "tiny_nft")]
    each: list[list[float]] = [[], []]
    for _ in range(repeats + 1):
        for run, found in zip(runs, each):
            begun = time.perf_counter()
            run._rollouts([0, 1, 2, 3])
            found.append(time.perf_counter() - begun)
    products = [cost.flops(run.config, run.generator)["rollout"] for run in runs]
    return {"frames": frames, "seconds": statistics.median(a / b for a, b in list(zip(*each))[1:]),
            "products": products[0] / products[1]}  # fmt: skip


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print one."""
    out = Table(*columns, title=title, title_justify="left")
    for row in rows:
        out.add_row(*row)
    Console(width=120).print(out)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objectives", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of every recipe")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in args.objectives:
        run = run_of(RECIPES[name], *args.set, f"prompts_per_step={args.prompts}")
        parts = seconds(run, args.repeats)
        total, videos = sum(parts.values()), args.prompts * run.config.group
        counted = cost.flops(run.config, run.generator)
        found[name] = {
            "videos": videos, "seconds": parts, "counted": counted, "memory": measured_memory(run),
            "per_video": (parts["rollout"] + parts["reward"]) / videos,
            "per_update": parts["update"] / run.config.updates,
            "estimated": sum(counted.values()) / cost.product_speed(run.generator) / cost.REACHED, "total": total,
        }  # fmt: skip
        saved = {}
        for length in LENGTHS:
            frames = min(max(length, SHORTEST.get(name, 0)), LONGEST.get(name, 1000))
            long = run_of(RECIPES[name], *args.set, "prompts_per_step=1", f"frames={frames}")
            saved[frames] = max(graph_bytes(long, rollouts(long, [0])[0]))
        found[name]["saved"] = saved
    mib = 2**20
    table(f"seconds, {args.prompts} group(s) an iteration, one thread",
          ["", "videos", "a scored video", "an update", "rollout", "reward", "update", "products", "estimated"],
          [[k, str(r["videos"]), f"{r['per_video']:.3f}", f"{r['per_update']:.2f}",
            *(f"{r['seconds'][p] / r['total']:.0%}" for p in ("rollout", "reward", "update")),
            f"{cost.number(sum(r['counted'].values()))}FLOP", f"{r['estimated'] / r['total']:.2f}"]
           for k, r in found.items()])  # fmt: skip
    table("MiB that one loss saves, by frames of the video; and memory, estimated over measured",
          ["", "saved", "rollout", "update"],
          [[k, ", ".join(f"{n}: {v / mib:.1f}" for n, v in r["saved"].items()),
            *(f"{a / b:.2f}" for a, b in r["memory"].values())] for k, r in found.items()])  # fmt: skip
    if "kv_routing" in args.objectives:
        routed = {}
        for size in ("null", "2", "1"):
            run = run_of("kv_routing_tiny", *args.set, "prompts_per_step=1", f"objective.args.at_once={size}")
            routed[size] = max(graph_bytes(run, run._rollouts([0])[0]))
        found["kv_routing"]["at_once"] = routed
        print("KV routing, MiB of one graph: " + ", ".join(f"at_once={k} {v / mib:.1f}" for k, v in routed.items()))
    if "chunk_fork" in args.objectives:
        forks = [fork_ratio(n, args.repeats) for n in LENGTHS]
        found["chunk_fork"]["fork_of_8"] = forks
        told = (
            f"{r['frames']} frames {r['seconds']:.2f} of the seconds, {r['products']:.2f} of the products"
            for r in forks
        )
        print(f"a fork group of {GROUP} over {GROUP} whole rollouts: {'; '.join(told)}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
