"""Scenes the world tests share, found by what happens in them and not by magic seeds."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.world.scene import ACTIONS, sample_scenes

FRAMES = 8


@pytest.fixture(scope="session")
def find():
    """``find("stay", "rest", "ball", count=2, frames=4)``: scenes with one object and one commanded action throughout,
    cut to their first ``frames`` frames."""
    pool = sample_scenes(range(1600), FRAMES)

    def pick(action, motion, shape=None, count=3, frames=FRAMES):
        wanted = ACTIONS.index(action)
        seeds = [
            s for s, a, o in zip(pool.seeds, pool.actions, pool.objects)
            if (a[1:] == wanted).all() and len(o) == 1 and o[0].motion == motion and shape in (None, o[0].shape)
        ]  # fmt: skip
        assert len(seeds) >= count
        scenes = sample_scenes(seeds[:count], FRAMES)
        timed = ("actions", "camera", "yaw", "centre", "spin")
        return replace(scenes, **{name: getattr(scenes, name)[:, :frames] for name in timed})

    return pick


@pytest.fixture(scope="session")
def pixel_grid():
    """``pixel_grid(size)``: homogeneous normalised pixel centres [size, size, 3], x / W and y / H in [0, 1]."""

    def grid(size):
        at = (torch.arange(size) + 0.5) / size
        y, x = torch.meshgrid(at, at, indexing="ij")
        return torch.stack([x, y, torch.ones_like(x)], -1)

    return grid
