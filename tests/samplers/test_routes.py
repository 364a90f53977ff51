"""KV routing draws: where a group may fork and which frames its branches read."""

from itertools import pairwise

import pytest

from samplers.randomness import Key
from samplers.routes import Memory, branch_sets, fork_frame, permuted, pool_needed, route

KEY, LONGLIVE = Key(3, 5, 7, 0), Memory()


def test_the_published_pool():
    """[max(s, a + 3 (P - 1) - (33 - s)), a - m) for LongLive's numbers."""
    assert [LONGLIVE.pool(a) for a in (12, 21, 42)] == [range(3, 8), range(3, 17), range(24, 38)]


def test_forks_leave_room_in_the_block_the_window_and_the_pool():
    assert LONGLIVE.forks(63, 8) == [21, 24, 27, 42, 45, 48]
    assert LONGLIVE.forks(56, 8) == [21, 24, 27], "15 routed frames from 42 on end at 57"
    assert Memory(first=43).forks(63, 8) == [45, 48], "on a chunk's first frame"
    small = Memory(sinks=1, routed=2, nearest=2, chunk=3, chunks=1, capacity=99, first=0, block=3)
    assert small.forks(12, 2) == [6, 9], "pools of 0, 0, 3 and 6 frames"


def test_the_fork_is_one_for_a_group_and_every_fork_is_drawn():
    assert len({fork_frame(Key(3, 5, 7, b), LONGLIVE, 63, 8) for b in range(8)}) == 1
    assert {fork_frame(Key(3, i), LONGLIVE, 63, 8) for i in range(100)} == set(LONGLIVE.forks(63, 8))


def test_branches_share_one_permutation_of_the_pool():
    pool = LONGLIVE.pool(42)
    orders = [permuted(Key(3, 5, 7, b), pool, 42) for b in range(8)]
    assert all(o == orders[0] for o in orders) and sorted(orders[0]) == list(pool) != orders[0]
    assert permuted(Key(3, 6, 7), pool, 42) != orders[0]


def test_the_published_rule_by_hand():
    order = [9, 3, 7, 5, 8, 4, 6]
    assert branch_sets(order, 3, 3, "published") == [(3, 7, 9), (5, 7, 8), (4, 6, 8)]  # starts 0, 2, 4
    assert branch_sets(order, 3, 8, "published")[7] == (3, 7, 9), "start 7 wraps round to the first"


def test_the_distinct_rule_by_hand():
    order = [9, 3, 7, 5, 8, 4, 6]
    assert branch_sets(order, 3, 3) == [(3, 7, 9), (5, 7, 8), (4, 6, 8)]  # starts 0, 2, 4
    assert branch_sets(order, 3, 4) == [(3, 7, 9), (3, 5, 7), (4, 5, 8), (4, 6, 9)]  # starts 0, 1, 3, 5


@pytest.mark.parametrize("pool", range(2, 30))
def test_distinct_sets_are_distinct_wherever_they_are_not_refused(pool):
    for routed in range(1, pool + 2):
        for group in range(2, 12):
            if pool >= pool_needed(routed, group):
                sets = branch_sets(range(pool), routed, group)
                assert len(set(sets)) == group and all(len(set(s)) == routed for s in sets)
            else:
                with pytest.raises(ValueError, match=f"pool of {pool} frames"):
                    branch_sets(range(pool), routed, group)


def test_what_the_published_rule_lets_pass():
    assert len(set(branch_sets(range(5), 5, 8, "published"))) == 1, "a pool of one set: no variance"
    assert len(set(branch_sets(range(6), 5, 8, "published"))) == 6, "fewer frames than branches: some repeat"
    starts = [s[0] for s in branch_sets(range(14), 1, 8, "published")]
    spread = [s[0] for s in branch_sets(range(14), 1, 8)]
    assert max(starts) == 7 and max(spread) == 12, "half of the pool starts no set"
    neighbours = [
        sum(len(set(a) & set(b)) for a, b in pairwise(branch_sets(range(14), 5, 8, rule)))
        for rule in ("published", "distinct")
    ]
    assert neighbours == [28, 23], "frames that neighbours share, of 35"


@pytest.mark.parametrize(
    ("pool", "routed", "group", "rule", "need"),
    [(5, 5, 8, "distinct", 8), (6, 6, 4, "distinct", 7), (7, 2, 8, "distinct", 8), (4, 5, 8, "published", 5)],
)
def test_a_pool_too_small_is_refused_with_the_numbers(pool, routed, group, rule, need):
    with pytest.raises(ValueError) as error:
        branch_sets(range(pool), routed, group, rule)
    message = str(error.value)
    assert f"pool of {pool} frames" in message and f"sets of {routed}" in message and f"needs {need};" in message
    assert f"no {group} " in message


def test_a_video_without_a_fork_is_refused_with_the_numbers():
    with pytest.raises(ValueError) as error:
        fork_frame(KEY, LONGLIVE, 30, 8)
    message = str(error.value)
    assert "30 frames" in message and "5 routed chunks of 3" in message and "8 older frames for 8" in message


def test_routes_are_a_pools_frames_and_the_same_for_all_processes():
    sets = route(KEY, LONGLIVE, 42, 8)
    assert len(set(sets)) == 8 and all(set(s) <= set(LONGLIVE.pool(42)) and list(s) == sorted(s) for s in sets)
    assert sets == route(Key(3, 5, 7, 4), LONGLIVE, 42, 8)


def test_one_branch_may_read_the_whole_pool():
    assert branch_sets(range(4), 4, 1) == [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Memory(routed=0), "routed=0"),
        (lambda: Memory(block=12), "5 routed chunks of 3 frames do not fit into a block of 12"),
        (lambda: branch_sets([1, 2], 1, 2, "spread"), "distinct or published"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
