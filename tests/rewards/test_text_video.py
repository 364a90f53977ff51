"""The text-video reward: what it must tell apart, what it refuses, and how words become one number."""

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from arvideo_rl.config import load as read_config
from arvideo_rl.training.text_video import TextVideoConfig
from arvideo_rl.world.captions import Shown, caption_of
from arvideo_rl.world.dataset import HELD_OUT
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import Object, sample_scenes
from rewards.contract import Clips, score, score_with_grad
from rewards.describe import describe
from rewards.registry import build
from rewards.text_video import LENGTH, SHIPPED, WINDOW, TextVideo, load

FRAMES, COUNT = 12, 24


@pytest.fixture(scope="module")
def world():
    """Held-out scenes: (frames, objects); prompts speak of the objects only."""
    scenes = sample_scenes(range(HELD_OUT + 2000, HELD_OUT + 2000 + COUNT), FRAMES, style="joystick")
    return render(scenes).clamp(0, 1), scenes.objects


def say(objects):
    return [caption_of(Shown(o, ())) for o in objects]


@pytest.fixture(scope="module", params=list(SHIPPED))
def shipped(request):
    return TextVideo(request.param)


def value(reward, frames, prompts):
    return score(reward, Clips(frames, prompts=prompts)).value


def test_right_captions_beat_those_of_other_scenes(world, shipped):
    frames, objects = world
    prompts = say(objects)
    right, wrong = value(shipped, frames, prompts), value(shipped, frames, prompts[1:] + prompts[:1])
    differ = torch.tensor([a != b for a, b in zip(prompts, prompts[1:] + prompts[:1])])
    above = (right[:, None] > wrong[None, differ]).float().mean()
    assert above > 0.9 and (right > wrong)[differ].float().mean() > 0.9


@pytest.mark.parametrize("attribute", ["colour", "shape", "motion"])
def test_the_wrong_word_is_the_one_found(world, shipped, attribute):
    """Exchanged in the prompt, an attribute's own component falls, in nearly every clip."""
    frames, objects = world
    other = {"red": "green", "green": "blue", "blue": "yellow", "yellow": "red",
             "left": "right", "right": "left", "rest": "right", "bounce": "left",
             "ball": "cube", "cube": "ball"}  # fmt: skip
    single = [i for i, o in enumerate(objects) if len(o) == 1]
    told = [(Object(**(vars(objects[i][0]) | {attribute: other[getattr(objects[i][0], attribute)]})),) for i in single]
    right = score(shipped, Clips(frames[single], prompts=say([objects[i] for i in single]))).components[attribute]
    wrong = score(shipped, Clips(frames[single], prompts=say(told))).components[attribute]
    assert (right > wrong).float().mean() > 0.85


def test_what_shows_nothing_scores_low(world, shipped):
    frames, objects = world
    prompts, real = say(objects), value(shipped, frames, say(objects)).mean()
    colour = torch.tensor({"red": (0.9, 0.13, 0.1), "green": (0.12, 0.72, 0.18), "blue": (0.13, 0.28, 0.92),
                           "yellow": (0.95, 0.83, 0.08)}[objects[0][0].colour])[:, None, None]  # fmt: skip
    painted = colour.expand(COUNT, FRAMES, 3, 32, 32).contiguous()
    for seen in (torch.full_like(frames, 0.5), painted):
        assert value(shipped, seen, prompts).mean() < 0.5 * real


def test_attributes_are_read_off_the_prompt():
    reward = TextVideo()

    def kinds(prompt):
        tokens, found = reward.read(prompt)
        words = ["", *prompt.lower().replace(",", "").split()]
        assert len(tokens) == len(found) == len(words)
        return {f"{i}{w}": reward.names[k] for i, (w, k) in enumerate(zip(words, found)) if k >= 0}

    assert kinds("A red ball rolls left, and a blue cube rests") == {
        "0": "count", "2red": "colour", "3ball": "shape", "4rolls": "motion", "5left": "motion", "8blue": "colour",
        "9cube": "shape", "10rests": "motion"}  # fmt: skip
    camera = kinds("the camera turns left then moves forward")
    assert set(camera.values()) == {"camera"} and len(camera) == 4  # and "left" says nothing of an object here


@pytest.mark.parametrize(
    "prompt, says",
    [
        ("a purple ball rests", "system: prompt word 'purple' is unknown to this model"),
        ("a red bal rests", "near: ball"),
        ("", "system: the prompt has 0 words"),
        ("red " * (LENGTH + 1), f"1 to {LENGTH}"),
        ("the camera", "system: the prompt says nothing of what counts"),
    ],
)
def test_a_prompt_it_cannot_read_is_no_number_and_no_fault_of_the_clip(world, prompt, says):
    frames, objects = world
    out = score(TextVideo(), Clips(frames[:2], prompts=[prompt, say(objects)[1]]))
    assert out.value[0].isnan() and out.value[1] >= 0 and says in out.reasons[0] and out.reasons[1] is None
    assert out.reasons[0].startswith("system:")
    torch.testing.assert_close(out.value[1:], value(TextVideo(), frames[1:2], say(objects)[1:2]), atol=1e-5, rtol=0)


def test_two_frames_are_too_few(world):
    frames, objects = world
    out = score(TextVideo(), Clips(frames[:, :2].contiguous(), prompts=say(objects)))
    assert out.reasons == ["content: 2 frames; motion shows in 3 or more"] * COUNT and out.value.isnan().all()
    assert not value(TextVideo(), frames[:, :3].contiguous(), say(objects)).isnan().any()


def test_the_three_scores_by_hand(world):
    frames, objects = world
    prompts = say(objects)[:4]
    reward = TextVideo()
    read = [reward.read(p) for p in prompts]
    tokens = torch.tensor([r[0] + [0] * (1 + LENGTH - len(r[0])) for r in read])
    p = reward.probabilities(frames[:4], tokens)
    for how in ("mean", "geometric", "product"):
        got = value(TextVideo(score=how), frames[:4], prompts)
        for i, (_, kinds) in enumerate(read):
            q = [float(p[i, j]) for j, k in enumerate(kinds) if k >= 0]
            whole = {"mean": sum(q) / len(q), "geometric": math.prod(q) ** (1 / len(q)), "product": math.prod(q)}[how]
            assert float(got[i]) == pytest.approx(whole, rel=1e-4), how
    parts = score(TextVideo(attributes=["colour", "shape"]), Clips(frames[:4], prompts=prompts))
    for i, (_, kinds) in enumerate(read):
        q = [float(p[i, j]) for j, k in enumerate(kinds) if k in (0, 1)]
        assert float(parts.value[i]) == pytest.approx(sum(q) / len(q), rel=1e-4)


def test_long_clips_are_read_in_windows_to_their_end(world):
    frames, objects = world
    prompts = say(objects)[:3]
    long = torch.cat([frames[:3]] * 3, 1)[:, :30]
    whole = value(TextVideo(), long, prompts)
    parts = [value(TextVideo(), long[:, s : s + WINDOW].contiguous(), prompts) for s in (0, 30 - WINDOW)]
    torch.testing.assert_close(whole, sum(parts) / 2, atol=1e-5, rtol=0)
    exact = long[:, :WINDOW].contiguous()
    torch.testing.assert_close(value(TextVideo(), exact, prompts), parts[0], atol=1e-5, rtol=0)


def test_gradients_reach_the_frames(world):
    frames, objects = world
    leaf = frames[:2].clone().requires_grad_()
    value = score_with_grad(build("text_video"), Clips(leaf, prompts=["a purple ball rests", say(objects)[1]]))
    assert value[0].isnan()
    value[1].backward()
    assert leaf.grad.isfinite().all() and leaf.grad[1].abs().sum() > 0 and leaf.grad[0].abs().sum() == 0


def test_larger_frames_are_reduced_and_odd_ones_refused():
    scenes = sample_scenes([HELD_OUT + 2100, HELD_OUT + 2101], 9)
    prompts = say(scenes.objects)
    small, large = (value(TextVideo(), render(scenes, n).clamp(0, 1), prompts) for n in (32, 64))
    torch.testing.assert_close(small, large, atol=0.1, rtol=0)
    with pytest.raises(ValueError, match="16x32"):
        value(TextVideo(), torch.rand(2, 9, 3, 16, 32), prompts)


@pytest.mark.parametrize(
    "args, words",
    [
        ({"score": "sum"}, ("'sum'", "mean, geometric, product")),
        ({"attributes": ["hue"]}, ("'hue'", "colour", "count")),
    ],
)
def test_wrong_options_are_refused(args, words, world):
    with pytest.raises(ValueError) as error:
        value(build("text_video", **args), world[0], say(world[1]))
    assert all(w in str(error.value) for w in words) and "\n" not in str(error.value)


def test_shipped_weights_carry_their_report_and_are_small(shipped):
    report = shipped.report
    assert "train-text-video" in report["command"] and report["seconds"] > 0
    for style in ("smooth", "joystick"):
        assert report["auroc"][style]["another scene's"]["auroc"] > 0.95
    assert shipped.path.stat().st_size < 3e6
    assert sum(p.numel() for p in shipped.net.parameters()) < 1.5e6


def test_the_two_models_were_made_by_their_commands_on_different_halves_and_seeds():
    made = [TextVideo(n).report["config"] for n in SHIPPED]
    assert {c["half"] for c in made} == {0, 1} and made[0]["seed"] != made[1]["seed"]
    for (path, command), config in zip(TextVideo.files.items(), made):
        told = vars(read_config(TextVideoConfig, None, command.split()[3:]))
        assert told | {"out": ""} == config | {"out": ""} and Path(told["out"]) == path


def test_the_formula_follows_the_options():
    assert "geometric mean" in describe("text_video", score="geometric")["formula"]
    assert "words of shape" in describe("text_video", attributes=["shape"])["formula"]


def test_weights_are_lazy_and_strict(tmp_path):
    missing = TextVideo(tmp_path / "none.safetensors")  # nothing is read yet
    with pytest.raises(ValueError, match=r"none\.safetensors.*shipped: text_video, text_video_heldout"):
        missing.prepare()
    tensors = load_file(SHIPPED["text_video"])
    with safe_open(str(SHIPPED["text_video"]), "pt") as file:
        header = file.metadata()
    variants = {
        "a tensor too few": ({k: v for k, v in tensors.items() if k != "spot.bias"}, header, "spot.bias"),
        "a tensor too many": (tensors | {"tail.bias": torch.ones(1)}, header, "tail.bias"),
        "no report": (tensors, None, "train-text-video"),
    }
    for name, (content, metadata, word) in variants.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(content, str(path), metadata)
        with pytest.raises(ValueError, match=word) as error:
            load(path)
        assert "\n" not in str(error.value)
