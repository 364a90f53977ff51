"""Mixtures of rewards: what each mode is by hand, what gates and floors promise, what missing values do."""

import math

import pytest
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.objectives.advantages import advantages
from arvideo_rl.objectives.mix import MODES, Axis, check_mix, combine, passing, shut

NAN = math.nan
GROUPS = torch.tensor([0, 0, 0, 0])
TWO = torch.tensor([0, 1, 0, 1, 0, 1])


def comparing(groups, form="group_z"):
    return lambda values, least_std: advantages(values, groups, form, floor=least_std)


def column(*values):
    return torch.tensor(values)[:, None]


def mix(values, weights, mode, groups=GROUPS, form="group_z", **axes):
    return combine(values, weights, groups, comparing(groups, form), mode, axes)


def close(mine, theirs):
    torch.testing.assert_close(mine[:, 0], torch.tensor(theirs), rtol=0, atol=1e-5)


A, B = column(0.1, 0.2, 0.3, 0.8), column(0.9, 0.1, 0.5, 0.5)
BOTH, W = {"a": A, "b": B}, {"a": 3.0, "b": -1.0}


def z(v):
    return (v - v.mean()) / v.std(correction=0)


def test_each_mode_is_what_it_says():
    by_hand = {
        "advantages": (3 * z(A) - z(B)) / 4,
        "zsum": z(3 * z(A) - z(B)),
        "sum": z(3 * A - B),
        "rank": z(3 * column(0, 1 / 3, 2 / 3, 1) - column(1, 0, 0.5, 0.5)),
    }
    for mode, expected in by_hand.items():
        close(mix(BOTH, W, mode)[0], expected[:, 0].tolist())
    close(mix(BOTH, {"a": 2.0, "b": 1.0}, "product")[0], z(A.square() * B)[:, 0].tolist())
    summed = mix(BOTH, W, "advantages")[0]
    close(mix(BOTH, W, "gdpo")[0], (summed / summed.std(correction=0))[:, 0].tolist())
    assert set(by_hand) | {"product", "gdpo"} == set(MODES)


@pytest.mark.parametrize("mode", MODES)
def test_one_reward_alone_is_its_own_mixture(mode):
    alone, _ = mix({"a": A}, {"a": 0.5}, mode)
    expected = z(column(0.0, 1.0, 2.0, 3.0)) if mode == "rank" else z(A.sqrt()) if mode == "product" else z(A)
    close(alone, expected[:, 0].tolist())


@pytest.mark.parametrize("mode", sorted(set(MODES) - {"sum", "product"}))
def test_the_scale_of_a_reward_does_not_matter(mode):
    wide = {"a": A, "b": 100 * B + 7}
    torch.testing.assert_close(mix(BOTH, W, mode)[0], mix(wide, W, mode)[0], rtol=0, atol=1e-4)
    assert (mix(BOTH, W, "sum")[0] - mix(wide, W, "sum")[0]).abs().max() > 0.5


def test_an_outlier_does_not_move_the_ranks_of_the_others():
    calm, wild = ({"a": column(0.1, 0.2, 0.3, top)} for top in (0.4, 1e6))
    assert torch.equal(mix(calm, {"a": 1.0}, "rank")[0], mix(wild, {"a": 1.0}, "rank")[0])
    assert mix(wild, {"a": 1.0}, "zsum")[0][:3].std() < 1e-4


MOTION = column(0.0, 0.3, 0.6, 0.05)  # the first is frozen, and best at everything else
QUALITY, RIGID = column(1.0, 0.4, 0.5, 0.9), column(1.0, 0.2, 0.3, 0.9)


@pytest.mark.parametrize("form", ["group_z", "global_std", "centre", "quasi_norm", "raw", "best"])
@pytest.mark.parametrize("mode", MODES)
def test_a_frozen_clip_never_wins_when_motion_is_a_gate(mode, form):
    values = {"quality": QUALITY, "rigid": RIGID, "motion": MOTION}
    weights = {"quality": 1.0, "rigid": 2.0, "motion": 0.0}
    free, _ = mix(values, weights, mode, form=form)
    assert free[0] >= free.max() and free[1] < free.max()
    adv, stats = mix(values, weights, mode, form=form, motion=Axis(gate=0.1))
    moving = adv[1:3]
    assert (adv[0] < moving.max()) and (adv[0] <= moving).all() and (adv[3] <= moving).all()
    if form != "best":
        assert adv[0] < moving.min()
    assert stats["mix/passing"] == 0.5
    soft, _ = mix(values, weights, mode, form=form, motion=Axis(gate=0.1, soft=0.01))
    assert soft[0] < soft[2] and soft[0] <= soft[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_gate_that_lets_all_through_changes_nothing(mode):
    values, weights = {"a": A, "b": B, "c": MOTION}, {"a": 1.0, "b": 1.0, "c": 0.0}
    open_, _ = mix(values, weights, mode, c=Axis(gate=-1.0))
    assert torch.equal(open_, mix(values, weights, mode)[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_gate_without_a_value_says_nothing_about_a_group(mode):
    values, weights = {"a": A, "b": B, "c": torch.full_like(MOTION, torch.nan)}, {"a": 1.0, "b": 1.0, "c": 0.0}
    unknown, _ = mix(values, weights, mode, c=Axis(gate=0.5))
    assert torch.equal(unknown, mix({"a": A, "b": B}, {"a": 1.0, "b": 1.0}, mode)[0])


def test_two_gates_must_both_be_passed_and_a_soft_one_is_a_sigmoid():
    both = {"a": Axis(gate=0.2), "b": Axis(gate=0.5)}
    assert passing(BOTH, both)[:, 0].tolist() == [0, 0, 1, 1]
    close(passing(BOTH, {"a": Axis(gate=0.2, soft=0.1)}), torch.sigmoid((A[:, 0] - 0.2) / 0.1).tolist())
    assert passing(BOTH, {"a": Axis()}) is None


def test_a_shut_branch_is_a_deviation_below_the_worst_and_higher_with_a_wider_gap():
    v, none = column(1.0, 2.0, 3.0, 4.0), column(0.0, 1.0, 1.0, 1.0)
    std = v.std(correction=0).item()
    close(shut(v, 1 - none.flip(0), GROUPS), [1 - std, 1 - std, 1 - std, 4.0])
    assert (shut(v, torch.full_like(v, 0.5), GROUPS).diff(dim=0) > 0).all()
    close(shut(torch.ones(4, 1), none, GROUPS), [0.0, 1.0, 1.0, 1.0])  # equal clips, one of them shut
    gone = shut(column(NAN, 1.0, 2.0, 3.0), column(1.0, NAN, 1.0, 1.0), GROUPS)[:, 0]
    assert gone.isnan().tolist() == [True, True, False, False]


def test_negative_weights_are_gated_to_the_worst_too():
    adv, _ = mix({"a": A, "c": MOTION}, {"a": -1.0, "c": 0.0}, "advantages", c=Axis(gate=0.1))
    assert adv[0] < adv[2] and adv[3] < adv[2]  # without the gate the first is best, having the least of a


@pytest.mark.parametrize("mode", sorted(set(MODES) - {"product"}))
def test_a_floor_counts_up_to_it(mode):
    weights = {"a": 1.0, "b": 1.0}
    enough, _ = mix(BOTH, weights, mode, b=Axis(floor=0.05))
    assert torch.equal(enough, mix({"a": A, "b": torch.full_like(B, 0.05)}, weights, mode)[0])
    lacking, _ = mix({"a": torch.ones(4, 1), "b": B}, weights, mode, b=Axis(floor=0.5))
    assert lacking[1] < 0 and torch.allclose(lacking[[0, 2, 3]], lacking[0])


def test_a_small_spread_is_not_blown_up():
    tight = {"a": 0.5 + A / 1000}
    for mode in ("advantages", "zsum"):
        loud, quiet = (mix({**tight, "b": B}, {"a": 1.0, "b": 1.0}, mode, a=Axis(least_std=s))[0] for s in (0.0, 0.1))
        assert (loud - mix({"b": B}, {"b": 1.0}, mode)[0]).abs().max() > 0.3
        other = mix({"a": torch.ones(4, 1), "b": B}, {"a": 1.0, "b": 1.0}, mode)[0]
        assert (quiet - other).abs().max() < 0.02


@pytest.mark.parametrize("mode", ["zsum", "sum", "rank", "product"])
def test_a_branch_without_one_reward_is_left_out_and_a_group_without_it_goes_by_the_rest(mode):
    a = torch.tensor([[0.1], [NAN], [0.4], [NAN], [0.9], [NAN]])
    b = torch.tensor([[0.2], [0.1], [NAN], [0.7], [0.3], [0.4]])
    adv, _ = combine({"a": a, "b": b}, {"a": 1.0, "b": 1.0}, TWO, comparing(TWO), mode)
    assert adv[2] == 0 and adv[0] == pytest.approx(-1) and adv[4] == pytest.approx(1)
    odd = torch.tensor([0, 0, 0])
    alone, _ = combine({"b": b[1::2]}, {"b": 1.0}, odd, comparing(odd), mode)
    torch.testing.assert_close(adv[1::2], alone, rtol=0, atol=1e-5)


def test_what_is_not_trained_does_not_count():
    adv, stats = mix({**BOTH, "c": MOTION}, {**W, "c": 0.0}, "zsum")
    assert torch.equal(adv, mix(BOTH, W, "zsum")[0])
    assert set(stats) == {f"{k}/{s}" for k in ("a", "b", "mix") for s in ("zero_spread_share", "group_std")}


UNIT = {"a": (0.0, 1.0), "b": (0.0, 1.0)}


@pytest.mark.parametrize(
    ("mode", "weights", "axes", "says"),
    [("sums", {}, {}, "mix=sums: did you mean sum"),
     ("zsum", {}, {"a": Axis(gate=NAN)}, "rewards.a.gate=nan: use a finite number"),
     ("zsum", {}, {"a": Axis(soft=0.1)}, "set rewards.a.gate too"),
     ("zsum", {}, {"a": Axis(gate=0.1, soft=-1.0)}, "rewards.a.soft=-1.0: use 0 or more"),
     ("zsum", {}, {"a": Axis(least_std=-1.0)}, "rewards.a.least_std=-1.0: use 0 or more"),
     ("zsum", {}, {"a": Axis(gate=0.1, floor=0.1)}, "name the reward twice"),
     ("zsum", {"b": -1.0}, {"b": Axis(floor=0.1)}, "rewards.b.floor=0.1 needs a weight above 0"),
     ("product", {"b": -1.0}, {}, "b has weight -1 and range 0 to 1"),
     ("product", {"far": 1.0}, {}, "far has weight 1 and range -inf to inf"),
     ("zsum", {"mix": 1.0}, {}, "choose another")],
)  # fmt: skip
def test_mixtures_that_mean_nothing_are_refused_in_one_line(mode, weights, axes, says):
    every = {"a": 1.0, "b": 1.0} | weights
    ranges = UNIT | {k: (-math.inf, math.inf) for k in weights if k not in UNIT}
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")) as error:
        check_mix(mode, every, {k: axes.get(k, Axis()) for k in every}, ranges)
    assert "\n" not in str(error.value)


def test_a_product_refuses_what_lies_outside():
    check_mix("product", {"a": 1.0, "b": 0.0}, {"a": Axis(), "b": Axis()}, UNIT | {"b": (-math.inf, 0.0)})
    with pytest.raises(ValueError, match="one is 1.5"):
        mix({"a": column(0.1, 0.2, 1.5, 0.0)}, {"a": 1.0}, "product")
