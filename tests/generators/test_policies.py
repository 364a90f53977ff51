"""Three policies over one network: who answers in which scope, who is trained, and what is copied."""

import pytest
import torch

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.policies import Policies, PolicyConfig

KINDS = ("lora", "full")
LORA = PolicyConfig("lora", rank=4, alpha=8.0)


@pytest.fixture
def batch(randn):
    return randn(2, 3, 3, 4, 4), torch.tensor([0.9, 0.3]), Context(text=randn(2, 5, 8))


@pytest.fixture
def make(tiny):
    return lambda kind="lora", **config: Policies(tiny(**config), PolicyConfig(kind, rank=4, alpha=8.0), seed=3)


def outputs(policies, batch):
    """What each policy predicts, by name."""
    out = {}
    with torch.no_grad():
        for name in ("old", "start", "current"):
            with policies.using(name) as model:
                out[name] = model(*batch).x0
    return out


@torch.no_grad()
def perturb(policies, name="current", by=0.05):
    source = torch.Generator().manual_seed(5)
    for p in policies.parameters(name).values():
        p += by * torch.randn(p.shape, generator=source)


@pytest.mark.parametrize("kind", KINDS)
def test_before_any_update_the_three_policies_are_the_base(kind, make, batch, tiny):
    out = outputs(make(kind), batch)
    with torch.no_grad():
        base = tiny()(*batch).x0
    assert all(torch.equal(x, base) for x in out.values())


@pytest.mark.parametrize("kind", KINDS)
def test_changing_current_changes_current_alone(kind, make, batch):
    policies = make(kind)
    before = outputs(policies, batch)
    perturb(policies)
    after = outputs(policies, batch)
    assert (after["current"] - before["current"]).abs().max() > 1e-3
    assert torch.equal(after["old"], before["old"]) and torch.equal(after["start"], before["start"])


@pytest.mark.parametrize("kind", KINDS)
def test_changing_old_changes_old_alone(kind, make, batch):
    policies = make(kind)
    before = outputs(policies, batch)
    perturb(policies, "old")
    after = outputs(policies, batch)
    assert (after["old"] - before["old"]).abs().max() > 1e-3
    assert torch.equal(after["current"], before["current"]) and torch.equal(after["start"], before["start"])


@pytest.mark.parametrize("kind", KINDS)
def test_calling_the_policies_runs_the_one_in_scope(kind, make, batch):
    policies = make(kind)
    perturb(policies)
    expected = outputs(policies, batch)
    with torch.no_grad():
        assert torch.equal(policies(*batch).x0, expected["current"])
        for name in ("old", "start", "current"):
            with policies.using(name):
                assert torch.equal(policies(*batch).x0, expected[name])
            assert torch.equal(policies(*batch).x0, expected["current"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["old", "start"])
def test_a_frozen_policy_with_gradients_on_is_refused(kind, name, make):
    with pytest.raises(RuntimeError, match=f"'{name}'.*no_grad"), make(kind).using(name):
        pass


def test_an_unknown_policy_is_refused_by_name(make):
    with pytest.raises(ValueError, match="'best'.*current, old, start or reference"), make().using("best"):
        pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_after_the_frozen_policies_answered_current_still_gets_its_gradients(kind, checkpointing, make, batch):
    policies = make(kind)
    perturb(policies)
    if checkpointing:
        policies.model.enable_gradient_checkpointing()
    names, wanted = zip(*policies.parameters().items())
    unused = "action_embedding"  # the batch has no actions
    reference = torch.autograd.grad(policies(*batch).x0.square().sum(), wanted, allow_unused=True)
    outputs(policies, batch)
    policies.check_backward()
    policies(*batch).x0.square().sum().backward()
    for name, p, expected in zip(names, wanted, reference):
        if not name.startswith(unused):
            assert torch.equal(p.grad, expected), name
    assert not any(p.requires_grad or p.grad is not None for p in policies.parameters("old").values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_start_until_it_is_told_to_move(kind, tiny, batch):
    policies = Policies(tiny(), PolicyConfig(kind, rank=4, alpha=8.0), seed=3, moving=True)

    def seen():
        with torch.no_grad(), policies.using("reference") as model:
            return outputs(policies, batch) | {"reference": model(*batch).x0}

    before = seen()
    assert torch.equal(before["reference"], before["start"])
    perturb(policies)
    policies.old_is_current = False
    assert torch.equal(seen()["reference"], before["start"])
    policies.copy("current", "reference", keep=0.0)
    perturb(policies)
    after = seen()
    assert (after["reference"] - before["start"]).abs().max() > 1e-3 and not policies.old_is_current
    assert (after["reference"] - after["current"]).abs().max() > 1e-3 and torch.equal(after["start"], before["start"])
    policies.check_backward()
    again = Policies(tiny(), PolicyConfig(kind, rank=4, alpha=8.0), seed=4, moving=True)
    again.load_state(policies.state(), old_is_current=False)
    with torch.no_grad(), again.using("reference") as model:
        assert torch.equal(model(*batch).x0, after["reference"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_that_never_moves_is_the_start_and_takes_no_room(kind, make, batch):
    policies = make(kind)
    perturb(policies)
    perturb(policies, "old")
    with torch.no_grad(), policies.using("reference") as model:
        reference = model(*batch).x0
    assert torch.equal(reference, outputs(policies, batch)["start"])
    assert {k.split("/")[0] for k in policies.state()} == {"current", "old"}


def test_a_policy_that_fails_in_scope_still_hands_current_back(make, batch):
    policies = make()
    for name in ("old", "start"):
        with pytest.raises(KeyError), torch.no_grad(), policies.using(name):
            raise KeyError
        policies.check_backward()


def test_check_backward_names_the_adapter_when_the_trainable_set_is_right(make):
    policies = make()
    policies.model.set_adapter("old")
    for name in ("old", "current"):
        for p in policies.parameters(name).values():
            p.requires_grad_(name == "current")
    with pytest.raises(RuntimeError, match="'old'.*current"):
        policies.check_backward()


@pytest.mark.parametrize("kind", KINDS)
def test_check_backward_counts_the_trainable_parameters(kind, make):
    policies = make(kind)
    next(iter(policies.parameters().values())).requires_grad_(False)
    n = len(policies.parameters())
    with pytest.raises(RuntimeError, match=f"{n - 1} parameters.*{n}"):
        policies.check_backward()


def test_adapters_are_float32_on_a_bfloat16_base_and_it_runs(tiny, randn):
    policies = Policies(tiny().to(torch.bfloat16), LORA)
    assert {p.dtype for n in ("current", "old") for p in policies.parameters(n).values()} == {torch.float32}
    assert policies.model.proj_out.weight.dtype == torch.bfloat16
    x, t, text = randn(1, 3, 3, 4, 4), torch.tensor([0.5]), randn(1, 5, 8)
    policies(x.bfloat16(), t, Context(text=text.bfloat16())).x0.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in policies.parameters().values())


def test_lora_covers_the_ten_linears_of_every_block_and_nothing_else(make):
    policies = make()
    assert len(policies.parameters()) == 2 * 2 * 10  # layers x (A, B) x linears
    assert all(k.startswith("blocks.") for k in policies.parameters())
    assert sum(p.requires_grad for p in policies.model.parameters()) == 40


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0.0, 0.25, 1.0])
def test_copy_is_keep_times_target_plus_the_rest_of_source(kind, keep, make):
    policies = make(kind)
    perturb(policies)
    source = {k: p.detach().clone() for k, p in policies.parameters("current").items()}
    target = {k: p.detach().clone() for k, p in policies.parameters("old").items()}
    policies.copy("current", "old", keep)
    for k, p in policies.parameters("old").items():
        torch.testing.assert_close(p.detach(), keep * target[k] + (1 - keep) * source[k])
        assert torch.equal(policies.parameters("current")[k], source[k])


def test_a_whole_copy_is_exact_and_says_so(make):
    policies = make()
    perturb(policies)
    policies.copy("current", "old", 0.5)
    assert not policies.old_is_current and policies.distance() > 0
    policies.copy("current", "old", 0.0)
    assert policies.old_is_current and policies.distance() == 0


def test_distance_is_the_euclidean_one(make):
    policies = make()
    with torch.no_grad():
        first, second = list(policies.parameters().values())[:2]
        first.flatten()[0] += 3
        second.flatten()[0] += 4
    assert policies.distance() == pytest.approx(5)


def test_the_seed_names_the_adapters(tiny):
    a, b, c = (Policies(tiny(), LORA, seed).parameters() for seed in (1, 1, 2))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[k], c[k]) for k in a)


def test_making_adapters_leaves_the_global_random_state_alone(tiny):
    torch.manual_seed(0)
    expected = torch.rand(1)
    model = tiny()
    torch.manual_seed(0)
    Policies(model, LORA, seed=9)
    assert torch.equal(torch.rand(1), expected)


def snapshot(policies):
    return {k: v.clone() for k, v in policies.state().items()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_restores_current_and_old(kind, make, batch):
    policies = make(kind)
    perturb(policies)
    perturb(policies, "old", 0.02)
    expected, state = outputs(policies, batch), snapshot(policies)
    other = make(kind)
    other.load_state(state, old_is_current=False)
    assert all(torch.equal(x, expected[name]) for name, x in outputs(other, batch).items())
    assert not other.old_is_current
    other.load_state(state, old_is_current=True)
    assert other.old_is_current


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_with_a_tensor_too_few_or_too_many_is_refused(kind, make):
    policies = make(kind)
    state = snapshot(policies)
    name, value = state.popitem()
    with pytest.raises(ValueError, match="differing names"):
        policies.load_state(state, False)
    with pytest.raises(ValueError, match="current/odd"):
        policies.load_state(state | {name: value, "current/odd": value}, False)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7)], ids=["that broadcasts", "that does not"])
def test_a_state_with_a_wrong_shape_is_refused(shape, make):
    policies = make()
    state = snapshot(policies)
    state[next(iter(state))] = torch.zeros(shape)
    with pytest.raises(ValueError):
        policies.load_state(state, False)


def test_unknown_kinds_and_targets_are_refused(tiny):
    with pytest.raises(ValueError, match="'dora'.*lora or full"):
        Policies(tiny(), PolicyConfig("dora"))
    for outside in ("to_z", "linear_1"):  # no linear at all, and one that is not in a block
        with pytest.raises(ValueError, match=f"{outside}.*known: to_q"):
            Policies(tiny(), PolicyConfig("lora", targets=(outside,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outer", ["old", "start", "current"])
@pytest.mark.parametrize("inner", ["old", "start", "current"])
def test_scopes_nest_and_leaving_one_gives_back_the_one_around(kind, outer, inner, make, batch):
    policies = make(kind)
    perturb(policies)
    perturb(policies, "old", 0.02)
    expected = outputs(policies, batch)
    assert len({tuple(x.flatten().tolist()) for x in expected.values()}) == 3
    with torch.no_grad():
        with policies.using(outer):
            with policies.using(inner) as model:
                assert torch.equal(model(*batch).x0, expected[inner])
            assert torch.equal(policies(*batch).x0, expected[outer])
        assert torch.equal(policies(*batch).x0, expected["current"])
    policies.check_backward()


def test_half_precision_weights_are_not_trained_whole(tiny):
    with pytest.raises(ValueError, match=r"policy\.kind=full would train bfloat16 weights, which barely move"):
        Policies(tiny().bfloat16(), PolicyConfig(kind="full"), 0)
