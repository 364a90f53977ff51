"""Pure functions of rewards/geometry against published numbers and against identities that hold on known scenes."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.world.geometry import geometry_of_room, geometry_of_scenes
from arvideo_rl.world.render import truth
from arvideo_rl.world.rooms import room
from arvideo_rl.world.scene import sample_scenes
from rewards.geometry.backends import triangulate
from rewards.geometry.cameras import Geometry, diagonal, lift, pixel_centres, project
from rewards.geometry.epipolar import eight_point, fundamental_of_poses, sampson
from rewards.geometry.flow import LARGE, clip_flow
from rewards.geometry.matching import match
from rewards.geometry.reprojection import reprojection, rerender, salient_points
from rewards.geometry.trajectory import following, smoothness

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "epipolar.safetensors")
ROOM = room(3, 6, 48)
KNOWN = geometry_of_room(ROOM)
SALIENCY = torch.rand(48, 48, generator=torch.Generator().manual_seed(0))


def turn_y(angle):
    c, s = math.cos(angle), math.sin(angle)
    return torch.tensor([[c, 0, s], [0, 1, 0], [-s, 0, c]])


def path(centres, angles=None):
    """World-to-camera [F, 4, 4] of ``centres`` [F, 3] and turns about y."""
    w2c = torch.eye(4).repeat(len(centres), 1, 1)
    for i, c in enumerate(centres):
        w2c[i, :3, :3] = turn_y(0.0 if angles is None else float(angles[i]))
        w2c[i, :3, 3] = -w2c[i, :3, :3] @ c
    return w2c


def line(frames=8, step=0.2):
    return torch.arange(frames)[:, None] * torch.tensor([step, 0.0, 0.3 * step])


def true_tracks(points, source):
    """Where the still points really go [N, F, 2], by lifting and projecting in float64."""
    g = KNOWN
    depth = g.depth[source][points[:, 1].long(), points[:, 0].long()].double()
    world = lift(points.double(), depth, g.w2c[source].double(), g.intrinsics.double())
    return torch.stack([project(world, w.double(), g.intrinsics.double())[0] for w in g.w2c], 1).float()


@pytest.mark.parametrize("published_f", [True, False])
def test_sampson_matches_the_published_numbers(published_f):
    g = {k.removeprefix("epipolar_noisy."): v for k, v in GOLDEN.items() if "noisy" in k}
    f = g["F"] if published_f else eight_point(g["points1"], g["points2"])
    ours = (sampson(g["points1"], g["points2"], f).square() + 1e-8).sqrt()
    torch.testing.assert_close(ours, g["sampson_distance"], rtol=1e-4, atol=1e-4)
    assert float(ours.mean()) == pytest.approx(float(g["mean"]), rel=1e-4)


def test_sampson_of_noise_free_matches_is_nearly_zero():
    a, b = GOLDEN["epipolar_clean.points1"], GOLDEN["epipolar_clean.points2"]
    assert float(sampson(a, b, eight_point(a, b)).max()) < 0.01


def test_both_routes_to_the_fundamental_matrix_agree_and_a_shift_across_the_line_counts():
    points = pixel_centres(48, 48)[::6, ::6].reshape(-1, 2)
    there = true_tracks(points, 0)[:, 5]
    f = fundamental_of_poses(ROOM.w2c[0], ROOM.w2c[5], ROOM.intrinsics)
    assert float(sampson(points, there, f).max()) < 0.01
    assert float(sampson(points, there, eight_point(points, there)).max()) < 0.05
    assert torch.allclose(sampson(points, there, 7 * f), sampson(points, there, f), atol=1e-4)
    lines = torch.cat([points, torch.ones(len(points), 1)], -1) @ f.T
    off = there + 2 * torch.nn.functional.normalize(lines[:, :2], dim=-1)
    # 2 px across the line in one image; Sampson shares the correction out: at least half of it
    moved = sampson(points, off, f)
    assert 1.0 < float(moved.min()) and float(moved.max()) < 2.01


def test_eight_point_wants_eight():
    with pytest.raises(ValueError, match="8 or more"):
        eight_point(torch.rand(7, 2), torch.rand(7, 2))


def test_true_depth_and_poses_reproject_without_error_and_a_shift_by_its_size():
    points = salient_points(SALIENCY, torch.ones(48, 48, dtype=torch.bool), share=1.0)
    tracks = true_tracks(points, 2)
    sure = torch.ones(tracks.shape[:2])
    error = reprojection(points, 2, tracks, sure, KNOWN)
    assert error[:, 2].isnan().all() and float(error[error.isfinite()].max()) < 1e-4
    assert float(error.isfinite().float().mean()) > 0.6
    shifted = reprojection(points, 2, tracks + torch.tensor([3.0, 4.0]), sure, KNOWN)
    assert torch.allclose(shifted[shifted.isfinite()], torch.tensor(5 / diagonal(48, 48)), atol=1e-4)


def test_reprojection_does_not_change_with_scale_but_with_depth_alone():
    points = salient_points(SALIENCY, torch.ones(48, 48, dtype=torch.bool))
    tracks = true_tracks(points, 0)
    sure = torch.ones(tracks.shape[:2])
    w2c = ROOM.w2c.clone()
    w2c[:, :3, 3] *= 7
    both = Geometry(7 * ROOM.depth, w2c, ROOM.intrinsics)
    tracks = tracks + 1.0
    same = reprojection(points, 0, tracks, sure, both)
    assert torch.allclose(same, reprojection(points, 0, tracks, sure, KNOWN), atol=1e-4, equal_nan=True)
    wrong = reprojection(points, 0, tracks - 1.0, sure, Geometry(1.5 * ROOM.depth, ROOM.w2c, ROOM.intrinsics))
    assert float(wrong[:, 5].nanmean()) > 0.01


def test_reprojection_leaves_out_what_is_not_seen():
    points = pixel_centres(48, 48)[4::8, 4::8].reshape(-1, 2)
    tracks = true_tracks(points, 0)
    sure = torch.ones(tracks.shape[:2])
    sure[:, 3] = 0.04
    depth = ROOM.depth.clone()
    depth[0, int(points[0, 1]), int(points[0, 0])] = torch.nan
    error = reprojection(points, 0, tracks, sure, Geometry(depth, ROOM.w2c, ROOM.intrinsics))
    assert error[:, 3].isnan().all() and error[0].isnan().all() and error[1:, 1].isfinite().any()


def test_salient_points_are_the_best_patches_without_the_unknown():
    saliency = torch.zeros(16, 16)
    saliency[0:4, 0:4], saliency[8:12, 4:8], saliency[12:, 12:] = 3, 2, 1
    known = torch.ones(16, 16, dtype=torch.bool)
    known[10, 6] = False
    points = salient_points(saliency, known, share=3 / 16)
    assert points.tolist() == [[2.5, 2.5], [14.5, 14.5]]


def test_rerender_of_a_true_scene_is_close_and_of_wrong_depth_is_not():
    error, coverage = rerender(ROOM.frames, KNOWN)
    wrong, _ = rerender(ROOM.frames, Geometry(ROOM.depth * torch.linspace(0.6, 1.4, 6)[:, None, None], ROOM.w2c,
                                              ROOM.intrinsics))  # fmt: skip
    assert float(coverage.min()) > 0.8
    assert float(error.mean()) < 0.02 and float(wrong.mean()) > 3 * float(error.mean())


def test_rerender_leaves_a_frames_own_points_out():
    frames = ROOM.frames.clone()
    frames[2] = 1 - frames[2]
    error, _ = rerender(frames, KNOWN)
    assert float(error[2]) > 0.05  # its own points would have drawn it without any error
    alone, nothing = rerender(frames[:1], Geometry(ROOM.depth[:1], ROOM.w2c[:1], ROOM.intrinsics))
    assert alone.isnan().all() and float(nothing) == 0


def test_rerender_sees_only_the_nearest_surface():
    k = torch.tensor([[8.0, 0, 4], [0, 8, 4], [0, 0, 1]])
    frames = torch.stack([torch.full((3, 8, 8), v) for v in (0.0, 1.0, 0.0)])
    depth = torch.tensor([1.0, 2.0, 1.0])[:, None, None].expand(3, 8, 8)
    error, _ = rerender(frames, Geometry(depth, torch.eye(4).repeat(3, 1, 1), k))
    assert error.tolist() == [0, 1, 0]  # black lies before white, so the white frame is drawn black


def test_triangulation_finds_the_true_depth_and_knows_when_it_cannot():
    points = pixel_centres(48, 48)[4::8, 4::8].reshape(-1, 2)
    there = true_tracks(points, 0)[:, 5]
    relative = ROOM.w2c[5] @ torch.linalg.inv(ROOM.w2c[0])
    depth, sharp = triangulate(points, there, relative, ROOM.intrinsics)
    expected = ROOM.depth[0][points[:, 1].long(), points[:, 0].long()]
    assert torch.allclose(depth, expected, rtol=1e-2) and float(sharp.min()) > 0.9
    _, none = triangulate(points, points, torch.eye(4), ROOM.intrinsics)
    assert float(none.max()) < 1e-6


def test_constant_velocity_is_smooth_and_known_shaking_costs_what_it_should():
    move, turn = smoothness(path(line(), torch.arange(8) * 0.05))
    assert float(move) > 0.999 and float(turn) > 0.99
    steps = torch.tensor([1.0, 3, 1, 3, 1, 3, 1]).cumsum(0)
    x = torch.cat([torch.zeros(1), steps])[:, None] * torch.tensor([0.1, 0, 0])
    assert float(smoothness(path(x))[0]) == pytest.approx(1 / (1 + 2 / 4), abs=2e-3)  # |3 - 1| / (3 + 1)
    assert float(smoothness(path(50 * x))[0]) == pytest.approx(float(smoothness(path(x))[0]), abs=1e-3)
    assert all(v.isnan() for v in smoothness(path(line(2))))


def test_a_path_follows_itself_whatever_its_scale_and_world():
    angles = torch.linspace(0, 0.4, 8)
    target = path(line(), angles)
    world = torch.eye(4)
    world[:3, :3], world[:3, 3] = turn_y(1.0), torch.tensor([3.0, 1, 2])
    scaled = target.clone()
    scaled[:, :3, 3] *= 9
    for same in (target, target @ world, scaled):
        assert float(following(same, target)["following"]) == pytest.approx(1, abs=1e-3)
    assert float(following(scaled, target, metric=True)["translation"]) == pytest.approx(0.7 + 0.3 / 9, abs=1e-3)


def test_wrong_paths_follow_less():
    right = path(line(), torch.linspace(0, 0.4, 8))
    backwards = path(-line(), torch.linspace(0, 0.4, 8))
    other_turn = path(line(), torch.linspace(0, -0.4, 8))
    still = path(0 * line())
    scores = [float(following(p, right)["following"]) for p in (backwards, other_turn, still)]
    assert max(scores) < 0.7
    assert float(following(backwards, right)["translation"]) < 0.35
    assert float(following(still, right)["translation"]) < 0.3
    assert float(following(still, still)["following"]) == pytest.approx(1)
    own = float(line().diff(dim=0).norm(dim=-1).sum())
    moved = following(path(line()), still, unit=2.0)
    assert float(moved["following"]) == pytest.approx(math.exp(-own / 6), abs=1e-3)
    with pytest.raises(ValueError, match="shapes"):
        following(still[:1], still)


def test_the_worlds_own_geometry_agrees_with_its_scene_flow():
    """A still pixel of the world lands where lifting and projecting say; that fixes every convention at once."""
    scenes = sample_scenes([11], 3)
    known, g = truth(scenes, 32), geometry_of_scenes(scenes, 32)[0]
    xy = pixel_centres(32, 32)
    still = known.valid[0, 0] & (known.scene_flow[0, 0].norm(dim=-1) < 1e-6)
    world = lift(xy[still], g.depth[0][still], g.w2c[0], g.intrinsics)
    back, z = project(world, g.w2c[0], g.intrinsics)
    assert torch.allclose(back, xy[still], atol=1e-3) and torch.allclose(z, g.depth[0][still], atol=1e-3)
    there, z = project(world, g.w2c[1], g.intrinsics)
    on = (there > 0).all(-1) & (there < 32).all(-1)
    seen = g.depth[1][there[on][:, 1].long(), there[on][:, 0].long()]
    near = (seen - z[on]).abs() / z[on] < 0.05
    assert float(near[z[on] < 6].float().mean()) > 0.9  # the ground below; far rows change much within one pixel
    assert g.depth[0][~known.valid[0, 0]].isnan().all()


@pytest.mark.parametrize("size", [128, 256])
def test_flow_is_as_exact_on_large_frames_as_on_small_ones(size):
    """Large ones end at half resolution, which costs nothing as a share of the diagonal."""
    assert 128 < LARGE <= 256
    known, xy = room(1, 2, size), pixel_centres(size, size)
    world = lift(xy.reshape(-1, 2), known.depth[0].reshape(-1), known.w2c[0], known.intrinsics)
    there = project(world, known.w2c[1], known.intrinsics)[0].reshape(size, size, 2)
    found = clip_flow(known.frames)
    error = (there - xy - found.forward[0]).norm(dim=-1) / diagonal(size, size)
    assert float(error.median()) < 3.5e-4 and float(found.confidence.mean()) > 0.95


def test_matches_are_nearest_both_ways_and_clearly(monkeypatch):
    """Against every pair by itself, in blocks and not; some of the second are near to one of the first together."""
    dice = torch.Generator().manual_seed(0)
    second = torch.randint(0, 120, (60, 128), generator=dice)
    first = torch.cat([second[:30] + torch.randint(0, 9, (30, 128), generator=dice), second[:5] + 3])
    distance = torch.cdist(first.double(), second.double(), compute_mode="donot_use_mm_for_euclid_dist")
    near = distance.topk(2, largest=False)
    expected = [(i, int(j)) for i, j in enumerate(near.indices[:, 0]) if near.values[i, 0] < 0.75 * near.values[i, 1]
                and int(distance[:, j].argmin()) == i]  # fmt: skip
    assert 25 <= len(expected) < len(first)
    at = [torch.arange(float(len(x)))[:, None].expand(-1, 2) for x in (first, second)]
    for block in (7, 1024):
        monkeypatch.setattr("rewards.geometry.matching.BLOCK", block)
        a, b = match((at[0], first.float().numpy()), (at[1], second.float().numpy()))
        assert list(zip(a[:, 0].int().tolist(), b[:, 0].int().tolist())) == expected


def test_malformed_geometry_is_refused():
    with pytest.raises(ValueError, match="w2c"):
        Geometry(None, torch.eye(4)[:3].repeat(2, 1, 1), torch.eye(3))
    with pytest.raises(ValueError, match="depth has shape"):
        Geometry(torch.ones(3, 4, 4), torch.eye(4).repeat(2, 1, 1), torch.eye(3))


def test_flow_is_computed_once_for_all_rewards_that_look_at_a_clip_and_little_is_kept(monkeypatch):
    from rewards.geometry import flow

    computed = []
    monkeypatch.setattr(flow, "_last", {})
    monkeypatch.setattr(flow, "pair_flow", lambda a, b, real=flow.pair_flow: (computed.append(1), real(a, b))[1])
    clips = [torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    first = flow.clip_flow(clips[0])
    assert flow.clip_flow(clips[0].clone()) is first and len(computed) == 4
    assert flow.clip_flow(clips[1]) is not first and len(computed) == 8
    monkeypatch.setattr(flow, "KEPT", 2 * first.nbytes)
    flow.clip_flow(clips[0])
    flow.clip_flow(clips[2])  # and the one that was used longest ago, clips[1], goes
    assert flow.clip_flow(clips[0]) is first and len(computed) == 12 and len(flow._last) == 2
    flow.clip_flow(clips[1])
    assert len(computed) == 16
    monkeypatch.setattr(flow, "KEPT", 0)
    flow.clip_flow(clips[3])
    assert not flow._last
