"""How scoring runs: values depend on the clip alone, a stopped command goes on as if it had not been stopped, two sets
are compared in pairs, and what cannot work is refused before anything is decoded."""

import errno
import json
import math
import os
import shutil
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from arvideo_rl.media import read_video, write_video
from arvideo_rl.scoring import ScoreConfig, measure, score_videos
from arvideo_rl.scoring import run as running
from arvideo_rl.scoring.inputs import collect
from arvideo_rl.scoring.settings import Named, prepare
from arvideo_rl.scoring.tables import even
from arvideo_rl.training.prompts import parse_actions
from rewards.contract import Clips, Scores, score
from rewards.inverse_dynamics import InverseDynamics

ACTIONS = "turn left*2, forward*3"


def brightness(clips):
    return clips.frames.mean((1, 2, 3, 4))


class Fussy:
    """Raises for a whole batch because of one clip in it; counts the clips it has seen."""

    name, needs, granularity = "fussy", frozenset(), "clip"
    value_range, licence, hacked_by = (0.0, 1.0), "", ""

    def __init__(self, error=None, bad=lambda clip: False):
        self.error, self.bad, self.batches = error, bad, []

    def __call__(self, clips):
        self.batches.append(len(clips))
        if any(self.bad(clip) for clip in clips.frames):
            raise self.error
        return Scores(clips.frames.mean((1, 2, 3, 4)), components={"rate": clips.fps.float()})


def numbers(result):
    return [(Path(r["file"]).name, r["reward"], r["value"], r["reason"]) for r in result.rows]


def test_values_are_those_of_each_clip_alone_whatever_the_batch_workers_and_order(clips):
    rewards = ["inverse_dynamics", "naive_colour"]
    told = {"reward": rewards, "actions": ACTIONS, "prompt": "a red ball rests"}
    first = score_videos(clips, **told)
    assert len(first.rows) == 16 and [r["reason"] for r in first.rows].count("content:damaged") == 2
    for row in first.rows:
        if row["reward"] == "inverse_dynamics" and row["value"] is not None:
            pixels, fps = read_video(row["file"])
            actions = torch.tensor([parse_actions(ACTIONS, len(pixels))[1:]])
            assert row["value"] == pytest.approx(
                score(InverseDynamics(), Clips(pixels[None], fps, None, actions)).value.item(), abs=1e-5
            )
            assert row["frames"] == len(pixels) and row["fps"] == fps
    want = {(n, r): v for n, r, v, _ in numbers(first)}
    files = sorted(clips.iterdir())
    for batch, workers, order in ((1, 1, files), (3, 4, files[::-1]), (100, 2, files[3:] + files[:3])):
        again = score_videos(order, batch=batch, workers=workers, **told)
        for name, reward, value, _ in numbers(again):
            assert value == pytest.approx(want[name, reward], abs=1e-5), (batch, workers, name)
        assert [Path(r["file"]) for r in again.rows[::2]] == order, "rows come in the order of the files"
    assert numbers(score_videos(clips, workers=5, **told)) == numbers(first), "bit for bit with other workers"


def test_clips_of_one_size_share_a_call_and_memory_limits_it(clips):
    reward = Fussy()
    score_videos(clips, reward, batch=8)
    assert sorted(reward.batches) == [1, 2, 2, 2], "7 clips of 4 shapes"
    reward = Fussy()
    score_videos(clips, reward, batch=8, gib=6 * 48 * 48 * 3 * 4 / 2**30)
    assert sum(reward.batches) == 7 and len(reward.batches) > 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("frames are odd"), "system:reward_failed"),
        (ZeroDivisionError("boom"), "system:reward_failed"),
        (torch.OutOfMemoryError("CUDA out of memory"), "system:out_of_memory"),
        (MemoryError(), "system:out_of_memory"),
    ],
)
def test_a_clip_that_a_reward_fails_on_does_not_take_the_others_of_its_batch(clips, error, reason):
    target = read_video(clips / "clip_2.gif")[0].mean()
    rows = score_videos(clips, Fussy(error, lambda clip: abs(clip.mean() - target) < 1e-7)).rows
    found = {Path(r["file"]).name: r["reason"] for r in rows}
    assert found.pop("clip_3b.mp4") == "content:damaged"
    assert found.pop("clip_2.gif") == reason and set(found.values()) == {""}


@pytest.mark.parametrize("end", ["csv", "jsonl"])
def test_stopped_and_continued_equals_uninterrupted(clips, tmp_path, end, monkeypatch):
    told = {"actions": ACTIONS, "batch": 2, "reward": "inverse_dynamics"}
    whole, cut = tmp_path / f"whole.{end}", tmp_path / f"cut.{end}"
    score_videos(clips, out=str(whole), **told)
    real, calls = running.score_batch, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(running, "score_batch", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"4 of 8 files are in .*cut\.\w+\.partial; the same command goes on"):
        score_videos(clips, out=str(cut), **told)
    journal = Path(f"{cut}.partial")
    assert not cut.exists() and len(journal.read_text().splitlines()) == 5
    lines = journal.read_bytes().splitlines(keepends=True)
    torn = [  # what a crash may leave: a row without the others of its batch, half a row, zeros
        b"".join(lines),
        b"".join(lines[:-1]),
        b"".join(lines)[:-7],
        b"".join(lines) + b'{"key": "a", "rew',
        b"".join(lines) + bytes(512),
    ]
    monkeypatch.undo()
    for content, kept in zip(torn, (4, 2, 2, 4, 4)):
        journal.write_bytes(content)
        done = score_videos(clips, out=str(cut), workers=3, **told)
        assert done.resumed == kept
        assert cut.read_bytes() == whole.read_bytes() and not journal.exists()
        summaries = [json.loads((tmp_path / f"{n}.summary.json").read_text()) for n in ("whole", "cut")]
        assert summaries[0] == summaries[1]
        cut.unlink()


def leave_half(clips, out, monkeypatch, **told):
    """What a command leaves that was stopped after the first batch."""
    real, calls = running.score_batch, []

    def interrupted(*args):
        if calls:
            raise KeyboardInterrupt
        calls.append(1)
        return real(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(running, "score_batch", interrupted)
        score_videos(clips, out=str(out), batch=2, **told)


def test_another_command_does_not_continue_what_it_did_not_begin(clips, tmp_path, monkeypatch):
    out = tmp_path / "s.csv"
    leave_half(clips, out, monkeypatch, actions=ACTIONS)
    before = Path(f"{out}.partial").read_bytes()
    for change, says in (
        ({"batch": 3}, "batch was 2, is 3"),
        ({"reward": "naive_colour"}, "reward was"),
        ({"args": {"score": "accuracy"}}, "args was"),
        ({"short_side": 16}, "short_side was null, is 16"),
    ):
        with pytest.raises(ValueError, match="begun with other settings") as error:
            score_videos(clips, out=str(out), **({"batch": 2, "actions": ACTIONS} | change))
        assert says in str(error.value) and "delete" in str(error.value)
        assert Path(f"{out}.partial").read_bytes() == before
    Path(f"{out}.partial").write_text("something else\n")
    with pytest.raises(ValueError, match="not begun by this version"):
        score_videos(clips, out=str(out), batch=2, actions=ACTIONS)


def test_files_that_came_or_changed_in_between_are_scored_and_the_others_are_not_again(clips, tmp_path, monkeypatch):
    folder = shutil.copytree(clips, tmp_path / "clips")
    out = tmp_path / "s.csv"
    leave_half(folder, out, monkeypatch, reward=brightness)
    write_video(folder / "clip_0.gif", torch.zeros(3, 3, 32, 32), 8)
    write_video(folder / "new.gif", torch.ones(3, 3, 32, 32), 8)
    result = score_videos(folder, brightness, out=str(out), batch=2)
    assert result.resumed == 1, "clip_1"
    found = {n: v for n, _, v, _ in numbers(result)}
    assert found["clip_0.gif"] == 0 and found["new.gif"] == 1 and len(found) == 9


def test_what_failed_by_no_fault_of_the_clip_is_tried_again_when_a_command_goes_on(clips, tmp_path, monkeypatch):
    """A server that is down, memory that ran out: Ctrl-C, mend it, the same command."""
    out = tmp_path / "s.jsonl"
    leave_half(clips, out, monkeypatch, reward=Fussy(ConnectionError("down"), bad=lambda clip: True))
    assert Path(f"{out}.partial").read_text().count("system:reward_failed") == 2
    mended = Fussy()
    leave_half(clips, out, monkeypatch, reward=mended)
    assert mended.batches == [1, 1], "the two of the first batch, of two sizes"
    result = score_videos(clips, Fussy(), out=str(out), batch=2)
    assert result.resumed == 2 and numbers(result) == numbers(score_videos(clips, Fussy()))
    assert len(out.read_text().splitlines()) == 8


def test_two_commands_do_not_write_one_file(clips, tmp_path):
    from arvideo_rl.scoring.journal import Journal

    first = Journal(tmp_path / "s.csv", {})
    with pytest.raises(ValueError, match="being written by another arvideo score"):
        Journal(tmp_path / "s.csv", {})
    first.close()
    Journal(tmp_path / "s.csv", {}).remove()
    assert not list(tmp_path.iterdir())


def test_two_sets_are_compared_in_pairs(tmp_path, capsys):
    levels = {"a": (0.6, 0.4), "b": (0.5, 0.5), "sub/c": (0.2, 0.6), "d": (0.9, 0.5), "alone": (0.3, None)}
    for name, pair in levels.items():
        for folder, level in zip(("new", "old"), pair):
            if level is not None:
                write_video(tmp_path / folder / f"{name}.gif", torch.full((2, 3, 32, 32), level), 8)
    (tmp_path / "new" / "broken.mp4").write_text("x")
    shutil.copy(tmp_path / "old" / "a.gif", tmp_path / "old" / "broken.gif")
    out = tmp_path / "s.csv"
    result = score_videos(tmp_path / "new", brightness, compare=str(tmp_path / "old"), out=str(out))
    found = result.summary["brightness"]["paired"]
    gaps = np.array([0.2, 0, -0.4, 0.4])
    assert (found["pairs"], found["invalid_pairs"], found["without_partner"]) == (4, 1, 1)
    assert found["difference"] == pytest.approx(gaps.mean(), abs=0.01)
    assert found["se"] == pytest.approx(gaps.std(ddof=1) / 2, abs=0.01)
    assert found["high"] - found["difference"] == pytest.approx(1.96 * found["se"], rel=1e-3)
    assert (found["wins"], found["ties"], found["losses"], found["win_rate"]) == (2, 1, 1, 0.625)
    assert result.summary["brightness"]["own"]["scored"] == 5 and result.summary["brightness"]["compare"]["scored"] == 5
    assert "sub/c" in out.read_text() and "set,pair" in out.read_text().splitlines()[0]
    with pytest.raises(ValueError, match="no two files have the same name"):
        score_videos(tmp_path / "new" / "sub", brightness, compare=str(tmp_path / "old"))
    shutil.copy(tmp_path / "old" / "a.gif", tmp_path / "old" / "sub" / "c.gif")
    (tmp_path / "old" / "a.mp4").write_text("x")
    with pytest.raises(ValueError, match="would both be called 'a'"):
        score_videos(tmp_path / "new", brightness, compare=str(tmp_path / "old"))


def test_a_reward_s_pictures_are_written_one_a_clip(clips, tmp_path):
    class Shows(Fussy):
        def maps(self, clips):
            return {"light": clips.frames.mean(2, keepdim=True).expand(-1, -1, 3, -1, -1)}

    rows = score_videos(clips, Shows(), maps=str(tmp_path / "maps")).rows
    names = sorted(p.name for p in (tmp_path / "maps").iterdir())
    assert names == [f"clip_{i}.fussy.light.png" for i in range(7)]
    told = {Path(r["file"]).name: r["maps"] for r in rows}
    assert told["clip_2.gif"] == str(tmp_path / "maps" / "clip_2.fussy.*.png") and told["clip_3b.mp4"] == ""
    with pytest.raises(ValueError, match="inverse_dynamics cannot draw pictures; leave maps out.* epipolar, .*sharpne"):
        score_videos(clips, maps=str(tmp_path / "more"), actions=ACTIONS)
    assert not (tmp_path / "more").exists()


def test_a_picture_that_cannot_be_drawn_costs_no_value_and_no_two_clips_share_one(tmp_path, monkeypatch):
    class Fails(Fussy):
        def maps(self, clips):
            if clips.frames.mean() > 0.5:
                raise ZeroDivisionError("no\nlight")
            return {"light": clips.frames}

    long = "红" * 80
    for name, light in (("a b", 0.2), ("a_b", 0.3), ("sub/c", 0.2), (f"{long}1", 0.2), (f"{long}2", 0.2), ("bad", 0.9)):
        write_video(tmp_path / "clips" / f"{name}.gif", torch.full((2, 3, 32, 32), light), 8)
    rows = score_videos(tmp_path / "clips", Fails(), maps=str(tmp_path / "maps")).rows
    assert all(r["value"] is not None for r in rows)
    assert [r["maps"] for r in rows if r["maps"].startswith("none")] == ["none: ZeroDivisionError: no light"]
    assert len(list((tmp_path / "maps").glob("*.png"))) == 5 and len({r["maps"] for r in rows}) == 6

    def no_space(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(measure, "write_video", no_space)
    rows = score_videos(tmp_path / "clips", Fails(), maps=str(tmp_path / "full")).rows
    assert all(r["value"] is not None for r in rows) and sum("No space left" in r["maps"] for r in rows) == 5


def test_two_rewards_of_one_kind_draw_under_their_own_names(tmp_path):
    write_video(tmp_path / "a.gif", torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), 8)
    parts = {"low": Named("sharpness", {"quantile": 0.0}), "high": Named("sharpness", {"quantile": 1.0})}
    rows = score_videos(tmp_path / "a.gif", rewards=parts, maps=str(tmp_path / "m")).rows
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["a.high.detail.png", "a.low.detail.png"]
    assert [Path(r["maps"]).name for r in rows] == ["a.low.*.png", "a.high.*.png"]


@pytest.mark.parametrize("keys", [{"out": "./m.jsonl"}, {"pairs": "m.jsonl"}, {"out": "o.csv", "compare": "o.csv"}])
def test_a_manifest_is_never_written_over(clips, tmp_path, monkeypatch, keys):
    monkeypatch.chdir(tmp_path)
    rows = [{"path": str(clips / "clip_0.gif"), "prompt": "x", "n": i} for i in range(2)]
    before = "\n".join(map(json.dumps, rows))
    Path("m.jsonl").write_text(before)
    Path("o.csv").write_text(f"path\n{clips / 'clip_0.gif'}\n")
    with pytest.raises(ValueError, match="is what is to be scored, and would be written over"):
        score_videos("m.jsonl", brightness, **keys)
    assert Path("m.jsonl").read_text() == before and Path("o.csv").read_text().startswith("path")


def test_pictures_do_not_become_frames_of_a_clip(tmp_path):
    write_video(tmp_path / "sheet.png", torch.rand(1, 3, 32, 32), 8)
    (tmp_path / "clip").mkdir()
    for i in range(2):
        shutil.copy(tmp_path / "sheet.png", tmp_path / "clip" / f"{i}.png")
    with pytest.raises(ValueError, match="maps=.*clip is a clip to be scored"):
        score_videos(tmp_path / "clip", "sharpness", fps=8, maps=str(tmp_path / "clip"))
    assert score_videos(tmp_path / "clip", "sharpness", fps=8, maps=str(tmp_path / "maps")).rows[0]["frames"] == 2


def test_what_a_manifest_says_is_part_of_what_was_scored_and_nan_is_nothing(clips, tmp_path):
    row = {"path": str(clips / "clip_0.gif"), "pair": "a", "loss": math.nan}
    (tmp_path / "m.jsonl").write_text(json.dumps(row))
    score_videos(tmp_path / "m.jsonl", brightness, out=str(tmp_path / "s.jsonl"))
    found = json.loads((tmp_path / "s.jsonl").read_text(), parse_constant=pytest.fail)
    assert found["value"] > 0 and found["loss"] is None
    (before,) = collect([str(tmp_path / "m.jsonl")])
    (tmp_path / "m.jsonl").write_text(json.dumps(row | {"pair": "b"}))
    assert collect([str(tmp_path / "m.jsonl")])[0].key != before.key, "its partner is another"


def test_globs_lists_and_a_file_named_twice(clips, monkeypatch):
    monkeypatch.chdir(clips)
    names = [n for n, *_ in numbers(score_videos("clip_[0-2].*", brightness))]
    assert names == ["clip_0.gif", "clip_1.gif", "clip_2.gif"]
    assert len(score_videos(["clip_1.gif", "clip_1.gif", "clip_[01].gif"], brightness).rows) == 2
    assert len(score_videos("**/*", brightness).rows) == 8
    with pytest.raises(ValueError, match="nothing matches 'zz"):
        score_videos("zz*.mp4", brightness)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_that_of_the_computing_inside(clips, dtype):
    seen = []

    def judge(clips):
        x = torch.ones(4, 4)
        seen.append((x @ x).dtype)
        return brightness(clips)

    assert clips and score_videos(clips / "clip_0.gif", judge, dtype=dtype).rows[0]["value"] is not None
    assert seen == [getattr(torch, dtype)]


def test_chunk_and_group_rewards_and_needs_that_files_cannot_meet_are_refused(clips):
    def judge(clips):
        return brightness(clips)

    judge.needs = {"cameras"}
    with pytest.raises(ValueError, match="needs cameras, which files cannot give"):
        score_videos(clips, judge)
    with pytest.raises(ValueError, match="gives a value for each chunk; score wants one a clip"):
        score_videos(clips, args={"granularity": "chunk"})


def test_parquet_needs_its_library_and_says_so(clips, tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == "pyarrow" else real(n, *a))
    with pytest.raises(ValueError, match="needs pyarrow .pip install pyarrow.; or write .csv or .jsonl"):
        score_videos(clips, brightness, out=str(tmp_path / "s.parquet"))


def test_parquet_holds_the_same_table(clips, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    result = score_videos(clips, brightness, out=str(tmp_path / "s.parquet"))
    table = pq.read_table(tmp_path / "s.parquet").to_pylist()
    assert [r["value"] for r in table] == [r["value"] for r in result.rows]


@pytest.mark.parametrize(
    ("cells", "want"),
    [
        ([1, None, 2**62], [1, None, 2**62]),
        ([1, 2.5, None], [1.0, 2.5, None]),
        ([2**63, 1], ["9223372036854775808", "1"]),
        ([True, 1], ["true", "1"]),
        (["a", 1, None, ["b"]], ["a", "1", None, '["b"]']),
        (["lone \ud800", "röt 红"], ["lone \\ud800", "röt 红"]),
        ([None], [None]),
    ],
)
def test_a_column_of_a_table_has_one_type_whatever_a_manifest_passed_through(cells, want):
    found = even(cells)
    assert found == want and len({type(x) for x in found if x is not None}) < 2
    pa = pytest.importorskip("pyarrow")
    assert pa.table({"x": found}).to_pylist() == [{"x": x} for x in want]


def test_memory_stays_flat_over_many_short_clips(clips, tmp_path):
    """Rows are kept, pixels are not."""
    source = clips / "clip_0.gif"
    rows = [json.dumps({"path": str(source), "id": i}) for i in range(120)]
    (tmp_path / "m.jsonl").write_text("\n".join(rows))
    job = prepare(ScoreConfig(batch=4, frames=2, reward="b"), [str(tmp_path / "m.jsonl")], {"b": brightness})
    seen = []
    tracemalloc.start()
    try:
        assert len(running.run(job, lambda n: seen.append(tracemalloc.get_traced_memory()[0])).rows) == 120
    finally:
        tracemalloc.stop()
    early, late = seen[len(seen) // 4], seen[-1]
    assert late - early < 90 * 6000, "6 kB a row at most; a clip of 2 frames is 6 kB of pixels and 25 kB of float"


def test_decoding_and_scoring_overlap(clips, tmp_path, monkeypatch):
    """With slow files and a slow reward the whole takes less than both one after the other."""
    real = running.decode

    def slow(path, how):
        time.sleep(0.05)
        return real(path, how)

    def judge(clips):
        time.sleep(0.05)
        return brightness(clips)

    monkeypatch.setattr(running, "decode", slow)
    took = score_videos(sorted(clips.glob("*.gif")), judge, batch=1, workers=2).seconds
    assert min(took["decoding"], took["scoring"]) >= 7 * 0.05
    assert took["clock"] < took["decoding"] + took["scoring"] and took["waiting"] < took["decoding"]
    assert took["waiting"] + took["scoring"] <= took["clock"]
