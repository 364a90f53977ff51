"""Reward-gradient guidance: how far a mean is moved, where to, at which steps, and what stays as it was."""

import math

import pytest
import torch

from samplers.exploration import Exploration
from samplers.guidance import Guidance, Guide
from samplers.kernels import Kernel
from samplers.randomness import Key
from samplers.step_window import StepWindow
from samplers.stream import draw_from, stream

SHAPE, LEVELS = (3, 3, 4, 4), (1.0, 0.9, 0.7, 0.4)
KERNEL = Kernel("cps", 0.8)
M = math.prod(SHAPE)
SLOPE = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


class Halving:
    """A denoiser without memory that predicts half its input."""

    def start(self):
        return ()

    def enter(self, context):
        return context

    def denoise(self, x, t, context):
        return x / 2

    def refresh(self, x0, context):
        return context


def linear(chunk, clean, before):
    """A reward whose gradient in x_t is half of SLOPE."""
    return (clean * SLOPE).flatten(1).sum(1)


def run(guidance=None, chunks=((0, 3),)):
    seen = {}
    draw = draw_from([Key(1, 0, 0, b) for b in range(2)], SHAPE)
    out = stream(Halving(), list(chunks), LEVELS, draw, kernel=KERNEL, guidance=guidance,
                 seen=lambda k, j, x, x0: seen.setdefault((k, j), x))  # fmt: skip
    return torch.cat([c.latents for c in out], 1), seen


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_mean_of_a_guided_step_is_moved_by_exactly_this(step):
    (_, plain), (_, guided) = run(), run(Guidance(linear, 0.1, {step}))
    std = KERNEL.from_x0(plain[0, 0], plain[0, 0], LEVELS[step], LEVELS[step + 1])[1]
    shift = guided[0, step + 1] - plain[0, step + 1]
    expected = 0.1 * std * math.sqrt(M) * SLOPE / SLOPE.norm()
    torch.testing.assert_close(shift, expected.expand_as(shift), rtol=0, atol=1e-5)
    assert all(torch.equal(plain[0, j], guided[0, j]) for j in range(step + 1))


def test_with_a_strength_of_zero_nothing_changes_to_the_bit():
    (plain, steps), (guided, others) = run(), run(Guidance(linear, 0.0, {0, 1, 2}))
    assert torch.equal(plain, guided) and all(torch.equal(steps[k], others[k]) for k in steps)


def test_the_length_does_not_depend_on_the_unit_of_the_reward():
    far = Guidance(lambda *a: 1000 * linear(*a), 0.1, {2})
    torch.testing.assert_close(run(far)[0], run(Guidance(linear, 0.1, {2}))[0])


def test_a_row_that_cannot_be_judged_or_is_judged_flat_is_left_alone():
    unjudged = Guidance(lambda *a: torch.where(torch.tensor([True, False]), torch.nan, linear(*a)), 0.1, {1})
    flat = Guidance(lambda *a: torch.tensor([0.0, 1.0]) * linear(*a), 0.1, {1})
    plain, both = run()[0], run(Guidance(linear, 0.1, {1}))[0]
    for guidance in (unjudged, flat):
        out = run(guidance)[0]
        assert torch.equal(out[0], plain[0]) and torch.equal(out[1], both[1])


def test_a_gradient_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="gradient is not finite in chunk 0"):
        run(Guidance(lambda s, clean, b: (clean * 0).sqrt().flatten(1).sum(1), 0.1, {1}))


def test_the_judge_sees_which_chunk_it_is_and_the_one_before():
    asked = []

    def judge(chunk, clean, before):
        asked.append((chunk, before))
        return linear(chunk, clean, before)

    out, _ = run(Guidance(judge, 0.1, {2}), ((0, 3), (3, 6)))
    assert [chunk for chunk, _ in asked] == [0, 1] and asked[0][1] is None
    assert torch.equal(asked[1][1], out[:, :3]) and not out.requires_grad


@pytest.mark.parametrize(
    ("window", "steps", "expected"),
    [(None, 1, [2]), (None, 2, [1, 2]), (None, 9, [0, 1, 2]), (StepWindow(1, 1), 2, [1]), (StepWindow(2), 1, [1])],
)
def test_guided_are_the_last_steps_that_draw(window, steps, expected):
    exploration = Exploration("shared_init", kernel=KERNEL, window=window, guide=Guide("a", 0.1, steps))
    assert list(exploration.guidance(linear, 0, 3).steps) == expected


@pytest.mark.parametrize(("options", "message"), [(dict(strength=0.2), "strength=0.2: use 0 to 0.1"),
                                                  (dict(steps=0), "steps=0: use 1 or more")])  # fmt: skip
def test_bad_guides_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Guide(**options)
