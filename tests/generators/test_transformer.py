"""Predictions are consistent and finite, levels are per frame, and the network refuses what it cannot do."""

import pytest
import torch

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.rope import rotate, rotation

CPU = torch.device("cpu")


@pytest.mark.parametrize("prediction", ["x0", "v"])
@torch.no_grad()
def test_both_predictions_agree_and_are_finite_down_to_t_0(prediction, tiny, randn):
    x, t = randn(1, 4, 3, 4, 4), torch.tensor([[1.0, 0.3, 1e-3, 0.0]])
    out = tiny(prediction=prediction)(x, t, Context(text=randn(1, 5, 8)))
    assert out.x0.isfinite().all() and out.v.isfinite().all()
    rebuilt = x - t[..., None, None, None] * out.v
    torch.testing.assert_close(rebuilt[:, :3], out.x0[:, :3], rtol=0, atol=1e-5)


@torch.no_grad()
def test_at_t_0_a_v_network_returns_its_input_and_an_x0_network_knows_no_v(tiny, randn):
    x, context = randn(1, 3, 3, 4, 4), Context(text=randn(1, 5, 8))
    assert torch.equal(tiny(prediction="v")(x, torch.zeros(1), context).x0, x)
    assert (tiny(prediction="x0")(x, torch.zeros(1), context).v == 0).all()


@torch.no_grad()
def test_the_two_kinds_read_the_same_raw_output(tiny, randn):
    x, context = randn(1, 3, 3, 4, 4), Context(text=randn(1, 5, 8))
    a, b = (tiny(prediction=kind)(x, torch.tensor([0.5]), context) for kind in ("v", "x0"))
    assert torch.equal(a.v, b.x0)


@torch.no_grad()
def test_one_level_per_clip_is_that_level_in_every_frame(tiny, randn):
    model, x, context = tiny(), randn(2, 3, 3, 4, 4), Context(text=randn(2, 5, 8))
    t = torch.tensor([0.8, 0.2])
    assert torch.equal(model(x, t, context).x0, model(x, t[:, None].expand(2, 3), context).x0)


@torch.no_grad()
def test_levels_are_not_rounded_to_whole_timesteps(tiny, randn):
    model, x, context = tiny(), randn(1, 3, 3, 4, 4), Context(text=randn(1, 5, 8))
    a, b = (model(x, torch.tensor([t]), context).x0 for t in (0.9371, 0.9374))
    assert (a - b).abs().max() > 1e-6


@torch.no_grad()
def test_actions_change_the_output(tiny, randn):
    model, x, text = tiny(), randn(1, 3, 3, 4, 4), randn(1, 5, 8)
    a, b = (model(x, torch.ones(1), Context(text=text, actions=torch.full((1, 3), k))).x0 for k in (2, 3))
    assert (a - b).abs().max() > 1e-3


def test_rotation_has_no_table_limit_and_scores_depend_on_differences_only(randn):
    q, k = randn(1, 1, 2, 24), randn(1, 1, 2, 24)

    def scores(a, b):
        return (rotate(q, rotation((a,), 1, 1, 24, CPU)) * rotate(k, rotation((b,), 1, 1, 24, CPU))).sum(-1)

    torch.testing.assert_close(scores(5_000_007, 5_000_000), scores(7, 0), rtol=0, atol=1e-5)
    assert (scores(8, 0) - scores(7, 0)).abs().max() > 1e-3


def test_rotation_keeps_dtype_and_length(randn):
    x = randn(1, 8, 2, 24)
    turned = rotate(x, rotation((3, 9), 2, 2, 24, CPU))
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), rotation((3, 9), 2, 2, 24, CPU)).dtype == torch.bfloat16


def forward(model, size=4, text=True, actions=None):
    x = torch.zeros(1, 3, 3, size, size + 2)
    return model(x, torch.ones(1), Context(text=torch.zeros(1, 5, 8) if text else None, actions=actions))


REFUSED = {
    "prediction": (lambda tiny: tiny(prediction="eps"), ("eps", "v", "x0")),
    "image_dim": (lambda tiny: tiny(image_dim=1280), ("image_dim",)),
    "added_kv": (lambda tiny: tiny(added_kv_proj_dim=8), ("added_kv_proj_dim",)),
    "patches": (lambda tiny: forward(tiny(), size=5), ("5x7", "2x2")),
    "text": (lambda tiny: forward(tiny(), text=False), ("text", "condition")),
    "actions": (lambda tiny: forward(tiny(num_actions=0), actions=torch.ones(1, 3).long()), ("num_actions is 0",)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_transformer_refuses_in_words(case, tiny):
    call, words = REFUSED[case]
    with pytest.raises(ValueError) as error:
        call(tiny)
    assert all(word in str(error.value) for word in words), error.value
