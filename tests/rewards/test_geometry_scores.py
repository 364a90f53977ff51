"""The geometric rewards as rewards: the contract, what they tell apart, what they refuse."""

import builtins

import pytest
import torch

from arvideo_rl.world.geometry import geometry_of_room
from arvideo_rl.world.rooms import FIELD_OF_VIEW, room
from rewards.contract import Clips, score
from rewards.distortions import freeze, jitter, melt
from rewards.geometry.backends import Classical, GroundTruth
from rewards.geometry.cameras import Cameras
from rewards.geometry.flow import clip_flow, motion
from rewards.geometry.matching import pair_error
from rewards.registry import build

NAMES = ("epipolar", "reprojection", "rerender", "camera_smoothness", "camera_following")
WITH_BACKEND = NAMES[1:]
SIZE, FRAMES = 80, 8
ROOMS = [room(seed, FRAMES, SIZE) for seed in range(4)]
CLEAN = torch.stack([r.frames for r in ROOMS])
CAMERAS = Cameras(torch.stack([torch.linalg.inv(r.w2c) for r in ROOMS]))
TRUTH = GroundTruth([geometry_of_room(r) for r in ROOMS])


def made(name, **args):
    return build(name, **({"backend": Classical(FIELD_OF_VIEW)} if name in WITH_BACKEND else {}) | args)


def values(reward, frames=CLEAN):
    return score(reward, Clips(frames, cameras=CAMERAS)).value


@pytest.fixture(scope="module")
def clean():
    return {name: score(made(name), Clips(CLEAN, cameras=CAMERAS)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_same_scores_again_alone_and_in_another_order_without_drawing_random_numbers(name, clean):
    before = torch.get_rng_state()
    order = torch.tensor([2, 0])
    some = score(made(name), Clips(CLEAN[order], cameras=Cameras(CAMERAS.c2w[order])))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(some.value, clean[name].value[order])
    assert clean[name].valid.all() and len(set(clean[name].value.tolist())) == len(CLEAN)


@pytest.mark.parametrize("name", NAMES)
def test_noise_is_in_range_or_refused(name):
    noise = torch.rand(3, FRAMES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    noise[1] = noise[1] * 0.02  # nearly black
    got = score(made(name), Clips(noise, cameras=Cameras(CAMERAS.c2w[:3])))
    assert ((got.value >= 0) & (got.value <= 1) | got.value.isnan()).all()
    assert float(got.value.nan_to_num(nan=0).max()) < 0.5


# jitter is a turn of the camera, which a method that estimates the camera itself forgives: it is for smoothness
@pytest.mark.parametrize("name", ["epipolar", "reprojection", "rerender"])
def test_melted_rooms_score_below_clean_ones(name, clean):
    melted = values(made(name), torch.stack([melt(f, i, SIZE / 20) for i, f in enumerate(CLEAN)]))
    assert float(melted.nan_to_num(nan=-1).max()) < float(clean[name].value.min())


@pytest.mark.parametrize("name", ["camera_smoothness", "camera_following"])
def test_shaken_rooms_score_below_clean_ones(name, clean):
    shaken = values(made(name), torch.stack([jitter(f, i, SIZE / 30) for i, f in enumerate(CLEAN)]))
    assert float(shaken.nan_to_num(nan=-1).max()) < float(clean[name].value.min())


@pytest.mark.parametrize("name", ["reprojection", "rerender"])
def test_ground_truth_tells_both_apart(name):
    reward = build(name, backend=TRUTH)
    clean = values(reward)
    for spoil in (melt, jitter):
        assert float(values(reward, torch.stack([spoil(f, i) for i, f in enumerate(CLEAN)])).max()) < float(clean.min())


@pytest.mark.parametrize("name", NAMES)
def test_a_frozen_clip_is_the_worst(name, clean):
    frozen = values(made(name), torch.stack([freeze(f) for f in CLEAN]))
    assert float(frozen.max()) < float(clean[name].value.min())
    if name != "camera_following":  # there a still camera is judged by the target
        assert frozen.tolist() == [0] * len(CLEAN)


def test_the_gate_is_the_share_of_the_floor_that_each_step_moves():
    moved = motion(clip_flow(CLEAN[0]))
    reward = build("reprojection", backend=GroundTruth(TRUTH.known[:1]), motion_floor=2 * float(moved.max()))
    got = score(reward, Clips(CLEAN[:1]))
    gate = float(moved.mean() / (2 * moved.max()))
    assert 0.3 < gate < 0.5 and float(got.components["gate"]) == pytest.approx(gate)
    assert float(got.value) == pytest.approx(gate * float(got.components["before_gate"]))
    frozen = Clips(freeze(CLEAN[0])[None])
    assert score(build("epipolar", motion_floor=0), frozen).reasons == ["content:no_parallax"]


def test_a_clip_that_freezes_half_way_loses_half():
    half = torch.cat(
        [CLEAN[:1, : FRAMES // 2], CLEAN[:1, FRAMES // 2 - 1 : FRAMES // 2].expand(-1, FRAMES // 2, -1, -1, -1)], 1
    )
    got = score(build("epipolar"), Clips(half))
    assert float(got.components["gate"]) == pytest.approx(3 / 7, abs=0.01) and float(got.value) < 0.5


def test_a_camera_that_only_turns_has_no_depth_but_is_followed():
    k = ROOMS[0].intrinsics
    big = ROOMS[0].frames[0]
    angles = 0.02 * torch.arange(FRAMES)
    rotation = torch.zeros(FRAMES, 4, 4)
    rotation[:, 0, 0] = rotation[:, 2, 2] = angles.cos()
    rotation[:, 0, 2], rotation[:, 2, 0] = -angles.sin(), angles.sin()  # camera to the right, world to the left
    rotation[:, 1, 1] = rotation[:, 3, 3] = 1
    frames = torch.stack([_turned(big, k, r[:3, :3]) for r in rotation])[None]
    clips = Clips(frames, cameras=Cameras(torch.linalg.inv(rotation)[None]))
    assert score(made("reprojection"), clips).reasons == ["content:no_parallax"]
    followed, away = score(made("camera_following"), clips), Clips(frames, cameras=Cameras(rotation[None]))
    assert float(followed.value) > 0.85 and float(score(made("camera_following"), away).value) < 0.6


def _turned(image, k, rotation):
    """What the camera of ``image`` sees when turned by world-to-camera ``rotation``; borders are repeated."""
    h, w = image.shape[1:]
    v, u = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
    there = torch.stack([u, v, torch.ones_like(u)], -1) @ (k @ rotation.T @ torch.linalg.inv(k)).T
    at = 2 * there[..., :2] / there[..., 2:] / torch.tensor([w, h]) - 1
    return torch.nn.functional.grid_sample(image[None], at[None], padding_mode="border", align_corners=False)[0]


def test_few_matches_are_a_reason_and_not_a_number():
    few = torch.rand(19, 2, generator=torch.Generator().manual_seed(0)) * 80
    error, reason = pair_error(few, few + 5, 80, 80)
    assert error != error and reason == "content:few_matches"


def test_an_outlier_counts_but_does_not_bend_the_fit():
    draw = torch.Generator().manual_seed(0)
    solid = torch.rand(200, 3, generator=draw) * torch.tensor([4.0, 4, 4]) + torch.tensor([-2.0, -2, 3])
    first = solid[:, :2] / solid[:, 2:] * 100 + 64
    second = (solid[:, :2] + torch.tensor([0.4, 0.1])) / solid[:, 2:] * 100 + 64
    clean, _ = pair_error(first, second, 128, 128)
    second[:20] += torch.tensor([0.0, 30.0])
    spoiled, _ = pair_error(first, second, 128, 128)
    assert clean < 1e-4 and spoiled == pytest.approx(0.1 * 0.01, rel=0.35)  # a tenth of the matches at the cap


def refused(call, *words):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_intrinsics_may_be_of_any_precision():
    """A camera file is often float64, while pixels are float32."""
    unit = ROOMS[0].intrinsics / torch.tensor([SIZE, SIZE, 1.0])[:, None]
    plain, fine = (Clips(CLEAN[:1], cameras=Cameras(CAMERAS.c2w[:1], k)) for k in (unit, unit.double()))
    assert score(made("camera_following"), fine).value.tolist() == score(made("camera_following"), plain).value.tolist()


def test_what_cannot_be_scored_is_refused_in_one_line(monkeypatch):
    refused(lambda: score(build("epipolar"), Clips(torch.rand(1, 4, 3, 16, 16))), "16x16", "32")
    refused(lambda: score(made("rerender"), Clips(CLEAN[:, :2])), "2 frames", "3")
    refused(lambda: build("reprojection", backend="classic"), "'classic'", "classical")
    refused(lambda: build("reprojection", backend=3), "3", "lacks name, licence, geometry", "classical")
    refused(lambda: build("four_d", backend="rewards.geometry.flow:grey"), "flow:grey", "lacks name", "network")
    refused(lambda: score(made("reprojection", patch=81), Clips(CLEAN)), "patch is 81", "80 pixels")
    refused(lambda: Cameras(CAMERAS.c2w, ROOMS[0].intrinsics), "row 0 must be divided by W")
    refused(lambda: Cameras(CAMERAS.c2w / 0), "not finite")
    refused(lambda: build("epipolar", tau=0), "tau is 0")
    refused(lambda: build("epipolar", motion_floor=-1), "motion_floor is -1")
    refused(lambda: build("rerender", frames=1), "frames is 1")
    refused(lambda: score(build("reprojection", backend=TRUTH), Clips(CLEAN[:2])), "4 clips", "2 clips")
    refused(lambda: score(made("camera_following"), Clips(CLEAN)), "cameras")
    refused(lambda: score(made("camera_following"), Clips(CLEAN, cameras=CAMERAS.c2w)), "Cameras(c2w")
    real = builtins.__import__

    def without_opencv(name, *args, **kwargs):
        if name == "cv2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_opencv)
    refused(lambda: build("epipolar").prepare(), "pip install opencv-python-headless")
