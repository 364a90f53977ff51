"""A window of steps: where it stands, which kernel each step has, and which noise a group shares."""

import pytest
import torch

from samplers.exploration import Exploration, draws
from samplers.kernels import Kernel
from samplers.randomness import Key
from samplers.step_window import StepWindow
from samplers.stream import draw_from, stream

SHAPE = (3, 3, 4, 4)
LEVELS = (1.0, 0.9, 0.7, 0.4)
KEYS = [Key(2, 0, 0, b) for b in range(2)]


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


def states(exploration, keys=KEYS):
    """Noisy inputs {step: [B, ...]} of the first chunk."""
    seen = {}
    draw = draws(exploration, keys, SHAPE, "cpu", None, 3)
    kernels = exploration.kernels(keys[0].iteration, 3)
    list(stream(Halving(), [(0, 3)], LEVELS, draw, kernel=kernels, seen=lambda k, j, x, x0: seen.setdefault(j, x)))
    return seen


def test_a_window_moves_on_by_one_and_begins_again():
    window = StepWindow(1, moves=2)
    assert [window.steps(i, 3)[0] for i in range(8)] == [0, 0, 1, 1, 2, 2, 0, 0]
    wide = StepWindow(2, start=1, moves=1)
    assert [list(wide.steps(i, 4)) for i in range(4)] == [[1, 2], [2, 3], [0, 1], [1, 2]]
    assert list(StepWindow(2, start=1).steps(100, 3)) == [1, 2]


@pytest.mark.parametrize("outside", ["cm", "ode"])
def test_steps_inside_are_the_kernels_and_steps_outside_plain_ones(outside):
    inside = Kernel("cps", 0.5)
    x = states(Exploration("shared_init", kernel=inside, window=StepWindow(1, 1, outside=outside)))
    draw = draw_from(KEYS, SHAPE)
    shared = draw_from([Key(2, 0, 0, -1)] * 2, SHAPE)
    for j, (kernel, noise) in enumerate([(Kernel(outside), shared), (inside, draw), (Kernel(outside), shared)]):
        mean, std = kernel.from_x0(x[j], x[j] / 2, LEVELS[j], LEVELS[j + 1])
        torch.testing.assert_close(x[j + 1], mean + std * noise(0, j + 1, "renoise"))


def test_branches_are_the_same_to_the_bit_up_to_the_window_and_differ_from_there():
    for outside in ("cm", "ode"):
        x = states(Exploration("shared_init", kernel=Kernel("cm"), window=StepWindow(1, 1, outside=outside)))
        assert torch.equal(x[0][0], x[0][1]) and torch.equal(x[1][0], x[1][1])
        assert not torch.equal(x[2][0], x[2][1]) and not torch.equal(x[3][0], x[3][1])


def test_with_independent_noise_only_the_start_and_the_window_differ():
    x = states(Exploration("independent", kernel=Kernel("cm"), window=StepWindow(1, 0)))
    noise = {j: x[j] - (1 - LEVELS[j]) * x[j - 1] / 2 for j in (1, 2, 3)}
    assert not torch.equal(x[0][0], x[0][1]) and not torch.allclose(*noise[1])
    torch.testing.assert_close(noise[2][0], noise[2][1])


def test_a_window_over_all_steps_is_none_to_the_bit():
    plain, wide = Exploration(kernel=Kernel("cps", 0.8)), Exploration(kernel=Kernel("cps", 0.8), window=StepWindow(3))
    one, other = states(plain), states(wide)
    assert all(torch.equal(one[j], other[j]) for j in range(4))


def test_where_it_stands_follows_from_the_iteration_of_the_keys():
    exploration = Exploration("shared_init", kernel=Kernel("cm"), window=StepWindow(1, moves=1))
    x = states(exploration, [Key(2, 2, 0, b) for b in range(2)])
    assert [torch.equal(x[j][0], x[j][1]) for j in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StepWindow(0), "window size=0"),
        (lambda: StepWindow(1, moves=0), "moves=0"),
        (lambda: StepWindow(outside="sde"), "outside='sde' is unknown; choose cm or ode"),
        (lambda: StepWindow(2, 2).steps(0, 3), "2 steps from step 2 on does not fit 3 transitions"),
        (lambda: Exploration("fork", window=StepWindow()), "'fork' has no steps of its own"),
        (lambda: list(stream(Halving(), [(0, 3)], LEVELS, None, kernel=(Kernel("cm"),))), "1 kernels for 4 levels"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
