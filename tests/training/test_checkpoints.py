"""The checkpoint format: complete or not there, damage found and named, the last and the best kept."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from arvideo_rl.training import checkpoints as module
from arvideo_rl.training.checkpoints import (
    OPTIMIZER,
    STATE,
    TENSORS,
    Damaged,
    best,
    check_base,
    checkpoints,
    load_checkpoint,
    newest,
    pick,
    read_state,
    read_tensors,
    save_checkpoint,
    tidy,
)


def save(folder: Path, step: int, **more) -> Path:
    tensors = {"current/a": torch.full((3, 2), float(step)), "old/a": torch.zeros(3, 2)}
    return save_checkpoint(folder, step, tensors, {"state": {0: {"step": step}}}, {"seconds": 1.5}, **more)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


def check_whole(path: Path, step: int) -> None:
    found = load_checkpoint(path)
    assert found.state["step"] == step and (found.tensors["current/a"] == step).all()
    assert found.optimizer == {"state": {0: {"step": step}}}


def test_killed_at_any_file_operation_of_a_save_the_last_complete_one_is_there(tmp_path, fork):
    save(tmp_path / "start", 1)
    save(tmp_path / "start", 2)

    def work(folder):
        for step in (3, 3):  # the second time there is one of that name already
            save(folder, step, keep_last=2)

    died, at, seen = True, 0, set()
    while died:
        at += 1
        folder = tmp_path / f"at{at}"
        shutil.copytree(tmp_path / "start", folder)
        died, _ = fork(lambda f=folder: work(f), folder, die_at=at)
        found = newest(folder, load_checkpoint, pytest.fail)  # nothing is half there, so nothing is reported
        check_whole(found.path, found.state["step"])
        seen.add(found.state["step"])
        for path in checkpoints(folder):
            load_checkpoint(path)
        tidy(folder, found.path, 2)
        last = found.state["step"]
        kept = [load_checkpoint(p).state["step"] for p in checkpoints(folder)]
        assert kept in ([last - 1, last], [last]), "a run that saves no more has nothing too much either"
        assert len(names(folder)) == len(kept)
    assert seen == {2, 3} and at > 20


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done, rename = [], Path.rename
    real = module.sync
    monkeypatch.setattr(module, "sync", lambda p: (done.append(p.name), real(p)))
    monkeypatch.setattr(Path, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    save(tmp_path, 1)
    before, after = done[: done.index("rename")], done[done.index("rename") :]
    assert {TENSORS, OPTIMIZER, STATE, "step-000001.tmp"} <= set(before) and after == ["rename", "checkpoints"]


def test_a_save_that_fails_leaves_nothing_and_takes_nothing(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize("name", [TENSORS, OPTIMIZER, STATE])
@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "flipped"])
def test_damage_is_told_in_one_line_and_the_one_before_is_used(tmp_path, name, how):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    data = path.read_bytes()
    spoils = {"missing": [None], "empty": [b""], "truncated": [data[: len(data) // 2], data[:-1]]}
    places = range(0, len(data) - 1, max(1, len(data) // 60))  # -1: the line end after the JSON is no part of it
    spoils["flipped"] = [data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in places]
    if name == STATE:
        spoils["truncated"] = spoils["truncated"][:1]
    for spoilt in spoils[how]:
        path.unlink(missing_ok=True)
        if spoilt is not None:
            path.write_bytes(spoilt)
        said: list[str] = []
        found = newest(tmp_path, load_checkpoint, said.append)
        check_whole(found.path, 1)
        assert len(said) == 1 and "step-000002" in said[0] and "\n" not in said[0], said
        assert name in said[0] or how == "flipped", said


def test_a_spoilt_json_says_so(tmp_path):
    for text in ("[]", "{", "\xff"):
        (save(tmp_path, 1) / STATE).write_text(text, encoding="latin-1")
        with pytest.raises(Damaged, match=r"state\.json cannot be read"):
            read_state(tmp_path / "checkpoints" / "step-000001")


def test_when_none_can_be_used_the_run_is_not_silently_begun_again(tmp_path):
    assert newest(tmp_path, load_checkpoint, pytest.fail) is None
    for step in (1, 2):
        (save(tmp_path, step) / TENSORS).write_bytes(b"")
    said: list[str] = []
    with pytest.raises(
        Damaged, match="none of the 2 checkpoints .* can be used; .* delete .*checkpoints to start over"
    ):
        newest(tmp_path, load_checkpoint, said.append)
    assert len(said) == 2


def test_half_written_ones_do_not_count_and_damaged_ones_are_set_aside(tmp_path):
    save(tmp_path, 1)
    for name in ("step-000002.tmp", "step-000001.before.tmp", "stepmother", "step-3"):
        (tmp_path / "checkpoints" / name).mkdir()
    (save(tmp_path, 4) / TENSORS).write_bytes(b"")
    found = newest(tmp_path, load_checkpoint, lambda _: None)
    tidy(tmp_path, found.path, None)
    assert names(tmp_path) == ["step-000001", "step-000004.damaged", "step-3", "stepmother"]
    assert [p.name for p in checkpoints(tmp_path)] == ["step-000001"]


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step, score in enumerate([float("nan"), 0.9, 0.1, 0.9, None, 0.3], 1):
        save(tmp_path, step, score=score, keep_last=2)
    assert names(tmp_path) == ["step-000002", "step-000005", "step-000006"]  # of two equal ones the earlier
    assert best(tmp_path) == pick(tmp_path, "best") == tmp_path / "checkpoints" / "step-000002"
    assert read_state(best(tmp_path))["score"] == 0.9
    save(tmp_path, 7, score=1.0, keep_last=1)
    assert names(tmp_path) == ["step-000007"]


@pytest.mark.parametrize("name", [TENSORS, OPTIMIZER, STATE])
def test_a_damaged_one_takes_no_place_among_those_kept_and_is_not_the_best(name, tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2, score=0.5)
    (save(tmp_path, 3, score=0.9) / name).write_text("{")
    save(tmp_path, 4, keep_last=2)
    assert names(tmp_path) == ["step-000002", "step-000004"]
    assert best(tmp_path).name == "step-000002"


def test_steps_beyond_six_digits_keep_their_order(tmp_path):
    for step in (999_999, 1_000_000):
        save(tmp_path, step)
    assert [p.name for p in checkpoints(tmp_path)] == ["step-999999", "step-1000000"]


def test_what_is_not_there_is_refused_with_what_is(tmp_path):
    save(tmp_path, 3)
    save(tmp_path, 40)
    assert pick(tmp_path, "40").name == "step-000040"
    for which in ("4", "last", "-3", ""):
        with pytest.raises(ValueError, match="steps 3, 40"):
            pick(tmp_path, which)
    with pytest.raises(ValueError, match="no checkpoint .* has a score"):
        pick(tmp_path, "best")


def test_another_base_is_refused_by_what_differs(tmp_path):
    mine = {"weights": "a" * 64, "rank": 4, "targets": ["to_q"]}
    path = save(tmp_path, 1, base=mine)
    check_base(path, read_state(path), mine, "here")
    for key, value in (("weights", "b" * 64), ("rank", 8), ("targets", ["to_q", "to_v"])):
        with pytest.raises(ValueError, match=f"does not belong to here: {key} was") as error:
            check_base(path, read_state(path), mine | {key: value}, "here")
        assert not isinstance(error.value, Damaged), "nothing is damaged, so none before may be tried"


def test_only_the_tensors_asked_for_are_read(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("the optimizer is not wanted"))
    assert set(read_tensors(path, read_state(path), "current/")) == {"current/a"}


def test_the_files_can_be_read_by_others(tmp_path):
    path, mask = save(tmp_path, 1), os.umask(0)
    os.umask(mask)
    assert all(p.stat().st_mode & 0o777 == 0o666 & ~mask for p in path.iterdir())


def test_checkpoints_from_before_the_format_had_a_number_load(tmp_path):
    path = save(tmp_path, 1)
    state = read_state(path)
    (path / STATE).write_text(json.dumps({k: state[k] for k in ("step", "seconds")}))
    check_whole(path, 1)
    (path / STATE).write_text(json.dumps({"format": 2, "step": 1}))
    with pytest.raises(Damaged, match="format 2"):
        load_checkpoint(path)
