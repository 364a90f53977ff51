"""A mixture in a run: what it writes of every branch, what only watches, and what a gate does to the update."""

import copy
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from arvideo_rl.config import ConfigError
from arvideo_rl.training.align import Run
from arvideo_rl.training.axes import Axes, table
from arvideo_rl.training.launch import align
from arvideo_rl.training.settings import Part, build_rewards, weights_of

NAN = math.nan


def light(clips):
    return clips.frames.mean((1, 2, 3, 4))


HERE = "my_judge:light"


@pytest.fixture(autouse=True)
def my_judge(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_judge", SimpleNamespace(light=light))


@pytest.fixture
def config(config):
    config.mix, config.probe.every = "zsum", 0
    config.rewards["sharp"] = Part("sharpness", 0.5, floor=0.9)
    return config


def rows(folder):
    return [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]


def test_every_value_of_every_branch_is_kept_and_resuming_keeps_each_iteration_once(config):
    config.rewards["light"] = Part(HERE, 2.0, held_out=True)
    config.iterations = 2
    folder = align(config)
    straight = rows(folder)
    assert [r["iteration"] for r in straight] == [0, 1]
    row = straight[0]
    assert {k: v["weight"] for k, v in row["rewards"].items()} == {"actions": 1.0, "sharp": 0.5, "light": 0.0}
    branches = config.prompts_per_step * config.group
    for values in (row["advantages"], *(v[k] for v in row["rewards"].values() for k in ("raw", "z"))):
        assert len(values) == branches and all(len(x) == 2 for x in values)
    groups, z = torch.tensor(row["groups"]), torch.tensor(row["rewards"]["light"]["z"])
    for g in groups.unique():
        assert z[groups == g].mean(0).abs().max() < 1e-4
    resumed = Axes(folder, 1)
    resumed.write(1, {"groups": []})
    resumed.sync()
    resumed.close()
    assert rows(folder) == [straight[0], {"iteration": 1, "groups": []}]


def test_a_held_out_reward_changes_nothing_and_says_whether_it_agrees(config):
    runs = []
    for part in (None, Part(HERE, held_out=True), Part(HERE, 0.0), Part(HERE, 1.0)):
        mine = copy.deepcopy(config)
        if part:
            mine.rewards["light"] = part
        run = Run(mine, Accelerator())
        metrics = run.step()
        runs.append((metrics, {k: v.clone() for k, v in run.policies.state().items()}))
    (plain, free), *others = runs
    for (metrics, state), same in zip(others, (True, True, False)):
        assert all(torch.equal(state[k], free[k]) for k in free) is same
        assert -1 <= metrics["reward/light/agreement"] <= 1
    assert plain["reward/actions/agreement"] > 0.1 and "reward/light/agreement" not in plain
    assert "reward/mix/group_std" in plain and "reward/sharp/zero_spread_share" in plain


def test_a_gate_is_no_term_and_shuts_branches_of_a_run(config):
    config.rewards["light"] = Part(HERE, 1.0, gate=2.0)  # which nothing can reach
    assert weights_of(config) == {"actions": 1.0, "sharp": 0.5, "light": 0.0}
    assert [w for _, w in build_rewards({"light": Part(HERE, 1.0, gate=0.1)}).values()] == [0.0]
    run = Run(config, Accelerator())
    metrics = run.step()
    assert metrics["reward/mix/passing"] == 0 and metrics["reward/mix/zero_spread_share"] == 1
    config.rewards["light"].gate = 0.0
    metrics = Run(config, Accelerator()).step()
    assert metrics["reward/mix/passing"] == 1 and metrics["reward/mix/zero_spread_share"] < 1


def test_missing_values_stand_as_null_and_say_nothing():
    raw, groups = torch.tensor([[0.123456789], [NAN]]), torch.tensor([4, 4])
    row, metrics = table({"a": raw}, {"a": raw}, {"a": 1.0}, torch.zeros(2, 1), groups)
    assert row == {"groups": [4, 4], "advantages": [[0.0], [0.0]],
                   "rewards": {"a": {"weight": 1.0, "raw": [[0.12346], [None]], "z": [[0.0], [0.0]]}}}  # fmt: skip
    assert metrics == {}
    _, metrics = table(
        {"a": raw}, {"a": torch.tensor([[1.0], [2.0]])}, {"a": 0.0}, torch.tensor([[1.0], [-1.0]]), groups
    )
    assert metrics == {"reward/a/agreement": pytest.approx(-1.0)}


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda c: setattr(c, "mix", "product"), "sharp|actions"),
     (lambda c: setattr(c, "mix", "zsumm"), "did you mean zsum"),
     (lambda c: c.rewards.update(x=Part(HERE, gate=0.1, held_out=True)), "x is held out and a gate"),
     (lambda c: (c.rewards["sharp"].__setattr__("least_std", 0.1), setattr(c.objective, "target", "kv_routing")),
      "kv_routing compares with its anchor")],
)  # fmt: skip
def test_a_mixture_that_cannot_be_is_refused_before_a_run(config, change, says):
    config.rewards["sharp"].weight = -1.0 if says == "sharp|actions" else 0.5
    config.rewards["sharp"].floor = None
    change(config)
    with pytest.raises(ConfigError, match=says):
        Run(config, Accelerator())
