"""``arvideo evaluate``: the held-out measures of one generator, or of two compared."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load
from arvideo_rl.training.compare import HeldOut


@dataclass
class EvaluateConfig:
    """What ``arvideo evaluate`` reads."""

    generator: str = "tiny"  # a shipped name, a generator folder, a run, RUN@best or RUN@STEP
    against: str = ""  # measure this one too, as "before"
    style: str = "joystick"  # actions of the held-out prompts: joystick or smooth
    reward: str = "inverse_dynamics"
    args: dict[str, Any] = field(default_factory=lambda: {"score": "expected_accuracy"})  # arguments of the reward
    out: str = ""  # also write the numbers here, as .json
    held_out: HeldOut = field(default_factory=HeldOut)


def help_text() -> str:
    """Text of --help."""
    return f"""arvideo evaluate [key=value ...]

Generates the held-out prompts under fixed noises and measures the reward and every verifier. Examples:

  arvideo evaluate
  arvideo evaluate generator=runs/quickstart against=tiny
  arvideo evaluate generator=runs/quickstart@best against=runs/quickstart

keys and defaults
{keys(EvaluateConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Measure and print."""
    if words:
        raise UsageError(f"evaluate takes only key=value, not {words[0]!r}; e.g. generator={words[0]}")
    config = load(EvaluateConfig, None, items)
    import torch

    from arvideo_rl.progress import console
    from arvideo_rl.training.aligned import load_any
    from arvideo_rl.training.compare import compare, measure
    from arvideo_rl.training.launch import quiet
    from arvideo_rl.training.outcome import sentence, table
    from arvideo_rl.training.prompts import held_out_prompts
    from arvideo_rl.training.rundir import write_json
    from arvideo_rl.world.verify import frechet
    from rewards import registry
    from rewards.inverse_dynamics import InverseDynamics

    quiet()
    size = config.held_out
    if size.prompts < 4 or size.noises < 1 or size.frames < 3 or size.batch < 1 or size.skip < 0:
        raise UsageError("held_out needs prompts of 4 or more, noises and batch of 1 or more, frames of 3 or more")
    name = config.reward
    rewards = {name: (registry.build(name, **config.args), 1.0)}
    prompts = held_out_prompts(size.prompts, size.frames, config.style, size.skip)
    sources = [s for s in (config.against, config.generator) if s]
    loaded = [load_any(s) for s in sources]
    for _, _, text in loaded:
        print(text)
    if "--dry-run" in flags:
        print(f"would generate {size.prompts} prompts x {size.noises} noises x {size.frames} frames for each")
        return 0
    with torch.no_grad():
        found = [measure(g, m, prompts, rewards, size, f"measuring {s}") for (g, m, _), s in zip(loaded, sources)]
    if config.against:
        result = compare(found[0], found[1], {name: 1.0}, size)
        console().print(table(result, f"{config.generator} against {config.against}"))
        print(sentence(result))
    else:
        result = {}
        for key, value in found[0].values.items():
            by_prompt = value.double().nanmean(1)
            se = by_prompt.std().item() / math.sqrt(len(by_prompt))
            result[key] = {"value": by_prompt.mean().item(), "se": se, "n": len(by_prompt)}
            print(f"{key:<26} {result[key]['value']:8.4f} +- {se:.4f}")
        reference = InverseDynamics("idm_heldout").frechet_reference
        result["frechet"] = {"value": frechet(found[0].features.flatten(0, -2), *reference), "n": len(prompts)}
        print(f"{'frechet (lower is better)':<26} {result['frechet']['value']:8.4f}")
    if config.out:
        write_json(Path(config.out), result)
        print(f"wrote {config.out}")
    return 0
