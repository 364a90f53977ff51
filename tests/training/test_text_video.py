"""Training of the text-video model: what it is shown, that it learns, and that it repeats."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.training import text_video as tv
from arvideo_rl.training.settings import AlignConfig, Part, check
from arvideo_rl.world.dataset import to_uint8
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import WORDS, sample_scenes
from rewards.inverse_dynamics import InverseDynamics
from rewards.text_video import PADDING, WHOLE, TextVideo


def some(count=8, frames=10, first=0):
    scenes = sample_scenes(range(first, first + count), frames)
    return tv.Clips(to_uint8(render(scenes, supersample=1).clamp(0, 1)), scenes.objects, scenes.actions.numpy())


def test_a_batch_asks_of_every_caption_what_could_be_otherwise():
    frames, tokens, target, _ = tv.sample_batch(some(), 8, np.random.default_rng(0))
    n, t = frames.shape[:2]
    assert n == 8 and tv.SHORTEST <= t <= 10 and frames.shape[2:] == (3, 32, 32)
    assert 0 <= frames.min() <= frames.max() <= 1
    assert tokens.shape == target.shape == (8, tv.CAPTIONS, tokens.shape[-1])
    assert (tokens[..., 0] == WHOLE).all() and not target[..., 0].isnan().any()
    assert target[tokens == PADDING].isnan().all()
    asked = {w for names in tv.ALTERNATIVES.values() for w in names}
    for word in WORDS:
        found = target[tokens == tv.TOKEN[word]]
        assert bool(found.isnan().all()) == (word not in asked), word
    assert target[:, 0].nanmean() > target[:, 1:].nanmean() + 0.15  # the first tells what is so


def test_frozen_cut_and_painted_clips_are_judged_as_what_they_are():
    clips, draw = some(16), np.random.default_rng(1)
    soft = painted = frozen = 0
    for _ in range(12):
        frames, _, target, actions = tv.sample_batch(clips, 16, draw)
        truth = target[:, 0]
        soft += int(((truth > 0.05) & (truth < 0.95)).any(1).sum())
        painted += int((torch.nan_to_num(truth).sum(1) == 0).sum())
        still = (frames[:, 1:] == frames[:, :-1]).flatten(1).all(1)
        frozen += int(still.sum())
        assert (actions[still] <= 1).all()
    assert min(soft, painted, frozen) > 0


def test_actions_are_those_of_what_is_seen():
    """Read off by the inverse-dynamics network, in mirrors and backwards, too; cuts and paint show none."""
    judge, draw = InverseDynamics(), np.random.default_rng(2)
    clips = some(32)
    frames, _, _, actions = tv.sample_batch(clips, 32, draw)
    seen = judge.logits(frames).argmax(-1) + 1
    told = actions > 0
    assert (seen == actions)[told].float().mean() > 0.97 and 0.8 < told.float().mean() < 1


def test_disturbing_keeps_range_length_and_the_global_random_state():
    frames = torch.from_numpy(some().pixels).float() / 255
    before = torch.random.get_rng_state()
    out = tv.disturb(frames, torch.Generator().manual_seed(0))
    assert out.shape == frames.shape and out.min() >= 0 and out.max() <= 1
    assert (out != frames).flatten(1).any(1).float().mean() > 0.9
    assert torch.equal(before, torch.random.get_rng_state())
    torch.testing.assert_close(tv.disturb(frames, torch.Generator(), strength=0.0), frames)


def test_scenes_that_lack_an_object_neither_show_nor_list_it():
    clips, scenes = tv.lacking_clips(3, 6, 9, False), sample_scenes(range(3, 9), 9)
    assert clips.objects == tuple(o[1:] for o in scenes.objects)
    full = to_uint8(render(scenes))
    assert (clips.pixels != full).reshape(6, -1).any(1).all()


def test_auroc_by_hand():
    assert tv.auroc(torch.tensor([3.0, 1.0]), torch.tensor([2.0, 1.0])) == pytest.approx((1 + 1 + 0 + 0.5) / 4)


def test_training_learns_repeats_and_writes(tmp_path, monkeypatch):
    made = {}

    def pixels(first, count, *, frames, style, progress):
        key = (first, count, frames, style)
        if key not in made:
            scenes = sample_scenes(range(first, first + count), frames, style=style)
            made[key] = to_uint8(render(scenes, supersample=1).clamp(0, 1))
        return type("Rendered", (), {"pixels": made[key]})

    monkeypatch.setattr(tv, "load_pixels", pixels)
    config = tv.TextVideoConfig(out=str(tmp_path / "a.safetensors"), steps=12, batch=8, smooth=8, joystick=4, lacking=2,
                                held_out=4, frames=9)  # fmt: skip
    before = torch.random.get_rng_state()
    report = tv.run(config)
    assert torch.equal(before, torch.random.get_rng_state())
    assert TextVideo(config.out).report == report and (tmp_path / "a.json").exists()
    assert set(report["auroc"]) == set(report["probes"]) == {"smooth", "joystick"}
    assert all(0 <= v["auroc"] <= 1 for v in report["auroc"]["smooth"].values())
    config.out = str(tmp_path / "b.safetensors")
    tv.run(config)
    again = load_file(config.out)
    assert all(torch.equal(v, again[k]) for k, v in load_file(tmp_path / "a.safetensors").items())


@pytest.mark.slow
def test_a_short_training_finds_colours():
    """Two minutes: the loss falls well below that of the base rate, and colours are told from others."""
    net = tv.train_text_video([some(256), some(64, first=900)], seed=0, steps=400)
    frames, tokens, target, _ = tv.sample_batch(some(64, first=5000), 64, np.random.default_rng(5))
    with torch.no_grad():
        p = net(frames, tokens, ~target.isnan()).sigmoid()
    named = torch.isin(tokens, torch.tensor([tv.TOKEN[c] for c in tv.COLOURS]))
    right, wrong = p[named & (target == 1)], p[named & (target == 0)]
    assert tv.auroc(right, wrong) > 0.8


@pytest.mark.parametrize(
    "args, words",
    [
        ({"out": "a.pt"}, ("a.pt", ".safetensors")),
        ({"steps": 0}, ("steps=0",)),
        ({"half": 2}, ("half=2",)),
        ({"frames": 19}, ("frames=19",)),
        ({"smooth": 1}, ("smooth=1",)),
    ],
)
def test_wrong_training_settings_are_refused(args, words):
    with pytest.raises(ValueError) as error:
        tv.run(tv.TextVideoConfig(**args))
    assert all(word in str(error.value) for word in words)


def test_the_judge_is_not_trained_on():
    config = AlignConfig(rewards={"prompt": Part("text_video", args={"weights": "text_video_heldout"})})
    config.objective = Part("nft")
    with pytest.raises(ValueError, match="text_video_heldout: that model only judges; give it held_out=true"):
        check(config, 3, 1)
    judge = Part("text_video", 1.0, {"weights": "text_video_heldout"}, held_out=True)
    config.rewards = {"prompt": Part("text_video"), "other": judge}
    check(config, 3, 1)
