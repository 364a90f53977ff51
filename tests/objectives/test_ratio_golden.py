"""Kernels, ratios, trust regions and score loss against the authors' numbers, values and gradients to 1e-5.

Where the authors' code is wrong, their number is reproduced next to ours and the difference asserted.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.objectives.ratio import chunk_weights, clipped_loss, kl, log_ratio, masked_loss, score_loss
from samplers.kernels import Kernel, Transition, log_prob, mean_over

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "ratio.safetensors")
WAN4_NEXT = (0.9375, 0.8333333, 0.625)  # where the recorded steps go; the first is the list's second level
SD3_NEXT = (0.9601293206214905, 0.7903682589530945, 0.008928571827709675)
KERNELS = {"flow_grpo": (Kernel("flow_sde", 0.7), "gaussian"), "flowcps": (Kernel("cps", 0.8), "squared")}
UNIRL = {
    "unirl_flow": (Kernel("flow_sde", 0.7, at_one=0.99), "gaussian"),
    "unirl_cps": (Kernel("cps", 0.8), "squared"),
    "unirl_dance": (Kernel("dance_sde", 0.3), "gaussian"),
}
RAVEN = {
    "raven_consistency": Kernel("cm"),
    "raven_consistency_kl": Kernel("cm"),
    # at t = 1 it has (1 + t - t')/(1 - t') with t' = .938, the level after it, where flow_grpo has 1/(1 - t')
    "raven_euler_maruyama": Kernel("flow_sde", 0.7, at_one=1 / (2 - 0.938)),
}


def golden(prefix):
    return {k.removeprefix(prefix + "."): v for k, v in GOLDEN.items() if k.startswith(prefix + ".")}


def close(found, expected):
    """To 1e-5 of the value, or of the largest element of a field."""
    found, expected = found.double().squeeze(), expected.double().squeeze()
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item() * (expected.ndim > 1)
    )


@pytest.mark.parametrize("levels", ["wan4", "sd3_10"])
@pytest.mark.parametrize("source", KERNELS)
def test_recorded_steps_and_replayed_ratios(source, levels):
    g, (kernel, form) = golden(f"{source}_{levels}"), KERNELS[source]
    x, x_next, t, s = g["sample"], g["prev_sample"], g["sigma"], g["sigma_prev"]
    v, v_old = g["new_model_output"].requires_grad_(), g["model_output"]
    mean, std = kernel.step(x, v_old, t, s)
    close(mean, g["prev_sample_mean"])
    close(std, g["noise_std"])
    close(log_prob(x_next, mean, std, form), g["log_prob"])
    new = log_prob(x_next, *kernel.step(x, v, t, s), form)
    close(new, g["new_log_prob"])
    close(torch.autograd.grad(new.sum(), v)[0], g["grad_new_log_prob_wrt_model_output"])
    log_r = log_ratio(kernel, v, v_old, x, x_next, t, s, form)
    close(log_r.exp(), g["ratio"])
    torch.testing.assert_close(log_r.float(), g["ratio"].log(), rtol=0, atol=3e-7)  # their differences are float32
    close(torch.autograd.grad(log_r.sum(), v)[0], g["grad_new_log_prob_wrt_model_output"])


@pytest.mark.parametrize(("source", "following"), [("wan4", WAN4_NEXT), ("sd3_10", SD3_NEXT)])
def test_the_wan_pipeline_of_flowcps_is_another_sde(source, following):
    g, (second, *_) = golden(f"wan_pipeline_{source}"), following
    t, s = g["sigma"], torch.tensor(following)
    mean, std = Kernel("linear_sde", second).step(g["sample"], g["model_output"], t, s)
    close(mean, g["prev_sample_mean"])
    close(std, g["noise_std"])
    close(log_prob(g["prev_sample"], mean, std), g["log_prob"])
    cps, spread = Kernel("cps", 0.8).step(g["sample"], g["model_output"], t, s)
    assert (cps - mean).abs().max() > 0.1 and (spread - std).abs().min() > 0.1


@pytest.mark.parametrize("source", UNIRL)
def test_unirl_kernels(source):
    g, (kernel, form) = golden(source), UNIRL[source]
    mean, std = kernel.step(g["sample"], g["model_output"], g["sigma"], g["sigma_next"])
    close(mean, g["prev_sample_mean"])
    close(log_prob(g["prev_sample"], mean, std, form), g["log_prob"])


@pytest.mark.parametrize("name", ["grpo_clip", "grpo_clip_kl"])
def test_flow_grpo_clipped_loss(name):
    g = golden(name)
    new = g["log_prob_new"].requires_grad_()
    loss, stats = clipped_loss(new - g["log_prob_old"], g["advantages"].clamp(-5, 5), 1e-4)
    close(loss.mean(), g["policy_loss"])
    close(torch.autograd.grad(loss.mean(), new)[0], g["grad_wrt_log_prob_new"])
    assert stats["ratio_max"] == pytest.approx(g["ratio"].max().item(), rel=1e-6)
    assert stats["clip_high"] == pytest.approx(1 / 6)  # the fourth: it has moved 3e-4 with its advantage


def test_flow_grpo_kl_is_not_the_gaussian_one():
    """It divides by twice g^2, where the variance is g^2 (t - s). Written with means in place of v: J = 1."""
    g = golden("grpo_clip_kl")
    mean, t, s = g["prev_sample_mean"].requires_grad_(), torch.tensor(0.9375).double(), torch.tensor(0.625).double()
    q = g["std_dev_t"].double() * (t - s).sqrt()
    k = Transition(t, s, torch.zeros_like(q), q, torch.ones_like(q))
    distance = kl(k, mean, g["prev_sample_mean_ref"], "flow_grpo")
    close(distance.mean(), g["kl_loss"])
    close(torch.autograd.grad(0.04 * distance.mean(), mean)[0], g["grad_wrt_prev_sample_mean"])
    close(g["policy_loss"] + 0.04 * distance.mean(), g["loss"])
    normal = torch.distributions.Normal
    std = q.float()[:, None, None, None]
    right = torch.distributions.kl_divergence(normal(mean, std), normal(g["prev_sample_mean_ref"], std)).mean((1, 2, 3))
    close(kl(k, mean, g["prev_sample_mean_ref"], "transition"), right)
    close(distance / right, torch.full((6,), 0.9375 - 0.625))


def test_flow_dppo_mask():
    g = golden("flowdppo")
    new, adv = g["new_logp"].requires_grad_(), g["advantages"]
    q = g["sigma_t"].flatten().double().expand(6, 3).flatten()
    one = torch.ones_like(q)
    k = Transition(one, 0 * one, 0 * one, q, one)  # means in place of v
    distance = kl(k, g["new_means"].flatten(0, 1), g["old_means"].flatten(0, 1)).view(6, 3)
    loss, stats = masked_loss(new - g["old_logp"], adv, distance, 1e-5)
    close(loss, g["loss_per_element"])
    close(loss.mean(), g["loss_mean"])
    close(torch.autograd.grad(loss.mean(), new)[0], g["grad_wrt_new_logp"])
    assert ((loss != 0) == g["keep_mask"].bool()).all()
    metrics = {"kl_over": 0.3888888895511627, "dropped": 0.2777777910232544, "ratio_mean": 0.9974082112312317}
    metrics |= {"ratio_min": 0.9700751900672913, "ratio_max": 1.0333168506622314}
    assert {m: stats[m] for m in metrics} == pytest.approx(metrics, rel=1e-6)
    assert distance.mean().item() == pytest.approx(6.363174179568887e-05, rel=1e-5)
    # the std of its first step is that of a level clamped to .99, which is what its sampler has at t = 1 too
    close(Kernel("flow_sde", 0.7, at_one=0.99).coefficients(1.0, 0.9375).q, g["sigma_t"].flatten()[0])


@pytest.mark.parametrize("name", RAVEN)
def test_raven_score_loss(name):
    g, kernel = golden("raven_consistency") | golden(name), RAVEN[name]
    x, x_next, adv = g["xt"], g["next_xt"], g["advantages"].clamp(-5, 5)
    t, s = g["timestep"].double() / 1000, g["next_timestep"].double() / 1000
    v = g["pred_v"].requires_grad_()
    k, (mean, std) = kernel.coefficients(t, s), kernel.step(x, v, t, s)
    close(mean, g["mean"])
    close(std, g["std"])
    close(-k.jacobian / t, g["score_grad_coeff"])  # d mean / d x0
    close(log_prob(x_next, mean, std), g["gaussian_log_prob_mean_over_dims"])

    weight, row = torch.ones(4), (adv, t, s)
    if name.endswith("_kl"):  # two chunks of 3 frames a row, weighted
        weight, row = chunk_weights([3, 3], -1.0).repeat(4), [y.repeat_interleave(2) for y in row]

    def chunks(y):
        return y.unflatten(2, (len(weight) // 4, -1)).movedim(2, 1).flatten(0, 1)

    policy = (weight * score_loss(kernel, chunks(v), chunks(x), chunks(x_next), *row)).mean()
    penalty = torch.zeros(())
    if name.endswith("_kl"):
        penalty = (weight * kl(kernel.coefficients(*row[1:]), chunks(v), chunks(g["ref_pred_v"]))).mean()
    loss = 100 * policy + 0.1 * penalty
    close(torch.autograd.grad(loss, v, retain_graph=True)[0], g["grad_wrt_pred_v"])

    # Their loss value is another: squares of half the x0-gradient, each term by itself (ours: 0, and the Gaussian KL)
    def squared_score(term):
        if not term.requires_grad:
            return 0.0
        by_x0 = chunks(torch.autograd.grad(term, v, retain_graph=True)[0] / -t.float().view(-1, 1, 1, 1, 1))
        return (mean_over((by_x0 * v.numel() / 2).square()) / weight).mean()

    value = 100 * squared_score(policy) + 0.1 * squared_score(penalty)
    close(value, g["policy_loss"])
    assert loss.item() < 1 < value.item()
