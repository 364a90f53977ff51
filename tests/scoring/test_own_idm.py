"""The inverse-dynamics model on somebody's own videos: names, numbers, VPT's recordings; how far it can be trusted."""

import json
import math

import cv2
import numpy as np
import pytest
import torch

from arvideo_rl.cli.main import main
from arvideo_rl.config import ConfigError
from arvideo_rl.media import write_video
from arvideo_rl.scoring import own_idm, score_videos, vpt
from arvideo_rl.training.idm import IdmConfig
from arvideo_rl.training.prompts import list_actions
from rewards.contract import Clips, score
from rewards.idm_network import load
from rewards.inverse_dynamics import InverseDynamics

STEPS = {"Left": -3, "wait": 0, "right": 3}  # pixels a frame by which a texture moves
FRAMES, COUNT = 12, 15


def film(folder, index, moves, fps=8):
    """A texture that moves; 24 x 32 pixels, so that it is stretched."""
    dice = np.random.default_rng(index)
    wide = cv2.GaussianBlur(dice.random((24, 160, 3), np.float32), (0, 0), 2)
    wide = (wide - wide.min()) / (wide.max() - wide.min())
    at = 64 + np.concatenate([[0], np.cumsum(moves)]).astype(int)
    pixels = torch.from_numpy(np.stack([wide[:, a : a + 32] for a in at])).permute(0, 3, 1, 2).contiguous()
    write_video(folder / f"{index:02d}.mp4", pixels, fps)
    return pixels


def videos(folder, say, seed=0):
    """COUNT videos, beside each what ``say`` makes of its moves."""
    folder.mkdir()
    dice = np.random.default_rng(seed)
    for i in range(COUNT):
        moves = dice.choice([*STEPS.values()], FRAMES - 1)
        film(folder, i, moves)
        (folder / f"{i:02d}.mp4.json").write_text(json.dumps({"actions": say(moves)}))
    return folder


def names(moves):
    return [next(n for n, s in STEPS.items() if s == m) for m in moves]


def train(folder, out, **settings):
    config = IdmConfig(**({"steps": 120, "batch": 32, "size": 24} | settings), data=str(folder), out=str(out))
    config.check()
    return own_idm.run(config)


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """(folder, weights of an ensemble of two, its report)."""
    top = tmp_path_factory.mktemp("named")
    folder = videos(top / "clips", names)
    return folder, top / "own.safetensors", train(folder, top / "own.safetensors", members=2)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """The same with numbers, the second of which never changes."""
    top = tmp_path_factory.mktemp("numbered")
    folder = videos(top / "clips", lambda moves: [[float(m), 0.5] for m in moves])
    return folder, top / "own.safetensors", train(folder, top / "own.safetensors")


def test_names_are_learned_and_what_was_measured_is_said(named):
    _, path, report = named
    assert report["kind"] == "discrete" and report["labels"] == ["left", "right", "wait"] and report["size"] == 24
    assert report["trust"] == report["accuracy"] > 0.9 and report["majority_baseline"] < 0.6
    assert np.sum(report["confusion"]) == report["transitions"] == 3 * (FRAMES - 1) and len(report["held_out"]) == 3
    probes = report["probes"]
    assert probes["real"] == report["ceiling"] > 0.8
    assert max(v for k, v in probes.items() if k != "real") < 0.65
    assert json.loads(path.with_suffix(".json").read_text())["trust"] == report["trust"]
    said = [line for line in own_idm.said(report) if "warning" in line]
    assert len(said) == 1 and "is of 3 held-out videos: doubtful=refuse would be a guess" in said[0]
    held_out = score_videos(report["held_out"], "inverse_dynamics",
                            args={"weights": str(path), "score": "expected_accuracy"})  # fmt: skip
    assert held_out.summary["inverse_dynamics"]["mean"] == pytest.approx(report["ceiling"], abs=5e-3)


def test_a_shell_scores_with_it_by_the_same_names(named, tmp_path):
    folder, path, _ = named
    args = {"weights": str(path), "score": "accuracy"}
    right = score_videos(folder, "inverse_dynamics", args=args)
    assert right.summary["inverse_dynamics"]["scored"] == COUNT and right.summary["inverse_dynamics"]["mean"] > 0.9
    assert all({"disagreement", "doubt"} <= row["components"].keys() for row in right.rows)
    wrong = score_videos(folder, "inverse_dynamics", args=args, actions="RIGHT*11")
    assert wrong.summary["inverse_dynamics"]["mean"] < 0.5
    with pytest.raises(ValueError, match="'jump' is unknown; choose from: null, left, right, wait"):
        score_videos(folder, "inverse_dynamics", args=args, actions="jump*3")
    manifest = tmp_path / "m.jsonl"
    manifest.write_text(json.dumps({"path": str(folder / "00.mp4"), "actions": ["jump"]}))
    (row,) = score_videos(manifest, "inverse_dynamics", args=args).rows
    assert row["reason"] == "input:actions" and "'jump' is unknown" in row["detail"]


def test_numbers_are_learned_and_one_that_never_changes_is_left_out(numbered):
    _, path, report = numbered
    assert report["kind"] == "continuous" and report["r2"]["number 1"] is None and report["r2"]["number 0"] > 0.4
    assert report["trust"] == pytest.approx(report["r2"]["number 0"], abs=1e-4)
    assert report["ceiling"] > report["mean_baseline"] + 0.2
    assert any("never changed" in line and "number 1" in line for line in own_idm.said(report))
    args = {"weights": str(path), "score": "closeness"}
    right = score_videos(report["held_out"], "inverse_dynamics", args=args).summary["inverse_dynamics"]
    assert right["mean"] == pytest.approx(report["ceiling"], abs=5e-3) and right["scored"] == 3


def test_closeness_is_its_formula(numbered):
    reward = InverseDynamics(numbered[1], "closeness")
    frames = torch.rand(2, 3, 3, 24, 24, generator=torch.Generator().manual_seed(0))
    actions = torch.tensor([[[1.0, 9.0], [-2.0, 9.0]], [[math.nan, 0.0], [3.0, 0.0]]])
    out = score(reward, Clips(frames, actions=actions))
    read, deviation = out.raw["predicted"][..., 0], float(load(numbered[1]).beside["action_std"][0])
    close = (-((read - actions[..., 0]) ** 2) / (2 * (0.5 * deviation) ** 2)).exp()
    torch.testing.assert_close(out.value, torch.stack([close[0].mean(), close[1, 1]]), atol=1e-5, rtol=0)


def test_networks_that_disagree_are_seen_and_can_be_refused(named):
    noise = torch.rand(40, 6, 3, 24, 24, generator=torch.Generator().manual_seed(1))
    clips = Clips(noise, actions=torch.full((40, 5), 2))
    mean, least = (score(InverseDynamics(named[1], combine=c), clips) for c in ("mean", "min"))
    assert (least.value <= mean.value + 1e-6).all() and (least.value < mean.value - 1e-3).any()
    nets = load(named[1]).nets
    apart = [net(noise[:, :-1].flatten(0, 1), noise[:, 1:].flatten(0, 1)).softmax(-1) for net in nets]
    middle = (apart[0] + apart[1]) / 2
    js = sum((p * (p / middle).log()).sum(-1) for p in apart).view(40, 5).mean(1) / 2
    torch.testing.assert_close(mean.components["disagreement"], js, atol=1e-5, rtol=1e-4)
    limit = named[2]["disagreement_95"]
    doubt = js > limit
    assert 0 < limit < 1 and torch.equal(mean.components["doubt"], doubt.float()) and doubt.any()
    refused = score(InverseDynamics(named[1], doubtful="refuse"), clips)
    assert torch.equal(refused.value.isnan(), doubt) and refused.reasons.count("content:doubtful") == int(doubt.sum())


def test_frames_are_stretched_as_opencv_does(named):
    frames = torch.randint(0, 256, (1, 2, 40, 56, 3), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    small = load(named[1])._resized(frames.permute(0, 1, 4, 2, 3).float() / 255)
    expected = np.stack([cv2.resize(f, (24, 24), interpolation=cv2.INTER_LINEAR) for f in frames[0].numpy()])
    assert (small[0].permute(0, 2, 3, 1) * 255 - torch.from_numpy(expected)).abs().max() < 1.5


def test_what_the_weights_do_not_read_is_refused(named, numbered):
    frames = torch.rand(1, 3, 3, 24, 24)
    with pytest.raises(ValueError, match="reads continuous actions; set score to closeness"):
        score(InverseDynamics(numbered[1]), Clips(frames, actions=torch.zeros(1, 2, 2)))
    with pytest.raises(ValueError, match="reads 2 numbers a change: number 0, number 1"):
        score(InverseDynamics(numbered[1], "closeness"), Clips(frames, actions=torch.zeros(1, 2, 3)))
    with pytest.raises(ValueError, match="actions are numbers; .* reads left, right, wait"):
        score(InverseDynamics(named[1]), Clips(frames, actions=torch.zeros(1, 2, 2)))
    with pytest.raises(ValueError, match="reads discrete actions; set score to log_likelihood"):
        score(InverseDynamics(named[1], "closeness"), Clips(frames, actions=torch.ones(1, 2, dtype=torch.int64)))


def test_actions_that_nobody_could_read_are_warned_of(tmp_path, capsys):
    dice = np.random.default_rng(5)
    folder = videos(tmp_path / "clips", lambda moves: [str(x) for x in dice.choice(["a", "b", "c"], len(moves))])
    with pytest.raises(SystemExit) as end:
        main(["rewards", "train-idm", f"data={folder}", f"out={tmp_path / 'w.safetensors'}", "steps=20", "size=16"])
    out = capsys.readouterr().out
    assert not end.value.code and "is noise: do not train on it" in out and "truth" in out and "w.safetensors" in out


def damage_none(folder):
    for note in folder.glob("*.json"):
        note.unlink()


def damage_mixed(folder):
    (folder / "00.mp4.json").write_text('{"actions": [0.5, "left"]}')


def damage_one(folder):
    for note in folder.glob("*.json"):
        note.write_text('{"actions": ["left", "left"]}')


def damage_few(folder):
    for path in [*folder.glob("0[4-9]*"), *folder.glob("1*")]:
        path.unlink()


def damage_long(folder):
    (folder / "03.mp4.json").write_text(json.dumps({"actions": ["left"] * FRAMES}))


def damage_fraction(folder):
    (folder / "00.mp4.json").write_text('{"actions": ["0.5", "left"]}')


def damage_twice(folder):
    (folder / "20.mp4").symlink_to(folder / "00.mp4")
    (folder / "20.mp4.json").write_text('{"actions": ["left"]}')


def damage_vpt(folder):
    (folder / "00.mp4.json").unlink()
    (folder / "00.jsonl").write_text('{"keyboard": {"keys": []}, "mouse": {"dx": 0, "dy": 0, "buttons": []}}\n{}')


@pytest.mark.parametrize(
    "damage, words",
    [
        (damage_none, "00.mp4 has no actions; name them in a manifest"),
        (damage_mixed, "not all of one kind"),
        (damage_one, "every action is 'left'"),
        (damage_few, "has 4 videos; give 5 or more"),
        (damage_long, f"03.mp4 has {FRAMES} actions, and {FRAMES - 1} changes between its frames"),
        (damage_fraction, "'0.5' is a number"),
        (damage_twice, "20.mp4 stands there twice"),
        (damage_vpt, "00.jsonl line 2 is no line of a VPT recording"),
    ],
)
def test_data_that_will_not_do_is_refused(named, tmp_path, damage, words):
    folder = tmp_path / "clips"
    folder.mkdir()
    for path in named[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    damage(folder)
    with pytest.raises((ConfigError, ValueError), match=words):
        own_idm.read(IdmConfig(data=str(folder), size=16))


@pytest.mark.parametrize(
    "say, settings, words",
    [
        (lambda moves: [[0.5]] * len(moves), {}, "no number of the training videos ever changes"),
        (lambda moves: ["left", "wait"], {"lr": 1e30, "steps": 3}, "failed at .*; lower lr=1e"),
    ],
)
def test_what_cannot_be_trained_leaves_an_older_file_alone(tmp_path, say, settings, words):
    folder = videos(tmp_path / "clips", say)
    (tmp_path / "w.safetensors").write_text("older")
    with pytest.raises(ConfigError, match=words):
        train(folder, tmp_path / "w.safetensors", size=16, **settings)
    assert [p.name for p in tmp_path.iterdir()] == ["clips", "w.safetensors"]
    assert (tmp_path / "w.safetensors").read_text() == "older"


def test_what_is_odd_about_the_videos_is_said(tmp_path):
    folder = videos(tmp_path / "clips", lambda moves: names(moves)[:4])
    film(folder, 2, [3] * 11, fps=12)
    for i in (4, 9, 14):
        (folder / f"{i:02d}.mp4.json").write_text('{"actions": ["left", "jump"]}')
    config = IdmConfig(data=str(folder), size=16)
    data = own_idm.read(config)
    train_on = [f for i, f in enumerate(data.films) if i % 5 != 4]
    notes = " | ".join([*data.notes, *own_idm.check_split(config, data, train_on, data.films[4::5])])
    assert "15 videos have fewer actions than changes" in notes and "from 8 to 12 frames a second" in notes
    assert "never in the training videos: jump" in notes and "never in the held-out videos: right, wait" in notes


def test_settings_of_the_world_say_nothing_of_own_videos(tmp_path):
    with pytest.raises(ConfigError, match="unexplained=0.5 is of clips of the embedded world; leave it out"):
        IdmConfig(data="clips", out=str(tmp_path / "w.safetensors"), unexplained=0.5).check()
    assert list_actions(["2", "5"], ("null", "1", "2", "5")) == [2, 3] and list_actions([2]) == [2]
    with pytest.raises(ValueError, match="'3' is unknown"):
        list_actions([3], ("null", "1", "2", "5"))


def line(keys=(), buttons=(), dx=0, dy=0):
    keys = [f"key.keyboard.{k}" for k in keys]
    return json.dumps({"keyboard": {"keys": keys}, "mouse": {"dx": dx, "dy": dy, "buttons": list(buttons)}})


def test_a_vpt_recording_becomes_numbers(tmp_path):
    for i in range(5):
        film(tmp_path, i, [3, 0, -3])
        rows = [line(["w", "left.shift"], [0], dx=20), line(dy=-400), line(["x"]), line()]
        (tmp_path / f"{i:02d}.jsonl").write_text("\n".join(rows) + "\n")
    data = own_idm.read(IdmConfig(data=str(tmp_path / "*.mp4"), size=16))
    assert data.kind == "continuous" and data.labels == vpt.NAMES and len(data.labels) == 25
    said = dict(zip(data.labels, data.actions(data.films[0])[0].tolist()))
    pressed = {k for k, v in said.items() if v}
    assert pressed == {"forward", "sneak", "attack", "camera.yaw"} and said["camera.yaw"] == vpt.camera_bin(3.0) > 0
    later = dict(zip(data.labels, data.actions(data.films[0])[1].tolist()))
    assert {k: v for k, v in later.items() if v} == {"camera.pitch": -5.0}


@pytest.mark.parametrize("change", [{"dx": math.nan}, {"dy": math.inf}, {"buttons": "0"}, {"keys": "key.keyboard.w"}])
def test_a_vpt_line_of_another_kind_is_named(tmp_path, change):
    row = json.loads(line())
    row["keyboard" if "keys" in change else "mouse"] |= change
    (tmp_path / "a.jsonl").write_text(f"{line()}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match="a.jsonl line 2 is no line of a VPT recording"):
        vpt.read_recording(tmp_path / "a.jsonl")


def test_camera_bins_are_mu_law():
    """Of eleven bins the middle one ends where log(1 + x) / log 11 is a tenth, x the angle in degrees."""
    edge = 11**0.1 - 1
    assert [vpt.camera_bin(a) for a in (0, 0.99 * edge, 1.01 * edge, -1.01 * edge, 10, 90, -90)] == [
        0,
        0,
        1,
        -1,
        5,
        5,
        -5,
    ]
    assert len({vpt.camera_bin(a / 100) for a in range(-1000, 1001)}) == 11
