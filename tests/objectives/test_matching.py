"""Distribution matching against numbers of the authors' code (Self-Forcing, Reward-Forcing, Stream-R1), identities."""

import pytest
import torch

from arvideo_rl.objectives.matching import (
    critic_loss,
    direction,
    guided,
    imbalance,
    joined_saliency,
    matching_loss,
    saliency_weights,
    sample_weights,
    score_level,
)
from samplers.kernels import forward

RUNS = {"dmd_self_forcing": (0.0, 0.0), "redmd_reward_forcing": (2.0, -0.7)}  # beta and reward


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradient_are_those_of_the_official_code(golden, name, masked):
    g = {k.split(".")[1]: v for k, v in golden("matching").items() if k.startswith(name)}
    x = g["generated"].clone().requires_grad_()
    real = guided(g["pred_real_cond_x0"], g["pred_real_uncond_x0"], 3.0)
    push = direction(x, real, g["pred_fake_x0"])
    assert torch.allclose(push, g["kl_grad_normalised"], atol=1e-5)
    beta, reward = RUNS[name]
    weight = sample_weights(torch.tensor([reward]), beta)
    loss = (weight * matching_loss(x, push, g["mask"].bool() if masked else None)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(g["loss_masked" if masked else "loss"].item(), rel=1e-5)
    assert torch.allclose(x.grad, g["grad_masked" if masked else "grad_wrt_generated"], rtol=1e-5, atol=1e-9)


def test_levels_and_the_critic_s_loss_are_those_of_the_official_code(golden):
    g = {k.split(".")[1]: v for k, v in golden("matching").items() if k.startswith("dmd_self_forcing")}
    told = [1000 * score_level(int(u) / 1000, 5.0, 0.02, 0.98) for u in g["raw_timestep"]]
    assert torch.allclose(torch.tensor(told), g["timestep_after_shift"][:, 0], rtol=1e-5)
    t = g["timestep_after_shift"][:, :1, None, None, None] / 1000
    assert torch.allclose(forward(g["generated"], g["noise"], t), g["noisy"], atol=1e-5)
    t = g["critic_timestep"][:, :, None, None, None] / 1000
    v = (forward(g["generated"], g["critic_noise"], t) - g["critic_pred_fake_x0"]) / t
    assert critic_loss(v, g["generated"], g["critic_noise"]).item() == pytest.approx(g["critic_loss"].item(), rel=1e-5)


def test_levels_stay_within_their_bounds():
    assert score_level(0.0, 5.0, 0.02, 0.98) == 0.02 and score_level(0.999, 5.0, 0.02, 0.98) == 0.98


def test_a_teacher_that_agrees_with_the_clip_gives_no_direction(randn):
    x = randn(2, 3, 1, 2, 2)
    assert direction(x, x, x).abs().max() == 0


def test_the_direction_of_a_clip_does_not_depend_on_the_others(randn):
    x, real, fake = (randn(3, 2, 1, 2, 2) for _ in range(3))
    assert torch.equal(direction(x, real, fake)[1:2], direction(x[1:2], real[1:2], fake[1:2]))


def test_weights_are_exponentials_of_the_reward_that_are_bounded_and_of_mean_one():
    r = torch.tensor([[0.3], [-0.2], [3.0]])
    plain = sample_weights(r, 2.0)
    assert (plain[0] / plain[1]).item() == pytest.approx(2.718281828 ** (2 * 0.5), rel=1e-5)
    assert plain[2].item() == pytest.approx(403.43, rel=1e-4)  # what a reward of 3 weighs in public code
    bounded = sample_weights(r, 2.0, 0.2, 5.0, mean=True)
    assert bounded.mean().item() == pytest.approx(1) and (bounded.max() / bounded.min()).item() <= 25.001
    assert torch.equal(sample_weights(r, 0.0, 0.2, 5.0, mean=True), torch.ones(3, 1))


SETTINGS = {"adaptive_factored": (1.0, 0.3, 0.5), "adaptive_factored_half": (None, 0.2, 0.3)}


def test_saliency_weights_are_those_of_the_official_code(golden):
    g = {k.split(".")[1]: v for k, v in golden("matching").items() if k.startswith("stream_r1_mask")}
    maps = torch.stack([g[f"saliency_{m}"] for m in ("MQ", "VQ", "TA")])[:, None]
    joined = joined_saliency(maps, torch.tensor([[-0.7], [0.4], [1.1]]))
    weights = saliency_weights(joined, 1.0, temporal_floor=0.3, spatial_floor=0.5)
    assert torch.allclose(weights[0], g["adaptive_factored"][0, :, 0], atol=1e-5)
    assert weights.mean().item() == pytest.approx(1)
    half = saliency_weights(joined, 0.6, temporal_floor=0.2, spatial_floor=0.3, temporal_strength=0.5)
    assert torch.allclose(half[0], g["adaptive_factored_half"][0, :, 0], atol=1e-5)


def test_a_constant_saliency_weighs_all_places_alike():
    assert torch.equal(saliency_weights(torch.full((1, 3, 2, 2), 7.0)), torch.ones(1, 3, 2, 2))


def test_the_balance_of_rewards_is_that_of_the_official_code(golden):
    g = {k.split(".")[1]: v for k, v in golden("matching").items() if k.startswith("stream_r1_balance")}
    history = g["rewards_VQ_MQ_TA"]
    ours = [imbalance(history[: i + 1], warmup=6) for i in range(len(history))]
    assert torch.allclose(torch.tensor(ours), g["penalty"], atol=1e-5)
    assert torch.allclose(history.mean(1) - 0.5 * g["penalty"], g["combined"], atol=1e-5)
