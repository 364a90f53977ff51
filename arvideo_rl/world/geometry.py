"""The world's ground truth, in the form in which geometric rewards take it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from arvideo_rl.world.render import truth
from arvideo_rl.world.rooms import Room
from arvideo_rl.world.scene import HEIGHTS, PITCHES, Scenes, camera_path, sample_scenes
from rewards.contract import Clips
from rewards.geometry.backends import Answer
from rewards.geometry.cameras import Geometry, in_pixels
from rewards.geometry.flow import Flow


def geometry_of_scenes(scenes: Scenes, size: int) -> list[Geometry]:
    """Depth (NaN on the sky), cameras, intrinsics and scene flow of each scene, rendered ``size`` pixels square."""
    known = truth(scenes, size)
    depth = known.depth.masked_fill(~known.valid, torch.nan)
    last = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(*known.w2c.shape[:2], 1, 4)
    poses, k = torch.cat([known.w2c, last], 2), in_pixels(known.intrinsics, size, size)
    moved = known.scene_flow
    return [Geometry(d, w, k, metric=True, scene_flow=f) for d, w, f in zip(depth, poses, moved)]


def geometry_of_room(room: Room) -> Geometry:
    """Depth, cameras and intrinsics of a room."""
    return Geometry(room.depth, room.w2c, room.intrinsics, metric=True)


def geometry_of_commands(actions: Tensor, size: int) -> Geometry:
    """What every obedient clip of the world shares, whatever else it shows: the bare ground, seen by a camera that does
    ``actions`` [T] (the first drives nothing) from the middle of the heights and pitches there are."""
    yaw, camera = (torch.from_numpy(x).float() for x in camera_path(actions.numpy()))
    camera[:, 1] = -float(np.mean(HEIGHTS))
    scene = sample_scenes([0], len(actions))
    bare = replace(
        scene, actions=actions[None], yaw=yaw[None], camera=camera[None], present=torch.zeros_like(scene.present),
        pitch=torch.full_like(scene.pitch, float(np.deg2rad(np.mean(PITCHES)))),
    )  # fmt: skip
    return geometry_of_scenes(bare, size)[0]


class Commanded:
    """A geometry backend that takes a clip's commands at their word. It estimates nothing, so it works at 32 pixels,
    and a reward on it asks whether the picture moves as the ground would."""

    name, licence = "commanded", "the package's own"

    def geometry(self, clips: Clips, index: int, flow: Flow) -> Answer:
        if clips.actions is None:
            raise ValueError("geometry backend commanded needs actions; pass Clips(actions=...)")
        if bool((clips.actions[index] == 0).any()):
            return "content:no_actions"
        actions = torch.cat([torch.zeros(1, dtype=torch.int64), clips.actions[index].cpu()])
        return geometry_of_commands(actions, clips.frames.shape[-1])
