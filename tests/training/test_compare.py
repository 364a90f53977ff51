"""The held-out comparison: arithmetic by hand, and verdicts that can go either way."""

import math

import pytest
import torch

from arvideo_rl.training.compare import HeldOut, Measured, compare, paired, paired_frechet, sky_and_ground, variety
from arvideo_rl.training.evaluation import alone
from rewards.inverse_dynamics import InverseDynamics


def test_paired_errors_are_clustered_by_prompt():
    before = torch.zeros(4, 2)
    after = torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 5.0], [0.0, 0.0]])
    by_prompt = torch.tensor([2.0, 2.0, 4.0, 0.0])
    found = paired(before, after)
    assert found["delta"] == pytest.approx(2.0) and found["n"] == 4
    assert found["se"] == pytest.approx(by_prompt.std().item() / 2)  # not the std of all eight


def test_pairs_with_an_unmeasurable_side_are_left_out():
    before = torch.tensor([[1.0], [math.nan], [3.0]])
    after = torch.tensor([[2.0], [9.0], [6.0]])
    found = paired(before, after)
    assert (found["n"], found["before"], found["after"], found["delta"]) == (2, 2.0, 4.0, 2.0)


def measured(seed: int, gain: float = 0.0, sharper: float = 0.0, spread: float = 1.0) -> Measured:
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(32, 2, generator=rng) * 0.02
    features = torch.randn(32, 2, 8, 64, generator=torch.Generator().manual_seed(seed)) * spread
    values = {"reward/actions": 0.5 + gain + noise, "sharpness": 4.0 + sharper + noise}
    return Measured(values, features, torch.zeros(6, 9, 3, 4, 4, dtype=torch.uint8))


def test_a_gain_with_nothing_lost_is_learned():
    before = measured(1)
    after = measured(1)
    after.values["reward/actions"] = before.values["reward/actions"] + 0.1 + 0.01 * torch.randn(32, 2)
    result = compare(before, after, {"actions": 1.0}, HeldOut())
    assert result["learned"] and result["nothing_sacrificed"]
    assert result["trained"]["delta"] == pytest.approx(0.1, abs=0.01)


def test_noise_alone_is_not_learning():
    before, after = measured(1), measured(1)
    torch.manual_seed(0)
    after.values["reward/actions"] = before.values["reward/actions"] + torch.randn(32, 2)
    assert not compare(before, after, {"actions": 1.0}, HeldOut())["learned"]


def test_a_verifier_below_its_margin_is_named():
    before, after = measured(1), measured(1, sharper=-0.5)
    result = compare(before, after, {"actions": 1.0}, HeldOut(margin=0.05))
    assert [v["name"] for v in result["verifiers"] if not v["ok"]] == ["sharpness"]
    assert not result["nothing_sacrificed"]
    wide = compare(before, after, {"actions": 1.0}, HeldOut(margin=0.2))
    assert wide["nothing_sacrificed"], "the margin is the user's to state"


def test_sharpness_that_rises_by_more_than_a_quarter_is_lost_too():
    before = measured(1)
    for sharper, ok in ((0.5, True), (2.0, False)):  # of about 4
        result = compare(before, measured(1, sharper=sharper), {"actions": 1.0}, HeldOut())
        assert {v["name"]: v["ok"] for v in result["verifiers"]}["sharpness"] is ok


def test_a_larger_frechet_distance_is_worse():
    before, after = measured(1), measured(1, spread=3.0)
    [row] = [v for v in compare(before, after, {"actions": 1.0}, HeldOut())["verifiers"] if v["name"] == "frechet"]
    assert row["better"] == "lower" and row["delta"] > 0 and not row["ok"]


def test_variety_is_the_distance_between_a_prompt_s_videos():
    pixels = torch.zeros(2, 3, 4, 3, 8, 8)
    pixels[1, 0, :, 0, :2] = 1  # one clip of the second prompt has a red sky
    found = variety(sky_and_ground(pixels))
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0, 0.0], [100.0, 50.0, 50.0]]))
    pixels[1] = 1
    assert variety(sky_and_ground(pixels))[1].max() == 0, "one look for all is no variety, however bright"


def test_the_frechet_error_is_paired():
    reference = InverseDynamics("idm_heldout").frechet_reference
    features = torch.randn(32, 2, 8, 64, generator=torch.Generator().manual_seed(0))
    found = paired_frechet(features, features.clone(), reference)
    assert found["delta"] == 0 and found["se"] == 0
    other = torch.randn(32, 2, 8, 64, generator=torch.Generator().manual_seed(1))
    assert paired_frechet(features, other, reference)["se"] > 0


def test_a_verifier_that_can_say_nothing_of_any_prompt_is_left_out_not_lost():
    before, after = measured(1), measured(1, gain=0.1)
    for m in (before, after):
        m.values["motion"] = torch.full_like(next(iter(m.values.values())), math.nan)
    result = compare(before, after, {"actions": 1.0}, HeldOut())
    assert "motion" not in {v["name"] for v in result["verifiers"]}
    assert result["nothing_sacrificed"]
    assert alone(after)["motion"]["n"] == 0 and alone(after)["reward/actions"]["n"] == 32
