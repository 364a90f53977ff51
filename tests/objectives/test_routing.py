"""KV-routing policy optimisation against the authors' numbers, gradients included, and identities derived on paper."""

import pytest
import torch

from arvideo_rl.objectives.categorical import log_policy
from arvideo_rl.objectives.routing import (
    by_energy,
    fuse,
    protection,
    routing_loss,
    temperature,
    trajectory_energy,
)
from samplers.schedule import shift_level

LEVELS = torch.tensor([1, 0.9375, 5 / 6, 0.625], dtype=torch.float64)


@pytest.fixture(scope="module")
def kvpo(golden):
    return {k.removeprefix("kvpo."): v for k, v in golden("groups").items() if k.startswith("kvpo.")}


def close(mine, theirs, tolerance=1e-5):
    """Within a relative tolerance of the largest number."""
    mine, theirs = torch.as_tensor(mine).double(), torch.as_tensor(theirs).double()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


def energies(g, weights, floor=1.0, levels=None, trained_steps=4):
    """Energies of the toy generator pred = w noisy (1 - t/2000), with gradient through the first steps of a block."""
    out = torch.zeros(5, dtype=torch.float64)
    scale = (1 - g["timesteps"] / 2000).view(4, 1, 1, 1, 1, 1)
    for block in range(2):
        pred = torch.einsum("oc,gsbfchw->gsbfohw", weights, g["noisy_inputs"][:, block]) * scale
        pred = torch.cat([pred[:, :trained_steps], pred[:, trained_steps:].detach()], 1)
        levels = g["timesteps"] / 1000 if levels is None else levels
        out = out + trajectory_energy(pred, g["x0_targets"][:, block], levels, floor)
    return out


@pytest.mark.parametrize("who", ["theta", "old", "init"])
def test_kvpos_trajectory_energies(kvpo, who):
    close(-energies(kvpo, kvpo[f"w_{who}"]), kvpo[f"log_pi_{who}"])


def test_kvpos_energies_have_its_gradient_through_the_first_two_steps_of_a_block(kvpo):
    w = kvpo["w_theta"].clone().requires_grad_()
    (-energies(kvpo, w, trained_steps=2).sum()).backward()
    close(w.grad, kvpo["grad_w_theta_of_sum_log_pi"])


def test_without_a_floor_levels_matter_and_kvpo_looks_them_up_truncated(kvpo):
    table = torch.tensor([shift_level(1 - i / 1000, 5) for i in range(1000)])
    truncated = torch.stack([table[(1000 * table - int(t)).abs().argmin()] for t in kvpo["timesteps"]])
    theirs = kvpo["log_pi_theta_sigma_floor0"]
    close(-energies(kvpo, kvpo["w_theta"], floor=0, levels=truncated), theirs)
    exact = -energies(kvpo, kvpo["w_theta"], floor=0)
    assert 1e-5 < (exact / theirs - 1).abs().max() < 1e-2, "ours takes the levels as they are"


def test_kvpos_advantages_are_fused_by_std_or_plainly(kvpo):
    a, b = kvpo["adv_a"], kvpo["adv_b"]
    close(fuse(a, b), kvpo["clipped_adv"])
    close(fuse(a, b), kvpo["fused_adv"])
    close(fuse(a, b, by_std=False), kvpo["total_component_adv"])
    assert fuse(a, b, clip=1.0).abs().max() == 1


def test_a_reward_that_is_the_same_for_all_branches_counts_nothing_in_the_fusion():
    a, same = torch.tensor([1.0, -1.0, 0.5]), torch.full((3,), 0.7)
    torch.testing.assert_close(fuse(a, same), fuse(a, 0 * same))


def mechanism(g, golden, name, factor):
    energy = -g["log_pi_theta"].double().requires_grad_()
    energy.retain_grad()
    loss, stats = routing_loss(energy, -g["log_pi_old"], -g["log_pi_init"], g["clipped_adv"], factor=factor)
    loss.backward()
    theirs = {k.rpartition(".")[2]: v for k, v in golden("groups").items() if k.startswith(f"kvpo_mechanism_{name}.")}
    return energy, loss, stats, theirs


@pytest.mark.parametrize(("name", "factor"), [("1_safe", 1.0), ("2_safe", 1.0), ("2_unsafe", 0.5)])
def test_kvpos_loss_and_gradient(kvpo, golden, name, factor):
    energy, loss, stats, theirs = mechanism(kvpo, golden, name, factor)
    close(loss.detach()[None], theirs["total_loss"])
    close(-energy.grad, theirs["grad_wrt_log_pi_theta"])
    ratio = (log_policy(energy, 1) - log_policy(-kvpo["log_pi_old"], 1)).detach()
    close(ratio, theirs["log_ratio"], 1e-4)
    close(ratio.exp(), theirs["ratio"])
    assert stats["kl"] == pytest.approx(theirs["loss_kl_term"].item(), abs=1e-7), "theirs is a float32 sum of +-1e-3"
    assert stats["clip_high"] == stats["clip_low"] == theirs["clip_fraction"].item() == 0


def test_kvpos_second_protection_halves_the_loss_whatever_the_branches_did_and_ours_does_not(kvpo, golden):
    g = golden("groups")
    old = -kvpo["log_pi_old"].double()
    for energy in (old, old + 3, old * 0 + 0.01):
        official = torch.cat([log_policy(energy, 1), torch.zeros(1)]).softmax(0)[-1].item()
        assert official == pytest.approx(g["kvpo_mechanism_2_unsafe.m2_pi_anchor"].item())
    right = [protection(e, 1.0, "scale", safe=False) for e in (0 * old, old, old + 3)]
    assert right[0] == pytest.approx(5 / 6), "branches like the anchor: one choice of six is the anchor's"
    weight = (-old).exp().sum().item()
    assert right[1] == pytest.approx(weight / (1 + weight))
    assert right[0] > 0.5 > right[1] > right[2] > 0, "the farther off the branches, the less they count"


def test_protections():
    energy = torch.tensor([0.1, 0.2])
    assert protection(energy, 1.0, "drop", safe=False) == 0
    assert all(protection(energy, 1.0, m, safe=True) == 1 for m in ("none", "drop", "scale"))
    assert protection(energy, 1.0, "none", safe=False) == 1
    with pytest.raises(ValueError, match="none, drop, scale"):
        protection(energy, 1.0, "halve", safe=False)


def group(randn, g=5, t=6):
    """Noisy inputs, levels, the old policy's and the branches' velocities; advantages that do not sum to zero."""
    x, v, v_g = (randn(g, t, 2, 3, 4).double() for _ in range(3))
    levels = LEVELS.repeat(2)[:t]
    return x, levels, v, v_g, randn(g).double() + 0.5


def x0(x, t, v):
    return x - t.view(1, -1, 1, 1, 1) * v


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_energies_of_predictions_are_those_of_velocities(randn, floor):
    x, t, v, v_g, _ = group(randn)
    weight = t**2 / t.clamp_min(floor) ** 2
    expected = (weight / 2 * (v_g - v).square().mean((2, 3, 4))).sum(1)
    close(trajectory_energy(x0(x, t, v), x0(x, t, v_g), t, floor), expected, 1e-12)


def test_energies_add_up_over_parts_of_a_trajectory_and_over_branches(randn):
    x, t, v, v_g, _ = group(randn)
    cur, rec = x0(x, t, v), x0(x, t, v_g)
    parts = trajectory_energy(cur[:, :2], rec[:, :2], t[:2]) + trajectory_energy(cur[:, 2:], rec[:, 2:], t[2:])
    close(parts, trajectory_energy(cur, rec, t), 1e-12)
    close(trajectory_energy(cur[1:2], rec[1:2], t), trajectory_energy(cur, rec, t)[1:2], 0)


def test_the_gradient_of_the_first_update(randn):
    """dL/dv(x_t^g) = -(1/G) (A_g - pi_g sum A) w_t (v_g - v) / (tau M), and no ratio is off 1."""
    x, t, v, v_g, adv = group(randn)
    tau = 0.7
    v = v.requires_grad_()
    energy = trajectory_energy(x0(x, t, v), x0(x, t, v_g), t)
    loss, stats = routing_loss(energy, energy.detach(), None, adv, tau=tau, kl_weight=0)
    loss.backward()
    share = (adv - log_policy(energy, tau).exp() * adv.sum()) / len(adv)
    expected = -share.view(-1, 1, 1, 1, 1) * (t**2).view(1, -1, 1, 1, 1) * (v_g - v) / (tau * 24)
    close(v.grad, expected.detach(), 1e-10)
    assert stats["ratio_off"] == stats["clip_high"] == stats["clip_low"] == 0
    assert loss.item() == pytest.approx(-adv.mean().item())


def test_descent_moves_towards_the_better_branch(randn):
    """On two branches from one input, checked by finite differences."""
    x, t, v, v_g, _ = group(randn, g=2, t=1)
    x, v = x[:1].expand(2, -1, -1, -1, -1), v[:1]
    adv = torch.tensor([1.0, -1.0])

    def loss(v):
        energy = trajectory_energy(x0(x, t, v.expand(2, -1, -1, -1, -1)), x0(x, t, v_g), t)
        return routing_loss(energy, old, None, adv, kl_weight=0)[0]

    old = trajectory_energy(x0(x, t, v.expand(2, -1, -1, -1, -1)), x0(x, t, v_g), t)
    at = v.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at)
    for towards, sign in ((v_g[:1] - v_g[1:], -1), (v_g[1:] - v_g[:1], 1)):
        slope = (loss(v + 1e-5 * towards) - loss(v - 1e-5 * towards)).item() / 2e-5
        assert slope == pytest.approx((gradient * towards).sum().item(), rel=1e-6) and slope * sign > 0


def test_no_routing_no_gradient(randn):
    x, t, v, _, adv = group(randn)
    v = v.requires_grad_()
    energy = trajectory_energy(x0(x, t, v), x0(x, t, v.detach()), t)
    routing_loss(energy, energy.detach(), energy.detach(), adv)[0].backward()
    assert energy.abs().max() == 0 and v.grad.abs().max() == 0


def test_opposite_advantages_turn_the_policy_gradient_round(randn):
    old = randn(5).double().abs()
    grads = []
    for sign in (1, -1):
        energy = old.clone().requires_grad_()
        routing_loss(energy, old, None, sign * torch.arange(5.0), kl_weight=0)[0].backward()
        grads.append(energy.grad)
    close(grads[0], -grads[1], 1e-12)


@pytest.mark.parametrize(
    ("moved", "adv", "trained"), [(0.5, 1, False), (0.5, -1, True), (-0.5, 1, True), (-0.5, -1, False)]
)
def test_the_clip_stops_what_has_moved_the_way_of_its_advantage(moved, adv, trained):
    old = torch.zeros(2, dtype=torch.float64)
    energy = torch.tensor([-moved, moved], dtype=torch.float64, requires_grad=True)  # ratios 1 +- .46
    loss, stats = routing_loss(energy, old, None, torch.tensor([float(adv), 0.0]), kl_weight=0)
    loss.backward()
    assert bool(energy.grad.abs().max() > 0) == trained
    assert stats["clip_high"] + stats["clip_low"] == (0 if trained else 0.5)


def test_the_clip_is_wider_upwards():
    def trained(shift, adv):
        energy = torch.tensor([-shift, shift], dtype=torch.float64, requires_grad=True)
        routing_loss(energy, energy.new_zeros(2), None, torch.tensor([adv, 0.0]), kl_weight=0)[0].backward()
        return bool(energy.grad.abs().max() > 0)

    assert trained(0.16, 1.0), "ratio 1.16 is below 1.2"
    assert not trained(-0.16, -1.0), "ratio .84 is below .9"


def test_the_kl_carries_gradient_and_advantages_none(randn):
    old, start = randn(5).double().abs(), randn(5).double().abs()
    start.requires_grad_()
    energy, adv = old.clone().requires_grad_(), torch.zeros(5, requires_grad=True)
    loss, stats = routing_loss(energy, old, start, adv)
    loss.backward()
    assert energy.grad.abs().max() > 1e-3 and adv.grad is start.grad is None and stats["kl"] > 0
    assert loss.item() == pytest.approx(10 * stats["kl"])
    with pytest.raises(ValueError, match="kl_weight=10.0 needs the start"):
        routing_loss(energy, old, None, adv)


def test_two_passes_give_the_gradient_of_one_and_hold_one_branch(randn):
    x, t, v, v_g, adv = group(randn)
    w = torch.ones(3, 1, dtype=torch.float64, requires_grad=True)  # a "policy": v scaled by row

    def energy(rows=slice(None)):
        return trajectory_energy(x0(x, t, v * w)[rows], x0(x, t, v_g)[rows], t)

    old, start = energy().detach() * 1.01, energy().detach() * 0.9

    def loss(e):
        return routing_loss(e, old, start, adv, tau=temperature(old), factor=0.3)

    whole = loss(energy())[0]
    (expected,) = torch.autograd.grad(whole, w)
    with torch.no_grad():
        first = energy()
    value, weights, _ = by_energy(first, loss)
    for g in range(5):
        (weights[g] * energy(slice(g, g + 1)).sum()).backward()
    assert value.item() == pytest.approx(whole.item(), rel=1e-12) and not value.requires_grad
    close(w.grad, expected, 1e-12)


def test_the_temperature_is_the_typical_difference_of_energies():
    assert temperature(torch.tensor([0.0, 1.0, 4.0])) == pytest.approx(3)  # 1, 3, 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: trajectory_energy(torch.ones(2, 3, 4), torch.ones(2, 2, 4), torch.ones(3)),
            r"\[2, 3, 4\] from \[2, 2",
        ),
        (
            lambda: trajectory_energy(torch.ones(2, 3, 4), torch.ones(2, 3, 4), torch.zeros(3), 0),
            "level 0 with floor 0",
        ),
        (lambda: log_policy(torch.ones(3), 0), "tau=0"),
    ],
)
def test_what_has_no_energy_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
