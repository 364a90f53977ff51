"""Warped levels are the published ones, and lists that are no schedule are refused."""

import pytest

from samplers.schedule import shift_level, warped_levels


@pytest.mark.parametrize(
    ("nominal", "shift", "levels"),
    [
        ((1000, 750, 500, 250), 5, (1, 0.9375, 5 / 6, 0.625)),
        ((1000, 750, 500, 250), 8, (1, 0.96, 8 / 9, 8 / 11)),
        ((1000, 800, 600, 400, 200), 5, (1, 20 / 21, 15 / 17, 10 / 13, 5 / 9)),
        ((1000, 500), 5, (1, 5 / 6)),
        ((700, 500, 400, 200), 1, (0.7, 0.5, 0.4, 0.2)),
    ],
)
def test_levels_are_the_published_ones(nominal, shift, levels):
    assert warped_levels(nominal, shift) == pytest.approx(levels, abs=1e-12)


@pytest.mark.parametrize("shift", [1.0, 5.0, 8.0])
def test_the_warp_keeps_its_ends_and_its_order(shift):
    warped = [shift_level(u / 100, shift) for u in range(101)]
    assert (warped[0], warped[-1]) == (0, 1) and warped == sorted(set(warped))


@pytest.mark.parametrize("nominal", [(), (500, 750), (500, 500), (1200, 500), (500, 0), (500, -1)])
def test_steps_that_do_not_fall_within_0_and_1000_are_refused_with_their_values(nominal):
    with pytest.raises(ValueError) as error:
        warped_levels(nominal, 5)
    assert str(list(nominal)) in str(error.value) and "(0, 1000]" in str(error.value)
