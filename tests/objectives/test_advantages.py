"""Advantages by group id, on arrays worked out by hand."""

import math

import pytest
import torch

from arvideo_rl.objectives.advantages import advantages, worst_of_group

NAN = math.nan


def column(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None]


def test_group_z_by_hand():
    adv, _ = advantages(column(1, 3, 10, 14), torch.tensor([7, 7, 2, 2]))
    torch.testing.assert_close(adv, column(-1, 1, -1, 1))


def test_global_std_keeps_the_scale_between_groups():
    values = column(1, 3, 10, 14)
    adv, _ = advantages(values, torch.tensor([0, 0, 1, 1]), "global_std")
    std = values.double().std(correction=0).item() + 1e-4
    torch.testing.assert_close(adv, column(-1 / std, 1 / std, -2 / std, 2 / std))


def test_centre_only_subtracts():
    adv, _ = advantages(column(1, 3, 10, 14), torch.tensor([0, 0, 1, 1]), "centre")
    torch.testing.assert_close(adv, column(-1, 1, -2, 2))


def test_groups_are_by_id_not_by_place_and_may_be_uneven():
    values, groups = column(1, 10, 3, 14, 12), torch.tensor([0, 1, 0, 1, 1])
    adv, _ = advantages(values, groups)
    torch.testing.assert_close(adv[[0, 2]], column(-1, 1))
    assert abs(adv[[1, 3, 4]].mean().item()) < 1e-6
    order = torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(advantages(values[order], groups[order])[0], adv[order])


def test_flat_and_lone_groups_give_zero_and_are_counted():
    adv, stats = advantages(column(2, 2, 5, 1, 3), torch.tensor([0, 0, 1, 2, 2]), "global_std")
    assert adv[:3].abs().max() == 0 and adv[3:].abs().min() > 0
    assert stats["zero_spread_share"] == pytest.approx(2 / 3)


def test_failed_measurements_are_left_out():
    adv, _ = advantages(column(1, NAN, 3), torch.tensor([0, 0, 0]))
    torch.testing.assert_close(adv, column(-1, 0, 1))


def test_columns_are_independent():
    values = torch.tensor([[1.0, 5.0], [3.0, 1.0]])
    adv, _ = advantages(values, torch.tensor([0, 0]))
    torch.testing.assert_close(adv, torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))


def test_a_clip_at_fault_counts_as_the_worst_of_its_group():
    values = torch.tensor([[4.0], [NAN], [2.0], [NAN], [NAN]])
    content = torch.tensor([[False], [True], [False], [False], [True]])
    groups = torch.tensor([0, 0, 0, 0, 1])
    filled = worst_of_group(values, content, groups)[:, 0]
    assert filled[:3].tolist() == [4, 2, 2]
    assert filled[3].isnan(), "a failed measurement is not the clip's fault"
    assert filled[4].isnan(), "nothing valid to compare with"


def test_unknown_form_is_refused():
    with pytest.raises(ValueError, match="centre"):
        advantages(column(1, 2), torch.tensor([0, 0]), "zscore")
