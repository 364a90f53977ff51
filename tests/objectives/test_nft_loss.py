"""The NFT loss against the authors' numbers and against identities derived on paper (objectives.md 2)."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.generators.transformer import Prediction
from arvideo_rl.objectives.nft import MODES, NFT, kl_loss, mean_flow_shift, policy_loss

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "nft.safetensors")
# settings of the authors' runs: beta, KL weight, and how advantages were mapped after clipping to +-5
DIFFUSION_NFT = {
    "diffusionnft": (1.0, 1e-4, lambda a: a),
    "diffusionnft_beta01": (0.1, 1e-4, lambda a: a),
    "diffusionnft_positive_only": (0.5, 0.0, lambda a: a.clamp_min(0)),
    "diffusionnft_binary": (0.5, 0.0, torch.sign),
}
ASTROLABE = {"astrolabe": (0.1, 1e-4), "astrolabe_beta1": (1.0, 1e-3)}


def golden(prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix + "."): v for k, v in GOLDEN.items() if k.startswith(prefix + ".")}


@pytest.mark.parametrize("name", DIFFUSION_NFT)
def test_diffusion_nft_values_and_gradients(name):
    g, (beta, weight, mode) = golden(name), DIFFUSION_NFT[name]
    v, t = g["v_theta"].clone().requires_grad_(), g["t"].view(-1, 1, 1, 1)
    adv = mode(g["advantages"].clamp(-5, 5))
    policy = policy_loss(g["xt"] - t * v, g["xt"] - t * g["v_old"], g["x0"], adv, beta, 5.0, "diffusion_nft")
    loss = (policy + weight * kl_loss(SimpleNamespace(v=v), SimpleNamespace(v=g["v_ref"]), "v")).mean()
    loss.backward()
    torch.testing.assert_close(policy.mean().double()[None], g["policy_loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(loss.double()[None], g["loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        v.grad, g["grad_wrt_v_theta"], rtol=0, atol=1e-5 * g["grad_wrt_v_theta"].abs().max().item()
    )


@pytest.mark.parametrize("name", ASTROLABE)
def test_astrolabe_values_and_gradients(name):
    g, (beta, weight) = golden(name), ASTROLABE[name]
    cur = g["x0_pred_theta"].clone().requires_grad_()
    policy = policy_loss(cur, g["x0_pred_old"], g["x0"], g["advantages"], beta, 5.0, "astrolabe")
    kl = kl_loss(SimpleNamespace(x0=cur), SimpleNamespace(x0=g["x0_pred_ref"]), "x0")
    loss = (policy + weight * kl).mean()
    loss.backward()
    torch.testing.assert_close(policy, g["per_sample_policy_loss"], rtol=1e-5, atol=0)
    torch.testing.assert_close(loss[None], g["loss"], rtol=1e-5, atol=0)
    expected = g["grad_wrt_x0_pred_theta"]
    torch.testing.assert_close(cur.grad, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


def draw(seed: int = 0, b: int = 5):
    rng = torch.Generator().manual_seed(seed)
    cur, old, x0 = (torch.randn(b, 3, 3, 4, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    return cur, old, x0, torch.randn(b, generator=rng, dtype=torch.float64) * 2


def mean(x):
    return x.mean(dim=tuple(range(1, x.ndim)))


def test_identity_a_unweighted_nft_is_regression_to_an_extrapolated_target():
    cur, old, x0, adv = draw()
    beta, signal = 0.3, (adv / 5).clamp(-1, 1)
    target = old + (signal / beta)[:, None, None, None, None] * (x0 - old)
    expected = beta**2 * mean((cur - target) ** 2) + (1 - signal**2) * mean((old - x0) ** 2)
    found = policy_loss(cur, old, x0, adv, beta, 5.0, "astrolabe").double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("adv_clip", [5.0, 8.0])
def test_identity_b_gradient_at_the_old_policy(beta, adv_clip):
    _, old, x0, adv = draw()
    cur = old.clone().requires_grad_()
    policy_loss(cur, old, x0, adv, beta, adv_clip, "diffusion_nft").sum().backward()
    m, w = old[0].numel(), mean((old - x0).abs())
    expected = (2 * adv / (w * m))[:, None, None, None, None] * (old - x0)  # free of beta and of adv_clip
    torch.testing.assert_close(cur.grad, expected, rtol=1e-5, atol=1e-9)

    cur.grad = None
    policy_loss(cur, old, x0, adv, beta, adv_clip, "astrolabe").sum().backward()
    expected = (2 * beta * adv / adv_clip / m)[:, None, None, None, None] * (old - x0)
    torch.testing.assert_close(cur.grad, expected, rtol=1e-5, atol=1e-9)


def test_identity_c_value_at_the_old_policy_does_not_depend_on_r_but_the_gradient_does():
    _, old, x0, adv = draw()
    values, grads = [], []
    for a in (adv, -adv, 0 * adv):
        cur = old.clone().requires_grad_()
        loss = policy_loss(cur, old, x0, a, 0.5, 5.0, "astrolabe")
        loss.sum().backward()
        values.append(loss.detach())
        grads.append(cur.grad)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(grads[0], -grads[1], rtol=1e-5, atol=1e-9)  # the sign of A flips the gradient
    assert grads[0].abs().max() > 0 and grads[2].abs().max() < 1e-12  # r = 1/2 gives none


def test_identity_d_minimiser_of_a_toy_is_the_old_prediction_plus_the_tilt():
    _, old, _, _ = draw(b=1)
    rng = torch.Generator().manual_seed(1)
    samples = torch.randn(64, *old.shape[1:], generator=rng, dtype=torch.float64)
    adv = torch.randn(64, generator=rng, dtype=torch.float64)
    beta = 0.7
    cur = old.clone().requires_grad_()
    for _ in range(2):  # quadratic: Newton's step lands at once, the second checks that it stays
        loss = policy_loss(cur.expand_as(samples), old.expand_as(samples), samples, adv, beta, 5.0, "astrolabe").mean()
        [grad] = torch.autograd.grad(loss, cur)
        cur = (cur - grad * cur.numel() / (2 * beta**2)).detach().requires_grad_()
    tilt = ((adv / 5).clamp(-1, 1)[:, None, None, None, None] * (samples - old)).mean(0, keepdim=True)
    torch.testing.assert_close(cur.detach(), old + tilt / beta, rtol=1e-4, atol=1e-5)


def test_the_weights_and_the_old_prediction_carry_no_gradient():
    cur, old, x0, adv = draw()
    cur, old, x0 = cur.requires_grad_(), old.requires_grad_(), x0.requires_grad_()
    policy_loss(cur, old, x0, adv, 1.0, 5.0, "diffusion_nft").sum().backward()
    assert old.grad is None and cur.grad is not None
    r = (0.5 + adv / 10)[:, None, None, None, None]
    step = (cur - old).detach()
    plus, minus = old.detach() + step - x0.detach(), old.detach() - step - x0.detach()
    w_plus, w_minus = (mean(e.abs())[:, None, None, None, None] for e in (plus, minus))
    by_hand = 5 * 2 / cur[0].numel() * (r * plus / w_plus - (1 - r) * minus / w_minus)  # w taken as constants
    torch.testing.assert_close(cur.grad, by_hand, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    "bad",
    [
        {"weighting": "x"},
        {"kl_space": "x"},
        {"context_writer": "x"},
        {"beta": 0},
        {"levels_per_chunk": 0},
        {"train_levels": 0},
        {"from_chunk": -1},
    ],
)
def test_bad_options_are_refused(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        NFT(**bad)


@pytest.mark.parametrize(
    ("mode", "counted"),
    [("all", [-7, -1, 0, 2]), ("positive", [0, 0, 0, 2]), ("negative", [-5, -1, 0, 0]), ("one", [0, 0, 0, 1]),
     ("binary", [-1, -1, 0, 1])],
)  # fmt: skip
def test_which_advantages_count(mode, counted):
    assert MODES[mode](torch.tensor([-7.0, -1.0, 0.0, 2.0]), 5.0).tolist() == counted


def test_visited_states_are_the_recorded_ones(alignable):
    objective = NFT(coupling="visited", levels_per_chunk=2, kl_weight=0.0)
    record = alignable[2](objective, frames=6)
    levels = alignable[0].streaming.levels
    x, t = objective._states(record, record.latents[:, 3:6], 1, 2, levels)
    for i, (state, level) in enumerate(zip(x.unflatten(0, (2, 2)).transpose(0, 1).flatten(0, 1), t.T.flatten())):
        assert torch.equal(state, record.steps.x[i // 2, 1, levels.index(pytest.approx(level.item()))])
    assert sum(1 for _ in alignable[3](objective, record, torch.randn(2, 2))) == 2


def test_uniform_levels_are_the_branch_s_own(alignable):
    objective = NFT(level_law="uniform", levels_per_chunk=3)
    record = alignable[2](objective, frames=6)
    _, t = objective._states(record, record.latents[:, :3], 0, 3, alignable[0].streaming.levels)
    assert t.shape == (3, 2) and t.unique().numel() == 6 and 0 < t.min() and t.max() <= 1


def test_the_mean_flow_shift_recovers_the_velocity_of_a_linear_flow_map():
    """v(x, t) = a x + b t: d/dt along the path is a d + b, whatever the step."""
    a, b = 0.3, -0.7

    def model(x, t, context):
        return Prediction(x - t[:, None, None] * (a * x + b * t[:, None, None]), None)

    x, x0, t = torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.tensor([1.0, 0.5, 0.2])
    wide = t[:, None, None]
    expected = -(wide**2) * (a * (x - x0) / wide + b)
    torch.testing.assert_close(mean_flow_shift(model, x, t, x0, None, 0.005), expected, rtol=1e-3, atol=1e-4)


def test_mean_flow_shifts_all_policies_alike(alignable):
    """At cur = old the gradient is still that of 2 A (x0_old - x0): only the target has moved."""
    _, policies, make, losses = alignable
    record, adv = make(NFT(), frames=6), torch.randn(2, 2)
    found = []
    for on in (False, True):
        for loss, metrics in losses(NFT(kl_weight=0.0, mean_flow=on), record, adv):
            loss.backward()
            assert metrics["x0_moved"] == 0
        found.append(torch.cat([p.grad.flatten() for p in policies.parameters().values()]))
        policies.model.zero_grad()
    assert found[0].norm() > 0 and 1e-4 < (found[1] - found[0]).norm() / found[0].norm() < 10
