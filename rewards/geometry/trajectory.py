"""Camera paths: how smooth one is (VGGRPO, arXiv 2603.26599) and how well it follows another (World-R1, 2604.24764)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rewards.geometry.cameras import centres, rotation_angle, rotation_vector

STILL = 1e-4  # a target path shorter than this, in median depths, does not move
STILL_TURN = 1e-3  # the same of turning, in radians


def smoothness(w2c: Tensor) -> tuple[Tensor, Tensor]:
    """Smoothness of the translation and of the rotation, both in (0, 1], 1 for constant velocity, of poses [F, 4, 4].

    1 / (1 + e), e = mean of |acceleration| / (|v_t+1| + |v_t|). Speeds below a thousandth of the fastest step of the
    same kind count as rest. Free of units, of the world's frame and of scale. NaN below three frames. A camera at rest
    is perfectly smooth: gate it by motion.
    """
    if len(w2c) < 3:
        nan = w2c.new_tensor(math.nan)
        return nan, nan
    velocity = centres(w2c).diff(dim=0)
    turn = rotation_vector(w2c[1:, :3, :3] @ w2c[:-1, :3, :3].transpose(-1, -2))
    return _smooth(velocity), _smooth(turn)


def _smooth(velocity: Tensor) -> Tensor:
    speed = velocity.norm(dim=-1)
    rest = 1e-3 * speed.max() + 1e-6
    error = velocity.diff(dim=0).norm(dim=-1) / (speed[1:] + speed[:-1] + rest)
    return 1 / (1 + error.mean())


def following(w2c: Tensor, target: Tensor, *, unit: float = 1.0, metric: bool = False) -> dict[str, Tensor]:
    """How well the path ``w2c`` [F, 4, 4] follows ``target`` [F, 4, 4] (both world-to-camera): parts in [0, 1], of
    which ``following`` is the whole.

    Both are moved so that their first camera is the origin, and the path is scaled to the target's size (RMS of the
    centres). ``unit`` is the length that counts as one where the target stands still: the median depth. The length of
    the path counts only when it is ``metric``, since scaling makes it agree otherwise.
    """
    if w2c.shape != target.shape or len(w2c) < 2:
        raise ValueError(
            f"paths have shapes {tuple(w2c.shape)} and {tuple(target.shape)}; expected two of [F > 1, 4, 4]"
        )
    pose, goal = _anchor(w2c), _anchor(target)
    here, there = centres(pose), centres(goal)
    own, asked = (c.diff(dim=0).norm(dim=-1).sum() for c in (here, there))
    turned, asked_turn = (_turns(p).sum() for p in (pose, goal))
    moves, turns = bool(asked > STILL), bool(asked_turn > STILL_TURN)
    degrees = torch.rad2deg(rotation_angle(pose[:, :3, :3] @ goal[:, :3, :3].transpose(-1, -2)))
    if moves:
        size = here.square().sum().sqrt()
        fitted = here * (there.square().sum().sqrt() / size) if size > 1e-9 else here
        path = (1 + (fitted * there).sum() / (fitted.norm() * there.norm()).clamp_min(1e-12)) / 2
        if size <= 1e-9:
            path = path.new_zeros(())
        near = torch.exp(-(fitted - there).norm(dim=-1).mean() / (2 * asked / (len(goal) - 1)))
        parts = [(0.4, path), (0.3, near)] + ([(0.3, _extent(own, asked))] if metric else [])
        move = sum(w * p for w, p in parts) / sum(w for w, _ in parts)
    else:
        move = torch.exp(-own / (3 * unit))
    if turns:
        turn = 0.5 * torch.exp(-degrees[1:].mean() / 6) + 0.3 * torch.exp(-degrees[-1] / 6)
        turn = turn + 0.2 * _extent(turned, asked_turn)
    else:
        turn = torch.exp(-torch.rad2deg(turned) / 5)
    whole = {(True, True): (move + turn) / 2, (True, False): 0.8 * move + 0.2 * turn,
             (False, True): 0.2 * move + 0.8 * turn, (False, False): move * turn}[moves, turns]  # fmt: skip
    parts_out = {"following": whole.clamp(0, 1), "translation": move, "rotation": turn}
    return {name: torch.as_tensor(part).float() for name, part in parts_out.items()}


def _anchor(w2c: Tensor) -> Tensor:
    return w2c.double() @ torch.linalg.inv(w2c[0].double())


def _turns(w2c: Tensor) -> Tensor:
    return rotation_angle(w2c[1:, :3, :3] @ w2c[:-1, :3, :3].transpose(-1, -2))


def _extent(a: Tensor, b: Tensor) -> Tensor:
    return torch.exp(-((a + 1e-6) / (b + 1e-6)).log().abs())
