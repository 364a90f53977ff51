"""Start or continue an alignment run: run directory, loop, checkpoints, held-out comparison."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.hub import NotHere
from arvideo_rl.generators.policies import trained_parameters
from arvideo_rl.progress import hidden
from arvideo_rl.training import rundir
from arvideo_rl.training.align import Run
from arvideo_rl.training.asked import asked_for
from arvideo_rl.training.axes import Axes
from arvideo_rl.training.checkpoints import best, sync, tidy
from arvideo_rl.training.compare import Measured, compare
from arvideo_rl.training.cost import told
from arvideo_rl.training.export import export
from arvideo_rl.training.interrupt import Alarmed, Stop
from arvideo_rl.training.memory import estimate
from arvideo_rl.training.outcome import finish
from arvideo_rl.training.probe import measure_shared
from arvideo_rl.training.settings import FREE_ON_RESUME, AlignConfig, fixed, notes, plan, weights_of
from arvideo_rl.training.watch import Watch, check_alarm


def align(config: AlignConfig, given: str | None = None) -> Path:
    """Run ``config`` to its last iteration, from the newest checkpoint if there is one, and compare held out.
    Returns the run directory; a finished run is left as it is. ValueError when the directory belongs to another
    configuration; Interrupted, after saving, on Ctrl-C or SIGTERM."""
    folder = Path(config.out) / config.name
    with Stop(f"arvideo align {folder / 'config.yaml'}") as stop:
        return _align(config, folder, given, stop)


def _align(config: AlignConfig, folder: Path, given: str | None, stop: Stop) -> Path:
    accelerator = accelerate_on_known_ground()
    resolved = dataclasses.asdict(config)
    begun = rundir.look(folder, "align", fixed(config), FREE_ON_RESUME)
    if text := _finished(folder, config):
        accelerator.print(text)
        return folder
    if begun:
        check_alarm(folder, config.alarm)
    run = Run(config, accelerator)  # refuses what cannot run before the directory is touched
    accelerator.print(run.kernel)
    for text in notes(config, run.generator):
        accelerator.print(f"note: {text}")
    last = run.restore(folder) if begun else None
    if last is not None:
        accelerator.print(f"continuing {folder} after iteration {run.iteration}")
    accelerator.wait_for_everyone()  # all have read before one tidies up
    main = accelerator.is_main_process
    if main:
        rundir.claim(folder, "align", fixed(config), FREE_ON_RESUME)
        tidy(folder, last, config.keep_last)
        rundir.start(folder, given, resolved)
    before = _held_out(run, folder / "held_out_before.safetensors", "measuring before")
    accelerator.wait_for_everyone()
    metrics = rundir.Metrics(folder, run.iteration) if main else None
    axes = Axes(folder, run.iteration) if main else None
    accelerator.wait_for_everyone()  # the watch reads what was kept of the rows
    run.replay()  # is recorded here, where an interrupt loses nothing
    watch = Watch(run, folder)
    bar = Progress(
        TextColumn("aligning"), BarColumn(), TextColumn("{task.completed}/{task.total} {task.description}"),
        TimeRemainingColumn(), disable=not main or hidden(),
    )  # fmt: skip
    with bar, stop.later():
        task = bar.add_task("", total=config.iterations, completed=run.iteration)
        while run.iteration < config.iterations:
            values = run.step()
            score, rang = watch.see(values)
            line = " ".join(
                f"{k.removeprefix('reward/')} {v:.3f}"
                for k, v in values.items()
                if k.count("/") == 1 and k[:7] == "reward/"
            )
            bar.update(task, advance=1, description=line)
            if metrics and axes:
                metrics.write(run.iteration - 1, values)
                axes.write(run.iteration - 1, run.table)
                if bar.disable:
                    print(
                        f"iteration {run.iteration}/{config.iterations} {line} kl {values.get('train/kl', 0):.4f}",
                        flush=True,
                    )
            stopping = stop.asked(accelerator) or (rang and config.alarm == "stop")
            if stopping or run.iteration % config.checkpoint_every == 0 or run.iteration == config.iterations:
                run.check_processes()
                if metrics and axes:
                    metrics.sync()
                    axes.sync()
                    run.save(folder, score)
            if stopping:
                watch.close()
                accelerator.wait_for_everyone()  # or torchrun would end the process that saves, once another has left
                if rang and config.alarm == "stop":
                    raise Alarmed(folder, run.iteration, best(folder) is not None)
                raise stop.interrupted(f"saved after iteration {run.iteration} of {config.iterations}")
    watch.close()
    if metrics and axes:
        metrics.close()
        axes.close()
    after = _held_out(run, None, "measuring after")
    if main:
        prompts = run.held_out
        weights = {name: weight for name, weight in weights_of(config).items() if weight}
        result = compare(before, after, weights, config.held_out)
        facts = {"name": config.name, "seed": config.seed, "iterations": run.iteration,
                 "seconds": round(run.seconds, 1), "alarms": watch.alarms()}  # fmt: skip
        if config.policy.kind == "lora":
            export(str(folder), folder / "adapter", "diffusers")
        finish(folder, result, facts, before, after, prompts, run.generator.streaming.fps)
    accelerator.wait_for_everyone()
    return folder


def accelerate_on_known_ground() -> Accelerator:
    """CUDA where there is one, else the CPU; other accelerators (MPS) lack the float64 that positions and times use."""
    return Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")


def dry_run(config: AlignConfig) -> dict[str, str]:
    """Everything short of running: build all parts, refuse what cannot work, return derived sizes by name. Of a
    published Wan whose weights are not here, what follows from its sizes."""
    folder = Path(config.out) / config.name
    begun = rundir.look(folder, "align", fixed(config), FREE_ON_RESUME)
    accelerator = accelerate_on_known_ground()
    try:
        run = Run(config, accelerator)
    except NotHere as error:
        return _without_weights(config, accelerator.num_processes, error)
    trainable = sum(p.numel() for p in run.policies.parameters().values())
    sizes = plan(config, run.generator, trainable, run.memory, told(config, run.generator))
    sizes["attention"] = run.kernel.removeprefix("attention ")
    sizes |= {f"note {i}": text for i, text in enumerate(notes(config, run.generator), 1)}
    if config.replay.path:
        there = Path(config.replay.path).exists()
        sizes["replay"] = f"{config.replay.groups} groups in {config.replay.path}" + (
            "" if there else ", to be recorded"
        )
    if text := _finished(folder, config):
        sizes["state"] = text
    elif begun and run.restore(folder):
        sizes["state"] = f"would continue after iteration {run.iteration}"
    return sizes


def _without_weights(config: AlignConfig, processes: int, missing: NotHere) -> dict[str, str]:
    """What a configuration comes to by the sizes of its generator alone; ``missing`` where those are not known."""
    try:
        generator = Generator.outline(config.generator)
    except ValueError:
        raise missing from None
    lacking: list[str] = []
    asked_for(config, generator, processes, lacking)
    trainable = trained_parameters(generator.transformer, config.policy)
    needed = estimate(config, generator, trainable, processes)
    sizes = plan(config, generator, trainable, needed, told(config, generator))
    sizes |= {f"note {i}": text for i, text in enumerate(notes(config, generator), 1)}
    sizes |= {f"weights of {text.partition(':')[0]}": text.partition(": ")[2] for text in lacking}
    return sizes | {"weights": f"{missing} - the rest is from the published sizes"}


def _finished(folder: Path, config: AlignConfig) -> str:
    """What to tell the user of a run that has done its iterations; empty while it has not."""
    path = folder / "summary.json"
    done = rundir.read_json(path, "iterations")["iterations"] if path.exists() else 0
    if done < config.iterations:
        return ""
    return f"{folder} is finished after {done} iterations: see {path}; a larger iterations= continues it"


def _held_out(run: Run, cache: Path | None, title: str) -> Measured:
    """Measure held out: with a ``cache`` the start point, once (an interrupted run reads it back), else the trained."""
    if cache is not None and cache.exists():
        try:
            return Measured.from_tensors(load_file(cache))
        except (SafetensorError, KeyError) as error:
            run.accelerator.print(f"{cache} is damaged ({error}); measuring again, which gives the same")
    found = measure_shared(run, run.held_out, run.config.held_out, "start" if cache else "current", title)
    for name, values in found.values.items():
        if name.startswith("reward/") and values.isnan().all():
            raise ValueError(f"{name} could score no held-out video ({title}); the same command tries again")
    if cache is not None and run.accelerator.is_main_process:
        draft = cache.with_suffix(".tmp")
        save_file(found.tensors(), draft)
        sync(draft)
        draft.replace(cache)
    return found


def quiet() -> None:
    """Silence library chatter that says nothing to a user."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    for name in ("diffusers", "transformers", "accelerate", "peft"):
        logging.getLogger(name).setLevel(logging.ERROR)
