"""KV routing: what branches read, that only that differs, and that the two-pass gradient is the one of the loss."""

from dataclasses import replace

import pytest
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.routing import Routed, routed_span
from arvideo_rl.generators.spans import crop
from arvideo_rl.objectives.advantages import anchor_relative
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.objectives.routing import fuse, routing_loss, trajectory_energy
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.routed import roll_out_routed
from samplers.randomness import Key, shared
from samplers.routes import route
from samplers.stream import draw_from

OBJECTIVE = KVRouting(routed=2, nearest=1, chunks=2, tau=1.0, kl_weight=1.0)
FRAMES = 24


@pytest.fixture
def group(alignable):
    generator, policies, _, losses = alignable
    memory = OBJECTIVE.memory(generator.streaming.attention_window(), FRAMES)
    prompts = Prompts(("a red ball",) * 4, torch.ones(4, FRAMES + 3, dtype=torch.long), (0,) * 4)
    keys = [Key(1, 0, 0, b) for b in range(4)]
    with torch.no_grad(), policies.using("old") as model:
        record = roll_out_routed(generator, model, prompts, keys, FRAMES, torch.zeros(4, dtype=torch.long), memory)
    return generator, policies, losses, record, memory


def test_only_what_is_read_tells_branches_apart(group):
    generator, policies, _, record, memory = group
    first = record.steps.first[0].item()
    start, stop = 3 * first, 3 * (first + 2)
    assert all(torch.equal(record.latents[0, :start], row[:start]) for row in record.latents)
    x = record.steps.x
    assert x.shape[:3] == (4, 2, 4) and all(torch.equal(x[0, 0, 0], row[0, 0]) for row in x)  # the same initial noise
    assert all(not torch.equal(record.latents[0, start:stop], row[start:stop]) for row in record.latents[1:])
    with torch.no_grad(), policies.using("old") as model:  # the anchor is the ordinary stream
        draw = draw_from(shared(record.keys[:1]), generator.latent_shape)
        plain = list(generator.stream(model, record.script.rows(slice(0, 1)), draw, FRAMES))
    torch.testing.assert_close(torch.cat([c.latents for c in plain], 1)[0], record.latents[3], rtol=0, atol=1e-5)


def test_a_branch_that_reads_its_ordinary_frames_is_the_anchor(group):
    generator, policies, _, record, memory = group
    window, first = generator.streaming.attention_window(), record.steps.first[0].item()
    draw = draw_from(shared(record.keys[:1]), generator.latent_shape)
    script = record.script.rows(slice(0, 1))
    with torch.no_grad(), policies.using("old") as model:
        chunks = list(generator.stream(model, script, draw, 3 * first + 3))
        before = chunks[first - 1].context
        archive = [s for c in chunks[:first] for s in crop(c.context.spans, c.start, c.start + 3)]
        recent = tuple(f for f in before.held() if f >= window.sink)
        span = routed_span(archive, [recent[:-1]], 3 * first - 1, True)
        routed = Routed(generator.denoiser(model, script, draw), span, 1, 3 * first, 3 * first + 3)
        context, x = routed.enter(before), draw(first, 0, "init")
        plain = routed.inner.denoise(x, 1.0, context)
        torch.testing.assert_close(routed.denoise(x, 1.0, context), plain, rtol=0, atol=1e-6)
        other = replace(span, keys=tuple(k.flip(1) for k in span.keys))
        changed = replace(routed, routed=other, _seen=None)
        assert not torch.allclose(changed.denoise(x, 1.0, context), plain)
        kept, same, moved = (d.refresh(x, context).spans[-1] for d in (routed.inner, routed, changed))
        torch.testing.assert_close(same.keys[-1], kept.keys[-1], rtol=0, atol=1e-6)
        assert not torch.allclose(moved.keys[-1], kept.keys[-1]), "what is committed was run under the routed past"
        assert (moved.start, moved.stop) == (3 * first, 3 * first + 3)


def test_routed_frames_keep_their_own_positions_where_those_are_absolute(group):
    generator, policies, _, record, _ = group
    draw = draw_from(shared(record.keys[:1]), generator.latent_shape)
    with torch.no_grad(), policies.using("old") as model:
        chunks = list(generator.stream(model, record.script.rows(slice(0, 1)), draw, 9))
    archive = [s for c in chunks for s in crop(c.context.spans, c.start, c.start + 3)]
    span = routed_span(archive, [(1, 4)], 9, False)
    for f, place in ((1, 7), (4, 8)):
        (raw,) = crop(archive, f, f + 1)
        torch.testing.assert_close(turn(span.crop(place, place + 1).keys[0], (place,)), turn(raw.keys[0], (f,)))


def test_sets_are_distinct_and_frames_that_left_are_refused(group):
    _, _, _, record, memory = group
    sets = route(record.keys[0], memory, 3 * record.steps.first[0].item(), 3)
    assert len(set(sets)) == 3 and all(len(s) == 2 for s in sets)
    with pytest.raises(ValueError, match="no longer at hand"):
        routed_span([], [(1, 2)], 9, True)


@pytest.mark.parametrize("moved", [False, True])
def test_the_gradient_is_that_of_the_whole_loss_in_one_graph(moved, group):
    generator, policies, losses, record, _ = group
    parameters = list(policies.parameters().values())
    if moved:
        source = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in parameters:
                p.add_(0.1 * torch.randn(p.shape, generator=source))
        policies.old_is_current = False
    adv = torch.tensor([1.0, -0.5, 2.0, 0.0])[:, None].expand(4, 8)
    seen = []
    for loss, metrics in losses(OBJECTIVE, record, adv):
        loss.backward()
        seen.append(metrics)
    got = torch.cat([p.grad.flatten() for p in parameters])
    assert len(seen) == 2 and (seen[0]["ratio_off"] < 1e-5) == (not moved)

    denoiser = generator.denoiser(policies, record.script, draw_from(record.keys, generator.latent_shape))
    part = record.rows(slice(0, 3))
    contexts = OBJECTIVE._contexts(policies, denoiser, part, record.steps.first[0].item())
    t = torch.tensor(generator.streaming.levels)

    def energies(name):
        with policies.using(name) as model:
            each = [
                model(part.steps.x[:, p, j], t[j].expand(3), c).x0 for p, c in enumerate(contexts) for j in range(4)
            ]
        x0 = part.steps.x0.flatten(1, 2)
        return trajectory_energy(torch.stack(each, 1), x0, t.repeat(2))

    with torch.no_grad():
        old, start = energies("old"), energies("start")
    loss, _ = routing_loss(energies("current"), old, start, adv[:3, 0], tau=1.0, kl_weight=1.0)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    assert expected.norm() > 0 and (got - expected).norm() < 1e-4 * expected.norm()


def test_advantages_are_relative_to_the_anchor_and_leave_it_out():
    values = torch.tensor([[9.0, 1, 1, 0], [9.0, 3, 3, 4], [9.0, 2, 2, 2]])  # the last is the anchor
    anchors, first = torch.tensor([False, False, True]), torch.tensor([1, 1, 1])
    adv, stats = OBJECTIVE.advantages(values, torch.zeros(3, dtype=torch.long), first, anchors)
    assert adv[2].abs().max() == 0 and (adv[0] < 0).all() and (adv[1] > 0).all()
    again, _ = OBJECTIVE.advantages(
        values * torch.tensor([0.0, 1, 1, 1]), torch.zeros(3, dtype=torch.long), first, anchors
    )
    assert torch.equal(adv, again)  # what came before the fork does not count
    relative, _ = anchor_relative(torch.tensor([[1, 2 / 3], [3, 10 / 3], [2, 2]]), torch.zeros(3), anchors)
    expected = fuse(relative[:2, 0], relative[:2, 1])  # divided by the branches' own std: the anchor is none of them
    torch.testing.assert_close(torch.tensor([adv[0, 0], adv[1, 0]]), expected)


def test_a_group_that_nothing_beats_can_be_dropped(group):
    _, policies, losses, record, _ = group
    adv = -torch.ones(4, 8)
    for mode, factor in (("drop", 0.0), ("none", None)):
        for loss, metrics in losses(replace(OBJECTIVE, protect=mode), record, adv):
            loss.backward()
            assert metrics["protected"] == float(mode == "drop")
        norm = sum(p.grad.square().sum() for p in policies.parameters().values()).sqrt()
        assert (norm == 0) == (mode == "drop") and factor in (0.0, None)
        policies.model.zero_grad()


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="protect=dorp: did you mean drop"):
        KVRouting(protect="dorp")
    with pytest.raises(ConfigError, match="chunks=2 leaves no past: a rollout has 2 chunks"):
        KVRouting().check_chunks(2)
