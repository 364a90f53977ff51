"""Clips and Scores refuse what is malformed; score() and the registry refuse what does not fit, in one clear line."""

import sys
import types

import pytest
import torch

from rewards.contract import Clips, Scores, score
from rewards.registry import REQUIRED, FunctionReward, arguments, available, build, resolve

NAN = float("nan")


def frames(b=2, t=4, seed=0):
    return torch.rand(b, t, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def brightness(clips):
    return clips.frames.mean((1, 2, 3, 4))


def one_line(call, *words):
    """The ValueError of ``call`` is one line and holds every one of ``words``."""
    with pytest.raises(ValueError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


GOOD = frames()
BAD_FRAMES = {
    "a list": (GOOD.tolist(), ("list", "tensor")),
    "uint8": ((GOOD * 255).to(torch.uint8), ("uint8", "frames.float() / 255")),
    "half": (GOOD.bfloat16(), ("bfloat16", "float32")),
    "[-1, 1]": (GOOD * 2 - 1, ("[-1, 1]", "[0, 1]", "(frames + 1) / 2")),
    "[0, 255]": (GOOD * 255, ("25", "frames / 255")),
    "overshoot": (GOOD * 1.2, ("1.2", "clamp")),
    "no batch axis": (GOOD[0], ("(4, 3, 8, 8)", "frames[None]")),
    "images": (GOOD[0, 0], ("(3, 8, 8)", "B, T, 3, H, W")),
    "time and colour swapped": (GOOD.transpose(1, 2), ("(2, 3, 4, 8, 8)", "transpose(1, 2)")),
    "colour last": (GOOD.permute(0, 1, 3, 4, 2), ("(2, 4, 8, 8, 3)", "permute(0, 1, 4, 2, 3)")),
    "grey": (GOOD[:, :, :1], ("(2, 4, 1, 8, 8)",)),
    "empty": (GOOD[:0], ("(0, 4, 3, 8, 8)",)),
    "NaN": (GOOD.clone().index_fill(0, torch.tensor([1]), NAN), ("clip 1", "non-finite")),
}


@pytest.mark.parametrize("case", BAD_FRAMES)
def test_malformed_frames_are_refused_naming_what_was_seen(case):
    bad, words = BAD_FRAMES[case]
    one_line(lambda: Clips(bad), *words)


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("fps", 0, ("fps", "0")),
        ("fps", NAN, ("fps",)),
        ("fps", torch.ones(3), ("fps", "2")),
        ("prompts", "ab", ("one string",)),
        ("prompts", ["a ball"], ("1 entries", "2 strings")),
        ("actions", torch.zeros(2, 4, dtype=torch.int64), ("(2, 4)", "(2, 3)", "actions[:, 1:]")),
        ("actions", torch.zeros(3, 3, dtype=torch.int64), ("(3, 3)", "(2, 3)")),
        ("actions", torch.zeros(2, 3), ("float32", "int64")),
        ("actions", [[0, 0, 0]] * 2, ("list", "int64")),
        ("group_ids", torch.zeros(3, dtype=torch.int64), ("group_ids", "(3,)")),
        ("chunk_starts", (), ("chunk_starts", "()")),
        ("chunk_starts", (1, 2), ("(1, 2)", "0")),
        ("chunk_starts", (0, 2, 2), ("(0, 2, 2)",)),
        ("chunk_starts", (0, 4), ("(0, 4)", "4 frames")),
    ],
)
def test_malformed_fields_are_refused(field, value, words):
    one_line(lambda: Clips(GOOD, **{field: value}), *words)


def test_well_formed_clips_are_taken():
    whole = Clips(GOOD, torch.tensor([8.0, 16.0]), ["a", "b"], torch.zeros(2, 3, dtype=torch.int64), None,
                  torch.tensor([0, 0]), (0, 1, 3))  # fmt: skip
    assert len(whole) == 2
    Clips(GOOD * 1.0005, fps=8)  # the overshoot of a resize


@pytest.mark.parametrize(
    "args, words",
    [
        ({"value": torch.ones(2, dtype=torch.float64)}, ("float64",)),
        ({"value": torch.ones(2, 2, 2)}, ("(2, 2, 2)",)),
        ({"value": [1.0, 2.0]}, ("list",)),
        ({"value": torch.tensor([1.0, NAN])}, ("sample 1", "nan")),
        ({"value": torch.tensor([float("inf"), 1.0])}, ("sample 0", "inf")),
        ({"value": torch.tensor([[1.0, 1.0], [1.0, NAN]])}, ("sample 1, chunk 1",)),
        ({"value": torch.tensor([1.0, 2.0]), "valid": torch.tensor([True, False]), "reasons": [None, "content:x"]},
         ("sample 1", "2.0", "not valid")),
        ({"value": torch.tensor([1.0, NAN]), "valid": torch.tensor([True, False])}, ("sample 1", "reason")),
        ({"value": torch.tensor([1.0, NAN]), "valid": torch.tensor([True, False]), "reasons": [None, "dark"]},
         ("'dark'", "content:")),
        ({"value": torch.ones(2), "reasons": ["content:x", None]}, ("sample 0", "content:x")),
        ({"value": torch.ones(2), "reasons": [None]}, ("1 reasons",)),
        ({"value": torch.ones(2), "valid": torch.ones(2)}, ("valid", "float32")),
        ({"value": torch.ones(2), "components": {"part": torch.ones(3)}}, ("'part'", "(3,)")),
    ],
)  # fmt: skip
def test_malformed_scores_are_refused(args, words):
    one_line(lambda: Scores(**args), *words)


def test_a_failure_is_nan_with_a_reason():
    value, valid = torch.tensor([[1.0, NAN], [1.0, 2.0]]), torch.tensor([[True, False], [True, True]])
    scores = Scores(value, valid, ["system:out_of_memory", None], {"part": torch.ones(2)})
    assert scores.reasons[0].startswith("system:") and scores.valid.sum() == 3
    assert Scores(torch.ones(2)).valid.all() and Scores(torch.ones(2)).reasons == [None, None]


@pytest.mark.parametrize(
    "need, field", [("fps", "fps"), ("prompts", "prompts"), ("actions", "actions"), ("cameras", "cameras"),
                    ("groups", "group_ids"), ("chunks", "chunk_starts")]
)  # fmt: skip
def test_a_missing_need_is_refused_before_any_compute(need, field):
    def never(clips):
        raise AssertionError("computed")

    never.needs = {need}
    one_line(lambda: score(FunctionReward(never, "mine", {}), Clips(GOOD)), "'mine'", need, f"Clips({field}=")


def test_granularity_implies_its_need_and_fixes_the_shape():
    reward = FunctionReward(brightness, "mine", {})
    reward.granularity = "chunk"
    one_line(lambda: score(reward, Clips(GOOD)), "chunk_starts")
    one_line(lambda: score(reward, Clips(GOOD, chunk_starts=(0, 2, 3))), "(2,)", "(2, 3)")
    reward.granularity = "group"
    one_line(lambda: score(reward, Clips(GOOD)), "group_ids")
    reward.granularity = "frame"
    one_line(lambda: score(reward, Clips(GOOD)), "'frame'", "clip")
    reward.granularity, reward.needs = "clip", frozenset({"depth"})
    one_line(lambda: score(reward, Clips(GOOD)), "'depth'", "prompts")


def test_score_keeps_no_gradient_and_catches_a_changed_input():
    leaf = frames().requires_grad_()
    assert not score(FunctionReward(brightness, "mine", {}), Clips(leaf)).value.requires_grad

    def insists(clips):
        with torch.enable_grad():
            value = clips.frames.mean((1, 2, 3, 4))
            return Scores(value, components={"a": value}, raw={"b": value}, diagnostics={"c": value})

    out = score(FunctionReward(insists, "mine", {}), Clips(leaf))
    parts = (out.value, out.components["a"], out.raw["b"], out.diagnostics["c"])
    assert not any(part.requires_grad for part in parts)

    def careless(clips):
        return clips.frames.mul_(0.5).mean((1, 2, 3, 4))

    one_line(lambda: score(FunctionReward(careless, "mine", {}), Clips(frames())), "changed the frames")
    with torch.inference_mode():
        score(FunctionReward(brightness, "mine", {}), Clips(frames() * 1))


@pytest.fixture
def plugin(monkeypatch):
    """An importable module with a function, a class and an object, as a user would write them."""
    module = types.ModuleType("my_rewards")

    def scaled(clips, factor=1.0):
        return factor * brightness(clips)

    scaled.needs = ["fps"]

    class Bright:
        name, needs, granularity, value_range = "bright", frozenset(), "clip", (0.0, 1.0)
        licence = hacked_by = ""

        def __init__(self, power):
            self.power = power

        def __call__(self, clips):
            return Scores(brightness(clips) ** self.power)

    module.scaled, module.Bright, module.ready, module.number = scaled, Bright, Bright(1), 3
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    return module


def test_build_takes_a_function_a_class_and_an_object(plugin):
    clips = Clips(GOOD, fps=8)
    expected = brightness(clips)
    function = build("my_rewards:scaled", factor=2.0)
    assert torch.equal(score(function, clips).value, 2 * expected)
    assert function.needs == {"fps"} and function.granularity == "clip"
    assert torch.equal(score(build("my_rewards:Bright", power=2), clips).value, expected**2)
    assert build("my_rewards:ready") is plugin.ready


@pytest.mark.parametrize(
    "target, args, words",
    [
        ("inverse_dynamic", {}, ("unknown", "did you mean 'inverse_dynamics'", "known: ", "module:attribute")),
        ("inverse_dynamics", {"flor": 0.1}, ("'flor'", "did you mean 'floor'", "granularity")),
        ("no_such_module:x", {}, ("no_such_module",)),
        ("my_rewards:scaledd", {}, ("scaledd", "did you mean 'scaled'")),
        ("my_rewards:scaled", {"clips": 1}, ("'clips'", "factor")),
        ("my_rewards:Bright", {}, ("requires power",)),
        ("my_rewards:ready", {"power": 1}, ("takes no arguments", "power")),
        ("my_rewards:number", {}, ("int",)),
    ],
)
def test_build_refuses_in_one_line(plugin, target, args, words):
    one_line(lambda: build(target, **args), *words)


def test_available_names_all_build_or_say_what_they_require():
    assert "inverse_dynamics" in available()
    for name in available():
        required = [k for k, default in arguments(resolve(name)).items() if default is REQUIRED]
        if required:
            one_line(lambda name=name: build(name), name, *required)
        else:
            build(name)


def test_a_function_that_returns_nan_is_an_error_naming_the_sample():
    def broken(clips):
        return torch.tensor([1.0, NAN])

    one_line(lambda: score(FunctionReward(broken, "mine", {}), Clips(GOOD)), "sample 1", "nan")
