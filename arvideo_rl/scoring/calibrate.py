"""Measure the constants of a reward on clips that are known to be good, and write them with where they came from."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from arvideo_rl.config import ConfigError, check_ranges
from arvideo_rl.decoding import Reading, VideoError, decode, images_of
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.outputs import check_file
from arvideo_rl.progress import hidden
from arvideo_rl.scoring.inputs import Task, collect
from arvideo_rl.training.aligned import load_any
from arvideo_rl.training.prompts import PromptConfig, Prompts, training_prompts
from arvideo_rl.training.rollout import clips_of, roll_out
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import Scenes, sample_scenes
from rewards import registry
from rewards.contract import Clips
from rewards.four_d.calibration import FEWEST, Calibration, calibrated
from rewards.four_d.observe import Observed, stride_of
from rewards.four_d.reward import FourD
from rewards.geometry.backends import identity
from samplers.randomness import Key

WORLD = 2_000_000_000  # first seed of the scenes that constants come from: neither trained on nor held out
WORLD_FPS, WORLD_FRAMES = 8.0, 16


@dataclass
class CalibrateConfig:
    """What ``arvideo rewards calibrate`` reads."""

    args: dict[str, Any] = field(default_factory=dict)  # of the reward; use the file with the same ones
    out: str = "calibration.json"  # where the constants go
    real: str = ""  # real videos to set beside them: a part in which yours are not below has no room to improve
    fps: float | None = None  # replaces what the files state
    frames: int | None = None  # measure only the first so many frames (world: 16)
    sample_fps: float | None = None  # pick frames at this even rate first
    short_side: int | None = None  # shrink to this many pixels first
    gib: float = 4.0  # most memory for the pixels of one clip
    clips: int = 64  # world and generator: how many
    size: int = 96  # world: pixels a side
    seed: int = 0  # world: other scenes; generator: other noise
    generator: str = ""  # instead of files: what this generator makes of training prompts, before it is aligned
    prompts: PromptConfig = field(default_factory=PromptConfig)  # generator: as a run's

    def check(self) -> None:
        """ConfigError for what cannot be."""
        limits = {"fps": "(0, inf)", "sample_fps": "(0, inf)", "frames": "[1, inf)", "short_side": "[1, inf)"}
        limits = {k: v for k, v in limits.items() if getattr(self, k) is not None}
        limits |= {"gib": "(0, inf)", "clips": "[2, 100000]", "size": "[32, 1024]", "seed": "[0, 20000]"}
        check_ranges(self, limits)
        check_file(Path(self.out), suffixes=(".json",))
        for key in {"calibration", "constants"} & self.args.keys():
            raise ConfigError(f"args.{key} is what this command makes; leave it out")


FILES = ("videos",)
READ_BY = {"fps": FILES, "sample_fps": FILES, "short_side": FILES, "clips": ("world", "generator"), "size": ("world",),
           "seed": ("world", "generator"), "prompts": ("generator",)}  # fmt: skip
USUAL = asdict(CalibrateConfig()) | {"prompts": PromptConfig()}


@dataclass(frozen=True)
class Measured:
    """What was seen of a set of clips."""

    observed: list[Observed]
    short_sides: list[int]
    time_steps: list[float]
    bad: Counter[str]  # how many could not be measured, by reason
    source: dict[str, Any]  # what they were


def prepare(config: CalibrateConfig, name: str, words: list[str]) -> tuple[FourD, list[Task] | None]:
    """The reward and the clips to measure (None: the world's); ConfigError or ValueError before any work."""
    config.check()
    reward = registry.build(name, **config.args)
    if not isinstance(reward, FourD):
        raise ConfigError(f"reward {name!r} has nothing to calibrate; four_d has")
    registry.prepare(reward)
    if bool(words) == bool(config.generator):
        raise ConfigError("give videos, world or generator=NAME to calibrate with: one of them")
    source = "generator" if config.generator else "world" if words == ["world"] else "videos"
    for key, of in READ_BY.items():
        if source not in of and not (config.real and "videos" in of) and getattr(config, key) != USUAL[key]:
            raise ConfigError(f"{key} is for {' or '.join(of)}, and the clips are of the {source}; leave it out")
    tasks = None if words in ([], ["world"]) else collect(words, fps=config.fps)
    if config.real:
        collect([config.real], fps=config.fps)
    return reward, tasks


def run(config: CalibrateConfig, name: str, words: list[str], command: str) -> tuple[Calibration, Measured]:
    """Measure, and write ``config.out``. ``command`` is noted in the file."""
    reward, tasks = prepare(config, name, words)
    seen = measure(reward, config, tasks)
    source = {
        **seen.source, "measured": len(seen.observed), "not_measured": dict(seen.bad), "command": command,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "arvideo_rl": version("arvideo-rl"),
    }  # fmt: skip
    sides, steps = seen.short_sides, seen.time_steps
    found = calibrated(seen.observed, identity(reward.backend), reward.settings, sides, steps, source)
    found.write(Path(config.out))
    return found, seen


def measure(reward: FourD, config: CalibrateConfig, tasks: list[Task] | None) -> Measured:
    """Measure every clip; ConfigError when fewer than two can be."""
    clips = list(range(config.clips)) if tasks is None else tasks
    out = Measured([], [], [], Counter(), {})
    if tasks is not None:
        each = _decoded(config, tasks, out.source.setdefault("files", []))
    elif config.generator:
        each = _generated(config, out.source)
    else:
        out.source["world"], each = _world(config), _rendered(config)
    for frames, fps in track(each, "measuring", total=len(clips), disable=hidden(), transient=True):
        if isinstance(frames, str):
            out.bad[frames] += 1
            continue
        try:
            (found,) = reward.observed(Clips(frames[None], fps=fps))
        except ValueError as error:  # too short or too small
            found = str(error)
        if isinstance(found, str):
            out.bad[found] += 1
            continue
        out.observed.append(found)
        out.short_sides.append(min(frames.shape[-2:]))
        out.time_steps.append(stride_of(fps, reward.settings.step) / fps)
    if len(out.observed) < 2:
        why = ", ".join(f"{n} {reason}" for reason, n in out.bad.items()) or "too few clips"
        way = "give others" if tasks is not None else "another args.backend or more frames may do"
        raise ConfigError(f"{len(out.observed)} of {len(clips)} clips could be measured ({why}); {way}")
    return out


def _world(config: CalibrateConfig) -> dict[str, int]:
    frames = config.frames or WORLD_FRAMES
    return {"clips": config.clips, "size": config.size, "frames": frames, "seed": config.seed}


def _rendered(config: CalibrateConfig) -> Iterator[tuple[Tensor | str, float]]:
    scenes = moving_scenes(config.clips, config.frames or WORLD_FRAMES, config.seed)
    for i in range(len(scenes)):
        yield render(scenes[i : i + 1], config.size)[0], WORLD_FPS


def moving_scenes(count: int, frames: int, seed: int = 0) -> Scenes:
    """The first ``count`` scenes of the embedded world in ``seed``'s stretch in which every object moves."""
    chosen: list[int] = []
    first = WORLD + 100_000 * seed
    while len(chosen) < count:
        some = range(first, first + 2 * count)
        named = zip(some, sample_scenes(some, 1).objects)
        chosen += [s for s, objects in named if all(o.motion != "rest" for o in objects)]
        first += 2 * count
    return sample_scenes(chosen[:count], frames)


def _generated(config: CalibrateConfig, source: dict[str, Any]) -> Iterator[tuple[Tensor | str, float]]:
    """Clips of a generator, as a run of ``config.prompts`` would see them; which one and how is noted in ``source``."""
    generator, model, prompts, frames = opened(config)
    prompts = prompts.take([i % len(prompts) for i in range(config.clips)])
    source["generator"] = {
        "generator": config.generator, "clips": config.clips, "frames": config.frames or frames,
        "seed": config.seed, "prompts": asdict(config.prompts),
    }  # fmt: skip
    for i in range(config.clips):
        one = prompts.take([i])
        record = roll_out(generator, model, one, [Key(config.seed, 0, i)], frames, torch.zeros(1, dtype=torch.int64))
        yield clips_of(generator, record, one).frames[0, : config.frames], generator.streaming.fps


def opened(config: CalibrateConfig) -> tuple[Generator, Any, Prompts, int]:
    """Generator, its network, prompts and whole chunks of latent frames; ConfigError or ValueError where there are
    none."""
    generator, model, _ = load_any(config.generator)
    chunk = generator.streaming.chunk
    frames = math.ceil((config.frames or generator.streaming.trained_frames) / chunk) * chunk
    return generator, model, training_prompts(config.prompts, frames), frames


def _decoded(config: CalibrateConfig, tasks: list[Task], files: list[dict]) -> Iterator[tuple[Tensor | str, float]]:
    """Frames [F, 3, H, W] and rate of each file, or the reason why there are none; files are noted in ``files``."""
    for task in tasks:
        how = Reading(fps=task.fps, frames=config.frames, sample_fps=config.sample_fps, short_side=config.short_side,
                      most=int(config.gib * 2**30 / 4))  # fmt: skip
        try:
            if task.problem:
                raise VideoError(task.path, *task.problem)
            video = decode(task.path, how)
        except VideoError as error:
            files.append({"name": task.name, "reason": error.kind})
            yield error.kind, 0.0
            continue
        files.append({"name": task.name, "sha256": _fingerprint(task.path)})
        yield torch.from_numpy(video.frames).permute(0, 3, 1, 2).float() / 255, video.fps


def _fingerprint(path: Path) -> str:
    """SHA-256 of a file, or of the images of a folder one after the other."""
    found = hashlib.sha256()
    for part in images_of(path) if path.is_dir() else [path]:
        found.update(part.read_bytes())
    return found.hexdigest()


def beside(config: CalibrateConfig, name: str, seen: Measured) -> dict[str, tuple[float, float]]:
    """Mean of each part of the value, of the clips measured and of those in ``config.real``, with the new constants."""
    reward = registry.build(name, **config.args, calibration=config.out)
    assert isinstance(reward, FourD)
    real = measure(reward, config, collect([config.real], fps=config.fps))
    judged = [[reward.judge(o) for o in some.observed] for some in (seen, real)]
    names = ("recon", "gate", "smooth", "rigid", "steady", "motion", "anchor", "value")
    return {n: tuple(sum(p[n] for p in some) / len(some) for some in judged) for n in names}  # type: ignore[misc]


def shaky(seen: Measured) -> str:
    """What to say when there are few clips; empty when there are enough."""
    few = len(seen.observed)
    return f"only {few} clips: the constants are shaky below {FEWEST}" if few < FEWEST else ""
