"""Sharpness and the motion rewards: the contract, what each tells apart, what each is blind to, and exact values."""

import math

import pytest
import torch
from torchvision.transforms.functional import gaussian_blur

from arvideo_rl.world.rooms import room
from rewards.contract import Clips, score
from rewards.distortions import freeze, jitter, melt
from rewards.geometry.flow import Flow
from rewards.motion import ENOUGH, DynamicDegree, Flicker, MotionSmoothness
from rewards.registry import build
from rewards.sharpness import NOISE_KEPT, frame_sharpness, noise_level

NAMES = ("sharpness", "dynamic_degree", "motion_smoothness", "flicker")
SIZE, FRAMES, FPS = 64, 8, 8.0
CLEAN = torch.stack([room(seed, FRAMES, SIZE).frames for seed in range(3)])


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def value(name, frames, fps=FPS, **args):
    return score(build(name, **args), Clips(frames.contiguous(), fps=fps)).value


def each(spoil):
    return torch.stack([spoil(f, i) for i, f in enumerate(CLEAN)])


SPOILED = {
    "frozen": each(lambda f, i: freeze(f)),
    "half frozen": each(lambda f, i: torch.cat([f[:4], f[3:4].expand(4, -1, -1, -1)])),
    "soft": each(lambda f, i: gaussian_blur(f, 9, 1.5)),
    "shaken": each(lambda f, i: jitter(f, i, 2.0)),
    "shuffled": each(lambda f, i: f[torch.tensor([4, 0, 6, 2, 7, 1, 5, 3])]),
    "melted": each(lambda f, i: melt(f, i, 4.0)),
    "doubled": each(lambda f, i: f[:4].repeat_interleave(2, 0)),
    "noisy": (CLEAN + 0.05 * noise(*CLEAN.shape)).clamp(0, 1),
    "flickering": (CLEAN * torch.tensor([1, 0.85] * 4)[:, None, None, None]),
    "darkened": CLEAN * 0.3,
    "one good frame": torch.cat([CLEAN[:, :1], each(lambda f, i: gaussian_blur(f[1:], 9, 1.5))], 1),
}
FALLS = {
    "sharpness": ("soft", "noisy", "one good frame"),
    "dynamic_degree": ("frozen", "half frozen"),
    "motion_smoothness": ("frozen", "half frozen", "shaken", "shuffled", "melted", "doubled"),
    "flicker": ("frozen", "half frozen", "noisy", "flickering"),
}


@pytest.fixture(scope="module")
def clean():
    return {name: value(name, CLEAN) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_same_scores_alone_and_in_another_order_without_drawing_random_numbers(name, clean):
    before, order = torch.get_rng_state(), torch.tensor([2, 0])
    assert torch.equal(value(name, CLEAN[order]), clean[name][order])
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(value(name, CLEAN[1:2]), clean[name][1:2])
    assert len(set(clean[name].tolist())) == len(CLEAN)


@pytest.mark.parametrize(("name", "spoiled"), [(n, s) for n in NAMES for s in FALLS[n]])
def test_what_it_is_made_for_scores_below_the_clean_clip(name, spoiled, clean):
    assert (value(name, SPOILED[spoiled]).nan_to_num(nan=-1) < 0.9 * clean[name]).all()


@pytest.mark.parametrize("name", NAMES)
def test_darkening_does_not_pay(name, clean):
    assert torch.allclose(value(name, SPOILED["darkened"]), clean[name], rtol=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_noise_and_nearly_black_are_in_range_or_refused(name):
    wild = noise(2, 5, 3, 48, 40).mul(0.2).add(0.5).clamp(0, 1)
    wild[1] *= 0.01
    got = value(name, wild)
    assert ((got >= 0) & (got <= 1) | got.isnan()).all()


def test_frozen_clips_are_exactly_worst_where_motion_counts():
    for name in NAMES[1:]:
        assert value(name, SPOILED["frozen"]).tolist() == [0, 0, 0]


def test_flat_frames_are_a_reason_and_not_a_number():
    flat = torch.full((1, 4, 3, 32, 32), 0.5)
    got = score(build("sharpness"), Clips(flat))
    assert got.reasons == ["content:no_texture"] and got.value.isnan().all()
    half = torch.cat([CLEAN[:1, :4], torch.full_like(CLEAN[:1, :4], 0.5)], 1)
    assert score(build("sharpness"), Clips(half)).reasons == ["content:no_texture"]
    assert score(build("sharpness", quantile=1.0), Clips(half)).reasons == [None]


def test_noise_is_measured_and_taken_out():
    size = 0.03
    grey = size * noise(4, 1, 128, 128)
    assert torch.allclose(noise_level(grey), torch.full((4,), size), rtol=0.03)
    share, energy, _ = frame_sharpness(0.5 + grey.expand(-1, 3, -1, -1))
    assert torch.allclose(energy, torch.full((4,), 4 * size**2), rtol=0.03)
    assert share.max() < 0.06
    taps = torch.tensor([1, 4, 6, 4, 1]) / 16
    edge = torch.nn.functional.pad(taps, (1, 0)) - torch.nn.functional.pad(taps, (0, 1))
    assert float(edge.square().sum() * taps.square().sum() / 2) == pytest.approx(NOISE_KEPT)


def still(velocity, frames=4, size=32):
    """A flow of ``velocity`` [F-1, 2] everywhere, trusted everywhere."""
    move = torch.tensor(velocity, dtype=torch.float32)[:, None, None].expand(-1, size, size, 2)
    sure = torch.ones(frames - 1, size, size)
    return Flow(move, -move, sure, sure, torch.ones(frames, size, size))


FLAT = torch.full((4, 3, 32, 32), 0.5)


def measured(reward, velocity, fps=10.0, frames=FLAT):
    return reward.measure(Clips(frames[None], fps=fps), 0, frames, still(velocity))


def test_dynamic_degree_is_speed_in_diagonals_a_second():
    got = measured(DynamicDegree(tau=0.5), [[3.0, 4.0]] * 3)
    assert got["diagonals_per_second"] == pytest.approx(5 * 10 / math.hypot(32, 32))
    assert got["value"] == pytest.approx(1 - math.exp(-got["diagonals_per_second"] / 0.5))
    limit = 6 * 32 / 256  # VBench: pixels in an eighth of a second
    for factor, dynamic in ((1.01, 1.0), (0.99, 0.0)):
        speed = factor * limit * 8 / 10
        assert measured(DynamicDegree(), [[speed, 0.0]] * 3)["vbench_dynamic"] == dynamic
    assert ENOUGH == pytest.approx(6 / 256 * 8 / math.hypot(1, 16 / 9), abs=5e-4)


def test_dynamic_degree_does_not_change_with_frame_rate_or_resolution():
    ten = room(5, 13, 96, step=0.04).frames[None]
    got = score(build("dynamic_degree"), Clips(ten, fps=16)).raw["diagonals_per_second"]
    slow = score(build("dynamic_degree"), Clips(ten[:, ::2].contiguous(), fps=8)).raw["diagonals_per_second"]
    small = torch.nn.functional.interpolate(ten[0], scale_factor=0.5, mode="area")[None]
    half = score(build("dynamic_degree"), Clips(small, fps=16)).raw["diagonals_per_second"]
    assert torch.allclose(slow, got, rtol=0.05)
    assert torch.allclose(half, got, rtol=0.15)  # the little flow there is at the borders of 48 pixels weighs more


@pytest.mark.parametrize(
    ("velocity", "expected"),
    [([[2.0, 0.0]] * 3, 1.0), ([[2.0, 0.0], [-2.0, 0.0], [2.0, 0.0]], 0.0), ([[2.0, 0.0], [0.0, 0.0], [2.0, 0.0]], 0.0),
     ([[1.0, 0.0], [3.0, 0.0], [1.0, 0.0]], 0.5)],
)  # fmt: skip
def test_smoothness_is_one_for_even_motion_and_none_for_turning_round(velocity, expected):
    assert measured(MotionSmoothness(), velocity)["value"] == pytest.approx(expected, abs=1e-6)


def test_flicker_is_colour_change_over_contrast():
    steps = torch.zeros(4, 3, 32, 32)
    steps[..., 16:] = 0.8  # deviation 0.4
    steps += torch.tensor([0, 0.1, 0, 0.1])[:, None, None, None]
    got = measured(Flicker(tau=0.5), [[0.0, 0.0]] * 3, frames=steps)
    contrast = float(steps.std((2, 3)).mean())
    assert got["error"] == pytest.approx(0.1 / contrast, rel=1e-4)
    assert got["value"] == pytest.approx(math.exp(-0.1 / contrast / 0.5), rel=1e-4)
    assert got["vbench_temporal_flickering"] == pytest.approx(1 - 0.1, rel=1e-4)


def test_where_too_little_can_be_followed_there_is_no_number():
    lost = still([[2.0, 0.0]] * 3)
    lost.confidence.zero_()
    for reward in (MotionSmoothness(), Flicker()):
        with pytest.raises(Exception, match="content:few_followed"):
            reward.measure(Clips(FLAT[None], fps=8), 0, FLAT, lost)


@pytest.mark.parametrize(
    ("call", "says"),
    [(lambda: value("sharpness", CLEAN, quantile=2), "quantile is 2"),
     (lambda: value("sharpness", CLEAN[..., :4]), "8 pixels"),
     (lambda: build("dynamic_degree", tau=0), "tau is 0"),
     (lambda: build("flicker", motion_floor=2), "motion_floor is 2"),
     (lambda: score(build("dynamic_degree"), Clips(CLEAN)), "needs fps"),
     (lambda: value("motion_smoothness", CLEAN[:, :2]), "2 frames; it needs 3"),
     (lambda: value("flicker", CLEAN[..., :16]), "64x16")],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_in_one_line(call, says):
    with pytest.raises(ValueError, match=says) as error:
        call()
    assert "\n" not in str(error.value)
