"""Every draw is a function of its key alone: not of the batch, the order of draws, or the process."""

from dataclasses import replace

import pytest
import torch

from samplers.randomness import PURPOSES, Key, generator, normal, shared

KEY = Key(seed=3, iteration=5, prompt=7, branch=2)


def draw(key=KEY, chunk=1, step=2, purpose="renoise", shape=(4, 5)):
    return normal([key], chunk, step, purpose, shape)[0]


def test_one_key_gives_one_noise():
    assert torch.equal(draw(), draw())


@pytest.mark.parametrize("field", ["seed", "iteration", "prompt", "branch"])
def test_every_field_of_the_key_changes_the_noise(field):
    assert not torch.equal(draw(), draw(replace(KEY, **{field: getattr(KEY, field) + 1})))


@pytest.mark.parametrize("change", [{"chunk": 2}, {"step": 1}, {"purpose": "init"}], ids=str)
def test_chunk_step_and_purpose_change_the_noise(change):
    assert not torch.equal(draw(), draw(**change))


def test_neighbouring_fields_are_not_run_together():
    a, b = Key(seed=1, iteration=11), Key(seed=11, iteration=1)
    assert not torch.equal(draw(a), draw(b))
    assert not torch.equal(draw(chunk=1, step=12), draw(chunk=11, step=2))


def test_every_purpose_has_its_own_noise():
    assert len({draw(purpose=p)[0, 0].item() for p in PURPOSES}) == len(PURPOSES)


def test_a_row_does_not_depend_on_its_batch():
    keys = [replace(KEY, branch=b) for b in range(4)]
    together = normal(keys, 0, 0, "init", (4, 5))
    assert all(torch.equal(together[i], normal([k], 0, 0, "init", (4, 5))[0]) for i, k in enumerate(keys))


def test_draws_do_not_touch_the_global_random_state():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    draw()
    assert torch.equal(torch.rand(1), expected)


def test_noise_is_the_same_in_every_process():
    expected = torch.tensor([[0.6047610, 2.0881639, 0.6113440]])  # a hash that varies between processes would change it
    torch.testing.assert_close(normal([Key(1, 2, 3, 4)], 5, 6, "forward", (3,)), expected, rtol=0, atol=1e-6)


def test_noise_is_standard_normal_float32():
    n = 200_000
    x = draw(shape=(n,))
    assert x.dtype == torch.float32
    moments = [x.double().pow(k).mean().item() for k in (1, 2, 3, 4)]
    spread = [1, 2**0.5, 15**0.5, 96**0.5]  # standard deviations of x, x^2, x^3, x^4
    assert all(abs(m - e) < 5 * s / n**0.5 for m, e, s in zip(moments, (0, 1, 0, 3), spread))


def test_branches_are_uncorrelated():
    n = 50_000
    x = normal([KEY, replace(KEY, branch=3)], 0, 0, "init", (n,))
    assert abs((x[0] * x[1]).mean().item()) < 5 / n**0.5


def test_shared_keys_are_one_for_a_group_and_no_branchs_own():
    keys = [replace(KEY, branch=b) for b in range(3)]
    noise = normal(shared(keys), 0, 1, "forward", (4,))
    assert torch.equal(noise[0], noise[1]) and torch.equal(noise[0], noise[2])
    assert not any(torch.equal(noise[0], draw(k, 0, 1, "forward", (4,))) for k in keys)
    other = shared([replace(KEY, prompt=8)])
    assert not torch.equal(noise[:1], normal(other, 0, 1, "forward", (4,)))


def test_an_unknown_purpose_is_refused_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        generator(KEY, 0, 0, "noise")
    assert "'noise'" in str(error.value) and all(p in str(error.value) for p in PURPOSES)
