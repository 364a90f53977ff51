"""docs/objectives/differences.md is true: for every row what public code computes, and what is computed here."""

import math
import re
from pathlib import Path

import pytest
import torch

from arvideo_rl.objectives.advantages import advantages
from arvideo_rl.objectives.mix import combine
from arvideo_rl.objectives.ratio import kl, log_ratio, score_loss
from arvideo_rl.objectives.routing import protection
from samplers.kernels import Kernel
from samplers.schedule import shift_level, warped_levels

PAGE = (Path(__file__).parents[2] / "docs" / "objectives" / "differences.md").read_text(encoding="utf-8")
NOMINAL = (1000.0, 750.0, 500.0, 250.0)
ONE_GROUP = torch.zeros(4, dtype=torch.long)


def latent(*values):
    """One row a value, as the smallest latent there is."""
    return torch.tensor(values).view(-1, 1, 1, 1, 1)


def levels_of_training():
    """Astrolabe rolls out at warped levels and trains at the nominal ones."""
    return [n / 1000 for n in NOMINAL], warped_levels(NOMINAL, 5.0)


def levels_of_integers():
    """RAVEN rounds time steps to whole numbers."""
    levels = warped_levels(NOMINAL, 5.0)
    return [round(1000 * t) / 1000 for t in levels], levels


def levels_of_truncation():
    """KVPO truncates time steps to look their levels up in a table of 1000."""
    levels, table = warped_levels(NOMINAL, 5.0), [shift_level(1 - i / 1000, 5.0) for i in range(1000)]
    return [min(table, key=lambda level: abs(1000 * level - int(1000 * t))) for t in levels], levels


def kl_of_a_transition():
    """flow_grpo divides the squared distance of the means by 2 g^2, where the variance is g^2 (t - s)."""
    t, s, v, v_other = 0.9375, 0.8333, latent(1.0), latent(0.5)
    kernel, x = Kernel("flow_sde", 0.7), latent(0.3)
    (one, _), (other, _) = kernel.step(x, v, t, s), kernel.step(x, v_other, t, s)
    g = 0.7 * math.sqrt(t / (1 - t))
    return [(one - other).square().item() / (2 * g**2)], [kl(kernel.coefficients(t, s), v, v_other).item()]


def levels_of_a_batch():
    """flow_grpo views levels as (-1, 1, 1, 1); in a batch of videos they then belong to channels."""
    x, v, t = torch.zeros(2, 2, 1, 1, 1), torch.ones(2, 2, 1, 1, 1), torch.tensor([0.9, 0.5])
    public = x - t.view(-1, 1, 1, 1) * v  # predicted clean latents of two rows
    mean, _ = Kernel("cm").step(x, v, t, torch.tensor([0.5, 0.25]))  # (1 - s) of them
    return public.flatten().tolist(), (mean / torch.tensor([0.5, 0.75]).view(-1, 1, 1, 1, 1)).flatten().tolist()


def likelihood_ratio():
    """FlowCPS's log-probability is -(x - mean)^2, without the variance: its ratio is not one of likelihoods."""
    t, s, kernel = 0.9375, 0.8333, Kernel("cps", 0.8)
    x, v, v_old, x_next = latent(0.3), latent(1.1), latent(1.0), latent(0.9)
    (now, _), (old, _) = kernel.step(x, v, t, s), kernel.step(x, v_old, t, s)
    public = -(x_next - now).square() + (x_next - old).square()
    return [public.exp().item()], [log_ratio(kernel, v, v_old, x, x_next, t, s).exp().item()]


def noise_of_the_wan_pipeline():
    """FlowCPS's Wan pipeline is another SDE: std lowest + (second level - lowest) t, times the root of the step."""
    levels = (*warped_levels(NOMINAL, 5.0), 0.0)
    public = [(levels[-1] + (levels[1] - levels[-1]) * t) * math.sqrt(t - s) for t, s in zip(levels[:3], levels[1:])]
    return public, [Kernel("cps", 0.8).coefficients(t, s).q.item() for t, s in zip(levels[:3], levels[1:])]


def std_of_the_mask():
    """Flow-DPPO's mask clamps levels at .99, its sampler only replaces 1: between the two, two deviations."""
    t, s, eta = 0.995, 0.9375, 0.7
    clamped = min(t, 0.99)
    public = eta * math.sqrt(clamped / (1 - clamped)) * math.sqrt(t - s)
    return [public], [Kernel("flow_sde", eta, at_one=0.99).coefficients(t, s).q.item()]


def a_lone_member():
    """UniRL divides by the sample std of a group of one."""
    reward = torch.tensor([0.7])
    std = (reward - reward.mean()).square().sum().sqrt() / torch.tensor(len(reward) - 1.0).sqrt()
    public = (reward - reward.mean()) / (std + 1e-8)
    ours, _ = advantages(reward[:, None], ONE_GROUP[:1], "group_z", correction=1)
    return public.tolist(), ours[:, 0].tolist()


def two_rewards():
    """RAVEN's sum_then_normalize stops at the sum."""
    a, b = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([10.0, 10.0, 30.0, 30.0])
    rewards, weights = {"a": a[:, None], "b": b[:, None]}, {"a": 1.0, "b": 1.0}
    ours, _ = combine(rewards, weights, ONE_GROUP, lambda values, _: advantages(values, ONE_GROUP), "sum")
    return ((a + b) / 2).tolist(), ours[:, 0].tolist()


def diversity():
    """Astrolabe's diversity mode computes a std and does not divide by it."""
    reward = torch.tensor([1.0, 2.0, 3.0, 6.0])
    ours, _ = advantages(reward[:, None], ONE_GROUP, "group_z")
    return (reward - reward.mean()).tolist(), ours[:, 0].tolist()


def anchor():
    """KVPO normalises the branches' logits before it adds the anchor's, 0: its probability is 1/2 whatever they did."""
    energies = torch.tensor([[0.1, 0.2], [3.0, 4.0]], dtype=torch.float64)
    public = [torch.cat([(-e).log_softmax(0), torch.zeros(1)]).softmax(0)[-1].item() for e in energies]
    return public, [1 - protection(e, 1.0, "scale", False) for e in energies]


def value_of_the_score():
    """RAVEN reports a squared score: the size of its gradient, not what is minimised. Value and gradient in x0."""
    s, adv, x_next, x0 = 0.8333, torch.tensor([2.0]).double(), latent(1.3), latent(0.4).requires_grad_()
    target = (x0 + adv * (1 - s) * (x_next - (1 - s) * x0) / (2 * s**2)).detach()
    public = (x0 - target).square().mean()
    (slope,) = torch.autograd.grad(public, x0)
    t, x = 0.9375, latent(0.2)
    v = (x - x0) / t
    ours = score_loss(Kernel("cm"), v, x, x_next, adv, t, s).mean()
    return [public.item(), slope.item()], [ours.item(), torch.autograd.grad(ours, x0)[0].item()]


CASES = [levels_of_training, levels_of_integers, levels_of_truncation, kl_of_a_transition, levels_of_a_batch,
         likelihood_ratio, noise_of_the_wan_pipeline, std_of_the_mask, a_lone_member, two_rewards, diversity, anchor,
         value_of_the_score]  # fmt: skip


def told():
    """{name: (public, here)} of the page's table."""
    rows = re.findall(r"^\| `(\w+)` \|[^|]+\|([^|]+)\|([^|]+)\|$", PAGE, re.M)
    return {name: [[float(x) for x in cell.split(",")] for cell in cells] for name, *cells in rows}


def test_the_page_has_a_row_for_each_and_no_other():
    assert list(told()) == [case.__name__ for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_public_code_and_ours_compute_what_the_page_says(case):
    public, ours = (list(side) for side in case())
    for computed, shown in zip((public, ours), told()[case.__name__]):
        assert computed == pytest.approx(shown, rel=6e-4, abs=1e-6, nan_ok=True)
    assert public != pytest.approx(ours, rel=5e-4)
