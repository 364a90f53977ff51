"""Prompt switches: from a frame on, other objects stand before the camera, in the same place under the same sky.

What a stream should show when its prompt changes while it runs: the camera, ground, sky and hills go on, the old
objects are gone, and the new ones enter where the camera looks at that moment.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from arvideo_rl.world.scene import Scenes, caption


def switched(first: Scenes, second: Scenes, frame: int) -> Scenes:
    """The scenes ``first`` as they are from ``frame`` on, after a switch to the objects and captions of ``second``.

    Both are batches of the same size and length; object time counts from ``frame`` (before it the objects of the
    result stand still and mean nothing). Captions name objects only, since the commands are those of ``first``. A
    ball keeps rolling about the world's z axis, which at a few pixels' size cannot be told from its own.
    """
    time = (torch.arange(first.actions.shape[1]) - frame).clamp_min(0)
    local = second.centre[:, time]  # [B, T, O, 3], in a frame whose camera stood at the origin and looked along z
    yaw, camera = first.yaw[:, frame, None, None], first.camera[:, frame, None, None]
    x, y, z = local.unbind(-1)
    ahead = torch.stack([yaw.sin() * z + yaw.cos() * x, y, yaw.cos() * z - yaw.sin() * x], -1)
    keep = {k: getattr(second, k) for k in ("objects", "present", "is_cube", "colour", "radius")}
    return replace(
        first,
        captions=tuple(caption(o, a, with_camera=False) for o, a in zip(second.objects, second.actions.numpy())),
        centre=ahead + camera * torch.tensor([1.0, 0.0, 1.0]),
        spin=second.spin[:, time],
        **keep,
    )
