"""Guidance by a reward of the run: each chunk is decoded and judged while it is being made, with gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError, check_choice
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.prompts import Prompts
from rewards.contract import Clips, Reward, score_with_grad
from samplers.guidance import Guide, Judge


def guiding(guide: Guide | None, rewards: dict[str, tuple[Reward, float]]) -> Reward | None:
    """The reward that ``guide`` names; ConfigError when there is none, or when it gives no gradient."""
    if guide is None:
        return None
    check_choice("objective.args.guide.reward", guide.reward, rewards)
    reward = rewards[guide.reward][0]
    if not getattr(reward, "differentiable", False) or reward.granularity == "group":
        raise ConfigError(
            f"objective.args.guide.reward={guide.reward}: reward {reward.name!r} as configured has no gradient; guide "
            "by one that declares differentiable, or with another score of it"
        )
    return reward


def judge_of(reward: Reward, generator: Generator, prompts: Prompts) -> Judge:
    """Judges chunks of one stream per row of ``prompts``: the chunk after the last frame of the one before it, where
    that is known, so that the change into its first frame counts. What decodes it begins there: Wan's shows that frame
    as one pixel frame, as it shows the first of a video."""

    def judge(chunk: int, clean: Tensor, before: Tensor | None) -> Tensor:
        known = before is not None
        frames = torch.cat([before[:, -1:], clean], 1) if before is not None else clean
        pixels = generator.codec.decode(frames).float().cpu()  # where rewards are
        first = chunk * generator.streaming.chunk - known
        per_pixel_frame = pixels.shape[1] == frames.shape[1]  # commands go with pixel frames
        actions = prompts.actions[:, first + 1 : first + frames.shape[1]].contiguous() if per_pixel_frame else None
        clips = Clips(
            frames=pixels, fps=generator.streaming.fps, prompts=list(prompts.texts), actions=actions,
            chunk_starts=(0, 1) if known else (0,),
        )  # fmt: skip
        value = score_with_grad(reward, clips)
        return value if value.ndim == 1 else value[:, -1]

    return judge
