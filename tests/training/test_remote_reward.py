"""Training with a reward that runs elsewhere: what the local one gives, bit for bit; and a server that is lost."""

import copy
import json

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.config import ConfigError
from arvideo_rl.training.align import Run
from arvideo_rl.training.launch import _held_out, align
from arvideo_rl.training.settings import Part, build_rewards
from rewards import registry
from rewards.remote import client


@pytest.fixture
def remote(config, serving):
    """``remote(*names)``: the configuration with the rewards ``names`` at a server instead, and the server."""

    def change(*names):
        parts = {name: config.rewards[name] for name in names}
        server = serving({name: registry.build(part.target, **part.args) for name, part in parts.items()})
        far = copy.deepcopy(config)
        for name, part in parts.items():
            far.rewards[name] = Part("remote", part.weight, {"url": server.url, "reward": name, "retries": 0})
        return far, server

    return change


def test_training_with_a_remote_reward_equals_training_with_the_local_one_bit_for_bit(config, remote):
    config.rewards["light"] = Part("inverse_dynamics", 0.5, {"score": "accuracy"})  # a clip reward, too
    far, _ = remote("actions", "light")
    here, there = Run(config, Accelerator()), Run(far, Accelerator())
    for _ in range(2):
        a, b = ({k: v for k, v in run.step().items() if not k.startswith("seconds")} for run in (here, there))
        assert a == b and a["reward/actions/invalid_share"] == 0
    mine, theirs = here.policies.state(), there.policies.state()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    assert any(bool(v.any()) for k, v in mine.items() if "lora_B" in k), "something was trained"


@pytest.mark.slow
def test_a_run_with_a_remote_reward_ends_in_the_same_numbers(config, remote, tmp_path):
    config.iterations, config.name = 1, "here"
    far, _ = remote("actions")
    far.name = "there"
    a, b = (json.loads((align(c) / "summary.json").read_text()) for c in (config, far))
    assert a | {"name": 0, "seconds": 0} == b | {"name": 0, "seconds": 0}


def test_a_server_that_is_lost_ends_the_run_in_one_line_that_says_so(remote, caplog):
    far, server = remote("actions")
    run = Run(far, Accelerator())
    run.step()
    server.stop()
    with pytest.raises(
        ValueError, match="'actions' could score none of 8 branches at iteration 1; the measuring failed"
    ):
        run.step()
    assert "system:unreachable for 8 clips" in caplog.text
    with pytest.raises(ValueError, match="reward/actions could score no held-out video .measuring after.; the same"):
        _held_out(run, None, "measuring after")


def test_one_answer_that_fails_is_left_out_and_training_goes_on(config, remote, monkeypatch):
    """Two processes ask for themselves; here, what one of them asks for is lost."""
    far, _ = remote("actions")
    run = Run(far, Accelerator())
    first = run._rollouts([0, 1])
    monkeypatch.setattr(run, "_rollouts", lambda rows: first)
    whole = client.Remote.__call__

    def half(self, clips):
        scores = whole(self, clips)
        scores.value[:1], scores.valid[:1] = torch.nan, False
        return type(scores)(scores.value, scores.valid, ["system:timeout", *scores.reasons[1:]])

    monkeypatch.setattr(client.Remote, "__call__", half)
    metrics = run.step()
    assert metrics["reward/actions/invalid_share"] == 1 / 8 and metrics["train/grad_norm"] > 0


@pytest.mark.slow
def test_a_server_lost_before_the_comparison_leaves_no_summary_and_the_same_command_finishes(
    config, remote, monkeypatch
):
    config.iterations = 1
    far, _ = remote("actions")
    ask, lost = client.Remote._ask, []

    def fail(self, method, path, body=None):
        if lost:
            raise client.Failed("unreachable", "it is gone")
        return ask(self, method, path, body)

    step = Run.step
    monkeypatch.setattr(client.Remote, "_ask", fail)
    monkeypatch.setattr(Run, "step", lambda run: (step(run), lost.append(1))[0])
    with pytest.raises(ValueError, match="reward/actions could score no held-out video .measuring after.; the same"):
        align(far)
    lost.clear()
    assert json.loads((align(far) / "summary.json").read_text())["iterations"] == 1


def test_a_reward_that_cannot_be_had_is_refused_before_the_run(remote):
    far, _ = remote("actions")
    far.rewards["actions"].args["reward"] = "action"
    with pytest.raises(ConfigError, match="rewards.actions: remote reward action at .* it serves actions"):
        build_rewards(far.rewards)
