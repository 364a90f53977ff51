"""Chunk-fork GRPO: identities of its policy and its gradient (no public code to compare with)."""

import pytest
import torch

from arvideo_rl.objectives.categorical import log_policy
from arvideo_rl.objectives.neighbour import anchor_branches, distances, neighbour_loss, temperature
from samplers.randomness import Key

ANCHORS = [0, 2, 5]


@pytest.fixture
def group(randn):
    """Points of six branches [6, ...] and advantages that sum to zero."""
    adv = randn(6).double()
    return randn(6, 3, 2, 4, 4).double(), adv - adv.mean()


def grad(points, adv, current=None, **options):
    current = (points[ANCHORS] if current is None else current).clone().requires_grad_()
    loss, stats = neighbour_loss(current, points, ANCHORS, adv, **options)
    loss.backward()
    return loss.item(), current.grad, stats


def test_distances_are_means_over_elements_and_an_anchor_is_at_its_own_point(group):
    points, _ = group
    d = distances(points, points)
    assert d.diagonal().abs().max() == 0 and torch.equal(d, d.T)
    assert d[0, 1].item() == pytest.approx((points[0] - points[1]).square().mean().item())


def test_every_ratio_is_exactly_1_at_the_first_update(group):
    points, adv = group
    loss, _, stats = grad(points.float(), adv)
    assert stats["ratio_off"] == stats["clip_high"] == stats["clip_low"] == 0
    assert loss == pytest.approx(0, abs=1e-12), "advantages sum to zero"


def test_the_policys_gradient(group, randn):
    """d log pi_i / d a = 2 / (tau M) (x_i - sum_j pi_j x_j)."""
    points, _ = group
    a = randn(1, 3, 2, 4, 4).double().requires_grad_()
    log_pi = log_policy(distances(a, points), 0.6)
    log_pi[0, 3].backward()
    mean = torch.einsum("j,jfchw->fchw", log_pi[0].exp().detach(), points)
    torch.testing.assert_close(a.grad[0], 2 / (0.6 * 96) * (points[3] - mean), rtol=0, atol=1e-12)


@pytest.mark.parametrize("tau", [0.3, 2.0, None])
def test_at_the_first_update_the_baseline_cancels_and_tau_only_scales(group, tau):
    """dL/da_k = -2/(G tau M) sum_i A_i x_i for every anchor, here divided by their number."""
    points, adv = group
    _, gradient, stats = grad(points, adv, tau=tau)
    expected = -2 / (6 * stats["tau"] * 96) * torch.einsum("i,ifchw->fchw", adv, points) / len(ANCHORS)
    for row in gradient:
        torch.testing.assert_close(row, expected, rtol=0, atol=1e-12)


def test_descent_moves_towards_the_better_of_two_branches(randn):
    points, adv, a = randn(2, 2, 3).double(), torch.tensor([1.0, -1.0]), [0]
    gradient = torch.autograd.grad(
        neighbour_loss(start := points[a].clone().requires_grad_(), points, a, adv)[0], start
    )
    for towards, sign in ((points[:1] - points[1:], -1), (points[1:] - points[:1], 1)):
        ends = [neighbour_loss(points[a] + h * towards, points, a, adv)[0].item() for h in (1e-5, -1e-5)]
        slope = (ends[0] - ends[1]) / 2e-5
        assert slope == pytest.approx((gradient[0] * towards).sum().item(), rel=1e-6) and slope * sign > 0


def test_opposite_advantages_turn_the_gradient_round(group):
    points, adv = group
    torch.testing.assert_close(grad(points, adv)[1], -grad(points, -adv)[1], rtol=0, atol=1e-14)


def test_the_clip_stops_what_has_moved_far_enough(group):
    """An anchor that has moved onto a branch with a positive advantage is pulled no further, and pushed off one with a
    negative advantage."""
    points = group[0]
    onto = points[[3, 3, 3]]
    only = torch.zeros(6).double()
    only[3] = 1
    _, pulled, stats = grad(points, only, onto)
    assert pulled.abs().max() == 0 and stats["clip_high"] == pytest.approx(1 / 6)
    nearly = 0.9 * points[[3, 3, 3]] + 0.1 * points[ANCHORS]
    assert grad(points, -only, nearly)[1].abs().max() > 0


def test_log_ratios_are_held_within_the_limit(group):
    points, adv = group
    far = points[[3, 3, 3]]
    _, _, stats = grad(points, adv, far, tau=1e-3)
    assert stats["ratio_mean"] < 6 * torch.tensor(10.0).exp() and torch.isfinite(torch.tensor(stats["ratio_std"]))
    held = grad(points, adv, far, tau=1e-3, limit=1e-3)[2]
    assert held["ratio_off"] == pytest.approx(1e-3, rel=1e-2)


def test_the_default_temperature_is_the_median_distance_and_keeps_the_policy_soft(group):
    points, adv = group
    d = distances(points, points)
    off = sorted(d[~torch.eye(6, dtype=torch.bool)].tolist())
    assert temperature(points) == pytest.approx((off[14] + off[15]) / 2)
    assert temperature(10 * points) == pytest.approx(100 * temperature(points))
    entropy = grad(points, adv)[2]["entropy"]
    assert 0.8 * torch.tensor(6.0).log() < entropy < torch.tensor(6.0).log()


def test_gradient_goes_to_the_current_predictions_alone(group):
    points, adv = group
    points, adv = points.requires_grad_(), adv.requires_grad_()
    current = points.detach()[ANCHORS].requires_grad_()
    neighbour_loss(current, points, ANCHORS, adv)[0].backward()
    assert current.grad.abs().max() > 0 and points.grad is None and adv.grad is None


def test_equal_branches_give_no_gradient(group):
    points = group[0][:1].expand(6, -1, -1, -1, -1)
    _, gradient, stats = grad(points, torch.zeros(6).double())
    assert gradient.abs().max() == 0 and stats["ratio_off"] == 0


def test_anchors_are_one_choice_for_a_group_and_each_branch_gets_its_turn():
    chosen = anchor_branches(Key(1, 2, 3, 4), 1, 12, 4)
    assert len(set(chosen)) == 4 and chosen == sorted(chosen) == anchor_branches(Key(1, 2, 3, 9), 1, 12, 4)
    assert {b for i in range(40) for b in anchor_branches(Key(1, i), 1, 12, 4)} == set(range(12))
    with pytest.raises(ValueError, match="5 anchors of a group of 4"):
        anchor_branches(Key(1), 0, 4, 5)


def test_numbers_that_do_not_agree_are_refused(group):
    points, adv = group
    with pytest.raises(ValueError, match="2 predictions for 3 anchors, 6 points for 6 advantages"):
        neighbour_loss(points[:2], points, ANCHORS, adv)
