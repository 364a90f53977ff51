"""What ``arvideo score`` is told, and the checks that come before any work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from arvideo_rl.config import ConfigError, check_choice, check_ranges
from arvideo_rl.outputs import check_file, check_folder
from arvideo_rl.scoring.inputs import Task, check_names, check_pairs, collect
from arvideo_rl.scoring.pairs import MOTION, Pairing, check_groups
from arvideo_rl.training.prompts import actions_for, spoken_actions
from rewards import registry
from rewards.contract import NEEDS, Reward

DEFAULT = "inverse_dynamics"
WRITES = (".csv", ".jsonl", ".parquet")
KNOWN = {"fps", "prompts", "actions"}  # what can be said of a file
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FREE = ("workers", "out", "pairs", "pairing")  # may change when a stopped command goes on: they change no value


@dataclass
class Named:
    """One of several rewards."""

    target: str = ""  # a short name, or module:attribute
    args: dict[str, Any] = field(default_factory=dict)  # its arguments


@dataclass
class ScoreConfig:
    """What ``arvideo score`` reads."""

    reward: str = DEFAULT  # a short name (arvideo rewards list) or module:attribute; several parted by commas
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward, e.g. args.score=accuracy
    rewards: dict[str, Named] = field(default_factory=dict)  # several, each with a name and arguments, instead
    compare: str = ""  # score these too and compare: a folder, glob or manifest; partners have the same name
    actions: str = ""  # commanded actions for every file, e.g. 'turn left*17'; else a manifest's, else FILE.json's
    prompt: str = ""  # prompt for every file; else a manifest's, else that of FILE.json
    fps: float | None = None  # replaces what the files state
    frames: int | None = None  # score only the first so many frames
    sample_fps: float | None = None  # pick frames at this even rate first
    short_side: int | None = None  # shrink to this many pixels first
    batch: int = 8  # files decoded and scored together; those of one size go through a reward at once
    workers: int = 2  # files decoded side by side, each by a process of its own
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    dtype: str = "float32"  # of the computing inside rewards that allow it: float32, bfloat16 or float16
    gib: float = 4.0  # most memory for the pixels of one clip, and of those that go through a reward at once
    seconds: float = 600.0  # a file that takes longer to decode is given up
    out: str = ""  # also write rows here, as .csv, .jsonl or .parquet, and NAME.summary.json
    maps: str = ""  # folder for the pictures that a reward can draw (matches, errors, flow, depth)
    pairs: str = ""  # also write the best and the worst clip of each prompt here, as .jsonl, for preference training
    pairing: Pairing = field(default_factory=Pairing)


@dataclass(frozen=True)
class Job:
    """All that is needed to score, loaded and checked."""

    config: ScoreConfig
    rewards: Mapping[str, Reward]  # by the name in the rows
    tasks: list[Task]
    device: torch.device
    settings: dict[str, Any]  # what a stopped command must share with the one that goes on


def prepare(config: ScoreConfig, words: list[str], own: Mapping[str, Any] | None = None) -> Job:
    """Find the files and load the rewards; ConfigError or ValueError before anything is scored. ``own`` holds
    rewards that are built already, or functions, instead of the named ones."""
    check_ranges(config, _ranges(config))
    check_choice("dtype", config.dtype, DTYPES)
    if config.out:
        check_file(Path(config.out), suffixes=WRITES)
        if config.out.lower().endswith(".parquet") and importlib.util.find_spec("pyarrow") is None:
            raise ConfigError(f"out={config.out}: needs pyarrow (pip install pyarrow); or write .csv or .jsonl")
    if config.maps:
        check_folder(Path(config.maps), "maps")
    for key, given in (("out", config.out), ("pairs", config.pairs)):
        if given and Path(given).resolve() in {Path(w).resolve() for w in (*words, config.compare) if w}:
            raise ConfigError(f"{key}={given} is what is to be scored, and would be written over; choose another name")
    spoken_actions(config.actions)
    device = find_device(config.device)
    told = {"prompt": config.prompt, "actions": config.actions, "fps": config.fps}
    tasks = collect(words, **told)  # type: ignore[arg-type]
    if config.compare:
        theirs = collect([config.compare], **told)  # type: ignore[arg-type]
        check_pairs(tasks, theirs)
        tasks += [replace(t, against=True) for t in theirs]
    if config.pairs:
        _check_pairing(config, tasks)
    rewards = build(config, own)
    if config.pairs:
        _add_pairing(config, rewards)
    _check(rewards)
    if config.actions:
        said = spoken_actions(config.actions)
        for reward in rewards.values():
            if "actions" in reward.needs:
                actions_for(reward, said, len(said) + 1)  # refuses what are not its actions
    if config.maps:
        check_names([t for t in tasks if not t.against], "maps")
        if Path(config.maps).resolve() in {t.path.resolve() for t in tasks if os.path.isdir(t.path)}:
            raise ConfigError(f"maps={config.maps} is a clip to be scored, and would get more frames; choose another")
    if config.maps and not any(hasattr(r, "maps") for r in rewards.values()):
        able = [n for n in registry.available() if hasattr(registry.resolve(n), "maps")]
        cannot = f"{' and '.join(rewards)} cannot draw pictures"
        raise ConfigError(
            f"maps={config.maps}: {cannot}; leave maps out, or score with one that can: {', '.join(able)}"
        )
    kept = {k: v for k, v in asdict(config).items() if k not in FREE}
    return Job(config, rewards, tasks, device, kept | {"device": device.type, "rewards": _described(config, rewards)})


def _check_pairing(config: ScoreConfig, tasks: list[Task]) -> None:
    """ConfigError when no pair can be made, whatever the values."""
    check_file(Path(config.pairs), "pairs", (".jsonl",))
    if config.out and Path(config.pairs) == Path(config.out):
        raise ConfigError(f"pairs={config.pairs} is where out= writes the rows; choose another name")
    if config.compare:
        raise ConfigError("pairs and compare are two things: to pair clips of both sets, name both before the keys")
    config.pairing.check()
    check_groups(tasks, config.pairing.by)


def _ranges(config: ScoreConfig) -> dict[str, str]:
    """The limits of the numbers that are set."""
    limits = {"fps": "(0, inf)", "sample_fps": "(0, inf)", "frames": "[1, inf)", "short_side": "[1, inf)"}
    limits = {k: v for k, v in limits.items() if getattr(config, k) is not None}
    return limits | {"batch": "[1, inf)", "workers": "[1, 256]", "gib": "(0, inf)", "seconds": "(0, inf)"}


def find_device(name: str) -> torch.device:
    """The device called ``name``; ConfigError when it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = str(error).splitlines()[0]
        raise ConfigError(f"device={name}: not here ({said}); use auto or cpu") from None
    return device


class Asked(Protocol):
    """Rewards as a command line names them: one or several by name, or a mapping with arguments."""

    reward: str
    args: dict[str, Any]
    rewards: dict[str, Named]


def build(config: Asked, own: Mapping[str, Any] | None = None) -> dict[str, Reward]:
    """The rewards by name; ConfigError or ValueError for those that cannot be built."""
    if own is not None:
        built = {k: hasattr(v, "granularity") and hasattr(v, "name") for k, v in own.items()}
        return {k: v if built[k] else registry.FunctionReward(v, k, {}) for k, v in own.items()}
    out: dict[str, Reward] = {}
    if config.rewards:
        if config.reward != DEFAULT or config.args:
            raise ConfigError("reward and args are for one reward, rewards.NAME for several; use one of the two ways")
        for name, part in config.rewards.items():
            if not part.target:
                raise ConfigError(f"rewards.{name} has no target; e.g. rewards.{name}.target={DEFAULT}")
            try:
                out[name] = registry.build(part.target, **part.args)
            except ValueError as error:
                raise ConfigError(f"rewards.{name}: {error}") from None
        return out
    names = [x.strip() for x in config.reward.split(",") if x.strip()]
    if not names:
        raise ConfigError(f"reward={config.reward!r} names no reward; e.g. reward={DEFAULT}")
    if len(names) > 1 and config.args:
        raise ConfigError(f"args: of which of {', '.join(names)}? Write rewards.NAME.target= and rewards.NAME.args.")
    return {name: registry.build(name, **config.args) for name in names}


def _add_pairing(config: ScoreConfig, rewards: dict[str, Reward]) -> None:
    """Check that pairs can be made by these rewards; add the one that tells still clips."""
    by = config.pairing.reward or next(iter(rewards))
    if by not in rewards:
        raise ConfigError(f"pairing.reward={by}: scored are {', '.join(rewards)}; name one of them")
    if "pairs" in rewards:
        raise ConfigError("a reward called 'pairs' cannot be told from the pairs in the summary; rename it")
    if config.pairing.motion and MOTION not in rewards:
        rewards[MOTION] = registry.build(MOTION)


def _check(rewards: Mapping[str, Reward]) -> None:
    """Refuse what files cannot be scored with; load the rest."""
    for name, reward in rewards.items():
        if reward.granularity != "clip":
            raise ConfigError(f"reward {name!r} gives a value for each {reward.granularity}; score wants one a clip")
        if lacking := sorted(set(reward.needs) & set(NEEDS) - KNOWN):
            raise ConfigError(f"reward {name!r} needs {', '.join(lacking)}, which files cannot give to it")
        registry.prepare(reward)


def _described(config: ScoreConfig, rewards: Mapping[str, Reward]) -> dict[str, Any]:
    """What tells one set of rewards from another."""
    return {k: asdict(config.rewards.get(k, Named(k, {} if config.rewards else dict(config.args)))) for k in rewards}
