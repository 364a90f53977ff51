"""Who is suspected, who is gated, and when the reference moves; side by side with the published code's sign."""

import pytest
import torch

from arvideo_rl.objectives.selective import MovingReference, Share, gate, overrated, win_rates

NAN = float("nan")


def suspicion(main, aux, groups=None, weight=1.0):
    main, aux = torch.tensor(main), torch.tensor(aux)
    groups = torch.zeros(len(main), dtype=torch.long) if groups is None else torch.tensor(groups)
    return overrated({"main": main, "aux": aux}, {"main": weight, "aux": 0.0}, groups)


def published(main, aux, share):
    """GARDO's rule on one list: ranks from the best, their difference, and what lies above its percentile."""

    def ranks(values):
        out = torch.empty(len(values))
        out[torch.tensor(values).argsort(descending=True)] = torch.arange(1.0, len(values) + 1)
        return out

    u = ranks(main) - ranks(aux)
    return u, u > torch.quantile(u[u >= 0], 1 - share)


def test_the_branch_that_the_trained_reward_alone_likes_is_gated_where_the_public_code_gates_the_opposite():
    main, aux = [10.0, 5.0, 0.0], [0.0, 5.0, 10.0]
    u = suspicion(main, aux)
    theirs, gated = published(main, aux, 0.1)
    assert u.tolist() == [1, 0, -1] and theirs.tolist() == [-2, 0, 2]
    assert gate(u, 0.1).tolist() == [True, False, False] and gated.tolist() == [False, False, True]


def test_a_hard_prompt_is_not_a_suspicious_one():
    """Ranked over both prompts, what is low in both rewards or high in both still differs by where prompts lie."""
    main, aux, groups = [9.0, 8.0, 1.0, 0.0], [0.1, 0.0, 0.9, 0.8], [0, 0, 1, 1]
    assert suspicion(main, aux, groups).tolist() == [0, 0, 0, 0]
    assert suspicion(main, aux, [0] * 4).abs().max() > 0.6


def test_win_rates_count_ties_half_and_leave_out_what_has_no_value():
    found = win_rates(torch.tensor([3.0, 1.0, 1.0, NAN, 5.0, 7.0]), torch.tensor([0, 0, 0, 0, 1, 2]))
    torch.testing.assert_close(found, torch.tensor([1, 0.25, 0.25, NAN, NAN, NAN]).double(), equal_nan=True)


def test_several_rewards_are_averaged_and_a_negative_weight_turns_the_order_round():
    rows = {"a": [1.0, 2.0, 3.0], "b": [5.0, 0.0, 9.0], "c": [0.0, 1.0, 2.0], "d": [2.0, 1.0, 0.0]}
    values = {name: torch.tensor(row) for name, row in rows.items()}
    groups = torch.zeros(3, dtype=torch.long)
    u = overrated(values, {"a": 3.0, "b": -1.0, "c": 0.0, "d": 0.0}, groups)
    by_hand = [0.75 * a + 0.25 * (1 - b) - 0.5 for a, b in ((0, 0.5), (0.5, 0), (1, 1))]
    assert u.tolist() == pytest.approx(by_hand)
    assert suspicion([1.0, 2.0], [1.0, 2.0], weight=-2.0).tolist() == [1, -1]


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0}, {"a": 0.0, "b": 0.0}])
def test_without_a_judge_or_a_trained_reward_nobody_can_be_suspected(weights):
    with pytest.raises(ValueError, match="one reward must be trained and one have weight 0"):
        overrated({"a": torch.zeros(2), "b": torch.zeros(2)}, weights, torch.zeros(2))


def test_of_the_suspects_the_given_share_is_gated_and_never_one_that_is_none():
    u = torch.tensor([0.2, -0.5, NAN, 0.9, 0.0, 0.2, 0.1, -0.1])
    for share, expected in ((0.02, [3]), (0.25, [3]), (0.26, [0, 3]), (0.5, [0, 3]), (1.0, [0, 3, 5, 6])):
        assert gate(u, share).nonzero()[:, 0].tolist() == expected, share
    assert not gate(-u.abs(), 1.0).any()


def test_the_share_follows_suspicion_within_its_bounds():
    share = Share()
    for mean, expected in ((0.3, 0.1), (0.4, 0.11), (0.35, 0.11), (0.2, 0.099), (0.0, 0.0891)):
        share.see(torch.tensor([mean, -1.0, NAN]).double())
        assert share.value == pytest.approx(expected)
    for i in range(60):
        share.see(torch.tensor([0.5 + i / 200]).double())
    assert share.value == 0.2 and len(share.recent) == 20
    for i in range(60):
        share.see(torch.tensor([0.4 - i / 200]).double())
    assert share.value == 0.02


def test_only_the_last_twenty_means_count():
    share = Share()
    for mean in (0.9, *[0.5] * 19):
        share.see(torch.tensor([mean]))
    share.see(torch.tensor([0.7]))  # the .9 is still among the twenty
    assert share.value == pytest.approx(0.09)  # of .5 after .9
    share.see(torch.tensor([0.8]))
    assert share.value == pytest.approx(0.099)


def moves(reference, kls):
    return [reference.see(kl) for kl in kls]


def test_the_reference_moves_when_far_or_after_a_while():
    assert moves(MovingReference(0.15, 5), [0.1, 0.2, None, None, 0.0, 0.1, 0.15, 0.0]) == [
        False, True, False, False, False, False, True, False]  # fmt: skip


def test_the_threshold_rises_after_short_gaps_and_falls_after_long_ones():
    reference = MovingReference()
    moves(reference, [0.5])
    assert reference.now == pytest.approx(0.16)  # the public code says .05 here
    moves(reference, [0.0] * 5 + [0.5])
    assert reference.now == pytest.approx(0.16)  # neither
    moves(reference, [0.0] * 15)
    assert reference.now == pytest.approx(0.15)
    moves(reference, [0.0] * 15 * 20)
    assert reference.now == pytest.approx(0.05)
    moves(reference, [0.9] * 40)
    assert reference.now == pytest.approx(0.25)
