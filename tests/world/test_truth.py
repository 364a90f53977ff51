"""The ground truth agrees with itself: depth, cameras, masks and scene flow re-project onto each other."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.world.render import FAR, intrinsics, render, truth
from arvideo_rl.world.scene import sample_scenes
from arvideo_rl.world.verify import colour_mask

SIZE = 64
PIXEL = 0.6  # pixels of a 64-pixel frame: how far re-projected points may lie off on average
CASES = [
    (action, motion)
    for action in ("stay", "turn left", "forward")
    for motion in ("rest", "left", "right", "bounce")
    if (action, motion) != ("stay", "rest")
]


@pytest.fixture(scope="module")
def some():
    scenes = sample_scenes(range(6), 4)
    return scenes, truth(scenes, SIZE)


def test_ground_depth_is_what_the_pinhole_says(some, pixel_grid):
    scenes, t = some
    ray = torch.einsum("ij,hwj->hwi", torch.linalg.inv(intrinsics()), pixel_grid(SIZE))  # in camera axes, z = 1
    pitch = scenes.pitch[:, None, None]
    down = ray[..., 1] * pitch.cos() + pitch.sin()
    expected = -scenes.camera[:, :, 1, None, None] / down[:, None]
    ground = t.valid & ~t.masks.any(2)
    assert ground[:, :, -1].all() and ground.float().mean() > 0.4
    torch.testing.assert_close(t.depth[ground], expected[ground], rtol=1e-4, atol=0)


def test_sky_is_invalid_and_far_and_above(some):
    t = some[1]
    assert torch.equal(t.valid, t.depth < FAR) and (t.depth[~t.valid] == FAR).all()
    assert not t.valid[..., 0, :].any() and t.valid[..., -1, :].all()


@pytest.mark.parametrize("gap", [-1.0, 1.0], ids=["the later one in front", "the later one behind"])
def test_every_pixel_belongs_to_the_nearest_surface(gap):
    pairs = [s for s, row in enumerate(sample_scenes(range(20), 2).objects) if len(row) == 2]
    scenes = sample_scenes(pairs[:3], 2)
    centre = scenes.centre.clone()
    centre[:, :, 1] = centre[:, :, 0] + torch.tensor([0.2, 0.0, gap])
    scenes = replace(scenes, centre=centre)
    both = truth(scenes, SIZE)
    first, second = (truth(replace(scenes, present=torch.eye(2)[i].bool().expand(3, 2)), SIZE) for i in range(2))
    assert (first.masks[:, :, 0] & second.masks[:, :, 1]).any()
    assert torch.equal(both.depth, torch.minimum(first.depth, second.depth))
    assert torch.equal(both.masks[:, :, 0], first.masks[:, :, 0] & (first.depth <= second.depth))


def test_objects_are_valid_and_about_as_far_as_their_centres(some):
    scenes, t = some
    assert t.valid[t.masks.any(2)].all()
    distance = (scenes.centre - scenes.camera[:, :, None])[..., [0, 2]].norm(dim=-1)
    for b in range(len(scenes)):
        seen = t.masks[b, 0, 0]
        assert (t.depth[b, 0][seen] - distance[b, 0, 0]).abs().max() < 2.5 * scenes.radius[b, 0]


def test_an_object_that_is_not_present_has_no_mask(some):
    scenes, t = some
    assert t.masks[:, :, 0].any() and not truth(replace(scenes, present=scenes.present & False), SIZE).masks.any()


def test_the_camera_looks_down_its_own_axis(some):
    scenes, t = some
    rotation, shift = t.w2c[..., :3], t.w2c[..., 3]
    torch.testing.assert_close(rotation @ rotation.mT, torch.eye(3).expand_as(rotation), rtol=0, atol=1e-5)
    assert (torch.linalg.det(rotation) > 0.99).all()
    here = torch.einsum("btij,btj->bti", rotation, scenes.camera) + shift
    assert here.abs().max() < 1e-5


def points(t, frame, grid):
    """World points [B, H, W, 3] seen at ``frame``, from depth, intrinsics and w2c alone."""
    seen = t.depth[:, frame, ..., None] * (grid @ torch.linalg.inv(t.intrinsics).T)
    rotation, shift = t.w2c[:, frame, :, :3], t.w2c[:, frame, :, 3]
    return torch.einsum("bji,bhwj->bhwi", rotation, seen - shift[:, None, None])


def project(t, frame, world):
    """Normalised image positions [B, H, W, 2] in [0, 1] and z-depth [B, H, W] of world points at ``frame``."""
    camera = torch.einsum("bij,bhwj->bhwi", t.w2c[:, frame, :, :3], world) + t.w2c[:, frame, None, None, :, 3]
    image = camera @ t.intrinsics.T
    return image[..., :2] / image[..., 2:], camera[..., 2]


def sample(image, at):
    """Image [B, C, H, W] read bilinearly at normalised positions [B, H, W, 2]."""
    return torch.nn.functional.grid_sample(image, 2 * at - 1, align_corners=False, padding_mode="border")


def test_points_project_back_onto_their_pixels(some, pixel_grid):
    t, grid = some[1], pixel_grid(SIZE)
    at, depth = project(t, 2, points(t, 2, grid))
    torch.testing.assert_close(at, grid[..., :2].expand_as(at), rtol=0, atol=1e-4)
    torch.testing.assert_close(depth, t.depth[:, 2], rtol=1e-4, atol=1e-4)


def landing(scenes, moved, pixel_grid):
    """Points of frame 0 of each object in frame 1, with their flow or (moved 0) without: the largest distance of their
    mean from the object's, in pixels of 64; the share that hits the object; the median error in depth, in metres."""
    t = truth(scenes, 2 * SIZE)
    at, depth = project(t, 1, points(t, 0, pixel_grid(2 * SIZE)) + moved * t.scene_flow[:, 0])
    on = sample(t.masks[:, 1, :1].float(), at)[:, 0]
    apart = (sample(t.depth[:, 1:], at)[:, 0] - depth).abs()
    out = []
    for b in range(len(scenes)):
        here, there = t.masks[b, 0, 0], t.masks[b, 1, 0]
        middle = (torch.nonzero(there).float() + 0.5).mean(0).flip(0) / 2
        off = (at[b][here].mean(0) * SIZE - middle).abs().max()
        inside = here & (on[b] > 0.99)  # beyond the silhouette bilinear depth mixes object and ground
        out.append((off.item(), (on[b][here] > 0.5).float().mean().item(), apart[b][inside].median().item()))
    return out


@pytest.mark.parametrize(("action", "motion"), CASES)
def test_object_points_moved_by_scene_flow_land_on_the_object(action, motion, find, pixel_grid):
    for off, share, apart in landing(find(action, motion, frames=2), 1, pixel_grid):
        assert off < PIXEL and share > 0.955 and apart < 0.003


@pytest.mark.parametrize("motion", ["left", "right", "bounce"])
def test_without_its_flow_a_moving_object_is_missed(motion, find, pixel_grid):
    for off, share, _ in landing(find("stay", motion, frames=2), 0, pixel_grid):
        assert off > PIXEL and share < 0.955


@pytest.mark.parametrize("action", ["turn right", "forward", "back"])
def test_the_picture_of_the_ground_moves_as_the_cameras_say(action, find, pixel_grid):
    scenes = find(action, "rest", frames=2)
    t, pixels, grid = truth(scenes, SIZE), render(scenes, SIZE), pixel_grid(SIZE)
    at, depth = project(t, 1, points(t, 0, grid))
    near = t.valid[:, 0] & ~t.masks[:, 0].any(1) & (t.depth[:, 0] < 6) & ((at > 0) & (at < 1)).all(-1)
    wrong = (pixels[:, 1] - pixels[:, 0]).abs().mean(1)[near].mean()
    right = (sample(pixels[:, 1], at) - pixels[:, 0]).abs().mean(1)[near].mean()
    assert right < 0.4 * wrong


def test_the_static_world_has_no_scene_flow(some):
    t = some[1]
    assert not t.scene_flow[~t.masks[:, :-1].any(2)].any()


@pytest.mark.parametrize("motion", ["left", "right"])
def test_a_rolling_ball_stands_still_where_it_touches_the_ground_and_is_twice_as_fast_on_top(motion, find, pixel_grid):
    scenes = find("stay", motion, "ball")
    t = truth(scenes, SIZE)
    seen = points(t, 0, pixel_grid(SIZE))
    for b in range(len(scenes)):
        mask, travel = t.masks[b, 0, 0], scenes.centre[b, :2, 0, 0].diff()
        below = (seen[b][mask] - scenes.centre[b, 0, 0])[:, 1] / scenes.radius[b, 0]  # -1 on top, 1 at the ground
        torch.testing.assert_close(t.scene_flow[b, 0][mask][:, 0], travel * (1 - below), rtol=0, atol=0.03)


@pytest.mark.parametrize("motion", ["left", "right"])
def test_the_quarters_painted_on_a_ball_turn_with_its_scene_flow(motion, find, pixel_grid):
    scenes = find("stay", motion, "ball", count=2, frames=2)
    t, pixels = truth(scenes, 2 * SIZE), render(scenes, 2 * SIZE, supersample=1)
    at, _ = project(t, 1, points(t, 0, pixel_grid(2 * SIZE)) + t.scene_flow[:, 0])
    before, after = pixels[:, 0].mean(1), sample(pixels[:, 1], at).mean(1)
    inside = t.masks[:, 0, 0] & (sample(t.masks[:, 1, :1].float(), at)[:, 0] > 0.99)
    other = ((after / before - 1).abs() > 0.25)[inside].float().mean()
    assert other < 0.06  # the seams; 0.3 if the quarters did not turn


def test_a_bouncing_object_moves_straight_up_or_down(find):
    t = truth(find("stay", "bounce"), SIZE)
    flow = t.scene_flow[t.masks[:, :-1, 0]]
    assert flow[:, [0, 2]].abs().max() < 1e-5 and flow[:, 1].abs().max() > 0.05


def test_masks_are_where_the_objects_colour_is(some):
    scenes, t = some
    pixels = render(scenes, SIZE, supersample=1)
    for b, row in enumerate(scenes.objects):
        for i, o in enumerate(row):
            found, mask = colour_mask(pixels[b], o.colour), t.masks[b, :, i]
            assert mask.any() and (found & mask).sum() > 0.98 * (found | mask).sum()
