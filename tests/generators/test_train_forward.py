"""Training-mode forwards: what official code does with one dense mask is here a walk over chunks whose contexts keep
their graph, and gives the same predictions, loss and gradients."""

import json
from pathlib import Path

import pytest
import torch

from arvideo_rl.generators.window import Window

WINDOWS = {
    "causal": Window(3, None, 0, "absolute"),
    "causal_l3": Window(3, 3, 0, "absolute"),
    "causal_l6": Window(3, 6, 0, "absolute"),
    "framewise": Window(1, None, 0, "absolute"),
    "tf": Window(3, None, 0, "absolute"),
    "tf_aug": Window(3, None, 0, "absolute"),
}
NAMES = json.loads((Path(__file__).parents[1] / "golden" / "wan_names.json").read_text("utf-8"))


@pytest.fixture(scope="module", params=WINDOWS)
def run(request, golden, golden_wan):
    """(variant, flow, loss, gradients by official name). A noisy chunk attends to earlier chunks as they were written:
    the noisy ones themselves, or with teacher forcing (tf) the clean ones at t = 0 or a level of their own."""
    name = request.param
    g, window, flows = golden("train_forward"), WINDOWS[name], []
    t = g[f"{name}.timestep"] / 1000
    context = window.start()
    for a, b in window.chunks(9):
        context = context.condition(g["text"], None)
        noisy = golden_wan(g["noisy"][:, a:b], t[:, a:b], context, write=True)
        flows.append(noisy.v)
        written = noisy
        if name.startswith("tf"):
            level = g["tf_aug.aug_t"][:, a:b] / 1000 if name == "tf_aug" else torch.zeros(2, b - a)
            written = golden_wan(g["clean"][:, a:b], level, context, write=True)
        context = window.commit(context, written.span)
    flow = torch.cat(flows, 1)
    loss = (flow - g["grad_target"]).square().mean()
    parameters = dict(golden_wan.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values()))))
    return name, flow.detach(), loss.detach(), {official: gradients[ours] for official, ours in NAMES.items()}


def test_predictions_and_loss_equal_the_official_ones(run, golden):
    name, flow, loss, _ = run
    g = golden("train_forward")
    torch.testing.assert_close(flow[1:], g[f"{name}.flow"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, g[f"{name}.loss"][0], rtol=0, atol=1e-5)


def test_gradients_equal_the_official_ones(run, golden):
    name, _, _, gradients = run
    g = golden("train_forward")
    for key in ("blocks.0.modulation", "blocks.1.self_attn.norm_k.weight", "head.head.bias"):
        expected = g[f"{name}.grad.{key}"]
        assert (gradients[key] - expected).norm() < 1e-5 * expected.norm(), key
    expected = g[f"{name}.grad.blocks.0.self_attn.q.weight"]  # every fourth row
    assert (gradients["blocks.0.self_attn.q.weight"][::4] - expected).norm() < 1e-5 * expected.norm()


def test_every_parameter_has_the_official_gradient_norm(run, golden):
    name, _, _, gradients = run
    got = torch.stack([gradients[key].norm() for key in sorted(NAMES)])
    torch.testing.assert_close(got, golden("train_forward")[f"{name}.norms"], rtol=1e-5, atol=0)


def test_the_variants_differ(golden):
    g = golden("train_forward")
    flows = [g[f"{name}.flow"] for name in WINDOWS if name not in ("tf", "tf_aug")]
    assert all((a - b).abs().max() > 0.01 for i, a in enumerate(flows) for b in flows[:i])
