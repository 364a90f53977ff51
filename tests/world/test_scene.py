"""A scene is its seed: what is in it, what is said of it, and what the actions do."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from arvideo_rl.world.scene import (
    ACTIONS,
    COLOURS,
    MOTION_WORDS,
    STEP,
    TURN,
    WORDS,
    Object,
    caption,
    parse_caption,
    sample_actions,
    sample_scenes,
)


def assert_same(a, b):
    for field in fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y, field.name


@pytest.fixture(scope="module")
def many():
    return sample_scenes(range(400), 18)


def test_one_seed_names_one_scene():
    assert_same(sample_scenes([5, 6], 12), sample_scenes([5, 6], 12))


def test_other_seeds_are_other_scenes(many):
    assert len({tuple(row.tolist()) for row in many.camera[:, 0]}) == 400


def test_a_scene_does_not_depend_on_its_batch():
    assert_same(sample_scenes([3, 4, 5], 12)[1:2], sample_scenes([4], 12))


def test_seeds_of_training_and_measuring_never_meet():
    from arvideo_rl.training.distill import DistillConfig
    from arvideo_rl.training.idm import IdmConfig
    from arvideo_rl.training.prompts import HELD_OUT_SEED, TRAIN_SEED, PromptConfig
    from arvideo_rl.world.dataset import HELD_OUT

    idm = IdmConfig()
    weights = range(0, max(idm.smooth, idm.joystick, DistillConfig().clips))
    policy = range(TRAIN_SEED, TRAIN_SEED + PromptConfig().count)
    measured = range(HELD_OUT, HELD_OUT + max(idm.held_out_smooth, idm.held_out_joystick))
    compared = range(HELD_OUT_SEED, HELD_OUT_SEED + 10_000)
    ordered = [weights, policy, measured, compared]
    assert all(a.stop <= b.start for a, b in zip(ordered, ordered[1:]))


def test_captions_read_back_as_the_objects(many):
    assert all(parse_caption(text) == objects for text, objects in zip(many.captions, many.objects))


def test_captions_use_the_vocabulary_and_all_of_it(many):
    assert {w for text in many.captions for w in text.split()} == set(WORDS)


def test_a_caption_says_the_camera_only_when_one_or_two_things_happen():
    ball = (Object("red", "ball", "left"),)
    text = "a red ball rolls left"
    assert caption(ball, np.array([0, 3, 3, 3]), True) == f"{text} while the camera turns right"
    assert caption(ball, np.array([0, 4, 2, 2]), True) == f"{text} while the camera moves forward then turns left"
    assert caption(ball, np.array([0, 4, 2, 4]), True) == text
    assert caption(ball, np.array([0, 4, 4, 4]), False) == text


@pytest.mark.parametrize("pair", MOTION_WORDS, ids=str)
def test_every_shape_and_motion_reads_back(pair):
    objects = (Object("green", *pair), Object("blue", "ball", "rest"))
    assert parse_caption(caption(objects, np.array([0, 1]), True)) == objects


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a red ball",
        "a pink ball rests",
        "a red cone rests",
        "a red ball flies",
        "the red ball rests",
        "a red ball rests and ",
    ],
)
def test_a_sentence_that_is_none_of_the_worlds_is_refused_with_its_form(text):
    with pytest.raises(ValueError) as error:
        parse_caption(text)
    assert repr(text) in str(error.value) and "a <colour> <shape> <motion>" in str(error.value)


@pytest.mark.parametrize("style", ["smooth", "joystick"])
@pytest.mark.parametrize("frames", [1, 2, 3, 18])
def test_the_first_frame_has_no_action_and_every_other_has_one(style, frames):
    for seed in range(40):
        actions = sample_actions(np.random.default_rng(seed), frames, style)
        assert len(actions) == frames and actions[0] == 0 and (actions[1:] > 0).all()


def runs(actions):
    """Lengths of runs of one action, frame 0 left out."""
    edges = np.flatnonzero(np.diff(actions[1:])) + 1
    return np.diff([0, *edges, len(actions) - 1])


def test_smooth_actions_are_one_or_two_segments():
    counts = [len(runs(sample_actions(np.random.default_rng(s), 18, "smooth"))) for s in range(100)]
    assert set(counts) == {1, 2}


def test_joystick_actions_change_every_two_to_five_frames():
    for seed in range(40):
        lengths = runs(sample_actions(np.random.default_rng(seed), 60, "joystick"))
        assert len(lengths) > 8 and all(2 <= n <= 5 for n in lengths[:-1]) and lengths[-1] <= 5


def test_an_unknown_style_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'drunk'.*smooth or joystick"):
        sample_scenes([0], 8, style="drunk")


def test_an_action_drives_the_change_into_its_frame(many):
    turned = many.yaw.diff(dim=1)
    moved = many.camera[..., [0, 2]].diff(dim=1)
    ahead = torch.stack([many.yaw.sin(), many.yaw.cos()], -1)[:, 1:]
    yaw_by = torch.tensor([0, 0, -TURN, TURN, 0, 0]).float()[many.actions[:, 1:]]
    go_by = torch.tensor([0, 0, 0, 0, STEP, -STEP])[many.actions[:, 1:]]
    torch.testing.assert_close(turned, yaw_by, rtol=0, atol=1e-5)
    torch.testing.assert_close(moved, go_by[..., None] * ahead, rtol=0, atol=1e-5)
    assert set(many.actions[:, 1:].unique().tolist()) == set(range(1, len(ACTIONS)))


def slots(scenes, motions):
    """(batch row, slot) of objects with one of the motions."""
    return [(b, i) for b, row in enumerate(scenes.objects) for i, o in enumerate(row) if o.motion in motions]


def test_objects_go_where_they_are_said_to_go(many):
    for motion, sign in (("left", -1), ("right", 1), ("rest", 0)):
        for b, i in slots(many, [motion]):
            step = many.centre[b, :, i, 0].diff()
            assert (step.sign() == sign).all() if sign else step.abs().max() == 0


def test_objects_stand_on_the_ground_unless_they_bounce(many):
    lift = -many.centre[..., 1] - many.radius[:, None]
    for b, i in slots(many, ["rest", "left", "right"]):
        assert lift[b, :, i].abs().max() < 1e-6
    for b, i in slots(many, ["bounce"]):
        assert lift[b, :, i].min() > -1e-6 and lift[b, :, i].max() > 0.3


def test_balls_roll_without_slipping_and_cubes_do_not_turn(many):
    for b, i in slots(many, ["left", "right"]):
        roll = many.spin[b, :, i].diff()
        expected = many.centre[b, :, i, 0].diff() / many.radius[b, i] * (not many.is_cube[b, i])
        torch.testing.assert_close(roll, expected, rtol=0, atol=1e-5)


def test_absent_objects_are_marked_so_and_present_ones_have_their_colour(many):
    for b, row in enumerate(many.objects):
        assert many.present[b].tolist() == [i < len(row) for i in range(2)]
        for i, o in enumerate(row):
            assert many.colour[b, i].tolist() == pytest.approx(COLOURS[o.colour])
            assert bool(many.is_cube[b, i]) == (o.shape == "cube")


def test_two_objects_never_share_a_colour(many):
    pairs = [row for row in many.objects if len(row) == 2]
    assert pairs and all(a.colour != b.colour for a, b in pairs)
