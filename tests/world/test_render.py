"""Pictures: range, anti-aliasing, and what an action does to them in pixels."""

import pytest
import torch

from arvideo_rl.world.render import intrinsics, render, truth
from arvideo_rl.world.scene import STEP, TURN, sample_scenes


def test_pixels_lie_in_0_1_and_use_the_range():
    x = render(sample_scenes(range(4), 4))
    assert x.shape == (4, 4, 3, 32, 32) and x.dtype == torch.float32
    assert x.min() >= 0 and x.max() <= 1 and x.max() - x.min() > 0.5


def test_a_picture_does_not_depend_on_its_batch():
    together, alone = render(sample_scenes([3, 4, 5], 3)), render(sample_scenes([4], 3))
    torch.testing.assert_close(together[1:2], alone, rtol=0, atol=1e-6)


def test_two_renders_are_equal_to_the_bit():
    scenes = sample_scenes([1, 2], 3)
    assert torch.equal(render(scenes), render(scenes))


def test_anti_aliasing_is_the_mean_over_the_finer_picture():
    scenes = sample_scenes([1], 2)
    fine = render(scenes, 64, supersample=1).flatten(0, 1)
    torch.testing.assert_close(render(scenes, 32, supersample=2).flatten(0, 1), torch.nn.functional.avg_pool2d(fine, 2))


def test_anti_aliasing_changes_the_edges_of_objects_most(find):
    scenes = find("stay", "rest")
    change = (render(scenes) - render(scenes, supersample=1)).abs().mean(2)[:, 0]
    mask = truth(scenes).masks[:, 0, 0].float()[:, None]
    grown, shrunk = torch.nn.functional.max_pool2d(mask, 3, 1, 1), -torch.nn.functional.max_pool2d(-mask, 3, 1, 1)
    edge, inside = (grown > shrunk)[:, 0], (shrunk > 0)[:, 0]
    assert change[edge].mean() > 0.02
    assert change[edge].mean() > 3 * change[inside].mean()


def centroid(masks):
    """Column of the centre of masks [..., H, W], in pixels."""
    at = torch.arange(masks.shape[-1]) + 0.5
    return (masks.sum(-2) * at).sum(-1) / masks.sum((-1, -2))


@pytest.mark.parametrize(("action", "sign"), [("turn right", -1), ("turn left", 1)])
def test_a_turn_moves_the_content_the_other_way_by_focal_times_angle(action, sign, find):
    x = centroid(truth(find(action, "rest"), 64).masks[:, :4, 0].float()) / 2  # in pixels of a 32-pixel frame
    step = x.diff(dim=1)
    per_frame = intrinsics()[0, 0].item() * 32 * TURN  # 1.97; more away from the axis, as the tangent has it
    assert (step * sign > 0.9 * per_frame).all() and (step * sign < 1.5 * per_frame).all()


def test_a_turn_to_the_right_turns_the_picture_and_not_only_the_truth(find):
    x = render(find("turn right", "rest"))[:, :2]
    left = (x[:, 1, ..., :-2] - x[:, 0, ..., 2:]).abs().mean()
    right = (x[:, 1, ..., 2:] - x[:, 0, ..., :-2]).abs().mean()
    assert left < 0.5 * right


@pytest.mark.parametrize(("action", "sign"), [("forward", 1), ("back", -1)])
def test_moving_changes_the_size_of_objects_as_their_distance_does(action, sign, find):
    scenes = find(action, "rest", "ball")
    area = truth(scenes, 64).masks[:, :, 0].float().sum((-1, -2))
    distance = scenes.centre[:, :, 0, 2] - scenes.camera[:, :, 2]
    torch.testing.assert_close(distance.diff(dim=1), torch.full((3, 7), -sign * STEP), rtol=0, atol=1e-5)
    expected = (distance[:, 0] / distance[:, -1]) ** 2
    assert ((area[:, -1] / area[:, 0] / expected - 1).abs() < 0.15).all()
    assert ((expected > 1) == (sign > 0)).all()


def test_staying_with_a_resting_object_is_a_still(find):
    x = render(find("stay", "rest"))
    assert torch.equal(x[:, 1:], x[:, :-1])
