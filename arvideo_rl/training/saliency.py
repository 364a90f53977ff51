"""Where in a clip a reward looks: the size of its gradient by place, on the grid of the latents."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from arvideo_rl.config import ConfigError
from rewards.contract import Clips, Reward, check_needs


def saliency(reward: Reward, clips: Clips, patch: int, grid: tuple[int, int, int]) -> Tensor:
    """[B, F, H, W] for the latent ``grid`` (F, H, W): L2 norm of d score / d pixels over each patch of a frame,
    interpolated. Clips without a score give 0. ConfigError when the reward cannot be differentiated.

    Stream-R1 takes patches of (2, 14, 14) pixels and scrambles their rows; here a patch is of one frame.
    """
    check_needs(reward, clips)
    frames = clips.frames.detach().clone().requires_grad_()
    with torch.enable_grad():
        scores = reward(replace(clips, frames=frames))
        if not scores.value.requires_grad:
            raise ConfigError(
                f"objective.args.saliency: reward {reward.name!r} gives no gradient; set saliency=0 or take another"
            )
        total = torch.where(scores.valid, scores.value, 0.0).sum()
        (slope,) = torch.autograd.grad(total, frames)
    square = avg_pool2d(slope.square().sum(2), patch, ceil_mode=True, divisor_override=1)
    return interpolate(square.sqrt()[:, None], grid, mode="trilinear", align_corners=False)[:, 0]
