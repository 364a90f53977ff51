"""What is seen of a prompt that changes on the way."""

import torch

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.following import continuations, jump, seen, switch_scenes
from arvideo_rl.world.render import render


def test_the_rendered_world_follows_at_once():
    before, after = switch_scenes(3, 9, 6)
    pixels = torch.cat([render(before)[:, :6], render(after)[:, 6:]], 1)
    new, old = seen(pixels, after.captions), seen(pixels, before.captions)
    assert new[:, :6].max() == 0 and new[:, 6:].min() == 1
    assert old[:, :1].min() == 1 and old[:, 6:].max() == 0
    assert jump(pixels, 6) > 1.5 > 1.3 > jump(pixels, 4)


def test_the_camera_stands_still_after_the_switch():
    before, after = switch_scenes(4, 24, 6)
    assert before.actions[:, 7:].eq(1).all() and before.yaw[:, 6:].eq(before.yaw[:, 6:7]).all()
    assert after.camera[:, 6:].eq(after.camera[:, 6:7]).all() and before.actions[:, 1:7].ne(1).any()


def test_all_ways_go_on_from_one_past(small):
    generator = Generator.load(small)
    settings = generator.streaming
    before, after = switch_scenes(1, 15, 12)
    videos = continuations(generator, before, after, 12, ["keep", "recache", "flush"])
    keep, recache, flush, world = videos.values()
    assert keep.shape == world.shape == (1, 15, 3, 32, 32) and generator.streaming == settings
    assert torch.equal(keep[:, :12], recache[:, :12]) and torch.equal(keep[:, :12], flush[:, :12])
    assert not torch.equal(keep[:, 12:], recache[:, 12:]) and not torch.equal(keep[:, 12:], flush[:, 12:])
