"""Load what a command is pointed at: a shipped generator, a generator folder, or a checkpoint of a run.

``runs/x`` is the newest checkpoint of a run, ``runs/x@best`` the one with the highest score, ``runs/x@40`` that of step
40; the folder of a checkpoint names it too.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from arvideo_rl.config import ConfigError, load
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import adapt
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.training.align import base_of
from arvideo_rl.training.checkpoints import check_base, newest, pick, read_state, read_tensors
from arvideo_rl.training.rundir import read_json
from arvideo_rl.training.settings import AlignConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Aligned:
    """A trained policy: its generator's transformer carries the adapter ``current``, or the trained weights."""

    generator: Generator
    config: AlignConfig
    checkpoint: Path
    base: dict  # what base_of says of the untrained generator
    tensors: int  # that were loaded


def load_any(source: str) -> tuple[Generator, CausalWan, str]:
    """(generator, model to call, one line that says what was loaded) for any ``source`` above."""
    folder, which = split(source)
    run = run_of(folder)
    if run is None or kind_of(run) == "distill":
        if which or (run and run != folder):  # a distillation has one result, whatever its checkpoints
            known = "a shipped name, a generator folder, a run, or RUN@best" if run is None else str(run)
            raise ConfigError(f"no alignment checkpoint at {source!r}; give {known}")
        if run and not (run / "generator" / "generator.json").is_file():
            raise ConfigError(f"{run} has not finished: continue with arvideo distill {run / 'config.yaml'}")
        generator = Generator.load(run / "generator" if run else source).to(DEVICE)
        return generator, generator.transformer, f"generator {source}: {generator.said}"
    found = load_aligned(source)
    text = f"generator {found.config.generator} aligned by {found.checkpoint} ({found.tensors} tensors of "
    return found.generator, found.generator.transformer, f"{text}{found.config.policy.kind})"


def load_aligned(source: str) -> Aligned:
    """The policy of an alignment run's checkpoint. ValueError when there is none, when it is damaged and was asked for
    by name, or when it was made on another base; a damaged newest one is told on stderr and the one before is taken."""
    config = config_of(source)
    generator = Generator.load(config.generator).to(DEVICE)
    base = base_of(generator.transformer, config.policy)
    path, tensors = _current(source, base, f"generator {config.generator}")
    adapt(generator.transformer, config.policy, tensors)
    return Aligned(generator, config, path, base, len(tensors))


def add_policy(policy: Aligned, source: str, scale: float) -> Path:
    """Add ``scale`` times what the run ``source`` changed to ``policy``, in place; returns its checkpoint. Both must
    have trained LoRA adapters, of any rank, on the same base."""
    config = config_of(source)
    if "full" in (config.policy.kind, policy.config.policy.kind):
        raise ConfigError(f"{source} cannot be added to {policy.checkpoint}: both must have policy.kind=lora")
    shape = {"rank": config.policy.rank, "alpha": config.policy.alpha, "targets": list(config.policy.targets)}
    path, tensors = _current(source, policy.base | shape, f"the base of {policy.checkpoint}")
    model = policy.generator.transformer
    adapt(model, config.policy, tensors, "added")
    model.set_adapters(["current", "added"], [1.0, scale])
    return path


def config_of(source: str) -> AlignConfig:
    """What the alignment run of ``source`` was told; ConfigError when it is none."""
    run = run_of(split(source)[0])
    if run is None or kind_of(run) != "align":
        raise ConfigError(f"{source!r} is not an alignment run or a checkpoint of one")
    return load(AlignConfig, str(run / "config.yaml"), [])


def _current(source: str, base: dict, where: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """The checkpoint that ``source`` names and the tensors of its trained policy, which must be of ``base``."""
    folder, which = split(source)
    run = run_of(folder)
    assert run is not None

    def read(path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
        state = read_state(path)
        check_base(path, state, base, where)
        return path, read_tensors(path, state, "current/")

    if folder != run:
        found = read(folder)
    elif which not in ("", "newest"):
        found = read(pick(run, which))
    else:
        found = newest(run, read, lambda line: print(f"arvideo: {line}", file=sys.stderr))
    if found is None:
        raise ConfigError(f"{run} has no complete checkpoint yet")
    return found[0], {k.removeprefix("current/"): v for k, v in found[1].items()}


def split(source: str) -> tuple[Path, str]:
    """Folder and what stands behind its last @, if a folder is not called that itself."""
    name, at, which = source.rpartition("@")
    return (Path(name), which) if at and not Path(source).exists() else (Path(source), "")


def run_of(folder: Path) -> Path | None:
    """The run directory that ``folder`` is or, as a checkpoint, lies in."""
    for run in (folder, folder.parent.parent if folder.parent.name == "checkpoints" else folder):
        if (run / "config.yaml").is_file():
            return run
    return None


def kind_of(run: Path) -> str:
    """What kind of run a directory belongs to."""
    stamp = run / "identity.json"
    return read_json(stamp, "kind")["kind"] if stamp.is_file() else "align"
