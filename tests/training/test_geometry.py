"""Training of the depth-and-pose network: what it is shown is consistent; the command learns, repeats and writes."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.cli.rewards import run
from arvideo_rl.training import geometry as tg
from arvideo_rl.world.render import FIELD_OF_VIEW
from rewards.geometry.cameras import pinhole
from rewards.geometry.flow import sample
from rewards.geometry.network import Network


@pytest.fixture(scope="module")
def windows():
    return tg.draw_windows(16, seed=5)


def test_depth_and_cameras_lead_the_colours_from_frame_to_frame(windows):
    """In mirrors and backwards, too: what is seen of the still world at the first frame is found at the last one."""
    frames, depth, still, w2c = tg.sample_batch(windows, 24, np.random.default_rng(1))
    k = pinhole(32, 32, FIELD_OF_VIEW)

    def error(poses):
        at = tg.seen_points(depth) @ (move := poses[:, -1] @ torch.linalg.inv(poses[:, 0]))[:, :3, :3].mT
        at = at + move[:, None, :3, 3]
        xy = (at @ k.T)[..., :2] / at[..., 2:].clamp_min(0.3)
        use = still[:, ::2, ::2].flatten(1).bool() & (at[..., 2] > 0.3) & (xy > 1).all(-1) & (xy < 31).all(-1)
        there = sample(frames[:, -1].permute(0, 2, 3, 1), xy)
        here = frames[:, 0, :, ::2, ::2].flatten(2).mT
        gap = (there - here).abs().mean(-1)
        return (gap * use).sum(1) / use.sum(1).clamp_min(1)

    moving = (w2c[:, -1] - w2c[:, 0]).abs().amax((1, 2)) > 0.1
    true, still_camera = error(w2c)[moving], error(w2c[:, :1].expand_as(w2c))[moving]
    assert moving.sum() >= 8 and float(true.mean()) < 0.05 and float(true.mean()) < 0.6 * float(still_camera.mean())
    mirrored = error(tg.MIRROR @ w2c @ tg.MIRROR)[moving]
    assert float(true.mean()) < float(mirrored.mean())


def test_the_truth_has_no_loss(windows):
    frames, depth, still, w2c = tg.sample_batch(windows, 8, np.random.default_rng(0))

    class Told:
        def depth(self, seen):
            return depth[::3].nan_to_num(nan=1).log(), 20 * (still[::3] - 0.5)

        def motion(self, first, second):
            return (w2c[:, 1:] @ torch.linalg.inv(w2c[:, :-1])).flatten(0, 1)

    assert all(float(part) < 1e-4 for part in tg.losses(Told(), frames, depth, still, w2c))
    wrong = Told()
    wrong.motion = lambda first, second: torch.eye(4).expand(8 * tg.SPAN, 4, 4)
    assert float(tg.losses(wrong, frames, depth, still, w2c)[2]) > 0.1


def test_lengths_are_in_heights_of_the_camera(windows):
    """Straight below the horizon by half the field of view lies the ground, one height under the camera."""
    rows = windows.depth.float()[:, 0, -1]
    pitch = torch.atan2(windows.w2c[:, 0, 2, 1], windows.w2c[:, 0, 1, 1])
    down = (15.5 / 32) / (0.5 / np.tan(np.deg2rad(FIELD_OF_VIEW / 2)))
    expected = 1 / (pitch.sin() + down * pitch.cos())
    ground = windows.still[:, 0, -1, 16]
    torch.testing.assert_close(rows[ground, 16], expected[ground], rtol=2e-3, atol=0)


def test_disturbing_keeps_range_and_the_global_random_state(windows):
    frames = torch.from_numpy(windows.pixels).float() / 255
    before = torch.random.get_rng_state()
    out = tg.disturb(frames, torch.Generator().manual_seed(0))
    assert out.shape == frames.shape and out.min() >= 0 and out.max() <= 1
    assert (out != frames).flatten(1).any(1).float().mean() > 0.8 and float((out - frames).abs().mean()) < 0.1
    assert torch.equal(before, torch.random.get_rng_state())


def test_training_learns_repeats_and_writes(tmp_path, capsys, windows):
    before = torch.random.get_rng_state()
    words = ["steps=4", "batch=4", "scenes=8", "held_out=1"]
    for name in ("a", "b"):
        assert run(["train-geometry"], [f"out={tmp_path / name}.safetensors", *words], set()) == 0
    assert torch.equal(before, torch.random.get_rng_state())
    said = capsys.readouterr().out
    assert "held-out joystick: depth abs rel" in said and "by a trivial answer" in said
    first, again = (load_file(tmp_path / f"{name}.safetensors") for name in "ab")
    assert all(torch.equal(v, again[k]) for k, v in first.items())
    assert Network(tmp_path / "a.safetensors").report["config"]["steps"] == 4 and (tmp_path / "a.json").exists()
    parts = [sum(map(float, tg.losses(tg.train_geometry(windows, seed=0, steps=n), *tg.sample_batch(
        windows, 16, np.random.default_rng(3))))) for n in (1, 12)]  # fmt: skip
    assert parts[1] < 0.8 * parts[0]


@pytest.mark.parametrize(("words", "says"), [("steps=0", "steps=0"), ("out=a.pt", ".safetensors"), ("lr=.inf", "lr")])
def test_wrong_settings_are_refused(words, says):
    with pytest.raises(ValueError, match=says):
        run(["train-geometry"], [words], {"--dry-run"})
