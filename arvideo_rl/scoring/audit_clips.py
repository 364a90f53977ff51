"""The clips of an audit: a user's files, or made here: the world's, rooms with known cameras, or a generator's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError
from arvideo_rl.decoding import Reading, VideoError, decode
from arvideo_rl.scoring.inputs import Task, collect
from arvideo_rl.training.prompts import held_out_prompts, parse_actions
from arvideo_rl.world.dataset import HELD_OUT
from arvideo_rl.world.render import intrinsics, render, truth
from arvideo_rl.world.rooms import room
from arvideo_rl.world.scene import sample_scenes
from rewards.contract import Clips
from rewards.geometry.cameras import Cameras
from samplers.randomness import Key

if TYPE_CHECKING:
    from arvideo_rl.scoring.audit import AuditConfig

SEED = HELD_OUT + 900_000_000  # beyond every scene that anything is trained or compared on
FPS = 8.0  # of what is made here


@dataclass(frozen=True)
class Found:
    """Clips, on the CPU."""

    batches: list[Clips]
    names: list[str]  # of the clips, batch after batch
    missing: list[str] = field(default_factory=list)  # what was left out and why


def made(config: AuditConfig) -> Found:
    """The clips of ``config.videos``; ConfigError when there is no such generator."""
    return {"world": from_world, "rooms": from_rooms}.get(config.videos, from_generator)(config)


def from_files(config: AuditConfig, words: list[str]) -> Found:
    """Clips of files, folders, globs or manifests, as ``arvideo score`` takes them; at most ``clips`` of them, evenly
    spread. Those of one size and length, with the same things known of them, go into a batch together."""
    tasks = collect(words, prompt=config.prompt, actions=config.actions, fps=config.fps)
    if len(tasks) > config.clips:
        tasks = [tasks[i] for i in torch.linspace(0, len(tasks) - 1, config.clips).round().long().tolist()]
    found: dict[Any, list[tuple[Task, Tensor, float]]] = {}
    missing = []
    for task in tasks:
        try:
            if task.problem:
                raise VideoError(task.path, *task.problem)
            how = Reading(fps=task.fps, frames=config.frames, short_side=config.short_side)
            video = decode(task.path, how)
        except (VideoError, OSError) as error:
            missing.append(f"{task.name}: {error}")
            continue
        pixels = torch.from_numpy(video.frames)
        kind = (pixels.shape, task.prompt is None, task.actions is None)
        found.setdefault(kind, []).append((task, pixels, video.fps))
    if not found:
        raise ConfigError(f"no clip could be read; {missing[0]}")
    batches, names = [], []
    for some in found.values():
        for start in range(0, len(some), config.batch):
            block = some[start : start + config.batch]
            batches.append(_batch(block))
            names += [task.name for task, _, _ in block]
    return Found(batches, names, missing)


def _batch(block: list[tuple[Task, Tensor, float]]) -> Clips:
    frames = torch.stack([p for _, p, _ in block]).permute(0, 1, 4, 2, 3).float() / 255
    tasks = [t for t, _, _ in block]
    prompts = None if tasks[0].prompt is None else [str(t.prompt) for t in tasks]
    actions = None
    if tasks[0].actions is not None:
        actions = torch.tensor([parse_actions(list(t.actions or []), frames.shape[1])[1:] for t in tasks])
    return Clips(frames, torch.tensor([f for _, _, f in block], dtype=torch.float64), prompts, actions)


def from_world(config: AuditConfig) -> Found:
    """Scenes of the world with captions, actions and cameras."""
    batches, names = [], []
    for block in _blocks(config):
        scenes = sample_scenes([SEED + i for i in block], config.frames, style="joystick")
        w2c = truth(scenes, 8).w2c
        last = torch.tensor([0.0, 0, 0, 1]).expand(*w2c.shape[:2], 1, 4)
        cameras = Cameras(torch.linalg.inv(torch.cat([w2c, last], 2)), intrinsics())
        pixels = render(scenes, config.size).clamp(0, 1)
        batches.append(Clips(pixels, FPS, list(scenes.captions), scenes.actions[:, 1:], cameras))
        names += [f"scene {SEED + i}" for i in block]
    return Found(batches, names)


def from_rooms(config: AuditConfig) -> Found:
    """Still, textured rooms with the true path of the camera: what classical geometry can measure."""
    batches, names = [], []
    for block in _blocks(config):
        rooms = [room(SEED + i, config.frames, config.size) for i in block]
        paths = torch.stack([torch.linalg.inv(r.w2c) for r in rooms])
        unit = rooms[0].intrinsics / torch.tensor([config.size, config.size, 1.0])[:, None]
        batches.append(Clips(torch.stack([r.frames for r in rooms]), FPS, cameras=Cameras(paths, unit)))
        names += [f"room {SEED + i}" for i in block]
    return Found(batches, names)


@torch.no_grad()
def from_generator(config: AuditConfig) -> Found:
    """What a generator makes of held-out prompts."""
    from arvideo_rl.training.aligned import load_any
    from arvideo_rl.training.rollout import clips_of, roll_out

    generator, model, _ = load_any(config.videos)
    chunk = generator.streaming.chunk
    whole, kept = math.ceil(config.frames / chunk) * chunk, generator.codec.pixel_frames(config.frames)
    prompts = held_out_prompts(config.clips, whole, "joystick")
    batches, names = [], []
    for block in _blocks(config):
        some = prompts.take(block)
        keys = [Key(config.seed, 0, i, 0) for i in some.ids]
        clips = clips_of(generator, roll_out(generator, model, some, keys, whole, torch.tensor(block)), some)
        actions = None if clips.actions is None else clips.actions[:, : kept - 1]
        batches.append(Clips(clips.frames[:, :kept], clips.fps, clips.prompts, actions))
        names += [f"prompt {i}" for i in some.ids]
    return Found(batches, names)


def _blocks(config: AuditConfig) -> list[list[int]]:
    every = list(range(config.clips))
    return [every[i : i + config.batch] for i in range(0, config.clips, config.batch)]
