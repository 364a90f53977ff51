"""Clips on disk: rendered once, read back exactly, never left half-written."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from arvideo_rl.world import dataset
from arvideo_rl.world.dataset import load_clips, to_uint8
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import sample_scenes


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def renders(monkeypatch):
    """The scenes rendered so far, block by block; the render itself is a cheap stand-in."""
    seen = []

    def fake(scenes, size):
        seen.append(scenes.seeds)
        return torch.tensor(scenes.seeds).view(-1, 1, 1, 1, 1).expand(-1, scenes.yaw.shape[1], 3, size, size) / 255

    monkeypatch.setattr(dataset, "render", fake)
    return seen


def files(cache):
    return sorted(p.name for p in cache.rglob("*") if p.is_file())


@pytest.mark.parametrize("style", ["smooth", "joystick"])
def test_clips_are_the_rendered_scenes_with_their_words(style, cache):
    scenes = sample_scenes([7, 8], 9, style=style)
    clips = load_clips(7, 2, frames=9, style=style)
    assert np.array_equal(clips.pixels, to_uint8(render(scenes)))
    assert clips.captions == scenes.captions and torch.equal(clips.actions, scenes.actions)


def test_the_second_load_reads_the_file(cache, renders):
    first = load_clips(3, 10, frames=2)
    assert [s for block in renders for s in block] == list(range(3, 13))
    renders.clear()
    second = load_clips(3, 10, frames=2)
    assert renders == [] and np.array_equal(first.pixels, second.pixels) and len(files(cache)) == 1


def test_rows_of_every_block_are_in_their_place(cache, renders):
    assert load_clips(3, 19, frames=2).pixels[:, 0, 0, 0, 0].tolist() == list(range(3, 22))


@pytest.mark.parametrize(
    "other", [dict(first_seed=4), dict(count=3), dict(frames=3), dict(style="joystick")], ids=lambda d: next(iter(d))
)
def test_what_makes_other_clips_makes_another_file(other, cache, renders):
    load_clips(**(dict(first_seed=3, count=2, frames=2) | {}))
    load_clips(**(dict(first_seed=3, count=2, frames=2) | other))
    assert len(files(cache)) == 2


def test_a_new_version_of_the_world_does_not_read_the_old_file(cache, renders, monkeypatch):
    load_clips(3, 2, frames=2)
    monkeypatch.setattr(dataset, "VERSION", dataset.VERSION + 1)
    load_clips(3, 2, frames=2)
    assert len(renders) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_render_that_is_broken_off_leaves_no_file_and_can_be_repeated(error, cache, renders, monkeypatch):
    good = dataset.render

    def fails_on_the_second_block(scenes, size):
        if 11 in scenes.seeds:
            raise error
        return good(scenes, size)

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(dataset, "render", fails_on_the_second_block)
        load_clips(3, 10, frames=2)
    assert files(cache) == []
    assert load_clips(3, 10, frames=2).pixels[-1, 0, 0, 0, 0] == 12


def test_a_draft_left_by_a_killed_process_is_not_taken_for_clips(cache, renders):
    load_clips(3, 2, frames=2)
    (path,) = (p for p in cache.rglob("*") if p.is_file())
    path.rename(path.with_suffix(".999.tmp"))
    renders.clear()
    load_clips(3, 2, frames=2)
    assert len(renders) == 1


def test_a_batch_is_float_in_0_1_by_rows(cache, renders):
    batch = load_clips(3, 10, frames=2).batch(np.array([9, 0]))
    assert batch.shape == (2, 2, 3, 32, 32) and batch.dtype == torch.float32
    torch.testing.assert_close(batch[:, 0, 0, 0, 0], torch.tensor([12.0, 3.0]) / 255)


def test_uint8_rounds_clamps_and_refuses_nan():
    assert to_uint8(torch.tensor([-0.2, 0.0, 0.4999 / 255, 0.5001 / 255, 1.0, 1.2])).tolist() == [0, 0, 0, 1, 255, 255]
    with pytest.raises(ValueError, match="NaN"):
        to_uint8(torch.tensor([0.5, float("nan")]))


def test_damaged_clips_are_named_with_the_way_out(cache, renders):
    load_clips(3, 2, frames=4)
    (path,) = (p for p in cache.rglob("*") if p.is_file())
    for content in (path.read_bytes()[:-10], b"", b"noise" * 100):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} are damaged; delete the file"):
            load_clips(3, 2, frames=4)


def test_clips_that_do_not_fit_on_the_disk_are_refused_before_they_are_rendered(cache, renders, monkeypatch):
    """Writing to a memory map on a full disk would kill the process."""
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr(dataset.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="do not fit into 0 MiB; free some space or set ARVIDEO_CACHE"):
        load_clips(3, 2, frames=4)
    assert renders == [] and files(cache) == []
