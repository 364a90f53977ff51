"""Measure one generator on the held-out prompts, or two and compare them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from arvideo_rl.config import ConfigError, check_choice
from arvideo_rl.generators.attention import choose
from arvideo_rl.outputs import check_file
from arvideo_rl.training import benchmark
from arvideo_rl.training.aligned import config_of, load_any
from arvideo_rl.training.benchmark import StreamingConfig
from arvideo_rl.training.compare import HeldOut, Measured, check_held_out, compare, measure
from arvideo_rl.training.judges import shows_world
from arvideo_rl.training.prompts import STYLES, PromptConfig, Prompts
from arvideo_rl.training.settings import AlignConfig, build_rewards, held_out_of
from arvideo_rl.world.verify import frechet
from rewards import registry
from rewards.contract import Reward
from rewards.inverse_dynamics import InverseDynamics

SCORE = {"score": "expected_accuracy"}  # of the recipes for the tiny generator


@dataclass
class EvaluateConfig:
    """What ``arvideo evaluate`` reads."""

    generator: str = "tiny"  # a shipped name, a generator folder, a run, RUN@best or RUN@STEP
    against: str = ""  # measure this one too, as "before"
    prompts: str = ""  # a prompt file, of which the prompts that a run on it holds out are taken; empty: the world's
    style: str = "joystick"  # actions of the world's held-out prompts: joystick or smooth
    reward: str = "inverse_dynamics"  # a short name, module:attribute, or run: those the run was trained on
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward; for inverse_dynamics else SCORE
    attention: str = "native"  # kernel: native, math, cudnn, flex, flash, flash3, sage, xformers (arvideo doctor)
    out: str = ""  # also write the numbers here, as .json
    benchmark: str = ""  # streaming: also drift, prompt switch and speed, as one table to paste
    streaming: StreamingConfig = field(default_factory=StreamingConfig)
    held_out: HeldOut = field(default_factory=HeldOut)  # its margins are of the comparison with against=


@dataclass(frozen=True)
class Job:
    """A measurement that can be made: loaded and checked."""

    config: EvaluateConfig
    rewards: dict[str, tuple[Reward, float]]  # with their weights
    prompts: Prompts
    loaded: list[tuple[str, Any]]  # (source, what load_any gave), "before" first
    kernel: str  # that computes attention


def prepare(config: EvaluateConfig) -> Job:
    """Load and check; ConfigError or ValueError for what cannot be measured or written. Writes nothing."""
    check_choice("style", config.style, STYLES)
    if config.out:
        check_file(Path(config.out), suffixes=(".json",))
    rewards = rewards_of(config)
    loaded = [(s, load_any(s)) for s in (config.against, config.generator) if s]
    if config.benchmark:
        check_choice("benchmark", config.benchmark, ("streaming",))
        for _, (generator, _, _) in loaded:
            benchmark.check(config.streaming, generator)
    world = all(shows_world(g) for _, (g, _, _) in loaded)
    check_held_out(config.held_out, world=world)
    if not (world or config.prompts):
        raise ConfigError(f"prompts= is empty: the world's prompts say nothing to {config.generator}; give a file")
    source = PromptConfig(config.prompts or "world", style=config.style)
    prompts = held_out_of(AlignConfig(prompts=source, held_out=config.held_out), world)
    said = [choose(model, config.attention, masked=g.streaming.past_weight < 1) for _, (g, model, _) in loaded]
    return Job(config, rewards, prompts, loaded, said[-1])


def rewards_of(config: EvaluateConfig) -> dict[str, tuple[Reward, float]]:
    """What is measured, by name with weights: one reward, or with ``reward=run`` all that the run was trained on, of
    which gates have weight 0."""
    if config.reward != "run":
        args = config.args or (SCORE if config.reward == "inverse_dynamics" else {})
        reward = registry.build(config.reward, **args)
        registry.prepare(reward)
        return {config.reward: (reward, 1.0)}
    if config.args:
        raise ConfigError("args= says nothing to reward=run, which takes the run's own: leave it out")
    try:
        parts = config_of(config.generator).rewards
    except ConfigError as error:
        raise ConfigError(f"reward=run takes the rewards of generator=, but {error}; name a reward") from None
    return build_rewards({name: part for name, part in parts.items() if part.trained or part.gate is not None})


@torch.no_grad()
def run(job: Job) -> dict[str, Any]:
    """Measure. With ``benchmark`` by generator ``held_out`` (:func:`alone`) and ``stream`` (benchmark.py); with
    ``against`` the comparison as :func:`compare` gives it, else value, standard error and number of
    prompts by name."""
    config, size = job.config, job.config.held_out
    found = [measure(g, m, job.prompts, job.rewards, size, f"measuring {s}") for s, (g, m, _) in job.loaded]
    if config.benchmark:
        streams = (benchmark.stream_benchmark(g, m, job.prompts, config.streaming, config.style)
                   for _, (g, m, _) in job.loaded)  # fmt: skip
        both = zip(job.loaded, found, streams)
        return {source: {"held_out": alone(seen), "stream": told} for (source, _), seen, told in both}
    if config.against:
        return compare(found[0], found[1], {name: weight for name, (_, weight) in job.rewards.items() if weight}, size)
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
    if found.features is not None:
        distance = frechet(found.features.flatten(0, -2), *InverseDynamics("idm_heldout").frechet_reference)
        out["frechet"] = {"value": distance, "n": len(found.features)}
    return out
