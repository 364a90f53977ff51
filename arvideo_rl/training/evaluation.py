"""Measure one generator on the held-out prompts, or two and compare them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arvideo_rl.config import check_choice
from arvideo_rl.generators.attention import choose
from arvideo_rl.outputs import check_file
from arvideo_rl.training.aligned import load_any
from arvideo_rl.training.compare import HeldOut, Measured, check_held_out, compare, measure
from arvideo_rl.training.prompts import STYLES, held_out_prompts
from arvideo_rl.world.verify import frechet
from rewards import registry
from rewards.contract import Reward
from rewards.inverse_dynamics import InverseDynamics


@dataclass
class EvaluateConfig:
    """What ``arvideo evaluate`` reads."""

    generator: str = "tiny"  # a shipped name, a generator folder, a run, RUN@best or RUN@STEP
    against: str = ""  # measure this one too, as "before"
    style: str = "joystick"  # actions of the held-out prompts: joystick or smooth
    reward: str = "inverse_dynamics"  # a short name (arvideo rewards list) or module:attribute
    args: dict[str, Any] = field(default_factory=lambda: {"score": "expected_accuracy"})  # arguments of the reward
    attention: str = "native"  # kernel: native, math, cudnn, flex, flash, flash3, sage, xformers (arvideo doctor)
    out: str = ""  # also write the numbers here, as .json
    held_out: HeldOut = field(default_factory=HeldOut)  # its margins are of the comparison with against=


@dataclass(frozen=True)
class Job:
    """A measurement that can be made: loaded and checked."""

    config: EvaluateConfig
    reward: Reward
    loaded: list[tuple[str, Any]]  # (source, what load_any gave), "before" first
    kernel: str  # that computes attention


def prepare(config: EvaluateConfig) -> Job:
    """Load and check; ConfigError or ValueError for what cannot be measured or written. Writes nothing."""
    check_held_out(config.held_out)
    check_choice("style", config.style, STYLES)
    if config.out:
        check_file(Path(config.out), suffixes=(".json",))
    reward = registry.build(config.reward, **config.args)
    registry.prepare(reward)
    loaded = [(s, load_any(s)) for s in (config.against, config.generator) if s]
    said = [choose(model, config.attention, masked=g.streaming.past_weight < 1) for _, (g, model, _) in loaded]
    return Job(config, reward, loaded, said[-1])


@torch.no_grad()
def run(job: Job) -> dict[str, Any]:
    """Measure. With ``against`` the comparison as :func:`compare` gives it, else value, standard error and number of
    prompts by name."""
    config, size = job.config, job.config.held_out
    prompts = held_out_prompts(size.prompts, size.frames, config.style, size.skip)
    rewards = {config.reward: (job.reward, 1.0)}
    found = [measure(g, m, prompts, rewards, size, f"measuring {s}") for s, (g, m, _) in job.loaded]
    if config.against:
        return compare(found[0], found[1], {config.reward: 1.0}, size)
    return alone(found[0])


def alone(found: Measured) -> dict[str, dict[str, float]]:
    """Value, standard error clustered by prompt, and number of prompts of every measure; NaN prompts are left out."""
    out = {}
    for key, value in found.values.items():
        by_prompt = value.double().nanmean(1)
        by_prompt = by_prompt[~by_prompt.isnan()]
        n = len(by_prompt)
        se = by_prompt.std().item() / math.sqrt(n) if n > 1 else math.nan
        out[key] = {"value": by_prompt.mean().item(), "se": se, "n": n}
    distance = frechet(found.features.flatten(0, -2), *InverseDynamics("idm_heldout").frechet_reference)
    out["frechet"] = {"value": distance, "n": len(found.features)}
    return out
