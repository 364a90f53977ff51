"""The training rollout of Self-Forcing, with the context cut as the paper says and leaking as its code does."""

import pytest
import torch

from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.generators.window import Window
from arvideo_rl.objectives.self_rollout import self_rollout

NEAREST = 5 * 0.001 / (1 + 4 * 0.001)  # the level that official code refreshes at when it means 0: .00498
SETTINGS = Streaming(3, None, 0, "absolute", shift=5.0, refresh_level=NEAREST)
NAMES = {
    "blocks.0.self_attn.q.weight": "blocks.0.attn1.to_q.weight",
    "blocks.0.self_attn.k.weight": "blocks.0.attn1.to_k.weight",
    "blocks.1.cross_attn.k.weight": "blocks.1.attn2.to_k.weight",
    "head.head.weight": "proj_out.weight",
}


@pytest.fixture(scope="module", params=[(e, leak) for e in (1, 3) for leak in (False, True)], ids=str)
def run(request, golden, golden_wan):
    """(exit step, whether it leaks, output, loss, gradients by our names)."""
    g, (leave, leak) = golden("training_rollout"), request.param
    noise = iter(g[f"exit{leave}.renoise"])

    def draw(chunk, step, purpose):  # in the order of the official code, which is the order they are asked for in
        return g["noise"][:, 3 * chunk : 3 * chunk + 3] if purpose == "init" else next(noise)[None]

    denoiser = Denoiser(golden_wan, SETTINGS.attention_window(), Script(((0, g["text"]),)), mix=SETTINGS.mix(draw))
    chunks = SETTINGS.attention_window().chunks(12)
    output = self_rollout(denoiser, chunks, SETTINGS.levels, draw, leave, through_context=leak)
    loss = (output - g["grad_target"]).square().mean()
    parameters = dict(golden_wan.named_parameters())
    gradients = torch.autograd.grad(loss, [parameters[n] for n in NAMES.values()])
    return leave, leak, output.detach(), loss.detach(), dict(zip(NAMES, gradients))


def test_the_rollout_equals_the_official_one(golden, run):
    g, (leave, _, output, loss, _) = golden("training_rollout"), run
    torch.testing.assert_close(output, g[f"exit{leave}.output"], rtol=0, atol=1e-5)
    torch.testing.assert_close(loss, g[f"exit{leave}.loss"][0], rtol=0, atol=1e-5)


def test_gradients_equal_the_official_ones(golden, run):
    """Every fourth row is stored. Detached: with the cache cut before every call; leaked: as the code is."""
    g, (leave, leak, *_, gradients) = golden("training_rollout"), run
    for name, got in gradients.items():
        expected = g[f"exit{leave}.{'leaked' if leak else 'detached'}.{name}"]
        assert (got[::4] - expected).norm() < 2e-5 * expected.norm(), name


@pytest.mark.parametrize("leave", [1, 3])
def test_the_two_gradients_are_told_apart(leave, golden):
    g, name = golden("training_rollout"), "blocks.0.self_attn.k.weight"
    a, b = (g[f"exit{leave}.{kind}.{name}"] for kind in ("detached", "leaked"))
    assert (a - b).norm() > 0.02 * b.norm()


def test_an_exit_past_the_last_step_is_refused(golden_wan):
    denoiser = Denoiser(golden_wan, Window(3, None, 0), Script(()))
    with pytest.raises(ValueError, match="exit_step=4: the sampler has steps 0 to 3"):
        self_rollout(denoiser, [(0, 3)], SETTINGS.levels, lambda *a: None, 4)
