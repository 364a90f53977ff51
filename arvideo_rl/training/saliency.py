"""Where in a clip a reward looks: the size of its gradient by place, on the grid of the latents."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from rewards.contract import Clips, Reward, score_with_grad


def saliency(reward: Reward, clips: Clips, patch: int, grid: tuple[int, int, int]) -> Tensor:
    """[B, F, H, W] for the latent ``grid`` (F, H, W): L2 norm of d score / d pixels over each patch of a frame,
    interpolated. Clips without a score give 0. ValueError when the reward gives no gradient.

    Stream-R1 takes patches of (2, 14, 14) pixels and scrambles their rows; here a patch is of one frame.
    """
    frames = clips.frames.detach().clone().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(score_with_grad(reward, replace(clips, frames=frames)).nansum(), frames)
    square = avg_pool2d(slope.square().sum(2), patch, ceil_mode=True, divisor_override=1)
    return interpolate(square.sqrt()[:, None], grid, mode="trilinear", align_corners=False)[:, 0]
