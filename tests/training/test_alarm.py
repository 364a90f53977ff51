"""The alarm's arithmetic: exact chances, few false alarms over a whole run, and a real fall is heard."""

import math

import pytest
import torch

from arvideo_rl.training.alarm import FEWEST, LEVEL, diagnose, fall, flat, parted, sentence, suspects

MARGINS, MARGIN = {"b": 0.25}, 0.05


def test_the_chance_of_a_fall_is_exact():
    one_down = torch.tensor([1.0] * 11 + [-3.0])
    # mean 8/12; below it are the sign patterns whose sum is at most 8: all but those with a sum of 10, 12 or 14
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 12)
    assert fall(one_down) == pytest.approx(((signs * one_down).sum(1) <= 8).double().mean().item())
    assert fall(-torch.ones(12)) == pytest.approx(2**-12) and fall(torch.ones(12)) == 1.0
    assert fall(torch.zeros(12)) == 1.0  # nothing changed, so nothing fell


def test_too_few_prompts_are_never_beyond_chance_and_missing_ones_do_not_count():
    assert fall(-torch.ones(FEWEST - 1)) == 1.0
    assert fall(torch.cat([-torch.ones(FEWEST), torch.full((5,), math.nan)])) == pytest.approx(2**-FEWEST)


def test_many_prompts_give_a_chance_that_is_small_and_not_zero():
    assert 0 < fall(-torch.ones(40)) < 1e-4
    x = torch.randn(40, generator=torch.Generator().manual_seed(3))
    normal = 0.5 * (1 + math.erf(x.sum().item() / x.norm().item() / math.sqrt(2)))
    assert fall(x) == pytest.approx(normal, abs=0.02)


def row(a=0.0, b=0.0, p=1e-5):
    """A row of metrics: two verifiers that began at 1.0."""
    return {"probe/a": 1 + a, "probe/change/a": a, "probe/fall/a": p, "probe/b": 1 + b, "probe/change/b": b,
            "probe/fall/b": p, "probe/reward/r": 0.5, "probe/change/reward/r": 0.1}  # fmt: skip


def test_a_suspect_is_down_beyond_chance_and_beyond_its_own_margin():
    assert suspects(row(a=-0.06, b=-0.2), MARGINS, MARGIN) == {"a"}
    assert suspects(row(a=-0.04, b=-0.26), MARGINS, MARGIN) == {"b"}
    assert suspects(row(a=-0.5, p=LEVEL / 40 + 1e-6), MARGINS, MARGIN) == set()
    assert suspects(row(a=0.5), MARGINS, MARGIN) == set()


def test_it_rings_for_two_looks_in_a_row_with_the_reward_up():
    down, fine = row(a=-0.2), row()
    assert parted(down, down, 0.1, MARGINS, MARGIN) == ["a"]
    assert parted(fine, down, 0.1, MARGINS, MARGIN) == parted(down, fine, 0.1, MARGINS, MARGIN) == []
    assert parted(down, down, -0.1, MARGINS, MARGIN) == parted(None, down, 0.1, MARGINS, MARGIN) == []
    assert parted(down, down, math.nan, MARGINS, MARGIN) == []
    assert "a fell from 1.000 to 0.800" in sentence(["a"], down, 0.1)


def rings(change: torch.Tensor) -> bool:
    """Whether a run whose looks at five verifiers change by ``change`` [looks, 5, prompts] rings at all."""
    before = None
    for look in change:
        now = {}
        for i, x in enumerate(look):
            mean, se = x.mean(), x.std() / len(x) ** 0.5
            # the exact chance costs time and only matters where it is small
            now |= {f"probe/{i}": 1 + mean.item(), f"probe/change/{i}": mean.item(),
                    f"probe/fall/{i}": fall(x) if mean < -2.5 * se else 1.0}  # fmt: skip
        if parted(before, now, 1.0, {}, 0.0):
            return True
        before = now
    return False


@pytest.mark.parametrize("kind", ["new at every look", "wandering"])
def test_changes_that_mean_nothing_ring_in_under_five_per_cent_of_the_runs(kind):
    source = torch.Generator().manual_seed(7)
    runs = [torch.randn(40, 5, 16, generator=source) for _ in range(150)]
    if kind == "wandering":
        runs = [r.cumsum(0) for r in runs]
    assert sum(map(rings, runs)) / len(runs) < LEVEL


def test_a_real_fall_is_heard():
    source = torch.Generator().manual_seed(8)
    heard = 0
    for _ in range(40):
        change = torch.randn(6, 5, 16, generator=source)
        change[2:, 0] -= 2.0  # one verifier of five falls by two standard deviations of a prompt
        heard += rings(change)
    assert heard > 36


def steps(count=3, **last):
    usual = {"reward/r/zero_spread_share": 0.1, "reward/r/invalid_share": 0.0, "train/grad_norm": 1.0,
             "train/x0_moved": 0.0}  # fmt: skip
    return [{"iteration": i, **usual, **last} for i in range(count)]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (steps(1, **{"train/x0_moved": 1e-3}), "differ by 1.0e-03 before the first update"),
        (steps(**{"reward/r/zero_spread_share": 0.6}), "no spread in reward r"),
        (steps(**{"reward/r/invalid_share": 0.3}), "reward r could not score 30% of the chunks"),
        ([*steps(8), {"iteration": 8, "train/grad_norm": 11.0}], "gradient norm is 11, over ten times its usual 1"),
    ],
)
def test_what_is_wrong_is_said_in_words(rows, says):
    found = diagnose(rows)
    assert len(found) == 1 and says in found[0][1]


def test_a_healthy_run_is_left_in_peace():
    rows = steps(12)
    for n in range(1, 13):
        assert diagnose(rows[:n]) == []
    assert diagnose(steps(2, **{"reward/r/zero_spread_share": 0.9})) == []  # once or twice is chance


def test_a_reward_that_stays_flat_comes_with_the_numbers_to_look_at():
    rows = [{"reward/r/group_std": 0.125, "train/kl": 0.5}]
    words = flat(torch.tensor([0.1, -0.1, 0.05, -0.05]), 8, rows)
    assert all(x in words for x in ("8 prompts an update (below 16", "spread inside groups 0.125", "KL 0.5"))
    assert flat(torch.tensor([0.1, 0.11, 0.09, 0.1]), 8, rows) is None
    assert "below 16" not in flat(torch.zeros(4), 32, rows)
