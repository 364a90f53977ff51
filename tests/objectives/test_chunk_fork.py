"""The chunk fork's policy over neighbours: its gradient on paper, its ratio at the start, and where a step goes."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.objectives.chunk_fork import ChunkFork, neighbours


def test_the_policy_is_a_softmax_over_distances_scaled_by_their_median(randn):
    x, a = randn(1, 4, 3, 2, 2, 2), randn(1, 2, 3, 2, 2, 2)
    p = neighbours(x, a, 0.7).exp()
    d = torch.stack([(x[0] - a[0, k]).square().mean((1, 2, 3, 4)) for k in range(2)])
    torch.testing.assert_close(p[0], (-d / 0.7).softmax(-1).double(), rtol=1e-5, atol=1e-6)
    between = torch.stack([(x[0, i] - x[0, j]).square().mean() for i in range(4) for j in range(4) if i != j])
    torch.testing.assert_close(neighbours(x, a), neighbours(x, a, between.median().item()))


def test_its_score_is_the_pull_from_the_mean_neighbour_to_the_own(randn):
    """d log pi_i / d a = (2 / (tau M)) (x_i - sum_j pi_j x_j)."""
    x, a = randn(1, 5, 12), randn(1, 1, 12).requires_grad_()
    log_p = neighbours(x, a, 0.5)
    (gradient,) = torch.autograd.grad(log_p[0, 0, 2], a)
    mean = (log_p.detach().exp()[0, 0, :, None] * x[0].double()).sum(0)
    torch.testing.assert_close(
        gradient[0, 0].double(), 2 / (0.5 * 12) * (x[0, 2].double() - mean), rtol=1e-4, atol=1e-6
    )


def test_at_the_first_update_advantages_that_sum_to_zero_pull_to_the_weighted_neighbours(randn):
    """d loss / d a = -(2 / (G tau M)) sum_i A_i x_i: the baseline cancels."""
    from arvideo_rl.objectives.ratio import clipped_loss

    x, adv = randn(1, 6, 12), randn(6).double()
    adv = adv - adv.mean()
    a = x[:, :1].clone().requires_grad_()
    log_p = neighbours(x, a, 0.5)
    loss, _ = clipped_loss(log_p - log_p.detach(), adv, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss.mean(), a)
    expected = -2 / (6 * 0.5 * 12) * (adv[:, None] * x[0].double()).sum(0)
    torch.testing.assert_close(gradient[0, 0].double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_moves_the_chunk_towards_the_neighbour_that_was_rewarded(sign, alignable):
    _, policies, make, losses = alignable
    objective = ChunkFork(anchors=3, clip_low=1.0, clip_high=9.0)
    record, adv = make(objective, branches=4, frames=9, pivot=1), torch.zeros(4, 3)
    adv[2] = sign
    optimizer = torch.optim.SGD(policies.parameters().values(), lr=0.1)
    seen = []
    for _ in range(4):
        ((loss, metrics),) = losses(objective, record, adv)
        seen.append((loss.item(), metrics))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[0][0] == pytest.approx(-sign / 4, abs=1e-5)  # -mean rho A over four branches, rho = 1
    assert seen[0][1]["ratio_off"] < 1e-5 and seen[0][1]["x0_moved"] < 1e-9
    assert seen[0][0] > seen[1][0] > seen[2][0] > seen[3][0] and seen[3][1]["x0_moved"] > 1e-9


def test_it_trains_one_chunk_of_one_group(alignable):
    generator, policies, make, losses = alignable
    record = make(ChunkFork(), branches=3, frames=9, pivot=2)
    ((_, metrics),) = losses(ChunkFork(kl_weight=1.0), record, torch.randn(3, 3))
    assert metrics["pivot"] == 2 and metrics["kl"] < 1e-9 and 1 / 3 < metrics["own_probability"] < 1
    with pytest.raises(ValueError, match="group by group"):
        next(losses(ChunkFork(), replace(record, groups=torch.tensor([0, 0, 1])), torch.randn(3, 3)))


def test_bad_options_are_refused():
    for options, message in ((dict(sigma=0), "sigma=0"), (dict(anchors=0), "anchors=0"), (dict(tau=0), "tau=0"),
                             (dict(credit="clip"), "credit=clip")):  # fmt: skip
        with pytest.raises((ConfigError, ValueError), match=message):
            ChunkFork(**options)
    with pytest.raises(ConfigError, match="from_chunk=4 leaves no pivot: a rollout has 4"):
        ChunkFork(from_chunk=4).check_chunks(4)
