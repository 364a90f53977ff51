"""A generator small enough for tests, with random weights, saved like any other; and runs that die."""

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from arvideo_rl.training.checkpoints import checkpoints, load_checkpoint
from arvideo_rl.training.distill import DistillConfig, Network, build
from arvideo_rl.training.settings import AlignConfig, Part


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def ctrl_c():
    """A shell makes its background jobs ignore Ctrl-C; the tests of it need it heard there too."""
    before = signal.getsignal(signal.SIGINT)
    if before == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def small(tmp_path_factory) -> str:
    """Folder of a 32-wide, 2-layer generator for 16x16-patch tokens."""
    generator = build(DistillConfig(network=Network(dim=32, layers=2, ffn=64, patch=(16, 16), text_dim=16)))
    torch.nn.init.normal_(generator.transformer.proj_out.weight, std=0.3)
    folder = tmp_path_factory.mktemp("small")
    generator.save(folder)
    return str(folder)


@pytest.fixture
def config(small, tmp_path) -> AlignConfig:
    """An alignment of it that takes a second."""
    config = AlignConfig(generator=small, out=str(tmp_path), iterations=2, prompts_per_step=2, group=4, frames=6)
    config.rewards = {"actions": Part("inverse_dynamics", 1.0, {"score": "expected_accuracy", "granularity": "chunk"})}
    config.prompts.count = 8
    config.held_out.prompts, config.held_out.noises, config.held_out.frames = 8, 1, 12
    config.policy.rank, config.policy.alpha = 4, 4.0
    return config


FILE_EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


@pytest.fixture
def fork():
    """``fork(work, folder, die_at)`` runs ``work()`` in a child process that kills itself (SIGKILL) at its
    ``die_at``-th operation on files of ``folder``; with a ``die_after`` instead, it is killed after so many seconds.
    Returns (whether it was killed, operations it did). An error in the child fails the test."""

    def run(work, folder: Path, die_at: int | None = None, die_after: float | None = None) -> tuple[bool, int]:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            count = 0

            def watch(event: str, args: tuple) -> None:
                nonlocal count
                if event in FILE_EVENTS and (event != "open" or str(args[0]).startswith(str(folder))):
                    count += 1
                    if count == die_at:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(watch)
            try:
                work()
                os.write(writer, f"{count}".encode())
            except BaseException:
                os.write(writer, traceback.format_exc().encode())
            os._exit(0)
        os.close(writer)
        if die_after is not None:
            select.select([reader], [], [], die_after)  # or until it is done
            os.kill(child, signal.SIGKILL)
        said = b"".join(iter(lambda: os.read(reader, 1 << 16), b"")).decode()
        os.close(reader)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or said.isdigit(), said
        return killed, 0 if killed else int(said)

    return run


@pytest.fixture
def same_run():
    """``same_run(a, b)`` asserts that two run directories hold the same, but for wall time."""

    def check(a: Path, b: Path) -> None:
        mine, theirs = ([p.name for p in checkpoints(x)] for x in (a, b))
        assert mine == theirs
        x, y = (load_checkpoint(checkpoints(f)[-1]) for f in (a, b))
        assert x.tensors.keys() == y.tensors.keys() and all(torch.equal(x.tensors[k], y.tensors[k]) for k in x.tensors)
        torch.testing.assert_close(x.optimizer, y.optimizer, rtol=0, atol=0)
        timeless = [{k: v for k, v in c.state.items() if k not in ("seconds", "files")} for c in (x, y)]
        assert timeless[0] == timeless[1]
        assert rows_of(a) == rows_of(b) and list(rows_of(a)) == list(range(len(rows_of(a))))
        assert board_of(a) == board_of(b)
        summaries = [json.loads((f / "summary.json").read_text()) for f in (a, b)]
        assert summaries[0] | {"name": 0, "seconds": 0} == summaries[1] | {"name": 0, "seconds": 0}
        assert not [p for p in a.rglob("*.tmp")]

    return check


def rows_of(folder: Path) -> dict[int, dict]:
    """Rows of metrics.jsonl without times, by iteration; every iteration stands once."""
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    out = {r["iteration"]: {k: v for k, v in r.items() if not k.startswith("seconds")} for r in rows}
    assert len(out) == len(rows)
    return out


def board_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, without times."""
    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    tags = [t for t in board.Tags()["scalars"] if not t.startswith("seconds")]
    assert tags
    return {t: [(e.step, e.value) for e in board.Scalars(t)] for t in tags}
