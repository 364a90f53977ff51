"""Paired finite differences: the sign on a known reward, what swapping does, and the minimum in the ratio."""

import pytest
import torch

from arvideo_rl.config import ConfigError, load
from arvideo_rl.objectives.pairs import Pairs, pair_loss
from arvideo_rl.training.settings import AlignConfig, check


def test_descent_on_a_quadratic_reward_goes_uphill(randn):
    """R = -|x - goal|^2: at the data policy, -d loss / d x0 points where R rises."""
    goal, middle, half = randn(1, 12), randn(1, 12), 0.05 * randn(1, 12)
    ends = torch.cat([middle + half, middle - half])
    reward = -(ends - goal).square().sum(1)
    gain = torch.stack([reward[0] - reward[1], reward[1] - reward[0]]) / 2
    v = randn(2, 12).requires_grad_()
    loss, stats = pair_loss(v, v.detach().clone(), torch.cat([half, -half]), gain, 0.03)
    (gradient,) = torch.autograd.grad(loss.sum(), v)
    slope = (-2 * (middle - goal) * half).sum()  # of R along the pair
    uphill = (gradient * half).sum(1)  # x0 = x - t v: descent on v moves x0 by +t gradient
    assert (uphill * slope > 0).all() and stats["ratio_off"] < 1e-6
    size = half.square().mean() + 1e-6
    torch.testing.assert_close(gradient[0], (2 * gain[0] * half[0] / size / 12).float(), rtol=1e-4, atol=1e-6)


def test_swapping_the_two_changes_nothing(randn):
    v, v_old, half, gain = randn(2, 12), randn(2, 12), randn(1, 12), 0.7
    a, _ = pair_loss(v, v_old, torch.cat([half, -half]), torch.tensor([gain, -gain]), 0.03, 1e9)
    b, _ = pair_loss(v.flip(0), v_old.flip(0), torch.cat([-half, half]), torch.tensor([-gain, gain]), 0.03, 1e9)
    torch.testing.assert_close(a.sum(), b.sum())


@pytest.mark.parametrize("gain", [0.4, -0.4])
def test_the_minimum_lies_a_width_from_one(gain):
    rho = torch.linspace(0.8, 1.2, 4001, dtype=torch.float64)
    loss = -gain * rho + abs(gain) / (2 * 0.03) * (rho - 1).square()
    assert rho[loss.argmin()].item() == pytest.approx(1 + 0.03 * (1 if gain > 0 else -1), abs=2e-4)


@pytest.mark.parametrize("noise", ["antithetic", "churn"])
def test_a_step_moves_both_branches_towards_the_better(alignable, noise):
    _, policies, make, losses = alignable
    objective = Pairs(noise=noise, apart=0.3, width=10.0)
    record = make(objective, frames=9, pivot=1)
    assert torch.equal(record.latents[0, :3], record.latents[1, :3])
    half = (record.steps.x0[0, 0, -1] - record.steps.x0[1, 0, -1]) / 2
    assert half.abs().max() > 1e-3
    adv = torch.tensor([[1.0], [-1.0]]).expand(2, 3)  # branch 0 is better
    optimizer = torch.optim.SGD(policies.parameters().values(), lr=1e-3)
    before = record.steps.x0[:, 0]
    for _ in range(3):
        ((loss, metrics),) = losses(objective, record, adv)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    generator = alignable[0]
    from samplers.stream import draw_from

    denoiser = generator.denoiser(policies, record.script.rows(slice(0, 1)), draw_from(record.keys[:1], (3, 3, 4, 4)))
    with torch.no_grad(), policies.using("current") as model:
        context = denoiser.enter(denoiser.refresh(record.latents[:1, :3], denoiser.enter(denoiser.start())))
        after = torch.stack([model(record.steps.x[:1, 0, j], torch.tensor([t]), context).x0[0]
                             for j, t in enumerate(generator.streaming.levels)])  # fmt: skip
    moved = ((after - before[0]) * half).sum()
    assert moved > 0 and metrics["ratio_off"] > 0


def test_it_takes_pairs_and_raw_differences():
    config = load(AlignConfig, "align/pairs_tiny", [])
    check(config, 3, 1)
    for key, value in (("group", 4), ("advantage", "group_z")):
        with pytest.raises(ConfigError, match="use group=2 advantage=centre"):
            check(load(AlignConfig, "align/pairs_tiny", [f"{key}={value}"]), 3, 1)
    with pytest.raises(ConfigError, match="apart=0"):
        Pairs(apart=0)
