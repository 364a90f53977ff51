"""Watching a run never changes it, survives a resume, and can stop it."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from arvideo_rl.cli.main import main
from arvideo_rl.config import ConfigError
from arvideo_rl.training.aligned import load_aligned
from arvideo_rl.training.checkpoints import checkpoints, load_checkpoint, read_state
from arvideo_rl.training.interrupt import Alarmed
from arvideo_rl.training.launch import align
from arvideo_rl.training.settings import check

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(config):
    config.iterations, config.checkpoint_every = 4, 2
    config.probe.every, config.probe.prompts = 1, 12
    return config


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(x) for x in (folder / name).read_text().splitlines()]


def trained_part(row: dict) -> dict:
    return {k: v for k, v in row.items() if not k.startswith(("probe/", "seconds/"))}


def ring_at_the_second_look(monkeypatch):
    monkeypatch.setattr("arvideo_rl.training.watch.suspects", lambda *_: {"sharpness"})
    monkeypatch.setattr("arvideo_rl.training.watch.parted", lambda before, *_: ["sharpness"] if before else [])


def test_a_run_with_a_probe_equals_one_without(config):
    with_probe = align(config)
    config.name, config.probe.every = "without", 0
    without = align(config)
    a, b = (load_checkpoint(checkpoints(f)[-1]) for f in (with_probe, without))
    assert a.tensors.keys() == b.tensors.keys() and all(torch.equal(v, b.tensors[k]) for k, v in a.tensors.items())
    assert list(map(trained_part, rows(with_probe))) == list(map(trained_part, rows(without)))
    assert not any(k.startswith("probe/") for r in rows(without) for k in r) and not (without / "samples").exists()


def test_looks_are_where_they_are_due_paired_to_the_start_and_give_the_score(config):
    config.probe.every = 3
    folder = align(config)
    looked = [r["iteration"] + 1 for r in rows(folder) if "probe/reward/actions" in r]
    assert looked == [2, 3, 4]  # at checkpoints, every third, and at the end
    last = rows(folder)[-1]
    assert {
        "probe/sharpness",
        "probe/change/sharpness",
        "probe/fall/sharpness",
        "probe/change/reward/actions",
    } <= last.keys()
    assert "probe/fall/reward/actions" not in last and {"picture/saturation", "picture/contrast"} <= last.keys()
    for path in checkpoints(folder):
        step = read_state(path)["step"]
        assert read_state(path)["score"] == pytest.approx(rows(folder)[step - 1]["probe/reward/actions"])
    for moment in ("iteration-000000", "iteration-000002", "iteration-000004"):
        told = json.loads((folder / "samples" / moment / "samples.json").read_text())
        assert len(told) == 4 and (folder / "samples" / moment / told[0]["file"]).is_file()
    starts = {
        round(r["probe/sharpness"] - r["probe/change/sharpness"], 4) for r in rows(folder) if "probe/sharpness" in r
    }
    assert len(starts) == 1


def test_resumed_it_sees_what_the_straight_run_sees(config):
    straight = align(config)
    config.name, config.iterations = "resumed", 2
    align(config)
    config.iterations = 4
    resumed = align(config)
    strip = [
        [{k: v for k, v in r.items() if not k.startswith("seconds/")} for r in rows(f)] for f in (straight, resumed)
    ]
    assert strip[0] == strip[1]


def test_a_policy_that_has_lost_something_is_not_the_best(config, monkeypatch):
    monkeypatch.setattr("arvideo_rl.training.watch.suspects", lambda *_: {"sharpness"})
    folder = align(config)
    assert {read_state(p)["score"] for p in checkpoints(folder)} == {None}
    with pytest.raises(ValueError, match="best"):
        load_aligned(f"{folder}@best")


def test_stopped_by_its_alarm_a_run_is_saved_and_goes_on_only_when_told(config, monkeypatch, capsys):
    ring_at_the_second_look(monkeypatch)
    config.alarm, config.checkpoint_every = "stop", 10
    with pytest.raises(Alarmed, match=r"saved after iteration 2; .*alarm=warn") as stopped:
        align(config)
    folder = Path(config.out) / config.name
    assert "@best" not in str(stopped.value) or load_aligned(f"{Path(config.out) / config.name}@best")
    assert stopped.value.code == 3 and read_state(checkpoints(folder)[-1])["step"] == 2
    (alarm,) = rows(folder, "events.jsonl")
    assert (alarm["iteration"], alarm["kind"], alarm["verifiers"]) == (2, "alarm", ["sharpness"])
    assert capsys.readouterr().out.count("ALARM after iteration 2: the trained reward is up") == 1
    with pytest.raises(ConfigError, match=r"has rung after iteration 2 .*alarm=warn"):
        align(config)
    config.alarm = "warn"
    align(config)
    assert rows(folder, "events.jsonl") == [alarm]  # said once for a verifier
    assert json.loads((folder / "summary.json").read_text())["alarms"] == [alarm["text"]]


def test_a_resumed_run_remembers_the_look_before(config, monkeypatch):
    ring_at_the_second_look(monkeypatch)
    config.iterations = 1
    assert not rows(align(config), "events.jsonl")
    config.iterations = 2
    assert [e["iteration"] for e in rows(align(config), "events.jsonl")] == [2]


def test_the_exit_code_of_a_stopped_run(config, monkeypatch, tmp_path, capsys):
    ring_at_the_second_look(monkeypatch)
    data = dataclasses.asdict(config) | {"alarm": "stop"}
    data["policy"]["targets"] = list(config.policy.targets)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(SystemExit) as end:
        main(["align", str(tmp_path / "c.yaml")])
    err = capsys.readouterr().err
    assert end.value.code == 3 and err.count("\n") == 1 and "stopped by the alarm" in err


def test_off_is_silent_and_warn_goes_on(config, monkeypatch):
    ring_at_the_second_look(monkeypatch)
    config.alarm = "off"
    assert not rows(align(config), "events.jsonl")
    config.alarm, config.name = "warn", "warned"
    folder = align(config)
    assert [e["iteration"] for e in rows(folder, "events.jsonl")] == [2] and (folder / "summary.json").is_file()


def test_a_note_is_told_once(config, monkeypatch):
    monkeypatch.setattr("arvideo_rl.training.watch.diagnose", lambda _: [("spread", "there is none")])
    told = rows(align(config), "events.jsonl")
    assert [(e["iteration"], e["kind"], e["text"]) for e in told] == [(1, "note", "there is none")]


def test_wrong_settings_are_refused(config):
    for key, value in (("every", -1), ("prompts", 0)):
        old = getattr(config.probe, key)
        setattr(config.probe, key, value)
        with pytest.raises(ConfigError, match=f"probe.{key}={value}"):
            check(config, 3, 1)
        setattr(config.probe, key, old)
    config.probe.prompts = 3
    with pytest.raises(ConfigError, match=r"probe\.prompts=3: use at least one a process, 4"):
        check(config, 3, 4)
    config.probe.prompts = 12
    config.alarm = "stop"
    for key, value in (("every", 0), ("prompts", 11)):
        old = getattr(config.probe, key)
        setattr(config.probe, key, value)
        with pytest.raises(ConfigError, match="alarm=stop can never ring with"):
            check(config, 3, 1)
        setattr(config.probe, key, old)
    config.alarm = "wran"
    with pytest.raises(ConfigError, match="did you mean warn"):
        check(config, 3, 1)


def test_two_processes_see_what_one_does(config, tmp_path):
    one = align(config)
    data = dataclasses.asdict(config) | {"name": "two"}
    data["policy"]["targets"] = list(config.policy.targets)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, "-m", "arvideo_rl", "align", str(tmp_path / "c.yaml")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    for a, b in zip(rows(one), rows(tmp_path / "two"), strict=True):
        probed = {k: v for k, v in a.items() if k.startswith("probe/")}
        assert probed and {k: b[k] for k in probed} == pytest.approx(probed, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_the_documented_example_is_stopped_by_its_alarm(tmp_path):
    """docs/hack_alarm.md: about four minutes."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    preset = ["align/naive_colour_tiny", f"out={tmp_path}", "iterations=16", "alarm=stop"]
    done = subprocess.run(
        [sys.executable, "-m", "arvideo_rl", "align", *preset], env=env, capture_output=True, text=True
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert rows(tmp_path / "naive_colour", "events.jsonl")[-1]["kind"] == "alarm"
