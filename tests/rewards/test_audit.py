"""The audit: its numbers against ones computed by hand, its verdicts on rewards that are known to be good or bad."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rewards import registry
from rewards.adversarial import CHANGES, Change
from rewards.audit import Limits, audit, judge
from rewards.claims import Claims, claims_of
from rewards.contract import Clips, Scores
from rewards.registry import FunctionReward
from rewards.separation import Z95, auroc, auroc_interval, wilson, win_rate

ROOT = Path(__file__).parents[2]
INF, NAN = math.inf, math.nan
N, T = 8, 6


def test_auroc_by_hand():
    assert auroc([3, 2], [1, 2])[0] == 3.5 / 4  # 3 > 1, 3 > 2, 2 > 1, a tie
    assert auroc([1, 2], [3, 4])[0] == 0 and auroc([3, 4], [1, -INF])[0] == 1 and auroc([5], [5])[0] == 0.5
    assert auroc([0.0, 10.0], [1.0, 1.0, 1.0, 11.0])[0] == 3 / 8


def test_win_rate_by_hand_takes_places_together():
    assert win_rate([3, 2, 1, 0], [2, 2, 0, 5])[0] == 2.5 / 4
    assert auroc([3, 2, 1, 0], [2, 2, 0, 5])[0] != 2.5 / 4


def test_wilson_by_hand():
    assert wilson(1.0, 16) == pytest.approx((16 / (16 + Z95**2), 1.0))
    assert wilson(0.0, 4) == pytest.approx((0.0, Z95**2 / (4 + Z95**2)))
    assert wilson(0.5, 4) == pytest.approx((0.15004, 0.84996), abs=1e-4)


@pytest.mark.parametrize(("area", "n"), [(0.5, 10), (0.8, 16), (0.97, 6), (1.0, 12)])
def test_the_interval_of_an_auroc_ends_where_hanley_and_mcneil_put_its_error(area, n):
    low, high = auroc_interval(area, n, n)
    for end in (low, high):
        q1, q2 = end / (2 - end), 2 * end**2 / (1 + end)
        variance = (end * (1 - end) + (n - 1) * (q1 - end**2 + q2 - end**2)) / n**2
        if end != area:
            assert abs(end - area) == pytest.approx(Z95 * math.sqrt(variance), abs=1e-9)
    assert low < area <= high <= 1 and (low > 0.5 or area < 0.97)
    mirrored = auroc_interval(1 - area, n, n)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


def judged(clean, changed, claims=Claims(), harmless=False, span=10.0, **limits):  # noqa: B008
    def told(values):
        return [v if v is None or isinstance(v, tuple) else (float(v), None) for v in values]

    return judge("frozen", told(changed), told(clean), claims, harmless, span, Limits(**limits))


LIST = [float(i) for i in range(10)]


@pytest.mark.parametrize(
    ("changed", "more", "verdict"),
    [
        ([x - 20 for x in LIST], {}, "noticed"),
        ([x - 3 for x in LIST], {}, "falls"),  # every clip by 0.3 of the span, but less than clips differ
        ([x - 0.5 for x in LIST], {}, "stays"),
        ([x + 0.5 for x in LIST], {}, "stays"),
        ([x + 3 for x in LIST], {}, "FOOLED"),
        ([x + 3 * (-1) ** i for i, x in enumerate(LIST)], {}, "unclear"),
        ([x + (3 if x < 6 else -3) for x in LIST], {}, "unclear"),  # six of ten may be chance
        ([x - 20 for x in LIST], {"harmless": True}, "moves"),
        ([x + 3 for x in LIST], {"harmless": True}, "FOOLED"),
        ([x - 3 for x in LIST], {"claims": Claims(withstands=("frozen",))}, "moves"),
        ([x - 0.5 for x in LIST], {"claims": Claims(withstands=("frozen",))}, "stays"),
        ([x - 3 for x in LIST], {"stays": 0.4}, "stays"),
        ([x - 3 for x in LIST], {"noticed": 0.7}, "noticed"),
    ],
)
def test_verdicts(changed, more, verdict):
    assert judged(LIST, changed, **more).verdict == verdict


@pytest.mark.parametrize(
    ("changed", "claims", "passed"),
    [
        ([x - 20 for x in LIST], Claims(notices=("frozen",)), True),
        ([x - 3 for x in LIST], Claims(notices=("frozen",)), False),
        ([x + 3 for x in LIST], Claims(notices=("frozen",)), False),
        (LIST, Claims(withstands=("frozen",)), True),
        ([x - 3 for x in LIST], Claims(withstands=("frozen",)), False),
        ([x + 3 for x in LIST], Claims(blind_to=("frozen",)), None),
        ([x + 3 for x in LIST], Claims(notices=("melted",)), False),  # raised by what it does not warn of
        ([x - 3 for x in LIST], Claims(notices=("melted",)), None),
        ([x + 3 for x in LIST], Claims(), None),  # says nothing of itself
    ],
)
def test_claims_hold_or_do_not(changed, claims, passed):
    assert judged(LIST, changed, claims).passed is passed


def test_clips_without_value():
    """content: counts as the lowest, system: and clean clips without value are left out."""
    found = judged([1.0, 2.0, (NAN, "content:x"), 4.0, 5.0], [(NAN, "content:x"), 1.0, 0.0, (NAN, "system:y"), None])
    assert found.pairs == 2 and found.unmeasurable == 1 and found.auroc[0] == 3.5 / 4 and found.win_rate[0] == 1
    assert found.moved == INF and found.changed == 1.0, "medians are of what was measured"
    empty = judged([1.0], [(NAN, "system:y")], Claims(notices=("frozen",)))
    assert empty.verdict == "not measured" and empty.passed is None and math.isnan(empty.auroc[0])


def test_moved_is_a_share_of_the_span():
    assert judged(LIST, [x - 2 for x in LIST], span=8.0).moved == 0.25
    assert judged(LIST, LIST, span=0.0).moved == 0 and judged(LIST, [x + 1 for x in LIST], span=0.0).moved == INF


# rewards that are known


def movie() -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    return torch.nn.functional.interpolate(torch.rand(N * T, 3, 8, 8, generator=source), (32, 32)).unflatten(0, (N, T))


PROMPTS = ["bright" if i % 2 else "dark" for i in range(N)]
CLIPS = [Clips(movie()[i : i + 4], 8.0, PROMPTS[i : i + 4]) for i in (0, 4)]


def movement(clips):
    """Mean change from frame to frame: rises with anything that moves."""
    return clips.frames.diff(dim=1).abs().mean((1, 2, 3, 4))


def reward(function, **declared):
    made = FunctionReward(function, "mine", {})
    vars(made).update(declared)
    return made


def by_change(result):
    return {f.change: f for f in result.findings}


def test_a_motion_reward_is_fooled_by_noise_and_sees_frozen_clips():
    claims = Claims(notices=("frozen",), withstands=("reversed", "mirrored"), blind_to=("noisy",))
    result = audit(reward(movement, claims=claims), CLIPS)
    found = by_change(result)
    assert found["frozen"].verdict == "noticed" and found["frozen"].auroc[0] == 1 and found["frozen"].changed == 0
    assert found["frozen"].moved == pytest.approx(1, abs=0.1)
    assert found["reversed"].verdict == "stays" and found["reversed"].moved < 1e-5
    assert found["mirrored"].verdict == "stays"
    assert found["saturated"].verdict == "FOOLED" and found["saturated"].passed is False
    assert found["noisy"].claim == "blind_to" and found["noisy"].passed is None
    assert {f.change for f in result.failures} >= {"saturated"} and not result.untested
    assert "wrong_prompt" not in found and "wrong_actions" not in found, "it does not see them"
    assert all(f.pairs == N for f in result.findings)


def test_a_change_of_ones_own_can_be_claimed():
    slow = Change("every frame three times", lambda clips, seed: replace(clips, frames=clips.frames[:, [0, 0, 0, 3]]))
    found = audit(reward(movement, claims=Claims(notices=("slow",))), CLIPS, {"slow": slow})
    assert by_change(found)["slow"].claim == "notices" and not found.untested
    with pytest.raises(ValueError, match="slow"):
        audit(reward(movement, claims=Claims(notices=("slow",))), CLIPS)


def test_the_prompt_is_swapped_for_rewards_that_read_it():
    def agrees(clips):
        light = clips.frames.mean((1, 2, 3, 4)) - 0.5
        return torch.stack([light[i] if p == "bright" else -light[i] for i, p in enumerate(clips.prompts)])

    frames = movie()
    frames[1::2] = 0.5 + 0.5 * frames[1::2]
    frames[::2] = 0.5 * frames[::2]
    found = by_change(audit(reward(agrees, needs={"prompts"}), [Clips(frames, 8.0, PROMPTS)]))
    assert found["wrong_prompt"].auroc[0] == 1 and found["wrong_prompt"].changed == pytest.approx(
        -found["wrong_prompt"].clean, rel=0.2
    )


def test_values_do_not_depend_on_batches_and_every_step_is_told():
    told = []
    split = audit(reward(movement), CLIPS, seed=4, tell=lambda: told.append(1))
    whole = audit(reward(movement), [Clips(movie(), 8.0, PROMPTS)], seed=4)
    assert len(told) == 2 * len(split.values)
    for change, values in split.values.items():
        assert [v[0] for v in values] == pytest.approx([v[0] for v in whole.values[change]], abs=1e-6), change
    other = audit(reward(movement), CLIPS, seed=5)
    assert other.values["noisy"] != split.values["noisy"] and other.values["clean"] == split.values["clean"]


def test_a_reward_may_refuse_a_shorter_copy_but_not_the_clip():
    def needs_six(clips):
        if clips.frames.shape[1] < T:
            raise ValueError("wants six frames")
        return movement(clips)

    result = audit(reward(needs_six, claims=Claims(notices=("frozen",), withstands=("half_rate",))), CLIPS)
    assert by_change(result)["half_rate"].verdict == "not measured" and result.untested == ["half_rate"]
    assert "wants six frames" in result.values["half_rate"][0][1]
    with pytest.raises(ValueError, match="wants six frames"):
        audit(reward(needs_six), [Clips(movie()[:, :4])])


def test_what_a_reward_needs_is_asked_before_any_compute_and_gone_where_a_change_takes_it():
    def never(clips):
        raise AssertionError("computed")

    with pytest.raises(ValueError, match="needs actions"):
        audit(reward(never, needs={"actions"}), CLIPS)

    def obeys(clips):
        return movement(clips) + clips.actions.float().mean(1)

    acting = [Clips(movie(), 8.0, actions=torch.arange(N)[:, None].expand(N, T - 1).contiguous())]
    found = by_change(audit(reward(obeys, needs={"actions"}), acting))
    assert "half_rate" not in found and "mirrored" not in found, "those copies have no actions"
    assert "wrong_actions" in found


def test_unmeasurable_copies_count_as_the_lowest():
    def lost_when_still(clips):
        value = movement(clips)
        value[value == 0] = NAN
        return Scores(value, ~value.isnan(), ["content:still" if v else None for v in value.isnan()])

    found = by_change(audit(reward(lost_when_still), CLIPS))["frozen"]
    assert found.unmeasurable == N and found.auroc[0] == 1 and found.verdict == "noticed"


# claims


def test_claims_are_checked():
    assert claims_of(reward(movement, claims=Claims()), CHANGES) == Claims()
    for claims, says in [
        ({"notices": ["frozen"]}, "are a dict"),
        (Claims(notices=("frosen",)), "'frosen'; known changes: frozen"),
        (Claims(notices=("frozen",), blind_to=("frozen",)), "two things of 'frozen'"),
    ]:
        with pytest.raises(ValueError, match=says) as error:
            claims_of(reward(movement, claims=claims), CHANGES)
        assert "'mine'" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", registry.available())
def test_claims_of_shipped_rewards_name_changes_they_see_and_their_page_tells_the_outcome(name):
    if registry.REQUIRED in registry.arguments(registry.resolve(name)).values():
        pytest.skip("its arguments decide what it is")
    shipped = registry.build(name)
    claims = claims_of(shipped, CHANGES)
    for change in (*claims.notices, *claims.withstands, *claims.blind_to):
        assert not CHANGES[change].of or CHANGES[change].of in shipped.needs, change
    if claims != Claims():
        page = (ROOT / "docs" / "rewards" / f"{name}.md").read_text(encoding="utf-8")
        table = page.partition("## Audit")[2]
        assert all(f"`{change}`" in table for change in (*claims.notices, *claims.withstands)), "## Audit"
