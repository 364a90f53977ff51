"""What a video is judged by besides the trained rewards: the world's verifiers where it can show the world, and how it
looks as a whole anywhere else. Nothing here is trained on."""

from __future__ import annotations

from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.codec import IdentityCodec
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import appearance
from arvideo_rl.world.verify import VERIFIERS, motion, sharpness

LOOKS = ("sharpness", "motion", "brightness", "contrast", "saturation")  # of any video, from pixels alone


def shows_world(generator: Generator) -> bool:
    """Whether videos of ``generator`` can be the embedded world's: its pixels are the latents and it takes actions."""
    return isinstance(generator.codec, IdentityCodec) and generator.transformer.action_embedding is not None


def look(generator: Generator, pixels: Tensor, prompts: Prompts) -> dict[str, Tensor]:
    """Per clip [B] by name, of pixels [B, T, 3, H, W]: the verifiers (NaN where the prompt is not the world's), or
    without the world ``LOOKS``."""
    texts, actions = list(prompts.texts), prompts.actions[:, : pixels.shape[1]]
    if shows_world(generator):
        return {name: verify(pixels, texts, actions) for name, verify in VERIFIERS.items()}
    found = {"sharpness": sharpness(pixels, texts, actions), "motion": motion(pixels, texts, actions)}
    return found | appearance(pixels)
