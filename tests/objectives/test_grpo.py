"""GRPO on transitions: recorded steps replay, the ratio starts at one, and a step goes where the advantage points."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import Policies, PolicyConfig
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.generators.text import WordEncoder
from arvideo_rl.objectives import ratio
from arvideo_rl.objectives.grpo import GRPO
from arvideo_rl.objectives.record import Record
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import roll_out
from samplers.kernels import Kernel
from samplers.randomness import Key
from samplers.step_window import StepWindow
from samplers.stream import draw_from

WORDS = ("a", "red", "ball")
KERNELS = {"cm": None, "cps": 0.8, "flow_sde": 0.7, "dance_sde": 0.3}


@pytest.fixture
def world(tiny):
    """A small generator, its policies, and make(objective) -> a record of 2 x 2 branches."""
    torch.manual_seed(3)
    transformer = tiny()
    generator = Generator(transformer, WordEncoder(words=WORDS, dim=8), streaming=Streaming(3, 9, 3, size=4))
    policies = Policies(transformer, PolicyConfig("lora", rank=4, alpha=8.0), seed=3)

    def make(objective, frames=9, pivot=1, groups=2):
        parts = []
        for g in range(groups):
            prompts = Prompts(("a red ball",) * 2, torch.ones(2, frames + 3, dtype=torch.long) * (g + 1), (0, 0))
            keys = [Key(1, 0, g, b) for b in range(2)]
            with torch.no_grad(), policies.using("old") as model:
                parts.append(roll_out(generator, model, prompts, keys, frames, torch.full((2,), g),
                                      objective.exploration, pivot))  # fmt: skip
        prompts = Prompts(("a red ball",) * 2 * groups, torch.ones(2 * groups, 12, dtype=torch.long), (0,) * 4)
        actions = torch.cat([p.script.actions for p in parts])
        return Record.cat(parts, generator.script(list(prompts.texts), actions))

    return generator, policies, make


def losses(world, objective, record, adv):
    generator, policies, _ = world
    denoiser = generator.denoiser(policies, record.script, draw_from(record.keys, generator.latent_shape))
    return objective.losses(policies, denoiser, record, adv, generator.streaming.levels)


@pytest.mark.parametrize("kernel", KERNELS)
def test_recorded_steps_are_the_kernels_transitions_under_the_keys(kernel, world):
    generator, _, make = world
    objective = GRPO(kernel=kernel, eta=KERNELS[kernel])
    record = make(objective)
    steps, levels = record.steps, generator.streaming.levels
    assert steps.x.shape == (4, 3, 4, *generator.latent_shape) and steps.first.tolist() == [0] * 4
    draw = draw_from(record.keys, generator.latent_shape)
    for k in range(3):
        for j in range(3):
            mean, std = objective._kernel.from_x0(steps.x[:, k, j], steps.x0[:, k, j], levels[j], levels[j + 1])
            torch.testing.assert_close(steps.x[:, k, j + 1], mean + std * draw(k, j + 1, "renoise"))
        assert torch.equal(steps.x0[:, k, -1], record.latents[:, 3 * k : 3 * k + 3])


def test_with_shared_initial_noise_a_group_differs_by_re_noising_alone(world):
    x = world[2](GRPO()).steps.x
    assert torch.equal(x[0, :, 0], x[1, :, 0]) and torch.equal(x[2, :, 0], x[3, :, 0])
    assert not torch.equal(x[0, :, 1], x[1, :, 1]) and not torch.equal(x[0, :, 0], x[2, :, 0])
    own = world[2](GRPO(explore="independent")).steps.x
    assert not torch.equal(own[0, :, 0], own[1, :, 0])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("form", ["gaussian", "ratio_norm"])
def test_before_the_first_update_the_ratio_is_one(kernel, form, world):
    objective = GRPO(kernel=kernel, eta=KERNELS[kernel], ratio=form, steps_per_chunk=3)
    seen = [m for _, m in losses(world, objective, world[2](objective), torch.randn(4, 3))]
    assert len(seen) == 3 and max(m["ratio_off"] for m in seen) < 1e-5
    assert all(m["clip_high"] == m["clip_low"] == 0 for m in seen)


def test_at_equal_batch_shape_it_is_one_to_the_bit(world):
    objective = GRPO(steps_per_chunk=1)
    record = world[2](objective, groups=1)
    assert max(m["ratio_off"] for _, m in losses(world, objective, record, torch.randn(2, 3))) == 0


@pytest.mark.parametrize("outside", ["cm", "ode"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_with_a_window_only_its_steps_are_trained_and_their_ratio_starts_at_one(outside, kernel, world, monkeypatch):
    generator, policies, make = world
    objective = GRPO(kernel=kernel, eta=KERNELS[kernel], window=StepWindow(1, 1, outside=outside), steps_per_chunk=3)
    levels, record = generator.streaming.levels, make(objective)
    x = record.steps.x
    assert torch.equal(x[0, 0, 0], x[1, 0, 0]) and (x[0, 0, 2] - x[1, 0, 2]).abs().mean() > 0.01
    torch.testing.assert_close(x[0, 0, 1], x[1, 0, 1], atol=1e-5, rtol=1e-5)  # two rows of one batch may round apart
    asked = []
    monkeypatch.setattr(ratio, "log_ratio", lambda k, v, o, x, n, t, s, form, real=ratio.log_ratio: (
        asked.append((k, t.tolist(), s.tolist())) or real(k, v, o, x, n, t, s, form)))  # fmt: skip
    seen = [m for _, m in losses(world, objective, record, torch.randn(4, 3))]
    assert max(m["ratio_off"] for m in seen) < 1e-5
    inside = torch.tensor(levels)[1:3].tolist()
    assert asked == [(Kernel(kernel, KERNELS[kernel]), [inside[0]] * 4, [inside[1]] * 4)] * 3


def test_a_window_that_moves_trains_the_next_step(world):
    generator, _, make = world
    objective = GRPO(window=StepWindow(1, moves=1))
    record = make(objective)
    again = replace(record, keys=[replace(k, iteration=1) for k in record.keys])
    assert [objective._trained(r.keys[0].iteration, generator.streaming.levels)[0] for r in (record, again)] == [0, 1]
    assert objective.levels_trained(generator.streaming.levels) == (1, 1)


@pytest.mark.parametrize("trust", ["clip", "score", "mask"])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_makes_rewarded_transitions_likelier(trust, sign, world):
    """Where only branch 0 is credited, its log-ratio moves with its advantage, and more than the others'."""
    generator, policies, make = world
    objective = GRPO(trust=trust, steps_per_chunk=3, clip_low=1.0, clip_high=9.0)
    record, adv = make(objective), torch.zeros(4, 3)
    adv[0] = sign
    optimizer = torch.optim.SGD(policies.parameters().values(), lr=10.0)
    for _ in range(3):
        for loss, _ in losses(world, objective, record, adv):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    probe = GRPO(trust="clip", steps_per_chunk=3)
    moved = []
    for row in (0, 3):
        part = record.rows(slice(row, row + 1))
        moved.append(sum(m["ratio_mean"] - 1 for _, m in losses(world, probe, part, torch.ones(1, 3))))
    assert sign * moved[0] > 0 and abs(moved[0]) > 2 * abs(moved[1])


def test_all_trusts_have_one_gradient_at_the_start(world):
    generator, policies, make = world
    record, adv = make(GRPO()), torch.randn(4, 3)
    found = []
    for trust in ("clip", "score", "mask"):
        for loss, _ in losses(world, GRPO(trust=trust, steps_per_chunk=3), record, adv):
            loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in policies.parameters().values()]))
        policies.model.zero_grad()
    assert found[0].norm() > 0
    for other in found[1:]:
        assert (other - found[0]).norm() < 1e-4 * found[0].norm()


@pytest.mark.parametrize("options", [dict(steps_per_chunk=2, from_chunk=1, chunk_shape=-1.0), dict(trust="score")])
def test_packed_is_the_same_loss_and_gradient(options, world):
    generator, policies, make = world
    with torch.no_grad():
        for p in policies.parameters().values():
            p.add_(0.05 * torch.randn_like(p))
    policies.copy("current", "old", 0.0)
    record, adv, found = make(GRPO()), torch.randn(4, 3), []
    for packed in (False, True):
        objective = GRPO(context_writer="current", packed=packed, **options)
        seen = list(losses(world, objective, record, adv))
        assert len(seen) == (1 if packed else 3 - objective.from_chunk)
        total = sum(loss for loss, _ in seen)
        total.backward()
        found.append((total.item(), torch.cat([p.grad.flatten() for p in policies.parameters().values()]), seen[0][1]))
        policies.model.zero_grad()
    (one, a, _), (other, b, metrics) = found
    assert one == pytest.approx(other, abs=1e-6) and (a - b).norm() < 1e-4 * a.norm() and a.norm() > 0
    assert metrics.get("ratio_off", 0) < 1e-5 and metrics["v_moved"] < 1e-9


def test_packed_with_gradient_through_the_past_has_another_gradient_and_the_same_loss(world):
    generator, policies, make = world
    record, adv, found = make(GRPO()), torch.randn(4, 3), []
    for through in (False, True):
        objective = GRPO(context_writer="current", packed=True, context_gradient=through, kl_weight=0.1)
        ((loss, _),) = losses(world, objective, record, adv)
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in policies.parameters().values()])))
        policies.model.zero_grad()
    (one, a), (other, b) = found
    assert one == other and (a - b).norm() > 1e-3 * a.norm()


def test_the_pull_to_the_start_is_zero_there_and_grows(world):
    generator, policies, make = world
    objective = GRPO(kl_weight=1.0)
    record = make(objective)
    assert max(m["kl"] for _, m in losses(world, objective, record, torch.zeros(4, 3))) < 1e-9
    with torch.no_grad():
        for p in policies.parameters().values():
            p.add_(0.05 * torch.randn_like(p))
    assert min(m["kl"] for _, m in losses(world, objective, record, torch.zeros(4, 3))) > 1e-6


@pytest.mark.parametrize("kind", ["fork", "fork_fresh"])
def test_a_fork_has_one_past_and_its_branches_share_what_they_should(kind, world):
    generator, policies, _ = world
    exploration = replace(GRPO(kernel="cm", eta=None).exploration, kind=kind, sigma=0.5)
    prompts, keys = (
        Prompts(("a red ball",) * 3, torch.ones(3, 15, dtype=torch.long), (0,) * 3),
        [Key(1, 0, 0, b) for b in range(3)],
    )
    with torch.no_grad(), policies.using("old") as model:
        record = roll_out(generator, model, prompts, keys, 12, torch.zeros(3), exploration, 2)
    assert torch.equal(record.latents[0, :6], record.latents[1, :6]) and record.steps.first.tolist() == [2] * 3
    assert record.steps.x.shape[1] == 1
    assert all(not torch.equal(record.latents[0, a : a + 3], record.latents[1, a : a + 3]) for a in (6, 9))
    x, x0, levels = record.steps.x[:, 0], record.steps.x0[:, 0], generator.streaming.levels
    noise = x[:, 1] - (1 - levels[1]) * x0[:, 0]  # what the pivot was re-noised with, times a level
    same = torch.allclose(noise[0], noise[1], atol=1e-5)
    assert same == (kind == "fork") and not torch.equal(x[0, 0], x[1, 0])
    with torch.no_grad(), policies.using("old") as model:  # one stream by itself has the same past
        plain = [c.latents for c in generator.stream(model, record.script.rows(slice(0, 1)), draw_from(
            [replace(keys[0], branch=-1)], generator.latent_shape), 6)]  # fmt: skip
    assert torch.equal(torch.cat(plain, 1)[0], record.latents[0, :6])


def test_neighbours_have_the_correlation_that_sigma_says():
    from samplers.exploration import Exploration, draws

    keys = [Key(5, 0, 0, b) for b in range(2)]
    draw = draws(Exploration("fork", sigma=0.6), keys, (3, 16, 40, 40), "cpu", pivot=1)
    a, b = draw(1, 0, "init")
    assert a.std().item() == pytest.approx(1, abs=0.01)
    assert (a * b).mean().item() == pytest.approx(1 - 0.36, abs=0.02)
    for chunk, step, purpose in ((0, 0, "init"), (1, 1, "renoise"), (2, 0, "init")):
        a, b = draw(chunk, step, purpose)
        assert torch.equal(a, b)


def test_groups_that_fork_at_different_chunks_are_not_mixed(world):
    steps = world[2](GRPO()).steps
    with pytest.raises(ValueError, match=r"different chunks, \[0, 1\], are to be taken group by group"):
        replace(steps, first=torch.tensor([0, 0, 1, 1])).one_first()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kernel="ode", eta=None), "kernel=ode draws nothing"),
        (dict(kernel="cm"), "kernel 'cm' has no eta"),
        (dict(trust="clamp"), "trust=clamp: did you mean clip"),
        (dict(clip_low=0), "clip_low=0"),
        (dict(explore="fork"), "explore=fork"),
        (dict(steps_per_chunk=0), "steps_per_chunk=0"),
        (dict(packed=True), "packed=true lets the current policy write; set context_writer=current"),
        (dict(packed=True, context_writer="current", explore="fork_fresh"), "but fork_fresh trains one"),
        (dict(context_gradient=True), "context_gradient=true needs packed=true"),
        (dict(window=StepWindow(1), train_steps=2), "train_steps and window both choose steps"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises((ConfigError, ValueError), match=message):
        GRPO(**options)
