"""A prompt switch: the place goes on, the objects change, and the new ones stand where the camera looks."""

import numpy as np
import pytest
import torch

from arvideo_rl.world.dataset import HELD_OUT, OTHER, SWITCHES, Clips, load_clips, to_uint8
from arvideo_rl.world.render import camera_rotation, render
from arvideo_rl.world.scene import parse_caption, sample_scenes
from arvideo_rl.world.switch import switched

AT = 6


@pytest.fixture(scope="module")
def scenes():
    first, second = sample_scenes(range(40, 64), 12), sample_scenes(range(140, 164), 12)
    return first, second, switched(first, second, AT)


def test_the_place_and_the_commands_go_on(scenes):
    first, _, after = scenes
    for name in ("actions", "camera", "yaw", "pitch", "ground", "sky", "checker", "hills"):
        assert torch.equal(getattr(after, name), getattr(first, name)), name


def test_the_new_objects_stand_where_the_camera_looks(scenes):
    first, second, after = scenes
    assert (first.yaw[:, AT].abs() > 0.1).sum() > 3 and (first.camera[:, AT, [0, 2]].norm(dim=-1) > 0.3).sum() > 3

    right = camera_rotation(after)[:, AT, :, 0]  # level; ahead is level too, pitch left out
    ahead = torch.stack([-right[:, 2], 0 * right[:, 0], right[:, 0]], -1)
    offset = after.centre[:, AT] - after.camera[:, AT, None]
    seen = torch.stack([(offset * right[:, None]).sum(-1), (offset * ahead[:, None]).sum(-1)], -1)
    start = torch.stack([second.centre[:, 0, :, 0], second.centre[:, 0, :, 2]], -1)
    torch.testing.assert_close(seen, start)
    torch.testing.assert_close(after.centre[:, AT:, :, 1], second.centre[:, : 12 - AT, :, 1])
    travelled = (after.centre[:, -1] - after.centre[:, AT]).norm(dim=-1)
    torch.testing.assert_close(travelled, (second.centre[:, 11 - AT] - second.centre[:, 0]).norm(dim=-1))


def test_captions_name_the_new_objects_only(scenes):
    _, second, after = scenes
    assert [parse_caption(c) for c in after.captions] == list(second.objects)
    assert not any("camera" in c for c in after.captions)


def test_a_clip_is_the_first_scene_and_then_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path))
    clips = load_clips(30, 3, frames=15, style="switch")
    for i, (at, text) in enumerate(clips.later):
        seed = 30 + i
        assert at == SWITCHES[seed % 3]
        first, second = sample_scenes([seed], 15), sample_scenes([seed + OTHER], 15)
        assert np.array_equal(clips.pixels[i, :at], to_uint8(render(first, 32))[0, :at])
        after = switched(first, second, at)
        assert np.array_equal(clips.pixels[i, at:], to_uint8(render(after, 32))[0, at:]) and text == after.captions[0]
        assert clips.captions_at(np.array([i]), at - 1) == [first.captions[0]]
        assert clips.captions_at(np.array([i]), at) == clips.captions_at(np.array([i]), 14) == [text]


def test_joined_clips_keep_their_words():
    def some(n, later=()):
        return Clips(np.full((n, 4, 3, 2, 2), n, np.uint8), tuple(f"c{n}{i}" for i in range(n)),
                     torch.full((n, 4), n), later)  # fmt: skip

    both = Clips.join(some(2), some(3, ((6, "x"), (9, "y"), (12, "z"))))
    rows = np.array([1, 2, 4])
    assert both.captions_at(rows, 0) == ["c21", "c30", "c32"] and both.captions_at(rows, 6) == ["c21", "x", "c32"]
    assert both.batch(rows)[:, 0, 0, 0, 0].mul(255).round().tolist() == [2, 3, 3]
    assert both.actions[rows, 0].tolist() == [2, 3, 3]


def test_the_objects_of_switches_are_never_those_of_held_out_clips():
    assert OTHER + 2_000_000 < HELD_OUT
