"""Load what a command is pointed at: a shipped generator, a generator folder, or an alignment run (its policy)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from arvideo_rl.config import ConfigError, load
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import Policies
from arvideo_rl.generators.transformer import Prediction
from arvideo_rl.training import rundir
from arvideo_rl.training.settings import AlignConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load_any(source: str) -> tuple[Generator, Callable[..., Prediction], str]:
    """(generator, model to call, one line that says what was loaded). ``source`` is a shipped name, a generator
    folder, a run directory (its newest checkpoint) or one checkpoint folder of a run."""
    folder = Path(source)
    step = folder if folder.name.startswith("step-") else None
    run = folder.parent.parent if step else folder
    if not (run / "config.yaml").is_file():
        generator = Generator.load(source).to(DEVICE)
        return generator, generator.transformer, f"generator {source}"
    config = load(AlignConfig, str(run / "config.yaml"), [])
    found = rundir.checkpoints(run)
    if step is None and not found:
        raise ConfigError(f"{run} has no complete checkpoint yet")
    path = step or found[-1]
    generator = Generator.load(config.generator).to(DEVICE)
    policies = Policies(generator.transformer, config.policy, config.seed)
    tensors, _, state = rundir.load_checkpoint(path)
    policies.load_state(tensors, state["old_is_current"])
    text = (
        f"generator {config.generator} aligned by {path} ({len(policies.parameters())} tensors of {config.policy.kind})"
    )
    return generator, policies, text
