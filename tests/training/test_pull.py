"""The selective pull and the moving reference through the trainer."""

import copy

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.config import ConfigError
from arvideo_rl.training.align import Run
from arvideo_rl.training.pull import Pull, PullConfig
from arvideo_rl.training.settings import Method, Part


@pytest.fixture
def config(config):
    """A reward that judges alone, and a reference that moves."""
    config.rewards["colour"] = Part("naive_colour", 0.0)
    config.pull = PullConfig("selective", 0.2, "dynamic", every=3)
    config.objective.args, config.policy.targets = {"kl_weight": 1.0}, ("to_q", "ffn.net.2")
    return config


def tensors(run: Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.policies.state().items()}


@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_gate_and_reference_resume_to_the_bit(kind, config, tmp_path):
    config.policy.kind, config.pull.share, config.pull.threshold = kind, 0.15, 9.0  # so it moves after iteration 3
    straight = Run(copy.deepcopy(config), Accelerator())
    rows = [straight.step() for _ in range(3)]
    straight.save(tmp_path)
    saved = straight.pull.state()
    rows.append(straight.step())
    assert [r["pull/moved"] for r in rows] == [0, 0, 1, 0] and len({r["pull/share"] for r in rows}) > 1
    again = Run(copy.deepcopy(config), Accelerator())
    again.restore(tmp_path)
    resumed = again.step()
    assert again.pull.state() == straight.pull.state() != saved
    a, b = tensors(again), tensors(straight)
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert any(not torch.equal(a[f"reference/{k[8:]}"], v) for k, v in a.items() if k.startswith("current/"))
    assert {k: v for k, v in resumed.items() if k[:7] != "seconds"} == {
        k: v for k, v in rows[3].items() if k[:7] != "seconds"
    }


def test_a_reward_of_weight_0_judges_and_does_not_train(config):
    """With the gate open to all, runs with and without it are the same."""
    config.pull = PullConfig()
    ends = []
    for kept in (True, False):
        one = copy.deepcopy(config)
        if not kept:
            del one.rewards["colour"]
        run = Run(one, Accelerator())
        metrics = run.step()
        ends.append(tensors(run))
        assert ("reward/colour" in metrics) is kept
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])


def test_the_gated_branches_are_the_suspected_ones_of_their_group(config, monkeypatch):
    run = Run(config, Accelerator())
    seen = {}
    real = Run._update
    monkeypatch.setattr(Run, "_update", lambda self, record, adv: seen.update(r=record) or real(self, record, adv))
    told = torch.tensor([[4.0, 3, 2, 1, 1, 2, 3, 4], [1.0, 2, 3, 4, 4, 3, 2, 1]])
    table = {"actions": told[0][:, None].expand(8, 2), "colour": told[1][:, None].expand(8, 2)}
    nobody = {k: torch.zeros(8, 2, dtype=torch.bool) for k in table}
    monkeypatch.setattr("arvideo_rl.training.align.reward_table", lambda *_: (table, nobody))
    metrics = run.step()
    assert seen["r"].gates.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]  # u is 1, 1/3, ... in both groups; a fifth of four
    assert metrics["pull/gated"] == 1 / 8 and metrics["pull/suspicion"] == pytest.approx(2 / 3)


def test_the_mean_kl_is_of_the_pulled_branches():
    class Policies:
        def copy(self, *names, keep):
            self.seen = (*names, keep)

    pull, policies = Pull(PullConfig("selective", 0.2, "dynamic", threshold=0.5)), Policies()
    values = {"a": torch.tensor([[2.0], [1.0]] * 5), "b": torch.tensor([[1.0], [2.0]] * 5)}
    gates, _ = pull.gates(values, {"a": 1.0, "b": 0.0}, torch.arange(5).repeat_interleave(2))
    assert gates.sum() == 1
    assert pull.follow(policies, {"train/pull": 0.04})["pull/kl"] == pytest.approx(0.4) and not hasattr(
        policies, "seen"
    )
    assert pull.follow(policies, {"train/pull": 0.06})["pull/moved"] == 1 and policies.seen == (
        "current",
        "reference",
        0,
    )
    pull.gates({k: v * 0 for k, v in values.items()}, {"a": 1.0, "b": 0.0}, torch.zeros(10))
    assert "pull/kl" not in pull.follow(policies, {"train/pull": 0.0})  # nobody is suspected


def test_a_gate_is_trained_on_and_hence_no_judge(config):
    config.rewards["sharp"] = Part("sharpness", gate=-1e9)
    metrics = Run(config, Accelerator()).step()
    del config.rewards["sharp"]
    assert metrics["pull/suspicion"] == Run(config, Accelerator()).step()["pull/suspicion"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda c: setattr(c.rewards["colour"], "gate", 0.1),
            "needs independent judges: add rewards with weight=0 to actions",
        ),
        (lambda c: c.rewards.pop("colour"), "selective needs independent judges: add rewards with weight=0 to actions"),
        (lambda c: setattr(c.rewards["actions"], "weight", 0.0), "no reward is trained: give one of actions, colour a"),
        (
            lambda c: c.objective.args.update(kl_weight=0.0),
            "pull.branches=selective needs a pull: set objective.args.kl",
        ),
        (
            lambda c: setattr(c, "objective", Method("dmd", {"teacher": "x"})),
            "pulls nothing to a reference .*no kl_weight",
        ),
        (lambda c: setattr(c.pull, "branches", "some"), "pull.branches=.*selective"),
        (lambda c: setattr(c.pull, "share", 0.5), "pull.share=0.5: use 0.02 to 0.2"),
        (lambda c: setattr(c.pull, "threshold", 0.0), "pull.threshold=0.0"),
        (lambda c: setattr(c.pull, "every", 0), "pull.every=0"),
    ],
)
def test_a_pull_that_cannot_be_is_refused(change, says, config):
    change(config)
    with pytest.raises(ConfigError, match=says):
        Run(config, Accelerator())


def test_kv_routing_pulls_no_single_branch(config):
    config.objective.target, config.objective.args, config.group = (
        "kv_routing",
        {"routed": 1, "nearest": 2, "chunks": 1},
        3,
    )
    config.frames = 18
    with pytest.raises(ConfigError, match="kv_routing pulls a choice between branches"):
        Run(config, Accelerator())
    config.pull.branches = "all"
    assert Run(config, Accelerator()).step()["pull/kl"] == 0
