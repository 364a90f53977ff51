"""The inverse-dynamics reward: the invariants every reward keeps, the probes it must fail and pass, its arithmetic."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from arvideo_rl.media import read_video, write_video
from arvideo_rl.training import idm
from arvideo_rl.world.dataset import HELD_OUT
from arvideo_rl.world.dataset import Clips as WorldClips
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import sample_scenes
from rewards.contract import Clips, score
from rewards.describe import optional
from rewards.idm_network import load
from rewards.inverse_dynamics import SCORES, SHIPPED, InverseDynamics
from rewards.registry import REQUIRED, arguments, available, build, resolve

FRAMES, CHUNKS = 13, (0, 4, 7, 10)
# test_geometry_scores.py and test_four_d.py: 32 x 32 pixels are too few; test_preference_*.py: networks of their own
GEOMETRIC = {"epipolar", "reprojection", "rerender", "camera_smoothness", "camera_following", "four_d"}
COMPLETE = [name for name in available() if REQUIRED not in arguments(resolve(name)).values()]
VARIANTS = [(name, {}) for name in COMPLETE if name not in GEOMETRIC and not optional(name)]
VARIANTS += [("inverse_dynamics", {"score": s, "granularity": g}) for s in SCORES for g in ("clip", "chunk")]


@pytest.fixture(scope="module")
def clips():
    """Twelve held-out clips, half smooth and half joystick, with everything a reward may ask for."""
    parts = [sample_scenes(range(HELD_OUT + 900, HELD_OUT + 906), FRAMES, style=s) for s in ("smooth", "joystick")]
    pixels = torch.cat([render(p) for p in parts]).clamp(0, 1)
    return Clips(pixels, 8.0, [c for p in parts for c in p.captions], torch.cat([p.actions[:, 1:] for p in parts]),
                 None, torch.arange(12) // 4, CHUNKS)  # fmt: skip


def take(clips, rows):
    return Clips(clips.frames[rows], clips.fps, [clips.prompts[i] for i in rows], clips.actions[rows], None,
                 clips.group_ids[rows], clips.chunk_starts)  # fmt: skip


def blurry(clips):
    """Away from the ceiling, so that scores differ."""
    grain = torch.rand(clips.frames.shape, generator=torch.Generator().manual_seed(3))
    return Clips(clips.frames.lerp(grain, 0.35), clips.fps, clips.prompts, clips.actions, None, clips.group_ids, CHUNKS)


@pytest.mark.parametrize("name, args", VARIANTS)
def test_invariants_of_every_reward(clips, name, args, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward, hard = build(name, **args), blurry(clips)
    before, rng = hard.frames.clone(), torch.random.get_rng_state()
    whole = score(reward, hard)
    assert torch.equal(whole.value, score(reward, hard).value)  # deterministic
    assert torch.equal(rng, torch.random.get_rng_state())  # no global randomness used
    assert torch.equal(before, hard.frames) and not list(tmp_path.iterdir())  # no side effects
    low, high = reward.value_range
    assert ((whole.value >= low) & (whole.value <= high)).all()
    assert whole.value.dtype == torch.float32 and whole.valid.all()

    alone = torch.cat([score(reward, take(hard, [i])).value for i in range(4)])
    torch.testing.assert_close(alone, whole.value[:4], atol=1e-5, rtol=0)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    torch.testing.assert_close(score(reward, take(hard, order)).value, whole.value[order], atol=1e-5, rtol=0)
    assert reward.licence and reward.hacked_by and reward.name


@pytest.mark.parametrize("name, args", [(n, a) for n, a in VARIANTS if "accuracy" not in (a.get("score") or "")])
def test_two_clips_never_score_the_same(clips, name, args):
    value = score(build(name, **args), blurry(clips)).value
    assert len({str(row) for row in value.tolist()}) == len(clips)


@pytest.mark.parametrize("name, args", VARIANTS)
def test_random_clips_stay_in_range_or_are_invalid(name, args):
    dice = torch.Generator().manual_seed(0)
    frames = torch.rand(100, 5, 3, 32, 32, generator=dice)
    clips = Clips(frames, 8.0, ["a red ball"] * 99 + ["x"], torch.randint(0, 6, (100, 4), generator=dice), None,
                  torch.arange(100) // 4, (0, 2, 4))  # fmt: skip
    reward = build(name, **args)
    out = score(reward, clips)
    low, high = reward.value_range
    assert ((out.value >= low) & (out.value <= high))[out.valid].all() and out.valid.any()


@pytest.fixture(scope="module", params=list(SHIPPED))
def shipped(request):
    return InverseDynamics(request.param)


def test_shipped_weights_are_good_and_carry_their_report(shipped):
    report = shipped.report
    assert report["labels"] == ["stay", "turn left", "turn right", "forward", "back"]
    assert report["accuracy"] > 0.985 and report["balanced_accuracy"] > 0.985
    assert report["majority_baseline"] < 0.25 and "train-idm" in report["command"] and report["seconds"] > 0
    confusion = torch.tensor(report["confusion"])
    assert confusion.sum() == report["transitions"]
    assert float(confusion.trace() / confusion.sum()) == pytest.approx(report["accuracy"])
    assert float(shipped.class_frequency.sum()) == pytest.approx(1)


def test_real_clips_reach_the_ceiling(clips, shipped):
    out = score(shipped, clips).components
    assert out["accuracy"].mean() > shipped.report["accuracy"] - 0.02
    assert out["expected_accuracy"].mean() > 0.95 and out["log_likelihood"].mean() > -0.1


def test_what_does_not_obey_scores_at_chance(clips, shipped):
    frames, actions = clips.frames, clips.actions
    real = score(shipped, clips).value

    def scored(frames):
        out = score(shipped, Clips(frames, actions=actions))
        assert (out.value.mean() < real.mean() - 1.0).all()
        return float(out.components["accuracy"].mean())

    share = (actions == 1).float().mean()
    assert scored(frames[:, :1].expand_as(frames)) == pytest.approx(float(share))  # static is read as "stay", always
    assert scored(frames.roll(1, 0)) < 0.4
    shuffle = torch.randperm(FRAMES, generator=torch.Generator().manual_seed(0))
    assert scored(frames[:, shuffle]) < 0.5
    assert scored(torch.full_like(frames, 0.5)) < 0.4


def test_reversed_clips_swap_forward_and_back_and_left_and_right(clips, shipped):
    swap = torch.tensor([0, 1, 3, 2, 5, 4])
    backwards = score(shipped, Clips(clips.frames.flip(1), actions=swap[clips.actions].flip(1)))
    assert backwards.components["accuracy"].mean() > 0.97


def test_appearance_alone_changes_little(clips, shipped):
    for frames in (clips.frames * 0.3, clips.frames.clamp_min(1e-4) ** 0.7, 0.5 + (clips.frames - 0.5) * 0.6):
        assert score(shipped, Clips(frames, actions=clips.actions)).components["accuracy"].mean() > 0.95


def test_chunks_add_up_to_the_clip_and_own_the_changes_into_their_frames(clips):
    hard = blurry(clips)
    for kind in ("log_likelihood", "expected_accuracy", "accuracy"):
        chunk = score(InverseDynamics(score=kind, granularity="chunk"), hard)
        count = chunk.diagnostics["changes_scored"]
        assert count[0].tolist() == [3, 3, 3, 3]  # frames 1-3, 4-6, 7-9, 10-12
        total = (chunk.value * count).sum(1) / count.sum(1)
        torch.testing.assert_close(total, score(InverseDynamics(score=kind), hard).value)
    frames = hard.frames.clone()
    frames[:, 7:] = hard.frames[:, 6:7]  # breaks the changes into frames 7 and later, and no other
    broken = score(InverseDynamics(granularity="chunk"), Clips(frames, actions=hard.actions, chunk_starts=CHUNKS))
    whole = score(InverseDynamics(granularity="chunk"), hard)
    torch.testing.assert_close(broken.value[:, :2], whole.value[:, :2], atol=1e-5, rtol=0)
    assert (broken.value[:, 2:] - whole.value[:, 2:]).abs().mean() > 0.5


def test_the_four_scores_by_hand(clips):
    reward = InverseDynamics(floor=0.2)
    hard = blurry(clips)
    hard = Clips(hard.frames, actions=hard.actions.roll(1, 0))  # mostly disobeyed, so that the floor counts
    p = reward.logits(hard.frames).softmax(-1)
    out = score(reward, hard).components
    rarity = 1 / reward.class_frequency
    for b in range(3):
        told = [int(a) - 1 for a in hard.actions[b]]
        chosen = [float(p[b, i, c]) for i, c in enumerate(told)]
        hits = [float(p[b, i].argmax() == c) for i, c in enumerate(told)]
        weight = [float(rarity[c]) for c in told]
        expect = {
            "log_likelihood": sum(math.log(max(q, 0.2)) for q in chosen) / len(told),
            "expected_accuracy": sum(chosen) / len(told),
            "accuracy": sum(hits) / len(told),
            "balanced_accuracy": sum(w * h for w, h in zip(weight, hits, strict=True)) / sum(weight),
        }
        for name, value in expect.items():
            assert float(out[name][b]) == pytest.approx(value, abs=1e-5), name


def test_balanced_accuracy_weighs_a_rare_action_more(clips):
    reward = InverseDynamics(score="balanced_accuracy")
    rare = {"class_frequency": torch.tensor([0.9, 0.025, 0.025, 0.025, 0.025])}
    reward._loaded = replace(reward._loaded, beside=rare)
    static = clips.frames[:1, :1].expand(-1, 3, -1, -1, -1)
    out = score(reward, Clips(static, actions=torch.tensor([[1, 4]]))).components  # "stay" is hit, "forward" missed
    assert float(out["accuracy"]) == 0.5
    assert float(out["balanced_accuracy"]) == pytest.approx((1 / 0.9) / (1 / 0.9 + 1 / 0.025))


def test_null_commands_are_not_scored(clips):
    actions = clips.actions.clone()
    actions[0] = 0
    actions[1, 3:] = 0
    out = score(InverseDynamics(), Clips(clips.frames, actions=actions))
    assert out.value[0].isnan() and out.reasons[:2] == ["content:no_actions", None]
    short = score(InverseDynamics(), Clips(clips.frames[1:2, :4], actions=actions[1:2, :3]))
    torch.testing.assert_close(out.value[1:2], short.value, atol=1e-5, rtol=0)
    chunk = score(InverseDynamics(granularity="chunk"), Clips(clips.frames, actions=actions, chunk_starts=CHUNKS))
    assert chunk.valid[1].tolist() == [True, False, False, False] and chunk.reasons[1] == "content:no_actions"
    still = score(InverseDynamics(), Clips(clips.frames[:, :1], actions=actions[:, :0]))
    assert still.reasons == ["content:no_actions"] * 12


def test_gradients_reach_the_frames_and_skip_unscored_clips(clips):
    actions = clips.actions[:2].clone()
    actions[0] = 0
    frames = clips.frames[:2].lerp(clips.frames[2:4], 0.3).requires_grad_()
    out = InverseDynamics()(Clips(frames, actions=actions))
    out.value[out.valid].sum().backward()
    assert frames.grad.isfinite().all() and frames.grad[1].abs().sum() > 0 and frames.grad[0].abs().sum() == 0


def test_features_have_a_reference_for_frechet_distances(clips, shipped):
    with torch.no_grad():
        features = shipped.features(clips.frames)
    mean, cov = shipped.frechet_reference
    assert features.shape == (12, FRAMES - 1, 64) and mean.shape == (64,) and cov.shape == (64, 64)
    assert mean.dtype == torch.float64 and torch.allclose(cov, cov.T)
    spread = cov.diagonal().sum().sqrt()
    assert (features.flatten(0, 1).double().mean(0) - mean).norm() < 0.5 * spread
    with torch.no_grad():
        static = shipped.features(clips.frames[:, :1].expand(-1, 3, -1, -1, -1)).flatten(0, 1).double().mean(0)
    assert (static - mean).norm() > (features.flatten(0, 1).double().mean(0) - mean).norm() * 2


def test_larger_frames_are_reduced():
    scenes = sample_scenes([HELD_OUT + 950], 6, style="joystick")
    actions = scenes.actions[:, 1:]
    large = score(InverseDynamics(), Clips(render(scenes, 64).clamp(0, 1), actions=actions))
    small = score(InverseDynamics(), Clips(render(scenes, 32).clamp(0, 1), actions=actions))
    assert float(large.components["accuracy"]) == float(small.components["accuracy"]) == 1
    stripes = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(32).expand(1, 2, 3, 128, 128)
    reduced = InverseDynamics()._loaded._resized(stripes)
    assert (reduced[..., 1:-1] - 0.5).abs().max() < 0.05  # every pixel counts: no aliasing


def test_an_mp4_scores_as_the_frames_it_was_made_from(clips, tmp_path):
    """Within .02 in accuracy and .05 in log-likelihood, at the quality videos are written with."""
    read = torch.stack([read_video(write_video(tmp_path / "a.mp4", x, 8))[0] for x in clips.frames])
    coded = score(InverseDynamics(), Clips(read, actions=clips.actions)).components
    plain = score(InverseDynamics(), clips).components
    assert not torch.equal(read, clips.frames)
    assert (coded["accuracy"].mean() - plain["accuracy"].mean()).abs() < 0.02
    assert (coded["log_likelihood"].mean() - plain["log_likelihood"].mean()).abs() < 0.05


@pytest.mark.parametrize(
    "args, words",
    [
        ({"score": "f1"}, ("'f1'", "log_likelihood")),
        ({"granularity": "group"}, ("'group'", "clip or chunk")),
        ({"floor": 0}, ("floor is 0",)),
        ({"floor": 1.0}, ("floor is 1.0",)),
    ],
)
def test_wrong_options_are_refused(args, words):
    with pytest.raises(ValueError) as error:
        InverseDynamics(**args)
    assert all(word in str(error.value) for word in words)


def test_wrong_clips_are_refused(clips):
    reward = InverseDynamics()
    actions = clips.actions.clone()
    actions[3, 2] = 6
    with pytest.raises(ValueError, match=r"action 6 of clip 3 at change 2 is not in 0\.\.5"):
        score(reward, Clips(clips.frames, actions=actions))
    with pytest.raises(ValueError, match="16x32"):
        score(reward, Clips(clips.frames[:, :, :, :16].contiguous(), actions=clips.actions))
    with pytest.raises(ValueError, match="16x16"):
        score(reward, Clips(clips.frames[:, :, :, :16, :16].contiguous(), actions=clips.actions))
    with pytest.raises(ValueError, match="needs actions"):
        score(reward, Clips(clips.frames))
    with pytest.raises(ValueError, match="chunk_starts"):
        score(InverseDynamics(granularity="chunk"), Clips(clips.frames, actions=clips.actions))


def test_weights_are_lazy_and_strict(tmp_path):
    missing = InverseDynamics(tmp_path / "none.safetensors")  # nothing is read yet
    with pytest.raises(ValueError, match=r"none\.safetensors.*shipped: idm, idm_heldout"):
        missing.report  # noqa: B018
    tensors = load_file(SHIPPED["idm"])
    with safe_open(str(SHIPPED["idm"]), "pt") as file:
        header = file.metadata()
    variants = {
        "a tensor too few": ({k: v for k, v in tensors.items() if k != "head.bias"}, header, "head.bias"),
        "a tensor too many": (tensors | {"tail.bias": torch.ones(1)}, header, "tail.bias"),
        "no reference": ({k: v for k, v in tensors.items() if k != "frechet.cov"}, header, "not such a file"),
        "no report": (tensors, None, "not such a file"),
    }
    for name, (content, metadata, word) in variants.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(content, str(path), metadata)
        with pytest.raises(ValueError, match=word) as error:
            load(path)
        assert "\n" not in str(error.value)
    (tmp_path / "text.safetensors").write_text("not weights")
    with pytest.raises(ValueError, match="cannot read weights"):
        load(tmp_path / "text.safetensors")


def world_clips(count=6, frames=12):
    scenes = sample_scenes(range(count), frames, style="joystick")
    pixels = (render(scenes, supersample=1).clamp(0, 1) * 255).to(torch.uint8).numpy()
    return WorldClips(pixels, scenes.captions, scenes.actions)


def test_pairs_are_labelled_by_what_the_camera_did():
    clips = world_clips()
    pairs, target = idm.sample_pairs(clips, 200, np.random.default_rng(0), 0.0)
    assert pairs.shape == (200, 2, 3, 32, 32) and (target.max(1).values == 1).all()
    read = score(InverseDynamics(), Clips(pairs, actions=target.argmax(1)[:, None] + 1))
    assert read.components["accuracy"].mean() > 0.95  # labels agree with an independent reader
    _, odd = idm.sample_pairs(clips, 400, np.random.default_rng(0), 0.999)
    uniform = (odd == 0.2).all(1).float().mean()
    assert 0.5 < uniform < 1 and torch.allclose(odd.sum(1), torch.ones(400))


@pytest.mark.parametrize("kind", idm.AUGMENTS)
def test_disturbing_keeps_range_meaning_and_global_rng(kind):
    pairs, target = idm.sample_pairs(world_clips(), 128, np.random.default_rng(0), 0.0)
    rng = torch.random.get_rng_state()
    out, told = idm.disturb(pairs, target, idm.AUGMENTS[kind], torch.Generator().manual_seed(0))
    assert torch.equal(rng, torch.random.get_rng_state())
    assert out.min() >= 0 and out.max() <= 1 and (out != pairs).flatten(1).any(1).float().mean() > 0.9
    turned = float((told != target).any(1).float().mean())  # half are turned; for some actions that changes nothing
    assert turned == 0 if kind.startswith("own") else 0.1 < turned < 0.6
    read = score(InverseDynamics(), Clips(out, actions=told.argmax(1)[:, None] + 1))
    assert read.components["accuracy"].mean() > 0.9  # so pixels and labels were turned together


def test_training_learns_repeats_and_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(idm, "load_clips", lambda first, count, **k: world_clips(count, k["frames"]))
    config = idm.IdmConfig(out=str(tmp_path / "a.safetensors"), steps=30, batch=64, smooth=4, joystick=4,
                           held_out_smooth=3, held_out_joystick=3, frames=8)  # fmt: skip
    rng = torch.random.get_rng_state()
    report = idm.run(config)
    assert torch.equal(rng, torch.random.get_rng_state())
    assert report["log_likelihood"] > math.log(0.2) + 0.05 and (tmp_path / "a.json").exists()
    first = InverseDynamics(tmp_path / "a.safetensors")
    assert first.report == report
    config.out = str(tmp_path / "b.safetensors")
    idm.run(config)
    again = load_file(tmp_path / "b.safetensors")
    assert all(torch.equal(v, again[k]) for k, v in load_file(tmp_path / "a.safetensors").items())
    both = idm.run(replace(config, members=2, steps=10))
    assert len(load(tmp_path / "b.safetensors").nets) == 2 and 0 < both["disagreement_95"] < math.log(2)


@pytest.mark.parametrize(
    "args, words",
    [
        ({"augment": "strong"}, ("strong", "main, other")),
        ({"out": "a.pt"}, ("a.pt", ".safetensors")),
        ({"steps": 0}, ("steps=0",)),
        ({"unexplained": 1.0}, ("unexplained=1.0",)),
        ({"frames": 5}, ("frames=5",)),
    ],
)
def test_wrong_training_settings_are_refused(args, words):
    with pytest.raises(ValueError) as error:
        idm.run(idm.IdmConfig(**args))
    assert all(word in str(error.value) for word in words)
