"""What several test folders share: golden numbers and small random generators. Nothing here reads outside tests/."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.transformer import CausalWan

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden():
    """``golden("rollouts")`` -> tensors of tests/golden/rollouts.safetensors, read once."""
    return lru_cache(lambda name: load_file(GOLDEN / f"{name}.safetensors"))


@pytest.fixture(scope="session")
def golden_wan(golden):
    """The tiny Wan all golden numbers were made with; never change it."""
    model = CausalWan(num_attention_heads=4, attention_head_dim=32, text_dim=32, ffn_dim=256, num_layers=2)
    model.load_state_dict(golden("wan_weights"))
    return model.eval()


def make_tiny(**config) -> CausalWan:
    """A random causal Wan on 3 x 4 x 4 latents (4 tokens a frame), x0 prediction and 6 actions unless told."""
    settings = dict(
        num_attention_heads=2, attention_head_dim=24, in_channels=3, out_channels=3, text_dim=8, freq_dim=32,
        ffn_dim=64, num_layers=2, prediction="x0", num_actions=6,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return CausalWan(**(settings | config)).eval()


@pytest.fixture
def tiny():
    """The factory :func:`make_tiny`; every call gives a fresh model with the same weights."""
    return make_tiny


@pytest.fixture
def randn():
    """``randn(2, 3)``: normal numbers from one generator per test."""
    source = torch.Generator().manual_seed(11)
    return lambda *shape: torch.randn(*shape, generator=source)


def make_moved(context: Context, by: int) -> Context:
    """The same context with every frame and position ``by`` frames later."""
    spans = tuple(replace(s, start=s.start + by, stop=s.stop + by) for s in context.spans)
    return replace(context, spans=spans, position=context.position + by, _rotated={})


@pytest.fixture
def moved():
    """:func:`make_moved`."""
    return make_moved
