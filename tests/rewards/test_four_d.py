"""The 4D reward: formulas against identities, what it tells apart on the world, constants and their refusals."""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torchvision.transforms.functional import gaussian_blur

from arvideo_rl.scoring.calibrate import moving_scenes
from arvideo_rl.world.geometry import geometry_of_room, geometry_of_scenes
from arvideo_rl.world.render import render
from arvideo_rl.world.rooms import room
from rewards.contract import Clips, score
from rewards.distortions import freeze, jitter, melt
from rewards.four_d import reward, terms
from rewards.four_d.calibration import UNCALIBRATED, calibrated, read
from rewards.four_d.observe import FEATURES, appearance
from rewards.four_d.reward import FourD
from rewards.geometry.backends import GroundTruth
from rewards.geometry.cameras import Cameras, Geometry, diagonal, lift, pixel_centres, project
from rewards.geometry.flow import clip_flow
from rewards.registry import build

pytestmark = pytest.mark.filterwarnings("ignore:four_d is not calibrated")
SIZE, FRAMES, FPS = 64, 9, 8.0
SCENES = moving_scenes(3, FRAMES)
CLEAN = render(SCENES, SIZE)
KNOWN = geometry_of_scenes(SCENES, SIZE)


def close(a, b, **kwargs):
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), **kwargs)


def made(backend="truth", known=KNOWN, **args):
    return FourD(backend=GroundTruth(known) if backend == "truth" else backend, **args)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# formulas


def test_a_still_world_moves_only_with_the_camera():
    """Where depth and cameras put every point of a still scene is the rigid flow, so nothing is left of it."""
    shown = room(3, 5, 48)
    known = geometry_of_room(shown)
    camera, far = terms.rigid_flow(known)
    grid = pixel_centres(48, 48)
    for i in range(4):
        world = lift(grid.double(), known.depth[i].double(), known.w2c[i].double(), known.intrinsics.double())
        there, _ = project(world, known.w2c[i + 1].double(), known.intrinsics.double())
        close(camera[i], (there - grid).float(), atol=1e-3, rtol=0)
    double = Geometry(2 * known.depth, known.w2c.clone(), known.intrinsics)
    double.w2c[:, :3, 3] *= 2
    close(terms.rigid_flow(double)[0], camera, atol=1e-3, rtol=0)
    assert float((camera - far).norm(dim=-1).mean()) > 0.5  # there is parallax to explain
    unknown = replace(known, depth=torch.full_like(known.depth, torch.nan))
    close(terms.rigid_flow(unknown)[0], far)


def test_the_scale_between_depth_and_path_is_found_though_a_fifth_moves():
    known = geometry_of_room(room(3, 5, 48))
    camera, far = terms.rigid_flow(known)
    seen = camera.clone()
    seen[:, :10] += torch.tensor([4.0, -3.0])
    wrong = Geometry(2.5 * known.depth, known.w2c, known.intrinsics)
    weight = torch.ones(camera.shape[:3])
    assert terms.fitted_scale(seen, weight, terms.rigid_flow(wrong)[0], far) == pytest.approx(2.5, rel=1e-3)
    assert terms.fitted_scale(far, weight, far, far) == 1.0  # a camera that only turns


def gliding(height=24, width=32, steps=4, speed=2):
    """A block that moves ``speed`` pixels to the right a step over a still ground: velocity and flow [S, H, W, 2]."""
    flow = torch.zeros(steps, height, width, 2)
    for i in range(steps):
        flow[i, 8:16, 4 + speed * i : 14 + speed * i, 0] = speed
    return flow * 0.01, flow


def test_an_object_that_glides_is_smooth_for_its_points_but_not_for_its_pixels():
    velocity, flow = gliding()
    block = (velocity.norm(dim=-1) > 0).float()
    ones = torch.ones_like(block)
    change, sure = terms.acceleration(velocity, flow, ones)
    m = terms.weighted(velocity.norm(dim=-1), block)
    moved = terms.weighted(change, sure * block[:-1])
    assert float(m) == pytest.approx(0.02) and float(moved) == 0.0 and float(terms.smooth(moved, m)) == 1.0
    change, sure = terms.acceleration(velocity, flow, ones, eulerian=True)  # its trailing edge: 2 of 10 columns
    moved = terms.weighted(change, sure * block[:-1])
    close(moved, torch.tensor(0.2 * 0.02)), close(terms.smooth(moved, m), torch.tensor(math.exp(-0.2)))
    turning = velocity * torch.tensor([1.0, -1, 1, -1])[:, None, None, None]
    change, sure = terms.acceleration(turning, flow, ones)
    close(terms.smooth(terms.weighted(change, sure * block[:-1]), m), torch.tensor(math.exp(-2)))


def test_stretching_is_the_gradient_of_the_velocity_in_diagonals():
    grid = pixel_centres(24, 32) / diagonal(24, 32)
    velocity = (grid @ torch.tensor([[3.0, 0], [0, 4.0]]))[None]  # dv/dx = (3, 0), dv/dy = (0, 4)
    stretch, sure = terms.stretching(velocity, torch.ones(1, 24, 32))
    close(stretch[:, :-1, :-1], torch.full((1, 23, 31), 7.0), rtol=1e-3, atol=0)
    weight = torch.ones(1, 24, 32)
    weight[0, 5, 5] = 0
    assert terms.stretching(velocity, weight)[1][0, 5, 4] == 0 and float(sure.min()) == 1
    close(terms.rigid(torch.tensor(7.0), 0.2), torch.tensor(math.exp(-0.7)))


def test_the_gate_is_natural_at_m_nat_and_shut_for_what_does_not_move():
    m = torch.tensor([0.1, 0.15, 0.05, 0.0, 0.0099, 0.0101])
    got = terms.gate(m, 0.1, 0.05)
    close(got[:3], torch.tensor([1, math.exp(-0.5), math.exp(-0.5)]))
    assert got[3] == 0 and got[4] == 0 and got[5] > 0.1  # the published form gives a frozen clip exp(-2) = .135
    assert terms.gate(torch.tensor(0.04), 0.1, 0.025) == 0  # below m_nat - 2 sigma


def test_the_other_terms_in_closed_form():
    close(terms.steady(torch.tensor(0.3), torch.tensor(0.2), 0.1), torch.tensor(math.exp(-1)))
    close(terms.anchor(torch.tensor([0.5, -3.0])), torch.tensor(math.exp(-0.5)))
    close(terms.whole(torch.tensor([1.0, 1, 0, 0])), torch.tensor(1 / 3))  # frozen half way: less than a half
    errors = terms.recon(torch.tensor([0.0, 0.2, 0.0]), torch.tensor([0.1, 0.0, 0.4]), 0.1, 0.1)
    close(errors, torch.tensor([1, math.exp(-2), math.exp(-3)]))
    close(terms.whole(torch.tensor([0.4])), torch.tensor(0.4))


def test_the_fastest_are_chosen_among_what_is_trusted():
    velocity = torch.zeros(1, 10, 10, 2)
    velocity[0, 0, :, 0], velocity[0, 1, :, 1] = 5.0, 3.0
    weight = torch.ones(1, 10, 10)
    weight[0, 0] = 0
    chosen = terms.moving(velocity, weight, 0.1)
    assert chosen.sum() == 10 and (chosen[0, 1] == 1).all()


def test_a_frame_is_redrawn_from_the_next_whatever_the_exposure():
    picture = torch.rand(3, 24, 40, generator=torch.Generator().manual_seed(0)) * 0.6
    frames = torch.stack([picture[..., i : i + 32] for i in (4, 2, 0)])  # all moves 2 pixels to the right
    flow = torch.zeros(2, 24, 32, 2)
    flow[..., 0] = 2
    weight = torch.ones(2, 24, 32)
    weight[:, :, -2:] = 0
    assert float((weight * terms.redrawn(frames, flow, weight)).max()) < 1e-5
    flicker = frames * torch.tensor([1.0, 0.8, 1.2])[:, None, None, None]
    assert float((weight * terms.redrawn(flicker, flow, weight)).max()) < 1e-5
    wrong = terms.redrawn(frames, 0 * flow, weight)
    assert float(wrong.mean()) > 0.5
    close(terms.redrawn(0.3 * frames, 0 * flow, weight), wrong, rtol=1e-3, atol=0)


def test_appearance_does_not_change_when_a_clip_is_darkened_and_does_when_it_is_blurred():
    clip = CLEAN[0]
    close(appearance(0.3 * clip), appearance(clip), atol=0.02, rtol=0)
    soft = appearance(gaussian_blur(clip, 9, 1.5)) - appearance(clip)
    assert float(soft[FEATURES.index("fine")]) < -0.5
    grey = clip.mean(1, keepdim=True).expand_as(clip)
    assert float(appearance(grey)[0]) < 0.01 < float(appearance(clip)[0])


# the reward on the world


def test_scene_flow_of_the_world_is_what_optical_flow_minus_rigid_flow_leaves():
    truth = score(made(motion="scene"), Clips(CLEAN, fps=FPS)).raw["m"]
    rest = replace(SCENES, centre=SCENES.centre[:, :1].expand_as(SCENES.centre).contiguous(),
                   spin=SCENES.spin[:, :1].expand_as(SCENES.spin).contiguous())  # fmt: skip
    still = score(made(known=geometry_of_scenes(rest, SIZE), motion="scene"), Clips(render(rest, SIZE), fps=FPS))
    assert still.value.tolist() == [0] * 3 and float(still.raw["m"].max()) < 1e-6 and (truth > 0.02).all()
    seen = score(made(), Clips(CLEAN, fps=FPS)).raw["m"]
    quiet = score(made(known=geometry_of_scenes(rest, SIZE)), Clips(render(rest, SIZE), fps=FPS)).raw["m"]
    assert (seen > 1.3 * quiet).all()
    bare = [replace(g, scene_flow=None) for g in KNOWN]
    assert score(made(known=bare, motion="scene"), Clips(CLEAN, fps=FPS)).reasons == ["system:no_scene_flow"] * 3
    blind = [replace(g, depth=torch.full_like(g.depth, torch.nan)) for g in KNOWN]  # no depth, so no speed in depths
    assert score(made(known=blind, motion="scene"), Clips(CLEAN, fps=FPS)).reasons == ["content:few_followed"] * 3


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A calibration on other clips of the world, as a file."""
    path = tmp_path_factory.mktemp("calibration") / "base.json"
    scenes = moving_scenes(6, FRAMES, seed=1)
    reward = made(known=geometry_of_scenes(scenes, SIZE))
    seen = reward.observed(Clips(render(scenes, SIZE), fps=FPS))
    calibrated(seen, "ground_truth", reward.settings, [SIZE], [0.125], {"world": 6}).write(path)
    return str(path)


HALF = FRAMES // 2
SPOILED = {
    "frozen": lambda f, i: freeze(f),
    "half frozen": lambda f, i: torch.cat([f[:HALF], freeze(f[HALF - 1 :])[: FRAMES - HALF]]),
    "jittered": lambda f, i: jitter(f, i, 0.01 * diagonal(SIZE, SIZE)),
    "shuffled": lambda f, i: f[torch.tensor([4, 0, 6, 2, 8, 1, 5, 3, 7])],
    "melted": lambda f, i: melt(f, i, SIZE / 24),
    "noisy": lambda f, i: (f + 0.1 * noise(*f.shape, seed=i)).clamp(0, 1),
    "each twice": lambda f, i: f.repeat_interleave(2, 0)[:FRAMES],
}


@pytest.fixture(scope="module")
def clean(base):
    return score(made(calibration=base), Clips(CLEAN, fps=FPS))


@pytest.mark.parametrize("name", SPOILED)
def test_spoiled_clips_score_below_clean_ones(name, base, clean):
    frames = torch.stack([SPOILED[name](f, i) for i, f in enumerate(CLEAN)])
    got = score(made(calibration=base), Clips(frames, fps=FPS)).value.nan_to_num(nan=-1.0)
    assert (got < 0.8 * clean.value).all(), (got, clean.value)
    if name == "frozen":
        assert got.max() <= 0


def test_darkening_and_flicker_do_not_matter(base, clean):
    close(score(made(calibration=base), Clips(0.3 * CLEAN, fps=FPS)).value, clean.value, rtol=0.15, atol=0.01)


def test_the_classical_backend_measures_clips_that_turn_out_of_view():
    got = score(build("four_d"), Clips(CLEAN[:2], fps=FPS))
    assert got.valid.all() and (got.raw["m"] > 0.01).all()
    frozen = score(build("four_d"), Clips(freeze(CLEAN[0])[None], fps=FPS))
    assert frozen.value.tolist() == [0] and frozen.components["gate"].tolist() == [0]


def test_a_backend_of_pieces_sees_the_cameras_of_the_clip_and_frames_that_it_is_given(monkeypatch):
    seen, followed = [], []
    monkeypatch.setattr(reward, "clip_flow", lambda frames: followed.append(len(frames)) or clip_flow(frames))

    class Pieces:
        name, licence, short = "pieces", "none", True

        def geometry(self, clips, index, flow):
            seen.append((len(clips.frames[index]), clips.cameras.c2w[index, :, 0, 3].tolist()))
            return "content:few_matches"

    places = torch.eye(4).repeat(2, FRAMES, 1, 1)
    places[..., 0, 3] = torch.arange(2 * FRAMES).view(2, FRAMES)
    clips = Clips(CLEAN[:2], fps=2 * FPS, cameras=Cameras(places))  # every second frame is compared
    assert score(made(Pieces()), clips).reasons == ["content:few_matches"] * 2
    first = [float(i) for i in range(0, FRAMES, 2)]
    assert seen == [(5, first), (5, [FRAMES + i for i in first])]
    assert followed == [5, 5]  # the flow between the other frames is not needed


def test_same_scores_again_alone_and_in_another_order_without_drawing_random_numbers(clean, base):
    before, order = torch.get_rng_state(), [2, 0]
    reward = made(known=[KNOWN[i] for i in order], calibration=base)
    some = score(reward, Clips(CLEAN[order], fps=torch.tensor([8.0, 8.0])))
    assert torch.equal(some.value, clean.value[order]) and torch.equal(torch.get_rng_state(), before)
    assert len(set(clean.value.tolist())) == 3 and set(clean.components) == set(FourD.parts)


def test_a_window_is_worth_the_product_of_its_parts_each_of_which_can_be_had_alone(clean, base):
    c = clean.components
    (seen,) = made(known=KNOWN[:1], calibration=base).observed(Clips(CLEAN[:1], fps=FPS))
    one = made(calibration=base).judge(replace(seen, **{k: v[:1] for k, v in vars(seen).items() if k != "features"}))
    assert one["value"] == pytest.approx(one["recon"] * one["motion"] * one["anchor"]) and one["value"] > 0.01
    assert one["motion"] == pytest.approx(one["gate"] * one["smooth"] * one["rigid"] * one["steady"])
    for part in ("recon", "motion", "anchor"):
        assert made(part=part, calibration=base).judge(seen)["value"] == pytest.approx(float(c[part][0]))
    published = made(steady=False, calibration=base).judge(seen)
    assert published["motion"] > float(c["motion"][0]) and published["steady"] == pytest.approx(float(c["steady"][0]))
    assert "anchor" not in made().judge(seen)


def test_frames_are_compared_a_time_step_apart_whatever_lies_between():
    few = [Geometry(KNOWN[0].depth[::2], KNOWN[0].w2c[::2], KNOWN[0].intrinsics, metric=True)]
    slow = score(made(known=few), Clips(CLEAN[:1, ::2].contiguous(), fps=8.0))
    odd = CLEAN[:1].clone()
    odd[:, 1::2] = 0.5
    close(score(made(known=KNOWN[:1]), Clips(odd, fps=16.0)).value, slow.value)


def test_noise_and_flat_pictures_are_in_range_or_refused():
    wild = noise(3, FRAMES, 3, 48, 40).mul(0.2).add(0.5).clamp(0, 1)
    wild[1], wild[2] = 0.5, 0.02 * wild[2]
    got = score(build("four_d"), Clips(wild, fps=FPS))
    assert ((got.value >= 0) & (got.value <= 1) | got.value.isnan()).all()
    assert got.reasons[1] is not None and got.reasons[1].startswith("content:")
    both = torch.stack([CLEAN[0], torch.full_like(CLEAN[0], 0.5)])
    got = score(made(known=KNOWN[:2]), Clips(both, fps=FPS))
    assert got.valid.tolist() == [True, False]
    for name, part in got.components.items():  # nothing is known of what was not measured
        assert part[1].isnan(), name


# constants


def refused(call, *words):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_constants_are_medians_and_say_what_they_are_of(base):
    found = read(base)
    assert 0.25 * found.m_nat <= found.sigma <= 0.5 * found.m_nat
    close(terms.rigid(torch.tensor(found.measured["stretch"]["median"]), found.k), torch.tensor(0.7))
    assert found.measured["m"]["median"] == pytest.approx(found.m_nat) and found.source == {"world": 6}
    low, high = found.measured["m_nat_95"]
    assert low <= found.m_nat <= high and found.m_range[0] < found.m_nat < found.m_range[1]


def test_a_calibration_is_refused_where_it_does_not_belong(base, tmp_path):
    clips = Clips(CLEAN[:1], fps=FPS)
    refused(lambda: build("four_d", calibration=base), "backend=ground_truth", "backend=classical")
    refused(lambda: made(calibration=base, window=1.0), "window=0.5", "window=1.0")
    refused(lambda: made(calibration=base, constants={"m_nat": 0.1}), "constants are both given")
    reward = made(known=KNOWN[:1], calibration=base)
    refused(lambda: score(reward, Clips(CLEAN[:1], fps=12.0)), "0.125 to 0.125 s apart", "0.167 s")
    small = torch.nn.functional.interpolate(CLEAN[0], size=(40, 40))[None]
    refused(lambda: score(reward, Clips(small, fps=FPS)), "64 to 64 pixels", "have 40")
    assert score(reward, clips).valid.all()
    for change, words in {
        "sigma": (1.0, ("sigma is 1", "half")),
        "m_nat": (-1, ("m_nat is -1",)),
        "k": ("x", ("k is x",)),
        "version": (0, ("version 0",)),
        "spread": ([1.0], ("numbers each",)),
        "features": ([math.nan] * len(FEATURES), ("no finite number",)),
        "m_range": ([0.2, 0.1], ("m_range is 0.2 to 0.1",)),
        "extra": (1, ("extra missing or unknown",)),
    }.items():
        value, said = words
        path = tmp_path / "wrong.json"
        path.write_text(json.dumps(json.loads(open(base).read()) | {change: value}))
        refused(lambda path=path: read(path), "wrong.json", *said)
    told = json.loads(open(base).read()) | {"settings": {}}  # says nothing of how it was made
    (tmp_path / "bare.json").write_text(json.dumps(told))
    refused(lambda: made(calibration=tmp_path / "bare.json"), "bare.json", "motion=None", "motion=residual")
    refused(lambda: read(tmp_path / "gone.json"), "cannot be read", "arvideo rewards calibrate")
    (tmp_path / "torn.json").write_text('{"m_nat": ')
    refused(lambda: read(tmp_path / "torn.json"), "not JSON")


def test_wrong_arguments_are_refused_in_one_line():
    refused(lambda: build("four_d", part="recom"), "part is 'recom'", "recon")
    refused(lambda: build("four_d", motion="both"), "motion is 'both'", "scene")
    refused(lambda: build("four_d", part="anchor"), "needs a calibration", "arvideo rewards calibrate")
    refused(lambda: build("four_d", step=0), "step is 0")
    refused(lambda: build("four_d", share=2), "share is 2")
    refused(lambda: build("four_d", constants={"m_nat": 0.1, "sigma": 0.09}), "sigma is 0.09", "half")
    refused(lambda: build("four_d", constants={"m_nut": 0.1}), "m_nut", "m_nat, sigma")
    refused(lambda: score(made(), Clips(CLEAN[:, :4], fps=16.0)), "4 frames", "5 or more")
    refused(lambda: score(made(), Clips(CLEAN)), "needs fps")


def test_who_does_not_calibrate_is_told():
    short = Clips(CLEAN[:1, :3], fps=FPS)
    known = [Geometry(KNOWN[0].depth[:3], KNOWN[0].w2c[:3], KNOWN[0].intrinsics, metric=True)]
    with pytest.warns(UserWarning, match="not calibrated"):
        got = score(made(known=known), short)
    assert got.components["anchor"].isnan().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        score(made(known=known, constants=dict(m_nat=0.1, sigma=0.05, k=0.4, tau=0.2, loose=0.0)), short)
    assert UNCALIBRATED.floor == pytest.approx(0.1 * UNCALIBRATED.m_nat)


def test_clips_in_which_nothing_moves_give_no_constants():
    reward = made(known=[Geometry(g.depth[:3], g.w2c[:3], g.intrinsics, metric=True) for g in KNOWN])
    seen = reward.observed(Clips(CLEAN[:, :3], fps=FPS))
    still = [replace(o, m=torch.zeros_like(o.m)) for o in seen if not isinstance(o, str)]
    refused(lambda: calibrated(still, "x", reward.settings, [64], [0.1], {}), "nothing moves", "3 clips")
