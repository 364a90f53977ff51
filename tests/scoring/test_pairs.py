"""Best/worst pairs for preference training elsewhere: who is paired, who is left out, and what is said of both."""

import json
from pathlib import Path

import pytest
import torch

from arvideo_rl.cli.main import main
from arvideo_rl.media import write_video
from arvideo_rl.scoring import Pairing, score_videos
from arvideo_rl.scoring.inputs import Task
from arvideo_rl.scoring.pairs import MOTION, make

JUMPS = torch.rand(3, 48, 48, generator=torch.Generator().manual_seed(0))


def brightness(clips):
    return clips.frames.mean((1, 2, 3, 4))


def clip(path: Path, light: float, moving: bool = True) -> str:
    """A textured clip of mean brightness about ``light`` whose texture slides by two pixels a frame."""
    frames = torch.stack([JUMPS.roll(2 * i if moving else 0, 2) for i in range(5)])
    write_video(path, 2 * light * frames, 8)
    return str(path)


def rows_of(value, motion=0.5, reason="system:reward_failed"):
    def row(name, number):
        return {"reward": name, "value": number, "reason": "" if number is not None else reason}

    return [row("r", value), row(MOTION, motion)]


def made(table, **how):
    """Pairs, as (chosen, rejected), of (prompt, actions, value, motion)."""
    tasks = [Task(Path(f"{i}.mp4"), str(i), prompt, actions) for i, (prompt, actions, *_) in enumerate(table)]
    rows = [rows_of(value, motion) for *_, value, motion in table]
    pairs, told = make(tasks, rows, "r", Pairing(**how))
    return [(p["chosen"][:-4], p["rejected"][:-4]) for p in pairs], told


def test_best_and_worst_of_each_prompt_make_a_pair_and_no_clip_is_in_two():
    table = [("a", None, v, 0.5) for v in (0.2, 0.9, 0.4, 0.8, 0.1)] + [("b", None, v, 0.5) for v in (3.0, 2.0)]
    assert made(table)[0] == [("1", "4"), ("5", "6")]
    assert made(table, most=9)[0] == [("1", "4"), ("3", "0"), ("5", "6")], "the middle of five is in none"
    assert made(table, gap=0.9)[0] == [("5", "6")] and made(table, gap=0.9)[1]["groups_left_out"] == {"gap": 1}


def test_a_tie_is_no_pair():
    pairs, told = made([("a", None, 0.5, 0.5)] * 2)
    assert pairs == [] and told["groups_left_out"] == {"gap": 1} and told["clips_left_out"] == {}


def test_clips_under_other_commands_are_not_compared():
    table = [("a", [1, 2], 0.1, 0.5), ("a", [2, 1], 0.9, 0.5), ("a", [1, 2], 0.3, 0.5)]
    pairs, told = made(table)
    assert pairs == [("2", "0")] and told["groups"] == 2 and told["groups_left_out"] == {"one_clip": 1}


def test_still_clips_are_left_out_before_best_and_worst_are_chosen_and_everybody_is_counted():
    table = [("a", None, v, m) for v, m in ((0.9, 0.01), (0.7, 0.5), (0.3, 0.4), (0.0, 0.0), (None, 0.5), (0.5, None))]
    table += [(None, None, 0.5, 0.5), ("b", None, 0.5, 0.05)]
    pairs, told = made(table)
    assert pairs == [("1", "2")]
    lost = {"still": 3, "system:reward_failed": 1, "no_prompt": 1, f"{MOTION} system:reward_failed": 1}
    assert told["clips_left_out"] == lost and told["groups_left_out"] == {"one_clip": 1}
    assert (told["clips"], told["groups"], told["pairs"]) == (8, 2, 1)
    assert made(table, motion=0.0)[0] == [("0", "3")], "0 turns it off"


def test_pairs_from_files_hold_what_training_wants(tmp_path, capsys):
    """Scored by a reward, filtered by the motion that is scored beside it, written with what the manifest said."""
    rows = []
    for i, (prompt, light, moving) in enumerate(
        [("a red ball", 0.2, True), ("a red ball", 0.4, True), ("a red ball", 0.45, False), ("röt", 0.3, True)]
    ):
        rows.append({"path": clip(tmp_path / f"{i}.gif", light, moving), "prompt": prompt, "seed": i})
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    where, out = tmp_path / "pairs.jsonl", tmp_path / "s.jsonl"
    result = score_videos(tmp_path / "m.jsonl", brightness, out=str(out), pairs=str(where))
    (pair,) = (json.loads(x) for x in where.read_text().splitlines())
    assert result.pairs == [pair] and pair["prompt"] == "a red ball"
    assert (Path(pair["chosen"]).name, Path(pair["rejected"]).name) == ("1.gif", "0.gif"), "2.gif does not move"
    assert pair["gap"] == pytest.approx(pair["chosen_score"] - pair["rejected_score"]) and pair["gap"] > 0.1
    assert pair["chosen_motion"] > 0.1 and pair["chosen_given"] == {"seed": 1}
    assert pair["reward"] == "brightness"
    told = json.loads((tmp_path / "s.summary.json").read_text())["pairs"]
    assert told["clips_left_out"] == {"still": 1} and told["groups_left_out"] == {"one_clip": 1}
    assert {r["reward"] for r in result.rows} == {"brightness", MOTION}
    free = score_videos(tmp_path / "m.jsonl", brightness, pairs=str(where), pairing=Pairing(motion=0, by="prompt"))
    assert Path(free.pairs[0]["chosen"]).name == "2.gif" and "chosen_motion" not in free.pairs[0]
    assert len(free.rows) == 4, "what is not asked for is not scored"


def test_the_command_line_says_how_many_and_why_not_more(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, light in enumerate((0.2, 0.4)):
        clip(tmp_path / f"{i}.gif", light)
    clip(tmp_path / "still.gif", 0.3, moving=False)
    Path("judges.py").write_text("def judge(clips): return clips.frames.mean((1, 2, 3, 4))\n")
    line = ["score", "0.gif", "1.gif", "still.gif", "reward=judges:judge", "prompt=a b", "pairs=p.jsonl"]
    with pytest.raises(SystemExit) as end:
        main(line)
    out, err = capsys.readouterr()
    assert end.value.code == 0 and not err
    assert "1 pair in 1 group by judges:judge; gap 0." in out and "clips left out: 1 still" in out
    assert "wrote p.jsonl" in out and len(Path("p.jsonl").read_text().splitlines()) == 1


def test_a_column_of_the_manifest_may_say_who_is_compared(tmp_path):
    lights = {"x": (0.2, 0.4), "y": (0.3, 0.35)}
    rows = [{"path": clip(tmp_path / f"{scene}{i}.gif", light), "scene": [scene]}
            for scene, both in lights.items() for i, light in enumerate(both)]  # fmt: skip
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = {"pairs": str(tmp_path / "p.jsonl"), "pairing": Pairing(by="scene", motion=0)}
    found = score_videos(tmp_path / "m.jsonl", brightness, **told).pairs
    assert [Path(p["chosen"]).name for p in found] == ["x1.gif", "y1.gif"] and found[0]["prompt"] is None


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"pairs": "p.csv"}, "pairs=.*must end with .jsonl"),
        ({"pairs": "s.jsonl", "out": "s.jsonl"}, "is where out= writes the rows"),
        ({"pairs": "p.jsonl"}, "no clip has a prompt; give a manifest"),
        ({"pairs": "p.jsonl", "pairing": Pairing(by="scene")}, "no clip has a scene; is it a column"),
        ({"pairs": "p.jsonl", "prompt": "x", "pairing": Pairing(reward="r")}, "scored are brightness; name one"),
        ({"pairs": "p.jsonl", "prompt": "x", "pairing": Pairing(gap=-1)}, "pairing.gap=-1: use 0 or more"),
        ({"pairs": "p.jsonl", "prompt": "x", "pairing": Pairing(motion=2)}, "pairing.motion=2: use 0 to 1"),
        ({"pairs": "p.jsonl", "prompt": "x", "compare": "other"}, "pairs and compare are two things"),
    ],
)
def test_what_cannot_give_pairs_is_refused_before_anything_is_scored(tmp_path, monkeypatch, keys, says):
    monkeypatch.chdir(tmp_path)
    clip(tmp_path / "a.gif", 0.3), clip(tmp_path / "b.gif", 0.2)
    (tmp_path / "other").mkdir(), clip(tmp_path / "other" / "a.gif", 0.3)
    with pytest.raises(ValueError, match=says) as error:
        score_videos(["a.gif", "b.gif"], brightness, **keys)
    assert "\n" not in str(error.value) and not Path("p.jsonl").exists()


def test_prompts_that_stand_once_give_no_pair_and_that_is_said_first(tmp_path):
    rows = [{"path": clip(tmp_path / f"{i}.gif", 0.3), "prompt": f"prompt {i}"} for i in range(2)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="no two clips have the same prompt and actions"):
        score_videos(tmp_path / "m.jsonl", brightness, pairs=str(tmp_path / "p.jsonl"))


def test_a_stopped_command_may_ask_for_pairs_when_it_goes_on_but_scores_motion_only_if_it_did(tmp_path, monkeypatch):
    from arvideo_rl.scoring import run as running

    for i, light in enumerate((0.2, 0.4)):
        clip(tmp_path / f"{i}.gif", light)
    told = {"prompt": "x", "batch": 1, "out": str(tmp_path / "s.csv")}
    real, calls = running.score_batch, []

    def once(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(running, "score_batch", once)
        score_videos(tmp_path, brightness, **told)
    with pytest.raises(ValueError, match="begun with other settings"):
        score_videos(tmp_path, brightness, pairs=str(tmp_path / "p.jsonl"), **told)
    done = score_videos(tmp_path, brightness, pairs=str(tmp_path / "p.jsonl"), pairing=Pairing(motion=0), **told)
    assert done.resumed == 1 and len(done.pairs) == 1
