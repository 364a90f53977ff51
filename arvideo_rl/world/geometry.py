"""The world's ground truth, in the form in which geometric rewards take it."""

from __future__ import annotations

import torch

from arvideo_rl.world.render import truth
from arvideo_rl.world.rooms import Room
from arvideo_rl.world.scene import Scenes
from rewards.geometry.cameras import Geometry, in_pixels


def geometry_of_scenes(scenes: Scenes, size: int) -> list[Geometry]:
    """Depth (NaN on the sky), cameras and intrinsics of each scene, rendered ``size`` pixels square."""
    known = truth(scenes, size)
    depth = known.depth.masked_fill(~known.valid, torch.nan)
    last = torch.tensor([0.0, 0.0, 0.0, 1.0]).expand(*known.w2c.shape[:2], 1, 4)
    poses, k = torch.cat([known.w2c, last], 2), in_pixels(known.intrinsics, size, size)
    return [Geometry(d, w, k, metric=True) for d, w in zip(depth, poses)]


def geometry_of_room(room: Room) -> Geometry:
    """Depth, cameras and intrinsics of a room."""
    return Geometry(room.depth, room.w2c, room.intrinsics, metric=True)
