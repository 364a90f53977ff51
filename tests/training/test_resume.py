"""Runs that are killed or told to stop go on where they were and end like the one that was left alone."""

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from arvideo_rl.cli.main import main
from arvideo_rl.config import load
from arvideo_rl.training import align as align_module
from arvideo_rl.training import rundir
from arvideo_rl.training.align import Run
from arvideo_rl.training.checkpoints import TENSORS, checkpoints, load_checkpoint, read_state
from arvideo_rl.training.interrupt import Interrupted, Stop
from arvideo_rl.training.launch import align
from arvideo_rl.training.settings import AlignConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(config) -> AlignConfig:
    """Short, with an old policy that lags, so that it is not just a copy of the current one."""
    config.iterations, config.checkpoint_every, config.lag, config.keep_last = 4, 1, "nft", 2
    config.policy.targets = ("to_q", "ffn.net.2")
    return config


def named(config: AlignConfig, name: str) -> AlignConfig:
    out = copy.deepcopy(config)
    out.name = name
    return out


def test_a_run_killed_again_and_again_equals_the_one_left_alone(config, tmp_path, fork, same_run):
    _, operations = fork(lambda: align(named(config, "straight")), tmp_path)
    torn = named(config, "torn")
    marks = [operations * k // 6 for k in (2, 1, 3, 2, 4)]  # each start does what is left, so they fall anywhere
    kills = sum(fork(lambda: align(torn), tmp_path, die_at=at)[0] for at in marks)
    assert kills >= 3
    fork(lambda: align(torn), tmp_path)
    same_run(tmp_path / "torn", tmp_path / "straight")


@pytest.mark.slow
def test_fifty_kills_at_random_moments_lose_nothing(config, tmp_path, fork, same_run):
    trials = int(os.environ.get("KILLS", 50))
    config.iterations = 12
    align(named(config, "warm"))  # what is loaded on first use is loaded here, and each life starts where it matters
    begun = time.monotonic()
    _, operations = fork(lambda: align(named(config, "straight")), tmp_path)
    takes = time.monotonic() - begun
    rng, kills, finished, reached, seen = random.Random(0), 0, 0, 0, []
    while kills < trials or not finished:
        torn = named(config, f"torn{finished}")
        folder = tmp_path / torn.name
        when = {"die_after": rng.uniform(0, takes)} if kills % 2 else {"die_at": rng.randrange(operations // 2)}
        died, _ = fork(lambda t=torn: align(t), tmp_path, **(when if kills < trials else {}))
        kills += died
        now = [read_state(p)["step"] for p in checkpoints(folder)]
        assert max(now, default=0) >= reached, "a checkpoint was lost"
        reached = max(now, default=0)
        seen.append(reached)
        if (folder / "summary.json").is_file():
            fork(lambda t=torn: align(t), tmp_path)  # only says that it is finished
            same_run(folder, tmp_path / "straight")
            finished, reached = finished + 1, 0
    print(f"{kills} kills, {finished} runs finished, all equal to the one left alone; newest checkpoints: {seen}")
    assert trials < 50 or len(set(seen)) > 4, "kills should fall everywhere"


def test_time_is_counted_once(config, tmp_path, monkeypatch):
    """With a clock that every look moves on by a second, two runs that did the same say the same."""
    clock = iter(range(10**6))
    monkeypatch.setattr(align_module.time, "time", lambda: next(clock))
    run = Run(copy.deepcopy(config), Accelerator())
    for _ in range(3):
        run.step()
    first = Run(copy.deepcopy(config), Accelerator())
    first.step()
    first.save(tmp_path)
    first.step()  # lost
    second = Run(copy.deepcopy(config), Accelerator())
    second.restore(tmp_path)
    for _ in range(2):
        second.step()
    assert second.seconds == run.seconds > 0


def test_all_rows_are_on_the_disk_before_a_checkpoint_says_so(tmp_path, fork, monkeypatch):
    def work():
        monkeypatch.setattr(os, "fsync", lambda _: None)  # leaves TensorBoard's thread no time to catch up unasked
        sys.setswitchinterval(10)
        metrics = rundir.Metrics(tmp_path)
        for i in range(40):
            metrics.write(i, {f"reward/{k}": float(i) for k in range(20)})
        metrics.sync()
        os.kill(os.getpid(), signal.SIGKILL)

    assert fork(work, tmp_path)[0]
    board = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert all([e.step for e in board.Scalars(f"reward/{k}")] == list(range(40)) for k in range(20))
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 40


def test_tensorboard_reads_the_parts_of_a_run_in_their_order_however_fast_it_was_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(
        event_file_writer, "_global_uid", event_file_writer.AtomicCounter(9)
    )  # names end with this count, and .10 sorts before .9
    for start in range(3):
        metrics = rundir.Metrics(tmp_path, start)
        for i in (start, start + 1):  # the second is lost and comes again
            metrics.write(i, {"reward/a": 100.0 * start + i})
        metrics.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    seen = [(e.step, e.value) for e in board.Scalars("reward/a")]
    assert seen == [(0, 0.0), (1, 101.0), (2, 202.0), (3, 203.0)]


def test_a_flipped_byte_in_the_newest_is_told_and_the_run_goes_on_from_before(config, tmp_path, fork, same_run, capsys):
    fork(lambda: align(named(config, "straight")), tmp_path)
    torn = named(config, "torn")
    torn.iterations = 3
    fork(lambda: align(torn), tmp_path)
    torn.iterations = 4
    path = checkpoints(tmp_path / "torn")[-1] / TENSORS
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)
    align(torn)
    said = capsys.readouterr().out
    assert "step-000003 is damaged" in said and "after iteration 2" in said
    (damaged,) = (tmp_path / "torn" / "checkpoints").glob("*.damaged")
    assert damaged.name == "step-000003.damaged"
    shutil.rmtree(damaged)
    same_run(tmp_path / "torn", tmp_path / "straight")


def test_a_run_without_one_usable_checkpoint_is_refused(config, tmp_path):
    folder = align(config)
    config.iterations = 5
    for path in checkpoints(folder):
        (path / TENSORS).write_bytes(b"")
    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match="none of the 2 checkpoints"):
        align(config)
    assert (folder / "metrics.jsonl").read_text() == before and len(checkpoints(folder)) == 2


def test_a_run_on_a_changed_base_is_refused(config, tmp_path):
    shutil.copytree(config.generator, tmp_path / "base")
    config.generator = str(tmp_path / "base")
    align(config)
    config.iterations = 5
    from arvideo_rl.generators.bundle import Generator

    other = Generator.load(config.generator)
    other.transformer.patch_embedding.weight.data[0] += 1e-3
    other.save(tmp_path / "base")
    with pytest.raises(ValueError, match="does not belong to generator .*base: weights was"):
        align(config)


def test_a_damaged_measurement_of_before_is_made_again(config, tmp_path, capsys):
    folder = align(config)
    cache = folder / "held_out_before.safetensors"
    whole = cache.read_bytes()
    cache.write_bytes(whole[:1000])
    config.iterations = 5
    align(config)
    assert "is damaged" in capsys.readouterr().out and cache.read_bytes() == whole


def test_a_finished_run_says_so_and_is_left_alone(config, tmp_path, capsys):
    folder = align(config)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    capsys.readouterr()
    align(config)
    said = capsys.readouterr().out
    assert f"finished after 4 iterations: see {folder / 'summary.json'}; a larger iterations= continues it" in said
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


# Ctrl-C and SIGTERM


def signal_in(monkeypatch, iteration: int, *numbers: int) -> None:
    """Send signals to this process in the middle of an iteration's update."""
    real = Run._update

    def update(run, *args):
        if run.iteration == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)
        return real(run, *args)

    monkeypatch.setattr(Run, "_update", update)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_iteration_saves_and_says_how_to_go_on(
    number, code, config, tmp_path, monkeypatch, same_run, capsys
):
    config.checkpoint_every = 2
    align(named(config, "straight"))
    torn = named(config, "torn")
    signal_in(monkeypatch, 2, number)
    monkeypatch.setattr("arvideo_rl.cli.align.load", lambda *_: torn)
    monkeypatch.setattr("arvideo_rl.cli.align.find", lambda _: tmp_path / "straight" / "config.yaml")
    with pytest.raises(SystemExit) as end:
        main(["align", "mine.yaml"])
    said = capsys.readouterr().err
    command = f"arvideo align {tmp_path / 'torn' / 'config.yaml'}"
    assert end.value.code == code and f"saved after iteration 3 of 4; continue with: {command}\n" in said
    assert "Traceback" not in said and checkpoints(tmp_path / "torn")[-1].name == "step-000003"
    assert not (tmp_path / "torn" / "summary.json").exists()

    monkeypatch.undo()
    given = (tmp_path / "torn" / "config_given.yaml").read_text()
    with pytest.raises(SystemExit) as end:
        main(command.split()[1:])
    assert not end.value.code and "continuing" in capsys.readouterr().out
    assert (tmp_path / "torn" / "config_given.yaml").read_text() == given, "what was given first stays on record"
    shutil.rmtree(tmp_path / "torn" / "checkpoints" / "step-000003")  # saved out of turn, still among the last two
    shutil.rmtree(tmp_path / "straight" / "checkpoints" / "step-000002")
    same_run(tmp_path / "torn", tmp_path / "straight")


def test_a_second_signal_stops_at_once(config, tmp_path, monkeypatch):
    monkeypatch.setattr("arvideo_rl.training.interrupt.SAME", 0.0)
    signal_in(monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    with pytest.raises(Interrupted, match="nothing new was saved; continue with: arvideo align"):
        align(config)
    assert checkpoints(tmp_path / config.name)[-1].name == "step-000002"


def test_a_signal_that_comes_twice_at_once_is_one(config, tmp_path, monkeypatch):
    signal_in(monkeypatch, 2, signal.SIGINT, signal.SIGINT)  # as torchrun hands on what the terminal sent already
    with pytest.raises(Interrupted, match="saved after iteration 3"):
        align(config)


def test_while_measuring_a_signal_stops_at_once(config, tmp_path, monkeypatch):
    monkeypatch.setattr("arvideo_rl.training.probe.measure", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="interrupted") as error:
        align(config)
    assert error.value.code == 143


def test_a_signal_after_the_loop_asked_last_is_not_forgotten():
    with pytest.raises(Interrupted, match="everything is saved"), Stop("again") as stop, stop.later():
        assert not stop.asked()
        os.kill(os.getpid(), signal.SIGTERM)


def test_the_handlers_found_are_put_back():
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with Stop("again"):
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_was_to_be_ignored_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop("again") as stop, stop.later():
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)


CHILD = """
import os, signal, sys, time, torch
from arvideo_rl.cli.main import main
from arvideo_rl.training import interrupt
from arvideo_rl.training.align import Run
what, config = sys.argv[1:]
real, save, interrupt.SAME = Run._update, Run.save, 0.0
Run.save = lambda *a, **k: (time.sleep(3 * (what == "signal")), save(*a, **k))  # as long as large weights take
def update(run, *args):
    rank = run.accelerator.process_index
    if what == "signal" and rank == 1 and run.iteration == 1:
        os.kill(os.getpid(), signal.SIGTERM)  # one process alone is told
    out = real(run, *args)
    if what == "diverge" and rank == 1 and run.iteration == 1:
        next(iter(run.policies.parameters().values())).data.view(-1)[3] += 1e-6
    return out
Run._update = update
main(["align", config])
"""


@pytest.mark.parametrize("what", ["signal", "diverge"])
def test_two_processes_stop_together_and_never_save_different_weights(what, config, tmp_path):
    import dataclasses

    config.checkpoint_every = 3 if what == "signal" else 1
    data = dataclasses.asdict(config)
    data["policy"]["targets"] = list(config.policy.targets)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(data))
    (tmp_path / "child.py").write_text(CHILD)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [*launch, str(tmp_path / "child.py"), what, str(tmp_path / "config.yaml")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    folder = tmp_path / config.name
    assert done.returncode != 0
    if what == "signal":
        assert "saved after iteration 2 of 4; continue with" in done.stderr, done.stderr[-2000:]
        assert load_checkpoint(checkpoints(folder)[-1]).state["step"] == 2
    else:
        assert "process 1 holds other weights than process 0" in done.stderr, done.stderr[-2000:]
        assert load_checkpoint(checkpoints(folder)[-1]).state["step"] == 1


def test_the_config_a_run_wrote_continues_it(config, tmp_path):
    folder = align(config)
    again = load(AlignConfig, str(folder / "config.yaml"), ["iterations=5"])
    align(again)
    assert json.loads((folder / "summary.json").read_text())["iterations"] == 5
    assert torch.equal(
        *(load_checkpoint(p).tensors["current/blocks.0.attn1.to_q.lora_A"].isfinite() for p in checkpoints(folder)[-2:])
    )
