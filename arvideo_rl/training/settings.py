"""What an alignment run is told, checked before anything runs, and what follows from it (``--dry-run``)."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from arvideo_rl.config import SEEDS, ConfigError, check_choice, check_keys, check_ranges, defaults, wrong_type
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import PolicyConfig
from arvideo_rl.objectives.advantages import FORMS
from arvideo_rl.objectives.chunk_fork import ChunkFork
from arvideo_rl.objectives.contract import Objective
from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.fpo import FPO
from arvideo_rl.objectives.grpo import GRPO
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.objectives.mix import Axis
from arvideo_rl.objectives.nft import NFT
from arvideo_rl.objectives.pairs import Pairs
from arvideo_rl.outputs import check_folder
from arvideo_rl.training.alarm import ACTIONS, FEWEST
from arvideo_rl.training.compare import HeldOut, check_held_out, least_prompts
from arvideo_rl.training.judges import LOOKS, shows_world
from arvideo_rl.training.prompts import (
    HELD_OUT_FRAMES,
    HELD_OUT_SEED,
    STYLES,
    PromptConfig,
    Prompts,
    held_out_prompts,
    own_prompts,
    read_prompts,
)
from arvideo_rl.training.pull import PullConfig
from arvideo_rl.training.replay import ReplayConfig
from rewards import registry
from rewards.contract import Reward

OBJECTIVES: dict[str, type[Objective]] = {
    "nft": NFT, "grpo": GRPO, "chunk_fork": ChunkFork, "kv_routing": KVRouting, "fpo": FPO, "pairs": Pairs,
    "dmd": DMD,
}  # fmt: skip
LAGS = ("none", "nft", "slow", "frozen")
JUDGES = ("idm_heldout", "text_video_heldout")  # reward models that measure and are never trained on
FREE_ON_RESUME = ("iterations", "checkpointing", "checkpoint_every", "keep_last", "alarm", "out", "name")


@dataclass
class Part(Axis):
    """A pluggable part of a mixture."""

    target: str = ""  # a name, or module:attribute with the module on the Python path or in the working directory
    weight: float = 1.0  # in the mixture; 0: measured and logged, never trained on
    args: dict[str, Any] = field(default_factory=dict)  # its arguments
    held_out: bool = False  # the same as weight 0, whatever the weight

    @property
    def trained(self) -> float:
        """Its weight as a term of the mixture: 0 for one that is only measured, and for a gate."""
        return 0.0 if self.held_out or self.gate is not None else self.weight


@dataclass
class Method:
    """A pluggable part of which there is one: a name and its arguments."""

    target: str = ""  # a name, or module:attribute as for rewards
    args: dict[str, Any] = field(default_factory=dict)


@dataclass
class ProbeConfig:
    """A small held-out measurement while the run goes on (docs/hack_alarm.md)."""

    every: int = 3  # iterations between looks, also at every checkpoint; 0 = none, and then no alarm
    prompts: int = 16  # one video each; with fewer than 12 a fall is never beyond chance


COUNT, POSITIVE = "[1, inf)", "(0, inf)"
RANGES = {
    "seed": SEEDS, "iterations": COUNT, "prompts.count": COUNT, "prompts_per_step": COUNT, "group": "[2, inf)",
    "frames": COUNT, "policy.rank": COUNT, "policy.alpha": POSITIVE, "lr": POSITIVE, "weight_decay": "[0, inf)",
    "max_grad_norm": POSITIVE, "rollout_batch": COUNT, "update_batch": COUNT, "updates": COUNT,
    "checkpoint_every": COUNT, "keep_last": COUNT, "probe.every": "[0, inf)", "probe.prompts": "[1, 1024]",
}  # fmt: skip


@dataclass
class AlignConfig:
    """What ``arvideo align`` reads."""

    name: str = "run"  # the run directory is <out>/<name>
    out: str = "runs"
    seed: int = 0
    iterations: int = 30
    generator: str = "tiny"  # a shipped name or a folder
    attention: str = "native"  # kernel: native, math, cudnn, flex, flash, flash3, sage, xformers (arvideo doctor)
    prompts: PromptConfig = field(default_factory=PromptConfig)
    prompts_per_step: int = 4  # groups in an update
    group: int = 8  # branches per prompt
    frames: int = 18  # of a rollout; whole chunks
    rewards: dict[str, Part] = field(default_factory=dict)  # any number, by names of the user's choice
    mix: str = "advantages"  # how several rewards become one: advantages, gdpo, zsum, sum, rank, product
    advantage: str = "group_z"  # a form of objectives/advantages.py
    objective: Method = field(default_factory=lambda: Method("nft"))
    pull: PullConfig = field(default_factory=PullConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lr: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lag: str = "none"  # how far the old policy trails: none, nft, slow, frozen
    rollout_batch: int = 32  # branches generated at once
    update_batch: int = 16  # branches in one backward
    checkpointing: bool = False  # compute every block again in the backward: far less memory, a third more time
    updates: int = 1  # optimizer steps on one set of rollouts; more than one needs an objective that limits them
    checkpoint_every: int = 10
    keep_last: int = 3  # checkpoints kept, besides the best one
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    alarm: str = "warn"  # when the reward rises while verifiers fall: warn, stop (saved, exit code 3) or off
    held_out: HeldOut = field(default_factory=HeldOut)


def lag_keep(law: str, iteration: int) -> float:
    """Share of the old policy kept after update ``iteration`` (from 1). Source: DiffusionNFT and Astrolabe."""
    laws = {"none": 0.0, "nft": min(0.001 * iteration, 0.5), "frozen": 1.0}
    laws["slow"] = 0.0 if iteration <= 75 else min(0.0075 * (iteration - 75), 0.999)
    return laws[law]


def check(config: AlignConfig, chunk: int, processes: int, world: bool = True) -> None:
    """Refuse what cannot run, before anything runs; messages name the nearest values that can. ``world``: whether the
    generator's videos can show the embedded world (judges.py)."""
    check_ranges(config, RANGES)
    check_held_out(config.held_out, processes, world)
    if not world and config.prompts.source == "world":
        raise ConfigError(f"prompts.source=world: those captions are the embedded world's, and {config.generator} does "
                          "not show it; give a file with a prompt a line")  # fmt: skip
    if config.name in ("", ".", "..") or "/" in config.name:
        raise ConfigError(f"name={config.name!r}: give the run a name without slashes")
    check_folder(Path(config.out) / config.name)
    check_choice("alarm", config.alarm, ACTIONS)
    if config.probe.every and config.probe.prompts < processes:
        raise ConfigError(f"probe.prompts={config.probe.prompts}: use at least one a process, {processes}")
    if config.alarm == "stop" and (not config.probe.every or config.probe.prompts < FEWEST):
        raise ConfigError(
            f"alarm=stop can never ring with probe.every={config.probe.every} probe.prompts={config.probe.prompts}; "
            f"use probe.every of 1 or more and probe.prompts of {FEWEST} or more"
        )
    check_choice("advantage", config.advantage, FORMS)
    check_choice("lag", config.lag, LAGS)
    check_choice("policy.kind", config.policy.kind, ("lora", "full"))
    check_choice("prompts.style", config.prompts.style, STYLES)
    objective_class(config.objective.target)
    if config.objective.target == "pairs" and (config.group != 2 or config.advantage != "centre"):
        raise ConfigError(f"objective pairs compares two branches: use group=2 advantage=centre, "
                          f"not group={config.group} advantage={config.advantage}")  # fmt: skip
    for name, part in config.rewards.items():
        if config.objective.target == "kv_routing" and part.least_std:
            raise ConfigError(f"rewards.{name}.least_std={part.least_std}: kv_routing compares with its anchor and "
                              "does not read it; use 0")  # fmt: skip
    if config.objective.target == "kv_routing" and config.group < 3:
        raise ConfigError(f"group={config.group}: kv_routing chooses between branches, and one of a group is the "
                          "anchor; use 3 or more")  # fmt: skip
    if not config.rewards:
        raise ConfigError("no rewards: add e.g. rewards.actions.target=inverse_dynamics")
    for name, part in config.rewards.items():
        if not part.target:
            raise ConfigError(f"rewards.{name} has no target; rewards here: {', '.join(config.rewards)}")
        if not abs(part.weight) < float("inf"):
            raise ConfigError(f"rewards.{name}.weight={part.weight}: use a finite number")
        if part.held_out and part.gate is not None:
            raise ConfigError(f"rewards.{name} is held out and a gate; a gate is trained on, so choose one")
        if (judge := part.args.get("weights")) in JUDGES and not part.held_out:
            raise ConfigError(f"rewards.{name}.args.weights={judge}: that model only judges; give it held_out=true")
    if not any(weights_of(config).values()):
        raise ConfigError(f"no reward is trained: give one of {', '.join(config.rewards)} a weight other than 0")
    if config.frames % chunk:
        low = config.frames // chunk * chunk
        raise ConfigError(f"frames={config.frames} is not whole chunks of {chunk}; use {low or chunk} or {low + chunk}")
    branches = config.prompts_per_step * config.group
    if branches % processes:
        near = [p for d in range(1, processes + 1) for p in (config.prompts_per_step - d, config.prompts_per_step + d)
                if p > 0 and p * config.group % processes == 0][:2]  # fmt: skip
        raise ConfigError(
            f"{config.prompts_per_step} prompts x {config.group} branches do not divide over {processes} processes; "
            f"use prompts_per_step={' or '.join(map(str, near))}"
        )


def check_groups(config: AlignConfig, objective: Objective, processes: int) -> None:
    """Refuse groups that would be split over processes where an objective takes them whole."""
    if objective.exploration.forks and config.prompts_per_step % processes:
        low = config.prompts_per_step // processes * processes
        near = " or ".join(str(n) for n in (low, low + processes) if n)
        raise ConfigError(
            f"objective {config.objective.target} takes whole groups, but prompts_per_step={config.prompts_per_step} "
            f"groups do not divide over {processes} processes; use {near}"
        )


def check_on_policy(config: AlignConfig, objective: Objective) -> None:
    """Refuse older rollouts where a loss has nothing that tells them from the policy's own."""
    score = isinstance(objective, GRPO) and objective.trust == "score"
    if (score or isinstance(objective, DMD)) and (config.updates > 1 or config.lag != "none"):
        name = f"{config.objective.target}{' with trust=score' if score else ''}"
        raise ConfigError(f"objective {name} is on-policy: use updates=1 lag=none, not updates={config.updates} "
                          f"lag={config.lag}")  # fmt: skip


def notes(config: AlignConfig, generator: Generator) -> list[str]:
    """What is no mistake but worth knowing before a run: values that nothing reads (a ``base:`` may bring them, so they
    are not refused), lengths the generator was not trained on."""
    out = []
    unused: list[tuple[str, Any, str, str]] = []
    if config.policy.kind == "full":
        unused += [("policy", config.policy, k, "policy.kind=full") for k in ("rank", "alpha", "targets")]
    if config.prompts.source != "world":
        unused += [("prompts", config.prompts, "count", "a prompt file, which is taken whole")]
    for name, part, key, reason in unused:
        if getattr(part, key) != defaults(type(part))[key]:
            out.append(f"{name}.{key}={getattr(part, key)} is not used with {reason}")
    if config.alarm == "warn" and not (config.probe.every and config.probe.prompts >= FEWEST):
        out.append(f"the alarm can never ring: it needs probe.every of 1 or more and probe.prompts of {FEWEST} or more")
    trained = generator.streaming.trained_frames
    for key, frames in (("frames", config.frames), ("held_out.frames", config.held_out.frames)):
        if frames > trained:
            out.append(f"{key}={frames} goes past the {trained} frames the generator was trained on: quality may drift")
    if config.prompts.source != "world":
        out.append(own_prompts(Path(config.prompts.source), config.frames)[2])
        used = held_out_of(config, shows_world(generator))
        if used.ids[0] >= HELD_OUT_SEED:
            out.append(f"the comparison is on {len(used)} held-out prompts of the world")
        elif len(used) < config.held_out.prompts:
            out.append(f"the comparison is on {len(used)} prompts, not held_out.prompts={config.held_out.prompts}")
    if not shows_world(generator):
        out.append(f"compared by the rewards and by {', '.join(LOOKS)}: verifiers of the embedded world have "
                   f"nothing to say of {config.generator}")  # fmt: skip
    return out


def held_out_of(config: AlignConfig, world: bool = True) -> Prompts:
    """The prompts a run is compared on: those its own file holds out, else (or where they are too few to compare
    anything) the world's, with the style the run trains on. ConfigError where neither will do."""
    size = config.held_out
    if config.prompts.source != "world":
        own = own_prompts(Path(config.prompts.source), max(HELD_OUT_FRAMES, size.frames + 3))[1]
        rows = list(range(len(own)))[size.skip : size.skip + size.prompts]
        if len(rows) >= least_prompts(size, world=world):
            return own.take(rows)
        if not world:
            raise ConfigError(f"{config.prompts.source} holds out {len(rows)} prompts, and a comparison needs "
                              f"{least_prompts(size, world=world)}: of 10 or more different texts every fifth is held "
                              "out, so add prompts")  # fmt: skip
    return held_out_prompts(size.prompts, size.frames, config.prompts.style, size.skip)


def fixed(config: AlignConfig) -> dict[str, Any]:
    """What a run directory belongs to: the resolved configuration, and what is in its prompt file."""
    out = asdict(config)
    if config.prompts.source != "world":
        path = Path(config.prompts.source)
        read_prompts(path, config.frames)  # refuses what is no prompt file in one line
        out["prompt_file"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return out


def weights_of(config: AlignConfig) -> dict[str, float]:
    """Weights of all rewards as terms of the mixture, by name; 0 for what is no term."""
    return {name: part.trained for name, part in config.rewards.items()}


def ungated(weights: dict[str, float], config: AlignConfig) -> dict[str, float]:
    """``weights`` without gates: they are trained on too, so that none of weight 0 here has a part in the training."""
    gates = [name for name, part in config.rewards.items() if part.gate is not None]
    return {name: weight for name, weight in weights.items() if name not in gates}


def build_rewards(parts: dict[str, Part], missing: list[str] | None = None) -> dict[str, tuple[Reward, float]]:
    """The configured rewards by name, with weights; ConfigError names the one that cannot be had. With ``missing``,
    what those that are fetched by who wants them lack is written there instead."""
    out = {}
    for name, part in parts.items():
        try:
            reward = registry.build(part.target, **part.args)
            out[name] = (reward, part.trained)
            registry.prepare(reward)
        except ValueError as error:
            if missing is None or name not in out or not getattr(reward, "optional", False):
                raise ConfigError(f"rewards.{name}: {error}") from error
            missing.append(f"rewards.{name}: {error}")
    return out


def objective_class(target: str) -> type[Objective]:
    """The objective of that name, or one's own by module:attribute; ConfigError when it is none (docs/objectives)."""
    if ":" not in target:
        check_choice("objective.target", target, [*OBJECTIVES, "module:attribute"])
        return OBJECTIVES[target]
    try:
        kind = registry.resolve(target, {}, "objective")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    parts = ("from_chunk", "credit", "exploration", "check_chunks", "levels_trained", "losses")
    lacks = [name for name in parts if not hasattr(kind, name)]
    if not isinstance(kind, type) or not is_dataclass(kind) or lacks:
        what = f"lacks {', '.join(lacks)}" if lacks else "is no dataclass"
        raise ConfigError(f"objective.target={target}: {what}; an objective is a dataclass with {', '.join(parts)}")
    return cast(type[Objective], kind)


def build_objective(part: Method, chunks: int) -> Objective:
    """The configured objective; names and types of its arguments are checked against its fields."""
    kind = objective_class(part.target)
    check_keys(kind, part.args, "objective.args.")
    try:
        objective = cast(Objective, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), part.args)))
    except OmegaConfBaseException as error:
        raise ConfigError(wrong_type(kind, part.args, error, "objective.args.")) from None
    objective.check_chunks(chunks)
    return objective


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def plan(
    config: AlignConfig, generator: Generator, trainable: int, memory: dict[str, int], costs: dict[str, str]
) -> dict[str, str]:
    """Sizes that follow from the configuration, as text by name; ``memory`` is of memory.py, ``costs`` of cost.py."""
    s, model = generator.streaming, generator.transformer
    chunks = config.frames // s.chunk
    branches = config.prompts_per_step * config.group
    objective = build_objective(config.objective, chunks)
    usable, m = objective.levels_trained(s.levels)
    weights = sum(p.numel() for k, p in model.named_parameters() if "lora_" not in k)
    out = {
        "branches per update": f"{config.prompts_per_step} prompts x {config.group} = {branches}",
        "chunks per branch": f"{config.frames} frames / {s.chunk} = {chunks}",
        "noise levels": ", ".join(f"{t:.4g}" for t in s.levels) + f" ({m} of {usable} trained per chunk)",
        "window": f"{s.window} frames, sink {s.sink}, {s.positions}",
        "trained parameters": f"{trainable:,} of {weights:,}",
        "memory": f"about {_bytes(sum(n for k, n in memory.items() if k != 'pixels'))} at most: "
        + ", ".join(f"{name} {_bytes(n)}" for name, n in memory.items() if n and name != "pixels")
        + f"; pixels {_bytes(memory.get('pixels', 0))} (of the machine, not a GPU)",
    }
    compared = f"{config.held_out.prompts} prompts x {config.held_out.noises} noises x {config.held_out.frames} frames"
    return out | costs | {"held-out comparison": f"{compared}, before and after"}
