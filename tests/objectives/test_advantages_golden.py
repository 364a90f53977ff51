"""Every published normaliser, from the authors' own numbers; where theirs is a defect, both are shown."""

import math

import pytest
import torch

from arvideo_rl.objectives.advantages import advantages, anchor_relative, diversity_bonus, extremes
from arvideo_rl.objectives.mix import combine

# the example of flow_grpo, Astrolabe and UniRL: three prompts, interleaved; "c" has one member
REWARDS = torch.tensor([0.1, 2.0, 0.5, 1.0, -0.3, 0.9, 2.0, 0.5])[:, None]
GROUPS = torch.tensor([0, 1, 0, 2, 1, 0, 1, 0])
RAVEN = {"floor": 1e-4, "epsilon": 1e-5}
NAN = math.nan


def form(*args, **options):
    return advantages(*args, **options)[0][:, 0]


def comparing(groups, *args, **options):
    """What combine takes the advantages of one reward with."""
    return lambda values, least_std: advantages(values, groups, *args, **options)


def close(mine, theirs):
    torch.testing.assert_close(mine, torch.as_tensor(theirs, dtype=torch.float32), rtol=0, atol=1e-5)


def test_flow_grpo_and_astrolabe_within_the_group():
    theirs = [-1.4137137, 0.7070416, 0.0, 0.0, -1.4140831, 1.4137137, 0.7070416, 0.0]
    close(form(REWARDS, GROUPS, "group_z", epsilon=1e-4), theirs)


def test_flow_grpo_and_astrolabe_over_the_batch():
    theirs = [-0.5163984, 0.9897635, 0.0, 0.0, -1.9795270, 0.5163984, 0.9897635, 0.0]
    close(form(REWARDS, GROUPS, "global_std"), theirs)


def test_unirl_gives_nan_to_a_lone_member_where_ours_gives_zero():
    theirs = torch.tensor([-1.2247449, 0.5773503, 0.0, NAN, -1.1547005, 1.2247449, 0.5773503, 0.0])
    mine = form(REWARDS, GROUPS, "group_z", correction=1)
    lone = theirs.isnan()
    assert lone.tolist() == (GROUPS == 2).tolist() and mine[lone].tolist() == [0]
    close(mine[~lone], theirs[~lone])


def test_unirl_over_the_batch():
    theirs = [-0.4831088, 0.9259585, 0.0, 0.0, -1.8519170, 0.4831088, 0.9259585, 0.0]
    close(form(REWARDS, GROUPS, "global_std", correction=1, epsilon=1e-8), theirs)


def test_rewards_as_weights_and_the_best_of_each_prompt():
    close(form(REWARDS, GROUPS, "raw"), REWARDS[:, 0])
    close(form(REWARDS, GROUPS, "best"), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0])


def test_a_preference_pair_of_equal_rewards_is_flow_grpos_alone():
    values, groups = torch.tensor([0.1, 2.0, 0.5, 2.0, -0.3, 2.0])[:, None], torch.tensor([0, 1, 0, 1, 0, 1])
    theirs = torch.tensor([0.0, -1.0, 1.0, 1.0, -1.0, 0.0])
    mine, equal = form(values, groups, "best_worst"), groups == 1
    close(mine[~equal], theirs[~equal])
    assert mine[equal].tolist() == [0, 0, 0] and theirs[equal].abs().sum() == 2


@pytest.mark.parametrize(("name", "over"), [("False", "group_z"), ("True", "global_std")])
def test_raven(golden, name, over):
    g = golden("groups")
    mine = form(g["raven_stat_tracker.rewards"][:, None], g["raven_stat_tracker.prompt_ids"], over, **RAVEN)
    close(mine, g[f"raven_stat_tracker.advantages_global_std_{name}"])


def test_a_floor_keeps_a_small_spread_from_being_blown_up():
    mine = form(torch.tensor([[1.0], [1.00002]]), torch.tensor([0, 0]), **RAVEN)
    torch.testing.assert_close(mine, torch.tensor([-1.0, 1.0]) * 1e-5 / (1e-4 + 1e-5), rtol=1e-2, atol=0)


def raven_rewards(golden):
    g = golden("groups")
    table = {name: g[f"raven_reward_agg.{name}"][:, None] for name in ("raft", "ta")}
    return g, table, {"raft": 0.35, "ta": 2.0}, torch.arange(8) % 2


def test_raven_normalises_then_sums(golden):
    g, table, weights, groups = raven_rewards(golden)
    adv, stats = combine(table, weights, groups, comparing(groups, **RAVEN))
    close(adv[:, 0], g["raven_reward_agg.normalize_then_sum"])
    assert "raft/group_std" in stats and "ta/zero_spread_share" in stats


def test_ravens_sum_then_normalize_does_not_normalise_and_ours_does(golden):
    g, table, weights, groups = raven_rewards(golden)
    theirs = g["raven_reward_agg.sum_then_normalize"]
    close(combine(table, weights, groups, comparing(groups, "raw"), "sum")[0][:, 0], theirs)
    mine = combine(table, weights, groups, comparing(groups), "sum")[0][:, 0]
    close(mine, form(theirs[:, None], groups))
    assert abs(theirs.mean()) > 0.5 and abs(mine.mean()) < 1e-6


def test_astrolabes_diversity_mode_divides_by_no_std(golden):
    g = golden("groups")
    adv = diversity_bonus(advantages(REWARDS, GROUPS, "centre")[0], GROUPS, g["astrolabe_stat_tracker_nft.features"])
    close(adv[:, 0], g["astrolabe_stat_tracker_nft.advantages"].float())
    both = diversity_bonus(advantages(REWARDS, GROUPS)[0], GROUPS, g["astrolabe_stat_tracker_nft.features"])[:, 0]
    std = REWARDS[GROUPS == 0].std(correction=0)
    torch.testing.assert_close(both[GROUPS == 0], adv[GROUPS == 0, 0] / std, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["a", "b"])
def test_kvpo_compares_with_the_anchor(golden, name):
    g = golden("groups")
    values = torch.cat([g[f"kvpo.reward_{name}"], g[f"kvpo.anchor_{name}"]])[:, None]
    adv, stats = anchor_relative(values, torch.zeros(6), torch.arange(6) == 5)
    close(adv[:5, 0], g[f"kvpo.adv_{name}"])
    assert adv[5, 0] == 0
    assert stats["better_than_anchor"] == pytest.approx((adv[:5, 0] > 0).float().mean().item())


def test_anchors_are_found_by_group_and_one_branch_is_enough():
    values = torch.tensor([[5.0], [1.0], [2.0], [4.0], [NAN], [7.0], [8.0]])
    groups, anchors = torch.tensor([0, 1, 0, 1, 2, 2, 2]), torch.tensor([0, 0, 1, 1, 1, 0, 0]).bool()
    adv, stats = anchor_relative(values, groups, anchors)
    close(adv[:, 0], [2**0.5, -(2**0.5), 0, 0, 0, 0, 0])
    assert stats["zero_spread_share"] == pytest.approx(1 / 3), "a group whose anchor failed counts"


@pytest.mark.parametrize("anchors", [[0, 0, 0], [1, 1, 0]])
def test_a_group_needs_one_anchor(anchors):
    with pytest.raises(ValueError, match=f"group 4 has {sum(anchors)} anchors in 3 rows; it needs one"):
        anchor_relative(torch.zeros(3, 1), torch.full((3,), 4), torch.tensor(anchors).bool())


def test_the_raw_pair_is_a_centred_group_of_two():
    close(form(torch.tensor([[5.0], [2.0]]), torch.tensor([0, 0]), "centre"), [1.5, -1.5])


def test_quasi_norm_is_the_z_score_at_power_2_and_tames_a_lone_outlier():
    values, groups = torch.rand(12, 1, generator=torch.Generator().manual_seed(0)), torch.zeros(12)
    close(form(values, groups, "quasi_norm", power=2), form(values, groups))
    halves, outlier = torch.tensor([1.0, -1.0] * 6)[:, None], torch.eye(12)[:, :1]
    assert form(halves, groups, "quasi_norm").abs().max().item() == pytest.approx(0.155, abs=5e-4)
    assert form(outlier, groups, "quasi_norm").max().item() == pytest.approx(1.04, abs=5e-3)
    assert form(outlier, groups).max().item() == pytest.approx(3.32, abs=5e-3)


@pytest.mark.parametrize("name", ["group_z", "global_std", "centre", "quasi_norm", "best_worst"])
@pytest.mark.parametrize("correction", [0, 1])
def test_equal_and_lone_members_get_zero_from_every_form_that_compares(name, correction):
    values = torch.tensor([[2.0], [2.0], [7.0], [1.0], [3.0], [NAN]])
    adv, stats = advantages(values, torch.tensor([0, 0, 1, 2, 2, 1]), name, correction=correction)
    assert adv[[0, 1, 2, 5]].abs().max() == 0 and adv[3] < 0 < adv[4]
    assert stats["zero_spread_share"] == pytest.approx(2 / 3)


def test_best_of_n_takes_both_ends_of_each_group():
    values = torch.tensor([[3.0], [9.0], [1.0], [8.0], [2.0], [NAN], [7.0]])
    groups = torch.tensor([0, 1, 0, 1, 0, 0, 1])
    assert extremes(values, groups, 1, 1)[:, 0].tolist() == [True, True, True, False, False, False, True]
    assert extremes(values, groups, 0, 2)[:, 0].tolist() == [False, False, True, True, True, False, True]
    with pytest.raises(ValueError, match="group 0 has 3 valid members, fewer than 2 best \\+ 2 worst"):
        extremes(values, groups, 2, 2)


def test_per_reward_advantages_ignore_a_rewards_scale_and_the_sum_does_not():
    source = torch.Generator().manual_seed(3)
    table = {name: torch.rand(8, 2, generator=source) for name in "ab"}
    wide = table | {"b": 100 * table["b"]}
    weights, groups = {"a": 1.0, "b": -1.0}, torch.arange(8) % 2
    each, summed = ([combine(t, weights, groups, comparing(groups), mode)[0] for t in (table, wide)]
                    for mode in ("advantages", "sum"))  # fmt: skip
    torch.testing.assert_close(*each, rtol=0, atol=1e-5)
    torch.testing.assert_close(summed[1], -advantages(table["b"], groups)[0], rtol=0, atol=0.2)
    assert (summed[0] - summed[1]).abs().max() > 0.1


def test_combinations_that_mean_nothing_are_refused():
    table, groups = {"a": torch.ones(2, 1)}, torch.tensor([0, 0])
    with pytest.raises(ValueError, match="weights of a are all 0"):
        combine(table, {"a": 0.0}, groups, comparing(groups))
    with pytest.raises(ValueError, match="mix=summ: did you mean sum"):
        combine(table, {"a": 1.0}, groups, comparing(groups), "summ")
    with pytest.raises(ValueError, match="power=0"):
        advantages(table["a"], groups, "quasi_norm", power=0)
