"""The transition kernels against identities derived on paper, and the forward process: means, spreads, dtypes."""

import pytest
import torch

from samplers.kernels import Kernel, consistency, forward, log_prob


def test_the_consistency_kernel_forgets_the_level_before(randn):
    x0 = randn(2, 3)
    mean, std = consistency(x0, 0.625)
    assert std == 0.625
    torch.testing.assert_close(mean, 0.375 * x0)


def test_the_consistency_kernel_is_a_point_at_level_0(randn):
    x0 = randn(2, 3)
    mean, std = consistency(x0, 0.0)
    assert std == 0 and torch.equal(mean, x0)


def test_the_consistency_kernel_works_in_float32(randn):
    x0 = randn(64).bfloat16()
    mean, _ = consistency(x0, 0.9375)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, 0.0625 * x0.float())


def test_the_kernel_draws_from_the_forward_process(randn):
    x0, noise = randn(2, 3), randn(2, 3)
    mean, std = consistency(x0, 0.4)
    torch.testing.assert_close(mean + std * noise, forward(x0, noise, 0.4))


@pytest.mark.parametrize(("t", "which"), [(0.0, "x0"), (1.0, "noise")])
def test_the_forward_process_starts_at_the_clip_and_ends_at_the_noise(t, which, randn):
    ends = {"x0": randn(2, 3), "noise": randn(2, 3)}
    assert torch.equal(forward(**ends, t=t), ends[which])


def test_the_forward_process_takes_a_level_per_row(randn):
    x0, noise, t = randn(2, 3), randn(2, 3), torch.tensor([[0.25], [0.5]])
    out = forward(x0, noise, t)
    for i in range(2):
        torch.testing.assert_close(out[i], (1 - t[i]) * x0[i] + t[i] * noise[i])


LEVELS = (1.0, 0.9375, 2.5 / 3, 0.625, 0.0)  # four steps at shift 5
STEPS = list(zip(LEVELS, LEVELS[1:]))
NOISY = STEPS[:-1]
KERNELS = {
    "ode": Kernel("ode"),
    "cm": Kernel("cm"),
    "cps": Kernel("cps", 0.8),
    "flow_sde": Kernel("flow_sde", 0.7),
    "flow_sde at .99": Kernel("flow_sde", 0.7, at_one=0.99),
    "dance_sde": Kernel("dance_sde", 0.3),
    "linear_sde": Kernel("linear_sde", 0.9375),
}
PRESERVING = [KERNELS[n] for n in ("ode", "cm", "cps")]
SDES = [k for n, k in KERNELS.items() if "sde" in n]
close = torch.testing.assert_close


def numbers(kernel, t, s):
    k = kernel.coefficients(t, s)
    return torch.stack([k.c, k.q, k.jacobian])


@pytest.mark.parametrize(("t", "s"), STEPS)
def test_ends_of_the_noise_range_are_other_kernels(t, s):  # identity 1
    assert torch.equal(numbers(Kernel("cps", 1.0), t, s), numbers(Kernel("cm"), t, s))
    ode = numbers(Kernel("ode"), t, s)
    close(ode, torch.tensor([s, 0.0, s - t], dtype=torch.float64))
    for name in ("cps", "flow_sde", "dance_sde", "linear_sde"):
        close(numbers(Kernel(name, 0.0), t, s), ode, rtol=0, atol=1e-15)


def test_points_and_forgetting_are_exact():
    for kernel in (Kernel("ode"), Kernel("cps", 0.0)):
        assert kernel.coefficients(0.9, 0.5).q == 0
    for kernel in (Kernel("cm"), Kernel("cps", 1.0)):
        assert kernel.coefficients(0.9, 0.5).c == 0


@pytest.mark.parametrize(("t", "s"), STEPS)
def test_spread_is_preserved_or_exceeds_by_the_stated_term(t, s):  # identity 2
    for kernel in PRESERVING:
        k = kernel.coefficients(t, s)
        close(k.c**2 + k.q**2, torch.tensor(s, dtype=torch.float64) ** 2)
    for kernel in SDES:
        k = kernel.coefficients(t, s)
        g2, d = k.q**2 / (t - s), t - s
        close(k.c**2 + k.q**2 - s**2, g2 * d**2 / t + g2**2 * d**2 / (4 * t**2))


def test_published_numbers_of_four_steps():
    """The table of coefficients to three digits: flow_sde at .7 and dance_sde at .3, total spread next to s."""
    flow, dance, cm = Kernel("flow_sde", 0.7), Kernel("dance_sde", 0.3), Kernel("cm")
    got = [[k.q, k.c, (k.c**2 + k.q**2).sqrt()] for k in (flow.coefficients(t, s) for t, s in STEPS)]
    expected = [[0.700, 0.693, 0.985], [0.875, 0.425, 0.973], [0.714, 0.319, 0.782], [0.714, -0.408, 0.823]]
    close(torch.tensor(got).float(), torch.tensor(expected), rtol=0, atol=1e-3)
    got = [[k.q, (k.c**2 + k.q**2).sqrt()] for k in (dance.coefficients(t, s) for t, s in STEPS)]
    close(
        torch.tensor(got).float(),
        torch.tensor([[0.075, 0.938], [0.097, 0.834], [0.137, 0.629], [0.237, 0.241]]),
        rtol=0,
        atol=1e-3,
    )
    got = [-k.q / k.jacobian for k in (cm.coefficients(t, s) for t, s in NOISY)]
    close(torch.stack(got).float(), torch.tensor([15.0, 16 / 3, 2.0]))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("t", "s"), STEPS)
def test_the_mean_moves_with_the_velocity_as_stated(kernel, t, s, randn):
    x, v = randn(2, 3, 4), randn(2, 3, 4).requires_grad_()
    mean, _ = kernel.step(x, v, t, s)
    mean.sum().backward()
    close(v.grad, torch.full_like(v, kernel.coefficients(t, s).jacobian))
    assert kernel.coefficients(t, s).jacobian < 0  # RatioNorm divides by it and takes its sign


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("t", "s"), NOISY)
def test_moments_with_exact_predictions(name, t, s):  # identity 3
    """Data x0 fixed, x_t drawn by the forward process, exact v: preserving kernels land on the forward process at s,
    SDEs have the same mean but more noise."""
    kernel, n = KERNELS[name], 200_000
    rng = torch.Generator().manual_seed(3)
    noise, fresh = torch.randn(2, 1, n, generator=rng)
    x0 = torch.full((1, n), 1.7)
    mean, std = kernel.step(forward(x0, noise, t), noise - x0, t, s)
    x = mean + std * fresh
    k = kernel.coefficients(t, s)
    spread = (k.c**2 + k.q**2).sqrt().item()
    assert abs(x.mean().item() - (1 - s) * 1.7) < 5 * spread / n**0.5
    assert abs(x.std().item() / spread - 1) < 5 / (2 * n) ** 0.5
    if kernel in PRESERVING:
        assert spread == pytest.approx(s)
    else:
        assert spread > s * 1.0001


@pytest.mark.parametrize(("t", "s"), STEPS[1:])
def test_sde_kernels_are_an_euler_step_minus_half_g_squared_of_the_score(t, s, randn):  # identity 4
    x, v = randn(2, 3), randn(2, 3)
    for name, eta, g in (
        ("dance_sde", 0.3, 0.3),
        ("flow_sde", 0.7, 0.7 * (t / (1 - t)) ** 0.5),
        ("linear_sde", 0.9, 0.9 * t),
    ):
        score = -(x + (1 - t) * v) / t
        mean, std = Kernel(name, eta).step(x, v, t, s)
        close(mean, x + (s - t) * v + 0.5 * g**2 * score * (t - s), rtol=1e-5, atol=1e-6)
        assert std.item() == pytest.approx(g * (t - s) ** 0.5)
    same = Kernel("dance_sde", 0.7 * (t / (1 - t)) ** 0.5)
    close(numbers(Kernel("flow_sde", 0.7), t, s), numbers(same, t, s))


def test_what_stands_for_level_one_is_only_in_the_root():
    t, s = 1.0, 0.9375
    for at_one, gap in (("next", 1 - s), (0.99, 0.01), (0.5, 0.5)):
        k = Kernel("flow_sde", 0.7, at_one=at_one).coefficients(t, s)
        g2 = 0.7**2 / gap
        close(numbers(Kernel("flow_sde", 0.7, at_one=at_one), t, s), torch.tensor(
            [s - g2 * (t - s) / 2, (g2 * (t - s)) ** 0.5, s - 1], dtype=torch.float64))  # fmt: skip
        assert k.t == 1
    below = [numbers(Kernel("flow_sde", 0.7, at_one=a), 0.9375, 0.8) for a in ("next", 0.99)]
    assert torch.equal(*below)
    # the choice matters: 2.5-fold on this list
    std = [Kernel("flow_sde", 0.7, at_one=a).coefficients(t, s).q.item() for a in ("next", 0.99)]
    assert std[1] / std[0] == pytest.approx(2.5)


def test_cm_is_the_consistency_transition_bit_for_bit(randn):
    x, v = randn(2, 3, 4), randn(2, 3, 4)
    mean, std = Kernel("cm").step(x, v, 0.9375, 0.625)
    expected, spread = consistency(x - 0.9375 * v, 0.625)
    assert torch.equal(mean, expected) and std.item() == spread


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_a_level_per_row_gives_each_row_its_own_step(kernel, randn):
    x, v, noise = randn(3, 2, 4), randn(3, 2, 4), randn(3, 2, 4)
    t, s = torch.tensor([x[:2] for x in NOISY], dtype=torch.float64).T
    mean, std = kernel.step(x, v, t, s)
    together = mean + std * noise
    for i in range(3):
        mean, std = kernel.step(x[i : i + 1], v[i : i + 1], *NOISY[i])
        assert torch.equal(together[i : i + 1], mean + std * noise[i : i + 1])


def test_steps_are_float32_whatever_comes_in(randn):
    x, v = randn(64).bfloat16()[None], randn(64).bfloat16()[None]
    mean, std = Kernel("cps", 0.8).step(x, v, 0.9375, 0.625)
    assert mean.dtype == std.dtype == torch.float32
    assert torch.equal(mean, Kernel("cps", 0.8).step(x.float(), v.float(), 0.9375, 0.625)[0])


def test_log_probability_is_the_mean_over_elements_of_the_density(randn):
    x, mean, std = randn(3, 2, 4), randn(3, 2, 4), torch.tensor([0.3, 0.8, 2.0])
    expected = torch.distributions.Normal(mean, std[:, None, None]).log_prob(x).mean((1, 2))
    close(log_prob(x, mean, std[:, None, None]).float(), expected)
    close(log_prob(x, mean, 0.3).float()[0], expected[0])
    assert log_prob(x, mean, 0.3).dtype == torch.float64


def test_the_squared_form_is_the_density_times_twice_the_variance_up_to_a_constant(randn):
    x, a, b, std = randn(3, 8), randn(3, 8), randn(3, 8), torch.tensor([[0.3], [0.8], [2.0]])
    squared = log_prob(x, a, std, "squared") - log_prob(x, b, std, "squared")
    gaussian = log_prob(x, a, std) - log_prob(x, b, std)
    close(squared, 2 * std[:, 0].double() ** 2 * gaussian)
    close(log_prob(x, a, std, "squared").float(), -(x - a).square().mean(1))


@pytest.mark.parametrize("form", ["gaussian", "squared"])
@pytest.mark.parametrize("name", ["ode", "cm", "cps"])
def test_points_have_no_log_probability(name, form, randn):
    x, v = randn(2, 3), randn(2, 3)
    mean, std = KERNELS[name].step(x, v, 0.625, 0.0)
    assert std == 0
    with pytest.raises(ValueError, match="std 0 is a point"):
        log_prob(mean, mean, std, form)
    with pytest.raises(ValueError, match=r"t = 0\.625 to s = 0\.0 is a point"):
        KERNELS[name].coefficients(0.625, 0.0).stochastic()


def test_one_point_among_rows_is_named():
    t, s = torch.tensor([1.0, 0.625]), torch.tensor([0.9, 0.0])
    with pytest.raises(ValueError, match=r"t = 0\.625 to s = 0\.0 is a point"):
        Kernel("cm").coefficients(t, s).stochastic()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"name": "sde"}, "kernel 'sde' is unknown; choose one of ode, cm, cps"),
        ({"name": "cm", "eta": 0.5}, "'cm' has no eta, but eta=0.5"),
        ({"name": "cps"}, r"'cps' needs eta \(published: 0.8\)"),
        ({"name": "cps", "eta": 1.1}, "'cps' with eta=1.1: use 0 to 1"),
        ({"name": "dance_sde", "eta": -0.1}, "eta=-0.1"),
        ({"name": "flow_sde", "eta": float("nan")}, "eta=nan"),
        ({"name": "flow_sde", "eta": 0.7, "at_one": 1.0}, "at_one=1.0: use next or a level"),
        ({"name": "flow_sde", "eta": 0.7, "at_one": "last"}, "at_one='last'"),
        ({"name": "cps", "eta": 0.7, "at_one": 0.99}, "'cps' has no at_one"),
    ],
)
def test_bad_kernels_are_refused_with_what_is_known(bad, message):
    with pytest.raises(ValueError, match=message):
        Kernel(**bad)


@pytest.mark.parametrize(("t", "s"), [(0.5, 0.5), (0.5, 0.6), (1.1, 0.5), (0.5, -0.1), (float("nan"), 0.1)])
def test_steps_that_do_not_go_down_are_refused(t, s):
    with pytest.raises(ValueError, match=f"no transition from t = {t} to s = {s}"):
        Kernel("cm").coefficients(t, s)
    with pytest.raises(ValueError, match=f"no transition from t = {t} to s = {s}"):
        Kernel("cm").coefficients(torch.tensor([1.0, t], dtype=torch.float64), torch.tensor([0.9, s]).double())


def test_an_unknown_log_probability_form_is_refused(randn):
    with pytest.raises(ValueError, match="'sum' is unknown; choose gaussian or squared"):
        log_prob(randn(1, 2), randn(1, 2), 1.0, "sum")
