"""A small generator with its policies, and what makes and trains on records of one group."""

import pytest
import torch

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import Policies, PolicyConfig
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.generators.text import WordEncoder
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import roll_out
from samplers.randomness import Key
from samplers.stream import draw_from


@pytest.fixture
def alignable(tiny):
    """(generator, policies, make, losses): ``make(objective, branches=, frames=, pivot=, prompt=)`` gives a record of
    one group, ``losses(objective, record, adv)`` what the objective says of it."""
    torch.manual_seed(3)
    transformer = tiny()
    generator = Generator(transformer, WordEncoder(words=("a", "red", "ball"), dim=8),
                          streaming=Streaming(3, 9, 3, size=4))  # fmt: skip
    policies = Policies(transformer, PolicyConfig("lora", rank=4, alpha=8.0), seed=3)

    def make(objective, branches=2, frames=9, pivot=1, prompt=0):
        prompts = Prompts(("a red ball",) * branches, torch.full((branches, frames + 3), prompt + 1), (0,) * branches)
        keys = [Key(1, 0, prompt, b) for b in range(branches)]
        with torch.no_grad(), policies.using("old") as model:
            return roll_out(generator, model, prompts, keys, frames, torch.full((branches,), prompt),
                            objective.exploration, pivot)  # fmt: skip

    def losses(objective, record, adv):
        denoiser = generator.denoiser(policies, record.script, draw_from(record.keys, generator.latent_shape))
        return objective.losses(policies, denoiser, record, adv, generator.streaming.levels)

    return generator, policies, make, losses
