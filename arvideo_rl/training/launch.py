"""Start or continue an alignment run: run directory, loop, checkpoints, held-out comparison."""

from __future__ import annotations

import dataclasses
import json
import logging
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file, save_file

from arvideo_rl.config import ConfigError
from arvideo_rl.progress import hidden
from arvideo_rl.training import rundir
from arvideo_rl.training.align import Run
from arvideo_rl.training.compare import Measured, compare, measure
from arvideo_rl.training.outcome import finish
from arvideo_rl.training.prompts import Prompts, held_out_prompts
from arvideo_rl.training.settings import FREE_ON_RESUME, AlignConfig, plan


def align(config: AlignConfig, given: str | None = None) -> Path:
    """Run ``config`` to its last iteration, from the newest checkpoint if there is one, and compare held out.
    Returns the run directory. ConfigError when the directory belongs to another configuration or is finished."""
    accelerator = accelerate_on_known_ground()
    folder = Path(config.out) / config.name
    resolved = dataclasses.asdict(config)
    last = rundir.look(folder, "align", resolved, FREE_ON_RESUME)
    _refuse_finished(folder, config)
    run = Run(config, accelerator)  # refuses what cannot run before the directory is touched
    if last is not None:
        run.restore(last)
        accelerator.print(f"continuing {folder} after iteration {run.iteration}")
    main = accelerator.is_main_process
    if main:
        rundir.claim(folder, "align", resolved, FREE_ON_RESUME)
        rundir.start(folder, given, resolved)
    before = _held_out(run, folder / "held_out_before.safetensors", "measuring before")
    accelerator.wait_for_everyone()
    metrics = rundir.Metrics(folder, run.iteration) if main else None
    bar = Progress(
        TextColumn("aligning"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeRemainingColumn(), disable=not main or hidden(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=config.iterations, completed=run.iteration)
        while run.iteration < config.iterations:
            values = run.step()
            line = " ".join(
                f"{k.removeprefix('reward/')} {v:.3f}"
                for k, v in values.items()
                if k.count("/") == 1 and k[:7] == "reward/"
            )
            bar.update(task, advance=1, description=line)
            if metrics:
                metrics.write(run.iteration - 1, values)
                if bar.disable:
                    print(
                        f"iteration {run.iteration}/{config.iterations} {line} kl {values.get('train/kl', 0):.4f}",
                        flush=True,
                    )
                if run.iteration % config.checkpoint_every == 0 or run.iteration == config.iterations:
                    run.save(folder)
    if metrics:
        metrics.close()
    after = _held_out(run, None, "measuring after")
    if main:
        prompts = _prompts(config)
        weights = {name: part.weight for name, part in config.rewards.items()}
        result = compare(before, after, weights, config.held_out)
        facts = {
            "name": config.name,
            "seed": config.seed,
            "iterations": run.iteration,
            "seconds": round(run.seconds, 1),
        }
        finish(folder, result, facts, before, after, prompts, run.generator.streaming.fps)
    accelerator.wait_for_everyone()
    return folder


def accelerate_on_known_ground() -> Accelerator:
    """CUDA where there is one, else the CPU; other accelerators (MPS) lack the float64 that positions and times use."""
    return Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")


def dry_run(config: AlignConfig) -> dict[str, str]:
    """Everything short of running: build all parts, refuse what cannot work, return derived sizes by name."""
    folder = Path(config.out) / config.name
    rundir.look(folder, "align", dataclasses.asdict(config), FREE_ON_RESUME)
    _refuse_finished(folder, config)
    run = Run(config, accelerate_on_known_ground())
    return plan(config, run.generator, sum(p.numel() for p in run.policies.parameters().values()))


def _refuse_finished(folder: Path, config: AlignConfig) -> None:
    done = folder / "summary.json"
    if done.exists() and json.loads(done.read_text(encoding="utf-8"))["iterations"] >= config.iterations:
        raise ConfigError(f"{folder} is finished; raise iterations= to continue it, or choose another name=")


def _prompts(config: AlignConfig) -> Prompts:
    """Held-out prompts: always the world's, with the style the run trains on."""
    size = config.held_out
    return held_out_prompts(size.prompts, size.frames, config.prompts.style, size.skip)


def _held_out(run: Run, cache: Path | None, title: str) -> Measured:
    """Measure held out: with a ``cache`` the start point, once (an interrupted run reads it back), else the trained."""
    if cache is not None and cache.exists():
        return Measured.from_tensors(load_file(cache))
    accelerator, prompts = run.accelerator, _prompts(run.config)
    n, i = accelerator.num_processes, accelerator.process_index
    mine = prompts.take(list(range(len(prompts)))[len(prompts) * i // n : len(prompts) * (i + 1) // n])
    with torch.no_grad(), run.policies.using("start" if cache else "current") as model:
        found = measure(run.generator, model, mine, run.rewards, run.config.held_out, title)
    found = Measured.join(gather_object([found]) if n > 1 else [found])
    if cache is not None and run.accelerator.is_main_process:
        draft = cache.with_suffix(".tmp")
        save_file(found.tensors(), draft)
        draft.replace(cache)
    return found


def quiet() -> None:
    """Silence library chatter that says nothing to a user."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("diffusers", "transformers", "accelerate", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)
