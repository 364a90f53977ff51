"""What ``arvideo status`` says of runs in every state."""

import dataclasses

import pytest
from accelerate import Accelerator

from arvideo_rl.cli.main import main
from arvideo_rl.config import ConfigError
from arvideo_rl.training import rundir
from arvideo_rl.training.align import Run
from arvideo_rl.training.checkpoints import STATE, checkpoints
from arvideo_rl.training.launch import align
from arvideo_rl.training.settings import FREE_ON_RESUME
from arvideo_rl.training.status import status


def test_a_run_on_its_way_then_finished(config, tmp_path, capsys):
    folder = tmp_path / config.name
    with pytest.raises(ConfigError, match="is not a run"):
        status(folder)
    resolved = dataclasses.asdict(config)
    rundir.claim(folder, "align", resolved, FREE_ON_RESUME)
    rundir.start(folder, None, resolved)
    assert status(folder)["state"] == "not finished, 0 of 2 iterations saved"

    config.keep_last = 5
    run = Run(config, Accelerator())
    metrics = rundir.Metrics(folder)
    values = run.step()
    metrics.write(0, values)
    run.save(folder, score=0.75)
    metrics.write(1, values | {"reward/actions": 0.123456})
    metrics.close()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "rew')  # under way
    (folder / "checkpoints" / "step-000002.tmp").mkdir()
    found = status(folder)
    assert found["state"].startswith("not finished, 1 of 2 iterations saved; 2 done, the last ")
    assert "reward/actions 0.1235" in found["last metrics"]
    assert found["newest checkpoint"] == found["best checkpoint"] == "step-000001, score 0.75"
    assert (
        found["continue with"] == f"arvideo align {folder / 'config.yaml'}"
        and "step-000002.tmp" in found["half-written"]
    )

    align(config)
    found = status(folder)
    assert found["state"] == "finished, 2 of 2 iterations" and found["newest checkpoint"].startswith(
        "step-000002, score 0."
    )
    assert found["best checkpoint"].startswith("step-000001") and "continue with" not in found
    assert found["extend with"].endswith("config.yaml iterations=4") and "half-written" not in found
    (checkpoints(folder)[-1] / STATE).write_text("{")
    assert "step-000002 is damaged" in status(folder)["damaged"]

    capsys.readouterr()
    for words, code, says in (
        ([str(folder)], 0, "finished"),
        ([], 2, "run directories"),
        (["nowhere"], 1, "not a run"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["status", *words])
        out, err = capsys.readouterr()
        assert (end.value.code or 0) == code and says in out + err
