"""Ratios, trust regions and KL forms against identities derived on paper."""

import math

import pytest
import torch

from arvideo_rl.objectives.ratio import chunk_weights, clipped_loss, kl, log_ratio, masked_loss, score_loss
from samplers.kernels import Kernel, log_prob, mean_over

STEPS = [(1.0, 0.9375), (0.9375, 2.5 / 3), (2.5 / 3, 0.625)]
KERNELS = [
    Kernel("cm"),
    Kernel("cps", 0.8),
    Kernel("flow_sde", 0.7),
    Kernel("dance_sde", 0.3),
    Kernel("linear_sde", 0.9),
]
by_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
by_step = pytest.mark.parametrize(("t", "s"), STEPS)
close = torch.testing.assert_close


def recorded(kernel, t, s, moved=0.05, b=3, seed=0):
    """A transition drawn by v_old and a policy v that has moved: x, x_next, v, v_old, e."""
    rng = torch.Generator().manual_seed(seed)
    x, v_old, step, e = (torch.randn(b, 3, 2, 4, 4, generator=rng) for _ in range(4))
    mean, std = kernel.step(x, v_old, t, s)
    return x, mean + std * e, (v_old + moved * step).requires_grad_(), v_old, e


def gradient(loss, v):
    [grad] = torch.autograd.grad(loss.sum(), v, retain_graph=True)
    return grad


@by_kernel
@by_step
def test_the_log_ratio_is_the_difference_of_log_probabilities(kernel, t, s):  # identity 5
    x, x_next, v, v_old, _ = recorded(kernel, t, s)
    new, old = (log_prob(x_next, *kernel.step(x, u, t, s)) for u in (v, v_old))
    found = log_ratio(kernel, v, v_old, x, x_next, t, s)
    close(found, new - old, rtol=1e-4, atol=1e-6)
    close(gradient(found, v), gradient(new, v), rtol=1e-4, atol=1e-6)
    new, old = (log_prob(x_next, *kernel.step(x, u, t, s), "squared") for u in (v, v_old))
    close(log_ratio(kernel, v, v_old, x, x_next, t, s, "squared"), new - old, rtol=1e-4, atol=1e-6)


@by_kernel
@by_step
def test_ratio_norm_undoes_mean_and_scale_of_the_log_ratio(kernel, t, s):  # identity 6
    x, x_next, v, v_old, e = recorded(kernel, t, s)
    k, dv = kernel.coefficients(t, s), v.detach() - v_old
    found = log_ratio(kernel, v, v_old, x, x_next, t, s, "ratio_norm")
    plain = log_ratio(kernel, v, v_old, x, x_next, t, s)
    bias = k.jacobian**2 / (2 * k.q**2) * mean_over(dv.square())
    close(found, k.q / k.jacobian.abs() * (plain + bias))
    close(found, -mean_over(e * dv), rtol=1e-4, atol=1e-6)  # J is negative
    # GRPO-Guard scales by q alone: J times mean(e dv), which still depends on the step
    close(k.q * (plain + bias), k.jacobian * mean_over(e * dv), rtol=1e-4, atol=1e-6)


@by_kernel
def test_ratio_norm_moves_every_step_alike_and_the_plain_ratio_does_not(kernel):
    sizes = {"ratio_norm": [], "gaussian": []}
    for t, s in STEPS:
        x, x_next, v, v_old, e = recorded(kernel, t, s, moved=0.0)
        for form, found in sizes.items():
            found.append(gradient(log_ratio(kernel, v, v_old, x, x_next, t, s, form), v) * v[0].numel())
        close(sizes["ratio_norm"][-1], -e, rtol=1e-4, atol=1e-4)  # descent on v follows -A e
    plain = [g.norm() for g in sizes["gaussian"]]
    assert max(plain) / min(plain) > 1.2
    if kernel.name == "cm":  # (1 - s) t / s: credit grows 9-fold over the steps
        close(torch.stack(plain) / plain[0], torch.tensor([1.0, 0.9375 * 3, 2.5 / 3 * 9]), rtol=1e-4, atol=0)


@by_kernel
@by_step
@pytest.mark.parametrize("form", ["gaussian", "ratio_norm", "squared"])
def test_an_unchanged_policy_has_ratio_exactly_one(kernel, t, s, form):  # identity 8
    x, x_next, _, v_old, _ = recorded(kernel, t, s)
    v = v_old.clone().requires_grad_()
    log_r = log_ratio(kernel, v, v_old, x, x_next, t, s, form)
    assert torch.equal(log_r, torch.zeros(3, dtype=torch.float64))
    adv = torch.tensor([1.0, -2.0, 0.5])
    for loss, stats in (clipped_loss(log_r, adv, 1e-5), masked_loss(log_r, adv, torch.zeros(3), 0.0)):
        assert stats["ratio_off"] == 0 and stats["ratio_mean"] == 1
        close(loss, -adv.double())
        close(gradient(loss, v), gradient(-adv * log_r, v))  # first update: the gradient of -A log pi, nothing clipped
        assert gradient(loss, v).abs().max() > 0
    assert clipped_loss(log_r, adv, 1e-5)[1]["clip_high"] == clipped_loss(log_r, adv, 1e-5)[1]["clip_low"] == 0


@by_kernel
@by_step
def test_first_gradient_is_the_one_derived_on_paper(kernel, t, s):
    x, x_next, v, v_old, e = recorded(kernel, t, s, moved=0.0)
    k, adv = kernel.coefficients(t, s), torch.tensor([1.0, -2.0, 0.5])
    paper = -adv[:, None, None, None, None] * e * (k.jacobian / (k.q * v[0].numel())).float()
    loss = clipped_loss(log_ratio(kernel, v, v_old, x, x_next, t, s), adv, 1e-3)[0]
    close(gradient(loss, v), paper, rtol=1e-4, atol=1e-6)
    loss = clipped_loss(log_ratio(kernel, v, v_old, x, x_next, t, s, "squared"), adv, 1e-3)[0]
    close(gradient(loss, v), paper * (2 * k.q**2).float(), rtol=1e-4, atol=1e-6)


@by_kernel
@by_step
def test_gaussian_kl_by_v_is_the_kl_of_the_two_transitions(kernel, t, s):  # identity 7
    x, _, v, v_old, _ = recorded(kernel, t, s)
    (mean, std), (other, _) = (kernel.step(x, u, t, s) for u in (v, v_old))
    normal = torch.distributions.Normal
    expected = torch.distributions.kl_divergence(normal(other, std), normal(mean, std)).mean((1, 2, 3, 4))
    k = kernel.coefficients(t, s)
    close(kl(k, v, v_old).float(), expected, rtol=1e-4, atol=1e-7)
    if kernel.name == "cm":
        close(kl(k, v, v_old), (1 - s) ** 2 * t**2 / (2 * s**2) * mean_over((v - v_old).square()))


def test_kl_forms_are_multiples_of_one_another():
    """flow_grpo's KL lacks the step length, so it is t - s times the Gaussian one; FlowCPS's has no variance."""
    kernel, t, s = Kernel("flow_sde", 0.7), 0.9375, 0.625
    x, _, v, v_old, _ = recorded(kernel, t, s)
    k = kernel.coefficients(t, s)
    (mean, _), (other, _) = (kernel.step(x, u, t, s) for u in (v, v_old))
    square, g = mean_over((mean - other).square()), 0.7 * (t / (1 - t)) ** 0.5
    tight = {"rtol": 1e-5, "atol": 0}
    close(kl(k, v, v_old, "flow_grpo"), square / (2 * g**2), **tight)
    close(kl(k, v, v_old, "transition"), square / (2 * g**2 * (t - s)), **tight)
    close(kl(k, v, v_old, "flow_grpo"), (t - s) * kl(k, v, v_old, "transition"), **tight)
    close(kl(k, v, v_old, "flowcps"), square, **tight)
    close(kl(k, v, v_old, "v"), mean_over((v - v_old).square()), **tight)
    close(kl(k, v, v_old, "x0"), mean_over((x - t * v - (x - t * v_old)).square()), **tight)


def test_only_the_trained_policy_carries_gradient():
    kernel, (t, s) = Kernel("cps", 0.8), STEPS[1]
    x, x_next, v, v_old, _ = recorded(kernel, t, s)
    given = [y.detach().clone().requires_grad_() for y in (x, x_next, v_old)]
    x, x_next, v_old = given
    adv = torch.ones(3, requires_grad=True)
    penalty = kl(kernel.coefficients(t, s), v, v_old)
    log_r = log_ratio(kernel, v, v_old, x, x_next, t, s)
    parts = [penalty, clipped_loss(log_r, adv, 9.0)[0], masked_loss(log_r, adv, penalty, 9.0)[0]]
    parts.append(score_loss(kernel, v, x, x_next, adv, t, s))
    for part in parts:
        v.grad = None
        part.sum().backward(retain_graph=True)
        assert v.grad.abs().max() > 0
    assert all(y.grad is None for y in (*given, adv))


@by_kernel
def test_rows_at_different_steps_are_each_their_own(kernel):
    t, s = torch.tensor(STEPS, dtype=torch.float64).T
    x, x_next, v, v_old, _ = recorded(kernel, t, s)
    together = log_ratio(kernel, v, v_old, x, x_next, t, s)
    distance = kl(kernel.coefficients(t, s), v, v_old, "flow_grpo")
    for i in range(3):
        row = slice(i, i + 1)
        alone = log_ratio(kernel, v[row], v_old[row], x[row], x_next[row], *STEPS[i])
        assert torch.equal(together[row], alone)
        close(distance[row], kl(kernel.coefficients(*STEPS[i]), v[row], v_old[row], "flow_grpo"))


@pytest.mark.parametrize("form", ["gaussian", "ratio_norm"])
def test_the_score_loss_is_on_policy_whatever_made_the_transition(form):  # identity 9
    kernel, (t, s) = Kernel("cm"), STEPS[2]
    x, x_next, v, _, _ = recorded(kernel, t, s, moved=0.3)
    adv = torch.tensor([1.0, -2.0, 0.5])
    loss = score_loss(kernel, v, x, x_next, adv, t, s, form)
    assert torch.equal(loss, torch.zeros(3, dtype=torch.float64))
    mean, std = kernel.step(x, v, t, s)
    expected = gradient(-adv * log_prob(x_next, mean, std), v)
    if form == "ratio_norm":
        expected = expected * s / ((1 - s) * t)
    close(gradient(loss, v), expected, rtol=1e-4, atol=1e-6)
    e = ((x_next - mean) / std).detach()  # by the chain rule: d log pi / d x0 = (1 - s) e / s, d x0 / d v = -t
    by_hand = adv[:, None, None, None, None] * (1 - s) * t / s * e / v[0].numel()
    close(expected, by_hand if form == "gaussian" else by_hand * s / ((1 - s) * t), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["gaussian", "ratio_norm", "squared"])
@pytest.mark.parametrize("kernel", [Kernel("ode"), Kernel("cm"), Kernel("cps", 0.8)], ids=lambda k: k.name)
def test_points_are_refused(kernel, form):
    x, _, v, v_old, _ = recorded(kernel, 0.625, 0.0)
    with pytest.raises(ValueError, match="is a point"):
        log_ratio(kernel, v, v_old, x, x, 0.625, 0.0, form)
    with pytest.raises(ValueError, match="is a point"):
        kl(kernel.coefficients(0.625, 0.0), v, v_old, "transition")
    assert (
        kl(kernel.coefficients(0.625, 0.0), v, v_old, "flowcps") > 0
    ).all()  # forms without variance do not need one


def test_unknown_forms_are_refused_with_what_is_known():
    kernel, (t, s) = Kernel("cm"), STEPS[0]
    x, x_next, v, v_old, _ = recorded(kernel, t, s)
    with pytest.raises(ValueError, match="ratio 'sum' is unknown; choose one of gaussian, ratio_norm, squared"):
        log_ratio(kernel, v, v_old, x, x_next, t, s, "sum")
    with pytest.raises(ValueError, match="KL form 'k1' is unknown; choose one of v, x0, transition"):
        kl(kernel.coefficients(t, s), v, v_old, "k1")


def test_clipping_stops_what_has_gone_far_enough_and_never_what_comes_back():
    log_r = torch.tensor([1.5, 1.15, 0.85, 0.5, 1.5, 1.15, 0.85, 0.5]).log().requires_grad_()
    adv = torch.tensor([1.0] * 4 + [-1.0] * 4)
    loss, stats = clipped_loss(log_r, adv, low=0.1, high=0.2)  # asymmetric: to .9 below, 1.2 above
    close(loss, torch.tensor([-1.2, -1.15, -0.85, -0.5, 1.5, 1.15, 0.9, 0.9]))
    stopped = gradient(loss, log_r) == 0
    assert stopped.tolist() == [True, False, False, False, False, False, True, True]
    assert stats["clip_high"] == 1 / 8 and stats["clip_low"] == 2 / 8
    close(clipped_loss(log_r, adv, 0.1)[0], clipped_loss(log_r, adv, 0.1, 0.1)[0])
    assert stats["ratio_off"] == pytest.approx(0.5) and stats["ratio_min"] == pytest.approx(0.5)


def test_the_reported_ratios():
    stats = clipped_loss(torch.tensor([0.5, 1.0, 1.2]).log(), torch.ones(3), 9.0)[1]
    expected = {"ratio_mean": 0.9, "ratio_std": (0.26 / 3) ** 0.5, "ratio_min": 0.5, "ratio_max": 1.2, "ratio_off": 0.5}
    assert stats == pytest.approx(expected | {"clip_high": 0, "clip_low": 0})


def test_the_mask_is_all_or_nothing_and_keeps_what_moves_back():
    log_r = torch.tensor([0.1, -0.1, 0.1, -0.1, 0.0], requires_grad=True)
    adv, far = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0]), torch.full((5,), 0.5)
    plain = -adv * log_r.exp()
    loss, stats = masked_loss(log_r, adv, far, 0.5)  # at the threshold counts as over
    assert (loss == 0).tolist() == [True, True, False, False, False]
    close(loss[2:], plain[2:])
    assert stats["dropped"] == pytest.approx(0.4) and stats["kl_over"] == 1
    close(masked_loss(log_r, adv, far, math.inf)[0], plain)  # no threshold: nothing but -A r
    close(masked_loss(log_r, adv, far, 0.51)[0], plain)


def test_a_dropped_ratio_that_overflows_leaves_no_nan_gradient():
    log_r = torch.tensor([1e4, 0.0], requires_grad=True)
    loss, _ = masked_loss(log_r, torch.ones(2), torch.ones(2), 0.5)
    assert loss.tolist() == [0.0, -1.0]
    assert gradient(loss, log_r).tolist() == [0.0, -1.0]


def test_chunk_weights():
    close(chunk_weights([3, 3], -1.0), torch.tensor([2 / 3, 4 / 3]))  # RAVEN's
    close(chunk_weights([3, 3, 3], 1.0), torch.tensor([1.5, 1.0, 0.5]))
    close(chunk_weights([3, 3], 2.0) / chunk_weights([3, 3], 2.0)[0], torch.tensor([1.0, 2 / 3]))
    w = chunk_weights([1, 3, 3], -1.0)  # a first frame of its own: p = 1, 6/7, 3/7
    close(w / w[2], torch.tensor([3 / 7, 1 / 2, 1.0]))
    close((w * torch.tensor([1.0, 3.0, 3.0])).sum() / 7, torch.tensor(1.0))
    with pytest.raises(ValueError, match="shape 0"):
        chunk_weights([3, 3], 0)
