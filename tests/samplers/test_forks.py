"""Noise of a group: its moments and correlations, and what is shared down to the bit."""

from dataclasses import replace

import pytest
import torch

from samplers.exploration import Exploration, draws
from samplers.forks import antithetic_noise, churn_kernel, neighbour_noise, pivot_of
from samplers.randomness import Key, normal, shared

KEYS = [Key(3, 5, 7, b) for b in range(4)]
N = 100_000
SHAPE = (3, 2, 4)
DRAWS = [(k, s, "renoise" if s else "init") for k in range(4) for s in range(3)]


def near(value, expected, spreads=5):
    assert abs(float(value) - expected) < spreads * 1.5 / N**0.5, (float(value), expected)


@pytest.mark.parametrize("sigma", [0.3, 0.5, 0.9])
def test_neighbours_have_unit_variance_and_the_stated_correlations(sigma):
    x = neighbour_noise(KEYS, 1, 0, "init", (N,), sigma)
    centre = normal(shared(KEYS), 1, 0, "init", (N,))[0]
    for i in range(4):
        near(x[i].mean(), 0), near(x[i].square().mean(), 1)
        near((x[i] * centre).mean(), (1 - sigma**2) ** 0.5)
        near((x[i] * x[i - 1]).mean(), 1 - sigma**2)


def test_neighbours_at_0_are_one_noise_and_at_1_each_its_own():
    same = neighbour_noise(KEYS, 1, 0, "init", SHAPE, 0)
    assert all(torch.equal(row, same[0]) for row in same)
    assert torch.equal(neighbour_noise(KEYS, 1, 0, "init", SHAPE, 1), normal(KEYS, 1, 0, "init", SHAPE))


def test_a_neighbour_does_not_depend_on_its_batch_and_prompts_have_their_own_centre():
    x = neighbour_noise(KEYS, 1, 0, "init", SHAPE, 0.5)
    assert torch.equal(x[2:3], neighbour_noise(KEYS[2:3], 1, 0, "init", SHAPE, 0.5))
    here, there = (neighbour_noise([replace(KEYS[0], prompt=p)], 1, 0, "init", SHAPE, 0) for p in (7, 8))
    assert not torch.equal(here, there)


def test_a_pair_lies_on_both_sides_of_its_middle():
    a = 0.2
    x = antithetic_noise(KEYS, 1, 0, "renoise", (N,), a)
    for one, two in ((x[0], x[1]), (x[2], x[3])):
        near(one.square().mean(), 1), near(two.square().mean(), 1)
        near((one * two).mean(), 1 - 2 * a**2)
        middle, half = (one + two) / 2, (one - two) / 2
        near(middle.square().mean(), 1 - a**2), near(half.square().mean(), a**2), near((middle * half).mean(), 0)
    near((x[0] * x[2]).mean(), 0)
    assert not any(torch.equal(x[0], y) for y in normal(KEYS, 1, 0, "renoise", (N,)))


def test_a_pair_with_no_difference_is_one_noise():
    x = antithetic_noise(KEYS, 1, 0, "init", SHAPE, 0)
    assert torch.equal(x[0], x[1]) and torch.equal(x[2], x[3]) and not torch.equal(x[0], x[2])


def differing(draw):
    """The draws in which branches differ."""
    return [d for d in DRAWS if not all(torch.equal(row, draw(*d)[0]) for row in draw(*d))]


def test_a_neighbour_fork_differs_in_the_pivots_initial_noise_alone():
    draw = draws(Exploration("fork", 0.5), KEYS, SHAPE, "cpu", 2)
    assert differing(draw) == [(2, 0, "init")]
    assert torch.equal(draw(2, 0, "init"), neighbour_noise(KEYS, 2, 0, "init", SHAPE, 0.5))


def test_a_fresh_fork_differs_in_all_noise_from_the_pivot_on():
    assert differing(draws(Exploration("fork_fresh"), KEYS, SHAPE, "cpu", 2)) == [d for d in DRAWS if d[0] >= 2]


def test_a_pair_fork_differs_in_all_noise_of_the_pivot_alone():
    assert differing(draws(Exploration("pair", 0.1), KEYS, SHAPE, "cpu", 2)) == [d for d in DRAWS if d[0] == 2]


def test_a_churned_pair_starts_from_neighbours_and_draws_the_pivots_steps_each_for_itself():
    draw = draws(Exploration("churn", 0.1), KEYS, SHAPE, "cpu", 2)
    assert differing(draw) == [d for d in DRAWS if d[0] == 2]
    assert torch.equal(draw(2, 0, "init"), neighbour_noise(KEYS, 2, 0, "init", SHAPE, 0.1))
    assert torch.equal(draw(2, 1, "renoise"), normal(KEYS, 2, 1, "renoise", SHAPE))


def test_routes_share_every_draw_that_of_refreshing_too():
    draw = draws(Exploration("route"), KEYS, SHAPE, "cpu")
    assert differing(draw) == []
    assert torch.equal(draw(1, 0, "refresh")[:1], normal(shared(KEYS[:1]), 1, 0, "refresh", SHAPE))


def test_all_forks_of_a_prompt_share_one_prefix():
    one, two, three = (
        draws(Exploration("fork", 0.5), KEYS, SHAPE, "cpu", 2),
        draws(Exploration("fork_fresh"), KEYS, SHAPE, "cpu", 3),
        draws(Exploration("pair", 0.1), KEYS, SHAPE, "cpu", 2),
    )
    for d in DRAWS[:6]:
        assert torch.equal(one(*d), two(*d)) and torch.equal(one(*d), three(*d))


def test_the_pivot_is_one_for_a_group_and_uniform_over_iterations():
    assert len({pivot_of(k, 1, 6) for k in KEYS}) == 1
    drawn = torch.tensor([pivot_of(Key(0, i), 1, 6) for i in range(2000)]).bincount(minlength=6)
    assert drawn[0] == 0 and (drawn[1:] - 400).abs().max() < 5 * 400**0.5


LEVELS = [(1.0, 1.0), (1.0, 0.9375), (0.8333, 0.625), (0.625, 0.0)]


@pytest.mark.parametrize(("t", "s"), LEVELS[1:])
@pytest.mark.parametrize("gamma", [0.0, 0.0025, 0.3])
def test_the_churn_kernel_is_the_published_step(t, s, gamma, randn):
    """Overshoot to a cleaner level r, then rescale and add noise: FDFO's two moves, written out."""
    x, v = randn(2, 3, 4), randn(2, 3, 4)
    r = s / (1 + gamma - gamma * s)
    mean = (x + (r - t) * v) / (1 + gamma * r)
    std = r * ((1 + gamma) ** 2 - 1) ** 0.5 / (1 + gamma * r)
    ours = churn_kernel((1 - (1 + gamma) ** -2) ** 0.5).step(x, v, t, s)
    torch.testing.assert_close(ours[0], mean, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours[1], torch.tensor(std, dtype=torch.float32), rtol=0, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.0025, 0.3])
def test_neighbours_are_the_published_churn_of_the_initial_noise(gamma):
    sigma = (1 - (1 + gamma) ** -2) ** 0.5
    assert (1 - sigma**2) ** 0.5 == pytest.approx(1 / (1 + gamma))
    assert sigma == pytest.approx(((1 + gamma) ** 2 - 1) ** 0.5 / (1 + gamma))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: neighbour_noise(KEYS, 0, 0, "init", SHAPE, 1.5), "sigma=1.5"),
        (lambda: antithetic_noise(KEYS, 0, 0, "init", SHAPE, -0.1), "a=-0.1"),
        (lambda: antithetic_noise(shared(KEYS), 0, 0, "init", SHAPE, 0.1), "branch below 0"),
        (lambda: pivot_of(KEYS[0], 4, 4), "from 4 on in a video of 4 chunks"),
        (lambda: churn_kernel(1.5), "sigma=1.5"),
    ],
)
def test_what_is_no_exploration_is_refused_with_its_number(call, message):
    with pytest.raises(ValueError, match=message):
        call()
