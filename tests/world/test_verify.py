"""Verifiers are near their best on real clips and fall when, and only when, what they measure is spoilt."""

import pytest
import torch

from arvideo_rl.world.render import render
from arvideo_rl.world.scene import COLOURS, parse_caption, sample_scenes
from arvideo_rl.world.verify import VERIFIERS, colour_mask, frechet, object_motion

OTHER = {"red": "blue", "blue": "green", "green": "yellow", "yellow": "red"}


@pytest.fixture(scope="module")
def real():
    scenes = sample_scenes(range(100, 116), 12)
    return render(scenes), list(scenes.captions), scenes.actions


@pytest.fixture(scope="module")
def measure(real):
    """measure(name, pixels=..., captions=..., actions=..., rows=...) -> mean over clips, real unless told."""
    pixels, captions, actions = real
    every = list(range(len(captions)))

    def call(name, pixels=pixels, captions=captions, actions=actions, rows=every):
        out = VERIFIERS[name](pixels[rows], [captions[i] for i in rows], actions[rows])
        assert out.shape == (len(rows),) and out.isfinite().all()
        return out.mean().item()

    return call


@pytest.fixture(scope="module")
def travelling(real):
    return [i for i, c in enumerate(real[1]) if all(o.motion in ("left", "right") for o in parse_caption(c))]


def test_real_clips_are_near_1(measure):
    assert measure("colour_present") > 0.95
    assert measure("direction_correct") > 0.9


def test_another_colour_than_said_is_not_found(real, measure):
    wrong = [" ".join(OTHER.get(w, w) for w in c.split()) for c in real[1]]
    assert measure("colour_present", captions=wrong) < 0.3
    assert measure("direction_correct", captions=wrong) < 0.3


def test_a_mirrored_clip_goes_the_wrong_way_and_keeps_its_colours(real, measure, travelling):
    mirrored = real[0].flip(-1)
    assert measure("direction_correct", rows=travelling) > 0.9
    assert measure("direction_correct", pixels=mirrored, rows=travelling) < 0.3
    assert measure("colour_present", pixels=mirrored) == measure("colour_present")


def test_an_opposite_caption_is_wrong(real, measure, travelling):
    swap = {"left": "right", "right": "left"}
    wrong = [" ".join(swap.get(w, w) for w in c.split(" while ")[0].split()) for c in real[1]]
    assert measure("direction_correct", captions=wrong, rows=travelling) < 0.1


def test_a_travelling_object_is_not_said_to_rest(real, measure, travelling):
    wrong = [" and ".join(f"a {o.colour} {o.shape} rests" for o in parse_caption(c)) for c in real[1]]
    assert measure("direction_correct", captions=wrong, rows=travelling) < 0.1


def test_a_whole_frame_of_the_colour_scores_0(measure, real):
    red = torch.tensor(COLOURS["red"]).view(3, 1, 1).expand_as(real[0])
    captions = ["a red ball rests"] * len(real[1])
    assert measure("colour_present", pixels=red, captions=captions) == 0


def test_a_blurred_clip_is_less_sharp(real, measure):
    blurred = torch.nn.functional.avg_pool2d(real[0].flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(real[0])
    assert measure("sharpness", pixels=blurred) < 0.75 * measure("sharpness")


def test_sharpness_counts_both_directions(real, measure):
    stripes = torch.zeros_like(real[0])
    stripes[..., ::2] = 1
    across, down = (measure("sharpness", pixels=x) for x in (stripes, stripes.mT))
    assert across == pytest.approx(50) and down == pytest.approx(50)


def test_a_frozen_clip_has_no_motion_and_travels_nowhere(real, measure, travelling):
    frozen = real[0][:, :1].expand_as(real[0])
    assert measure("motion") > 1 and measure("motion", pixels=frozen) == 0
    still = torch.ones_like(real[2])  # no camera motion to correct for
    assert measure("direction_correct", pixels=frozen, actions=still, rows=travelling) == 0


def test_motion_is_the_mean_change_in_per_cent(measure, real):
    flicker = torch.zeros_like(real[0])
    flicker[:, ::2] = 0.1
    assert measure("motion", pixels=flicker) == pytest.approx(10, rel=1e-4)


def test_an_object_that_is_never_seen_is_wrong(measure, real):
    grey = torch.full_like(real[0], 0.5)
    assert measure("direction_correct", pixels=grey) == 0 and measure("colour_present", pixels=grey) == 0


@pytest.mark.parametrize("action", ["stay", "turn right", "forward", "back"])
def test_the_speed_of_a_resting_object_is_0_whatever_the_camera_does(action, find):
    scenes = find(action, "rest")
    for clip, objects, actions in zip(render(scenes), scenes.objects, scenes.actions):
        speed, spread, seen = object_motion(clip, objects[0].colour, actions)
        assert seen >= 3 and abs(speed) < 0.2 and (spread < 0.2 or action != "stay")


def test_the_height_of_a_bouncing_object_varies(find):
    scenes = find("stay", "bounce")
    spreads = [object_motion(c, o[0].colour, a)[1] for c, o, a in zip(render(scenes), scenes.objects, scenes.actions)]
    assert min(spreads) > 0.7


@pytest.mark.parametrize("colour", COLOURS)
def test_an_objects_colour_is_its_own_in_light_and_in_shade(colour):
    paint = torch.tensor(COLOURS[colour]).view(3, 1, 1)
    for light in (0.3, 0.6, 1.0):
        assert [c for c in COLOURS if colour_mask(light * paint, c).all()] == [colour]


def test_the_dull_world_has_no_colour():
    x = render(sample_scenes([0], 1))[0, 0]
    rest = x[:, :4]  # the sky
    assert not any(colour_mask(rest, c).any() for c in COLOURS)


def exact(mean, cov, n=40):
    """n points whose sample mean and covariance are exactly the given ones."""
    x = torch.randn(n, len(mean), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = x - x.mean(0)
    white = x @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(x.T))).T
    return white @ torch.linalg.cholesky(cov).T + mean


A = torch.tensor([[2.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
B = torch.tensor([[1.0, -0.4], [-0.4, 3.0]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -2.0], dtype=torch.float64)


def test_frechet_is_0_for_the_same_gaussian():
    assert frechet(exact(MEAN, A), MEAN, A) == pytest.approx(0, abs=1e-9)


def test_frechet_of_samples_of_one_gaussian_is_small():
    x = torch.randn(5000, 4, generator=torch.Generator().manual_seed(1))
    assert 0 < frechet(x, torch.zeros(4), torch.eye(4)) < 0.02


def test_frechet_has_the_closed_form_for_axis_aligned_gaussians():
    zero, left, right = torch.zeros(2).double(), torch.tensor([4.0, 9.0]).double(), torch.tensor([1.0, 16.0]).double()
    got = frechet(exact(MEAN, left.diag()), zero, right.diag())
    assert got == pytest.approx(1 + 4 + (2 - 1) ** 2 + (3 - 4) ** 2)


def test_frechet_has_the_closed_form_for_two_turned_gaussians():
    cross = (torch.trace(A @ B) + 2 * torch.linalg.det(A @ B).sqrt()).sqrt()  # trace of the root of a 2 x 2 product
    expected = 5 + torch.trace(A) + torch.trace(B) - 2 * cross
    assert frechet(exact(MEAN, A), torch.zeros(2), B) == pytest.approx(expected.item())


def test_frechet_with_too_few_vectors_is_refused_with_the_numbers():
    with pytest.raises(ValueError) as error:
        frechet(torch.randn(5, 8), torch.zeros(8), torch.eye(8))
    assert "8 dimensions" in str(error.value) and "5 " in str(error.value)
    frechet(torch.randn(9, 8), torch.zeros(8), torch.eye(8))
