"""Pictures of what a reward saw: which there are, that they show it, and that nothing is drawn where nothing is
known."""

import pytest
import torch

from arvideo_rl.world.rooms import FIELD_OF_VIEW, room
from rewards.contract import Clips
from rewards.distortions import melt
from rewards.geometry.backends import Classical
from rewards.geometry.pictures import dots, flow_colours, heat, lines
from rewards.registry import build

ROOM = room(0, 6, 80)
SAID = {
    "epipolar": {"flow", "matches"},
    "reprojection": {"flow", "points", "depth"},
    "rerender": {"flow", "redrawn", "error", "depth"},
    "camera_smoothness": {"flow", "depth"},
    "dynamic_degree": {"flow", "speed"},
    "motion_smoothness": {"flow", "change"},
    "flicker": {"flow", "change"},
    "sharpness": {"detail"},
}
BACKED = ("reprojection", "rerender", "camera_smoothness")


def drawn(name, frames):
    reward = build(name, **({"backend": Classical(FIELD_OF_VIEW)} if name in BACKED else {}))
    return reward.maps(Clips(frames[None], 8.0))


@pytest.mark.parametrize("name", SAID)
def test_each_reward_draws_what_its_page_says(name):
    found = drawn(name, ROOM.frames)
    assert set(found) == SAID[name]
    for picture in found.values():
        assert picture.shape[0] == 1 and picture.shape[2] == 3 and picture.dtype == torch.float32
        assert 0 <= float(picture.min()) and float(picture.max()) <= 1 and float(picture.std()) > 0.02


@pytest.mark.parametrize(("name", "kind"), [("epipolar", "matches"), ("reprojection", "points")])
def test_what_is_wrong_is_red(name, kind):
    def redness(frames):
        picture = drawn(name, frames)[kind]
        marked = (picture.amax(2) - picture.amin(2)) > 0.7  # the lines and dots
        return float((picture[:, :, 0] - picture[:, :, 1])[marked].mean())

    assert redness(ROOM.frames) < -0.3 and redness(melt(ROOM.frames, seed=1)) > redness(ROOM.frames) + 0.3


def test_a_clip_that_cannot_be_measured_shows_its_flow_and_a_frozen_one_has_none():
    assert set(drawn("reprojection", torch.full_like(ROOM.frames, 0.5))) == {"flow"}
    still = drawn("dynamic_degree", ROOM.frames[:1].expand(4, -1, -1, -1))["speed"][0]
    assert still[:, :, 80:].max() < 0.02 and torch.equal(still[:, :, :80], ROOM.frames[:1].expand(3, -1, -1, -1))


def test_heat_rises_and_what_is_unknown_is_grey():
    colours = heat(torch.tensor([[[0.0, 0.5, 1.0, 9.0, torch.nan]]]), 1.0)[0, :, 0]
    light = colours.mean(0)
    assert light[0] < light[1] < light[2] and torch.equal(colours[:, 2], colours[:, 3])
    assert torch.equal(colours[:, 4], torch.full((3,), 0.5))


def test_hue_is_direction_and_brightness_speed():
    move = torch.tensor([[[[4.0, 0.0], [-4.0, 0.0], [1.0, 0.0], [4.0, 0.0]]]])
    right, left, slow, unknown = flow_colours(move, torch.tensor([[[1.0, 1.0, 1.0, 0.1]]]))[0, :, 0].T.tolist()
    assert right == pytest.approx([1, 0, 0], abs=0.01) and left == pytest.approx([0, 1, 1], abs=0.01)
    assert slow == pytest.approx([0.25, 0, 0], abs=0.01) and unknown == [0.5] * 3


def test_marks_lie_where_they_belong_in_the_colour_of_their_error():
    black = torch.zeros(3, 16, 16)
    at = torch.tensor([[3.5, 8.5], [12.5, 8.5]])
    picture = dots(black, at, torch.tensor([0.0, 1.0]), 1.0)
    assert picture[:, 8, 3].tolist() == [0, 1, 0] and picture[:, 8, 12].tolist() == [1, 0, 0]
    pair = lines(black, black, at[:1], at[1:], torch.tensor([torch.nan]), 1.0)
    assert pair.shape == (3, 16, 32) and pair[:, 8, 3].tolist() == pair[:, 8, 28].tolist() == [1, 1, 1]
    assert pair[0, 8, 2] < 0.5 and pair[0, 8, 29] < 0.5
