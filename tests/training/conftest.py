"""A generator small enough for tests, with random weights, saved like any other."""

import pytest
import torch

from arvideo_rl.training.distill import DistillConfig, Network, build
from arvideo_rl.training.settings import AlignConfig, Part


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> str:
    """Folder of a 32-wide, 2-layer generator for 16x16-patch tokens."""
    generator = build(DistillConfig(network=Network(dim=32, layers=2, ffn=64, patch=(16, 16), text_dim=16)))
    torch.nn.init.normal_(generator.transformer.proj_out.weight, std=0.3)
    folder = tmp_path_factory.mktemp("small")
    generator.save(folder)
    return str(folder)


@pytest.fixture
def config(small, tmp_path) -> AlignConfig:
    """An alignment of it that takes a second."""
    config = AlignConfig(generator=small, out=str(tmp_path), iterations=2, prompts_per_step=2, group=4, frames=6)
    config.rewards = {"actions": Part("inverse_dynamics", 1.0, {"score": "expected_accuracy", "granularity": "chunk"})}
    config.prompts.count = 8
    config.held_out.prompts, config.held_out.noises, config.held_out.frames = 8, 1, 12
    config.policy.rank, config.policy.alpha = 4, 4.0
    return config
