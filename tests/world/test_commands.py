"""The geometry that commands ask for: a bare scene has no other, and it tells obedience from the rest."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.world.geometry import Commanded, geometry_of_commands, geometry_of_scenes
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import sample_scenes
from rewards.contract import Clips, score
from rewards.geometry.scores import Rerender


@pytest.fixture(scope="module")
def bare():
    """Scenes without objects, seen from the middle of heights and pitches."""
    scenes = sample_scenes(range(6), 12, style="joystick")
    camera = scenes.camera.clone()
    camera[..., 1] = -1.3
    pitch = torch.full_like(scenes.pitch, 11 * torch.pi / 180)
    return replace(scenes, camera=camera, pitch=pitch, present=torch.zeros_like(scenes.present))


def test_it_is_the_true_geometry_of_a_bare_scene(bare):
    for actions, true in zip(bare.actions, geometry_of_scenes(bare, 32)):
        found = geometry_of_commands(actions, 32)
        torch.testing.assert_close(found.depth, true.depth, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(found.w2c, true.w2c, rtol=0, atol=1e-6)
        assert torch.equal(found.intrinsics, true.intrinsics)


def test_a_window_moves_as_it_does_within_the_whole(bare):
    """The ground is everywhere the same, so the frame a clip begins with does not matter."""
    whole = geometry_of_commands(bare.actions[0], 32)
    cut = bare.actions[0, 4:10].clone()
    cut[0] = 0
    part = geometry_of_commands(cut, 32)
    torch.testing.assert_close(part.depth, whole.depth[4:10], rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(
        part.w2c[5] @ part.w2c[0].inverse(), whole.w2c[9] @ whole.w2c[4].inverse(), rtol=0, atol=1e-5
    )


def test_obedient_clips_have_the_smaller_error(bare):
    """Objects, heights and pitches of their own included."""
    scenes = sample_scenes(range(20, 26), 12, style="joystick")
    pixels, reward = render(scenes), Rerender(Commanded(), motion_floor=0.0)
    own, other = (score(reward, Clips(pixels, actions=a[:, 1:])).raw["error"]
                  for a in (scenes.actions, scenes.actions.roll(1, 0)))  # fmt: skip
    assert (own < other).all() and own.mean() < 0.6 * other.mean()


def test_what_was_not_commanded_cannot_be_measured(bare):
    pixels, reward = render(bare), Rerender(Commanded(), motion_floor=0.0)
    actions = bare.actions[:, 1:].clone()
    actions[2, 3] = 0
    scores = score(reward, Clips(pixels, actions=actions))
    assert [r is not None for r in scores.reasons] == [i == 2 for i in range(6)]
    assert scores.reasons[2] == "content:no_actions"
    with pytest.raises(ValueError, match="backend commanded needs actions"):
        score(reward, Clips(pixels))
