"""The network for depth and camera motion: what it gives, what it refuses, and what its weights can tell apart."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from arvideo_rl.world.dataset import HELD_OUT
from arvideo_rl.world.geometry import geometry_of_scenes
from arvideo_rl.world.render import FIELD_OF_VIEW, render
from arvideo_rl.world.scene import sample_scenes
from rewards.contract import Clips, score
from rewards.describe import backend_lacks, describe
from rewards.distortions import freeze, jitter, melt
from rewards.geometry.cameras import lift, pixel_centres, project
from rewards.geometry.network import WEIGHTS, DepthPoseNet, Network, twist
from rewards.geometry.reprojection import reprojection
from rewards.registry import build

FRAMES = 8
SCENES = sample_scenes(range(HELD_OUT + 900, HELD_OUT + 906), FRAMES, style="joystick")
FINE = {"backend": "network", "reach": 3, "patch": 2, "references": 8}


@pytest.fixture(scope="module")
def clean():
    return render(SCENES, 32)


@pytest.fixture(scope="module")
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return DepthPoseNet(width=4).requires_grad_(False)


def test_equal_frames_do_not_move_and_the_way_back_is_the_inverse(net, clean):
    first, second = clean[:, 0], clean[:, 4]
    assert torch.equal(net.motion(first, first), torch.eye(4).expand(6, 4, 4))
    there, back = net.motion(first, second), net.motion(second, first)
    assert float((there - torch.eye(4)).abs().max()) > 1e-5
    torch.testing.assert_close(there @ back, torch.eye(4).expand(6, 4, 4), rtol=0, atol=1e-6)


def test_a_twist_is_an_angle_about_an_axis_and_a_step():
    turn = torch.linalg.matrix_exp(twist(torch.tensor([[0, 0.3, 0, 0, 0, 0], [0, 0, 0, 1, 2, 3.0]])))
    c, s = torch.tensor(0.3).cos(), torch.tensor(0.3).sin()
    torch.testing.assert_close(turn[0, :3, :3], torch.tensor([[c, 0, s], [0, 1, 0], [-s, 0, c]]))
    torch.testing.assert_close(turn[1, :3, 3], torch.tensor([1.0, 2, 3]))


class Told:
    """Answers with the true depth and motions, in place of the network."""

    size = 32

    def __init__(self, truth):
        self.truth = truth

    def depth(self, frames):
        return self.truth.depth.nan_to_num(nan=60).log(), torch.where(self.truth.depth.isnan(), -9.0, 9.0)

    def motion(self, first, second):
        return self.truth.w2c[1:] @ torch.linalg.inv(self.truth.w2c[:-1])


def test_true_depth_and_motions_put_points_where_they_are_seen(clean):
    truth = geometry_of_scenes(SCENES, 32)[0]
    backend = Network()
    backend.__dict__["_loaded"] = (Told(truth), {"field_of_view": FIELD_OF_VIEW})
    found = backend.geometry(Clips(clean[:1]), 0)
    assert torch.equal(found.confidence > 0, ~truth.depth.isnan())
    points = pixel_centres(32, 32)[~truth.depth[2].isnan()]
    v, u = points[:, 1].long(), points[:, 0].long()
    world = lift(points, truth.depth[2, v, u], truth.w2c[2], truth.intrinsics)
    tracks = torch.stack([project(world, w, truth.intrinsics)[0] for w in truth.w2c], 1)
    error = reprojection(points, 2, tracks, torch.ones(tracks.shape[:2]), found)
    assert error.isfinite().float().mean() > 0.5 and float(error[error.isfinite()].max()) < 1e-5


def test_what_comes_out_has_the_size_of_what_goes_in(clean):
    large = torch.nn.functional.interpolate(clean[0], (80, 80), mode="bilinear")[None]
    backend = Network()
    small, found = backend.geometry(Clips(clean), 0), backend.geometry(Clips(large), 0)
    assert found.depth.shape == found.confidence.shape == (FRAMES, 80, 80) and found.w2c.shape == (FRAMES, 4, 4)
    assert (found.depth > 0).all() and 0 <= found.confidence.min() <= found.confidence.max() <= 1
    assert float(found.intrinsics[0, 2]) == 40 and not found.metric
    ground = slice(-20, None)
    ratio = found.depth[:, ground].mean() / small.depth[:, -8:].mean()
    assert 0.9 < float(ratio) < 1.1
    with pytest.raises(ValueError, match="32x48; its weights want square ones"):
        backend.geometry(Clips(torch.rand(1, 3, 3, 32, 48)), 0)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p.unlink(), "cannot read weights"),
        (lambda p: p.write_bytes(b"x"), "cannot read weights"),
        (lambda p: shutil.copy(WEIGHTS.with_name("idm.safetensors"), p), "is not such a file"),
        (lambda p: resave(p, "maps.0.bias"), "does not fit"),
    ],
)
def test_wrong_weights_are_refused_in_one_line(tmp_path, spoil, says):
    path = tmp_path / "w.safetensors"
    shutil.copy(WEIGHTS, path)
    Network(path).prepare()
    spoil(path)
    with pytest.raises(ValueError, match=says) as error:
        Network(path).prepare()
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def resave(path, without):
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        metadata = file.metadata()
    save_file({k: v for k, v in load_file(path).items() if k != without}, path, metadata)


def test_rewards_say_that_they_read_its_weights(monkeypatch):
    about = describe("reprojection", backend="network")
    assert about["files"] == {str(WEIGHTS): WEIGHTS.stat().st_size} and "network" in about["licence"]
    assert WEIGHTS.stat().st_size < 2e6 and describe("reprojection")["files"] == {}
    assert backend_lacks("network") == backend_lacks("classical") == []
    monkeypatch.setattr("rewards.geometry.network.load", lambda path: (_ for _ in ()).throw(ValueError("gone")))
    ((what, how),) = backend_lacks("network")
    assert what == "gone" and how.startswith("arvideo rewards train-geometry out=")


def test_the_card_lies_beside_the_weights_and_beats_trivial_answers():
    card = json.loads(WEIGHTS.with_suffix(".json").read_text())
    assert card == Network().report
    for found in card["held_out"].values():
        for name in ("depth_abs_rel", "moved_pixels", "translation"):
            assert found[name] < 0.5 * found[f"{name}_baseline"], name
        assert found["still_accuracy"] > 0.9


def test_the_still_world_is_trusted_and_objects_are_not(clean):
    from arvideo_rl.world.render import truth

    known = truth(SCENES, 32)
    ground, objects = known.valid & ~known.masks.any(2), known.masks.any(2)
    sure = torch.stack([Network().geometry(Clips(clean), i).confidence for i in range(6)]) > 0.1
    assert sure[ground].float().mean() > 0.9
    assert sure[objects].float().mean() < 0.2 and sure[~known.valid].float().mean() < 0.1


def test_melted_shaken_shuffled_and_frozen_clips_score_below_clean_ones(clean):
    reward = build("reprojection", **FINE)
    spoiled = {
        "melted": torch.stack([melt(f, i, 4.0) for i, f in enumerate(clean)]),
        "shaken": torch.stack([jitter(f, i, 1.0) for i, f in enumerate(clean)]),
        "shuffled": clean[:, [3, 0, 6, 1, 7, 4, 2, 5]],
        "frozen": torch.stack([freeze(f) for f in clean]),
    }
    good = score(reward, Clips(clean)).value
    assert good.isfinite().all()
    for name, frames in spoiled.items():
        bad = score(reward, Clips(frames)).value.nan_to_num(nan=-1)
        assert (good > bad).float().mean() > 0.8, (name, good, bad)
        assert float(bad.mean()) < float(good.mean()), name


def test_points_are_followed_over_no_more_frames_than_asked(clean):
    """Every frame is a reference; with reach 1 each meets two neighbours, without it all others."""
    clips = Clips(clean[:2])
    near, far = (score(build("reprojection", **FINE | {"reach": r}), clips) for r in (1, None))
    met = [s.raw["compared"] / s.raw["coverage"] for s in (near, far)]  # over all references
    torch.testing.assert_close(met[1] / met[0], torch.full((2,), 7 / (14 / 8)), rtol=0.05, atol=0)
    assert (near.raw["error_diag"] < far.raw["error_diag"]).all()
    with pytest.raises(ValueError, match="reach is 0"):
        build("reprojection", reach=0)


def test_scores_do_not_depend_on_the_batch_or_draw_random_numbers(clean):
    reward, before = build("rerender", backend="network"), torch.get_rng_state()
    whole, alone = score(reward, Clips(clean)), score(reward, Clips(clean[3:4]))
    assert torch.equal(whole.value[3:4], alone.value) and torch.equal(torch.get_rng_state(), before)
    assert len(set(whole.value.tolist())) == len(clean)


def test_a_still_camera_over_moving_objects_is_not_said_to_move():
    scenes = sample_scenes(range(HELD_OUT + 40, HELD_OUT + 44), FRAMES)
    stay = replace(scenes, yaw=torch.zeros_like(scenes.yaw), camera=scenes.camera[:, :1].expand_as(scenes.camera))
    frames = render(stay, 32)
    moved = torch.stack([Network().geometry(Clips(frames), i).w2c[-1] for i in range(4)])
    assert float((moved - torch.eye(4)).abs().max()) < 0.15
