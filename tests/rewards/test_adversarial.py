"""Every change does what it says, leaves the rest as it was, and is the same whenever it is made again."""

import math

import pytest
import torch

from rewards import distortions as d
from rewards.adversarial import CHANGES, half_rate, mirror, wrong_actions, wrong_cameras, wrong_prompt
from rewards.contract import NEEDS, Clips
from rewards.geometry.cameras import Cameras, in_pixels, project

T, SIZE = 8, 32


def movie(seed: int) -> torch.Tensor:
    """Frames [T, 3, SIZE, SIZE] that all differ, smooth in space, with 0.2 to spare on both sides."""
    coarse = torch.rand(T, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, (SIZE, SIZE), mode="bilinear")
    return 0.2 + 0.6 * fine


def path(seed: int) -> torch.Tensor:
    """A camera path [T, 4, 4] that turns about the vertical and moves."""
    c2w = torch.eye(4).repeat(T, 1, 1)
    for t in range(T):
        angle = 0.1 * (seed + 1) * t
        c2w[t, 0, 0] = c2w[t, 2, 2] = math.cos(angle)
        c2w[t, 0, 2], c2w[t, 2, 0] = math.sin(angle), -math.sin(angle)
        c2w[t, :3, 3] = torch.tensor([0.2 * t, 0.1 * seed, 0.3 * t])
    return c2w


INTRINSICS = torch.tensor([[0.8, 0, 0.4], [0, 0.8, 0.5], [0, 0, 1.0]])
CLIPS = Clips(
    torch.stack([movie(i) for i in range(3)]),
    torch.tensor([8.0, 8.0, 16.0]),
    ["a red ball turns left", "a blue cube", "a red ball turns left"],
    torch.tensor([[2, 4, 2, 3, 1, 5, 4], [3] * 7, [4] * 7]),
    Cameras(torch.stack([path(i) for i in range(3)]), INTRINSICS),
)


def made(name: str, seed: int = 0) -> torch.Tensor:
    return CHANGES[name].make(CLIPS, seed).frames


ON_FRAMES = [k for k, c in CHANGES.items() if not c.of and k not in ("mirrored", "half_rate")]


@pytest.mark.parametrize("name", ON_FRAMES)
def test_a_change_of_frames_keeps_shape_range_and_all_that_is_said(name):
    before = CLIPS.frames.clone()
    changed = CHANGES[name].make(CLIPS, 3)
    assert changed.frames.shape == CLIPS.frames.shape and not torch.equal(changed.frames, CLIPS.frames)
    assert float(changed.frames.min()) >= 0 and float(changed.frames.max()) <= 1
    assert torch.equal(CLIPS.frames, before), "changed in place"
    assert changed.fps is CLIPS.fps and changed.prompts is CLIPS.prompts
    assert changed.actions is CLIPS.actions and changed.cameras is CLIPS.cameras
    assert CHANGES[name].make(Clips(CLIPS.frames[:, :1]), 0) is None, "one frame cannot be judged"


@pytest.mark.parametrize("name", ON_FRAMES)
def test_a_change_is_seeded_by_the_place_of_the_clip_and_draws_nothing_global(name):
    state = torch.get_rng_state()
    again, other = made(name, 5), made(name, 6)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(made(name, 5), again)
    if name in ("noisy", "grainy", "flickering", "jittered", "melted", "shuffled"):
        assert not torch.equal(again, other)
        same = Clips(CLIPS.frames[1:2])  # clip 1 after seed 5 is clip 0 after seed 6
        assert torch.equal(CHANGES[name].make(same, 6).frames[0], again[1])
    else:
        assert torch.equal(again, other)


def place(changed: torch.Tensor) -> list[list[int]]:
    """For every frame of every clip the one frame of the clean clip that it equals."""
    return [[next(i for i in range(T) if torch.equal(f, clean[i])) for f in clip]
            for clean, clip in zip(CLIPS.frames, changed)]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "order"),
    [("frozen", [0] * 8), ("half_frozen", [0, 1, 2, 3, 3, 3, 3, 3]), ("looped", [0, 1] * 4),
     ("reversed", [7, 6, 5, 4, 3, 2, 1, 0])],
)  # fmt: skip
def test_orders_of_frames(name, order):
    assert place(made(name)) == [order] * 3


def test_shuffled_leaves_no_frame_at_its_place():
    for seed in range(20):
        for order in place(made("shuffled", seed)):
            assert sorted(order) == list(range(T)) and all(i != o for i, o in enumerate(order))


def test_darkened_and_saturated_and_flickering():
    assert torch.allclose(made("darkened"), 0.3 * CLIPS.frames)
    grey = CLIPS.frames.mean(2, keepdim=True).expand_as(CLIPS.frames).contiguous()
    assert torch.allclose(CHANGES["saturated"].make(Clips(grey), 0).frames, grey, atol=2e-3)  # grey has no colour
    spread = [x.std(2).mean() for x in (CLIPS.frames, made("saturated"))]
    assert spread[1] > 1.5 * spread[0]
    gains = made("flickering") / CLIPS.frames
    flat = gains.flatten(2)
    assert torch.allclose(flat, flat[..., :1].expand_as(flat), atol=1e-5), "one gain a frame"
    one = flat[..., 0]
    assert 0.85 <= float(one.min()) < 0.93 and 1.07 < float(one.max()) <= 1.15


def test_blur_keeps_the_mean_and_takes_detail_and_texture_free_takes_more():
    dot = torch.zeros(1, 3, 65, 65)
    dot[..., 32, 32] = 1
    spread = d.blur(dot, 3.0)[0, 0]
    at = torch.arange(65) - 32.0
    assert float(spread.sum()) == pytest.approx(1, abs=1e-4)
    assert float((spread.sum(0) * at**2).sum()) == pytest.approx(9, rel=0.03)  # variance of a Gaussian of 3 pixels

    def detail(frames):
        return float(frames.diff(dim=-1).abs().mean())

    assert detail(made("texture_free")) < 0.7 * detail(made("blurred")) < 0.7 * detail(CLIPS.frames)
    assert d.diagonals(torch.zeros(1, 3, 30, 40), 0.02) == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "std"), [("noisy", 0.1), ("grainy", 0.01)])
def test_noise_has_its_size(name, std):
    assert float((made(name) - CLIPS.frames).std()) == pytest.approx(std, rel=0.05)


def test_jitter_shifts_each_frame_as_a_whole():
    ramp = torch.linspace(0.1, 0.9, 64).expand(T, 3, 64, 64)  # rises by 0.8 / 63 a column
    shaken = d.jitter(ramp, 0, 2.0)
    shift = ((shaken - ramp) * 63 / 0.8)[:, 0, 16:48, 16:48]  # away from the repeated borders
    one = shift.flatten(1)
    assert float(one.std(1).max()) < 1e-3, "all pixels of a frame move alike"
    assert 0.8 < float(one.mean(1).std()) < 4 and float(one.mean(1).diff().abs().min()) > 0.01


def test_melting_starts_at_nothing_grows_and_bends():
    ramp = torch.linspace(0.1, 0.9, 64).expand(T, 3, 64, 64)
    shifts = torch.stack([(d.melt(ramp, seed, 4.0) - ramp) * 63 / 0.8 for seed in range(8)])[:, :, 0, 16:48, 16:48]
    size = shifts.abs().mean((0, 2, 3))
    assert float(size[0]) < 1e-3 and float(size[-3:].mean()) > 2 * float(size[1:4].mean())
    assert float(shifts[:, -1].flatten(1).std(1).min()) > 0.2, "not the whole frame alike"
    assert float(shifts.diff(dim=-1).abs().mean()) < 0.3, "smooth: neighbours stay neighbours"


def test_resized_loses_what_half_the_size_cannot_hold():
    board = (torch.arange(SIZE) % 2).float().expand(2, 3, SIZE, SIZE)
    assert float(d.halve(board)[..., 4:-4].std()) < 0.1 * float(board.std())
    smooth = torch.linspace(0, 1, SIZE).expand(2, 3, SIZE, SIZE)
    assert torch.allclose(d.halve(smooth)[..., 4:-4], smooth[..., 4:-4], atol=0.01)


def test_what_is_said_is_exchanged_for_that_of_the_next_clip_that_differs():
    assert wrong_prompt(CLIPS).prompts == [CLIPS.prompts[1], CLIPS.prompts[2], CLIPS.prompts[1]]
    assert torch.equal(wrong_actions(CLIPS).actions, CLIPS.actions[[1, 2, 0]])
    assert torch.equal(wrong_cameras(CLIPS).cameras.c2w, CLIPS.cameras.c2w[[1, 2, 0]])
    for name, field in [("wrong_prompt", "prompts"), ("wrong_actions", "actions"), ("wrong_cameras", "cameras")]:
        changed = CHANGES[name].make(CLIPS, 0)
        assert changed.frames is CLIPS.frames
        assert NEEDS[CHANGES[name].of] == field
        assert CHANGES[name].make(Clips(CLIPS.frames), 0) is None, "nothing is said"
    assert wrong_prompt(Clips(CLIPS.frames, prompts=["a"] * 3)) is None, "nothing else could be said"


def test_mirrored_clips_are_true_of_the_mirrored_world():
    swap = (0, 1, 3, 2, 4, 5)
    seen = mirror(CLIPS, actions=swap)
    assert torch.equal(seen.frames, CLIPS.frames.flip(-1))
    assert seen.prompts[0] == "a red ball turns right" and seen.prompts[1] == "a blue cube"
    assert seen.actions[0].tolist() == [3, 4, 3, 2, 1, 5, 4]
    assert mirror(CLIPS).actions is None, "nobody said what actions become"
    point = torch.tensor([0.3, 0.2, 12.0])
    for t in range(T):
        before, _ = project(point, torch.linalg.inv(CLIPS.cameras.c2w[0, t]), in_pixels(INTRINSICS, SIZE, SIZE))
        after, _ = project(point * torch.tensor([-1.0, 1, 1]), torch.linalg.inv(seen.cameras.c2w[0, t]),
                           in_pixels(seen.cameras.intrinsics, SIZE, SIZE))  # fmt: skip
        assert torch.allclose(after, torch.stack([SIZE - before[0], before[1]]), atol=1e-3)
    assert float(torch.linalg.det(seen.cameras.c2w[1, -1])) == pytest.approx(1, abs=1e-5)


def test_half_the_rate_plays_as_long():
    changed = half_rate(CLIPS)
    assert torch.equal(changed.frames, CLIPS.frames[:, ::2]) and changed.fps.tolist() == [4, 4, 8]
    assert changed.actions is None and torch.equal(changed.cameras.c2w, CLIPS.cameras.c2w[:, ::2])
    assert half_rate(Clips(CLIPS.frames[:, :3])) is None
    assert half_rate(Clips(CLIPS.frames, chunk_starts=(0, 4))) is None
