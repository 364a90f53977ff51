"""Reward-weighted distribution matching where the sampler goes: the chunk-by-chunk update is the self-rollout's."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.matching import matching_loss
from arvideo_rl.objectives.self_rollout import self_rollout
from arvideo_rl.training.critic import leaving
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import roll_out
from samplers.exploration import draws
from samplers.randomness import Key


@pytest.fixture
def made(alignable, randn):
    """``made(step, **options)``: objective, record of three branches that left at ``step``, weights, and what runs."""
    generator, policies, _, _ = alignable

    def make(step, **options):
        objective = DMD(teacher="any", **options)
        prompts = Prompts(("a red ball",) * 3, torch.ones(3, 12, dtype=torch.long), (0, 1, 2))
        keys = [Key(1, 0, i, 0) for i in range(3)]
        with torch.no_grad(), policies.using("old") as model:
            record = roll_out(leaving(generator, step), model, prompts, keys, 9, torch.arange(3), objective.exploration)
        record = replace(record, towards=randn(*record.latents.shape))
        weights = torch.tensor([[0.5, 1.0, 2.0], [1.0, 1.0, 1.0], [0.2, 0.1, 3.0]])
        return objective, record, weights, generator, policies

    return make


def gradients(policies, losses):
    policies.model.zero_grad(set_to_none=True)
    total = 0.0
    for loss, _ in losses:
        loss.backward()
        total += loss.item()
    return total, {k: p.grad.clone() for k, p in policies.parameters().items()}


def updated(objective, record, weights, generator, policies):
    denoiser = generator.denoiser(policies, record.script, None)
    return gradients(policies, objective.losses(policies, denoiser, record, weights, generator.streaming.levels))


@pytest.mark.parametrize("step", [0, 1, 3])
@pytest.mark.parametrize("through", [False, True])
def test_the_update_is_that_of_a_self_rollout_with_its_whole_graph(made, step, through):
    objective, record, weights, generator, policies = made(step, through_context=through)
    total, found = updated(objective, record, weights, generator, policies)
    denoiser, levels = generator.denoiser(policies, record.script, None), generator.streaming.levels
    draw = draws(objective.exploration, record.keys, generator.latent_shape, "cpu")
    x = self_rollout(denoiser, [(0, 3), (3, 6), (6, 9)], levels, draw, step, through_context=through)
    assert torch.allclose(x.detach(), record.latents, atol=1e-5)
    each = weights.repeat_interleave(3, 1)[:, :, None, None, None]
    want, known = gradients(policies, [((each * matching_loss(x, record.towards)).mean(), {})])
    assert total == pytest.approx(want, rel=1e-5)
    for key in known:
        assert torch.allclose(found[key], known[key], atol=1e-6 + 1e-4 * known[key].abs().max().item()), key


def test_through_the_context_the_gradient_is_another(made):
    objective, *rest = made(1)
    apart = [updated(o, *rest)[1] for o in (objective, replace(objective, through_context=True))]
    size = sum(v.square().sum() for v in apart[0].values()).sqrt()
    assert sum((apart[0][k] - apart[1][k]).square().sum() for k in apart[0]).sqrt() > 1e-3 * size


def test_at_the_first_update_nothing_has_moved_and_the_gradient_is_weight_times_direction(made):
    objective, record, weights, generator, policies = made(2)
    denoiser = generator.denoiser(policies, record.script, None)
    each = list(objective.losses(policies, denoiser, record, weights, generator.streaming.levels))
    assert all(metrics["x0_moved"] < 1e-12 for _, metrics in each)
    loss = sum(loss for loss, _ in each).item()
    spread = weights.repeat_interleave(3, 1)[:, :, None, None, None]
    assert loss == pytest.approx((spread * record.towards.square() / 2).mean().item(), rel=1e-5)


def test_a_map_weighs_places(made):
    objective, record, weights, *rest = made(1)
    nothing = replace(record, map=torch.zeros(3, 9, 4, 4))
    assert updated(objective, nothing, weights, *rest)[0] == 0
    ones = replace(record, map=torch.ones(3, 9, 4, 4))
    a, b = (updated(objective, r, weights, *rest)[1] for r in (record, ones))
    assert all(torch.allclose(a[k], b[k]) for k in a)


def test_rows_of_a_record_keep_their_direction_and_map(made):
    _, record, *_ = made(1)
    record = replace(record, map=torch.rand(3, 9, 4, 4))
    part = record.rows(slice(1, 3))
    assert torch.equal(part.towards, record.towards[1:]) and torch.equal(part.map, record.map[1:])


def test_all_steps_are_drawn_and_the_same_in_every_process():
    objective, levels = DMD(teacher="any"), (1.0, 0.9, 0.8, 0.6)
    steps = [objective.exit_step(3, i, levels) for i in range(64)]
    assert set(steps) == {0, 1, 2, 3} and steps == [objective.exit_step(3, i, levels) for i in range(64)]


@pytest.mark.parametrize(
    "options, said",
    [({}, "teacher"), ({"teacher": "x", "lowest": 0.9, "highest": 0.5}, "lowest"),
     ({"teacher": "x", "balance": 0.5}, "normalise"), ({"teacher": "x", "critic_kind": "half"}, "critic_kind"),
     ({"teacher": "x", "saliency": 2.0}, "saliency")],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        DMD(**options)
