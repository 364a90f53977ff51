"""Every objective through the trainer: an iteration changes the policy, resumes to the bit, and does not care how many
processes share it."""

import copy
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate import Accelerator

from arvideo_rl.config import ConfigError, load, presets
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.training.align import Run
from arvideo_rl.training.asked import asked_for
from arvideo_rl.training.checkpoints import checkpoints, load_checkpoint
from arvideo_rl.training.distill import DistillConfig, Network, build
from arvideo_rl.training.launch import align
from arvideo_rl.training.settings import OBJECTIVES, AlignConfig, Method, Part, build_objective

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    "grpo": dict(args=dict(steps_per_chunk=2, kl_weight=0.1), updates=2),
    "grpo after a fork": dict(target="grpo", args=dict(kernel="cm", eta=None, explore="fork_fresh", credit="sequence")),
    "grpo in a window": dict(target="grpo", args=dict(window=dict(size=1, moves=1))),
    "chunk_fork": dict(args=dict(anchors=2, kl_weight=0.1)),
    "kv_routing": dict(args=dict(routed=1, nearest=2, chunks=1, kl_weight=1.0), group=3, frames=18),
    "fpo": dict(args=dict(draws=2, kl_weight=0.1), updates=2),
    "pairs": dict(args=dict(apart=0.3), group=2, advantage="centre"),
    "pairs churned": dict(target="pairs", args=dict(noise="churn", apart=0.3), group=2, advantage="centre"),
    "nft": dict(args=dict(coupling="visited", mean_flow=True)),
    "dmd": dict(args=dict(critic_updates=2, saliency=0.5, saliency_patch=8)),
    "dmd with a lora": dict(
        target="dmd",
        args=dict(critic_updates=1, critic_kind="lora", normalise=False, balance=0.5),
        rewards={"actions": Part("inverse_dynamics"), "colour": Part("naive_colour")},
    ),
}


@pytest.fixture(scope="session")
def teacher(tmp_path_factory) -> str:
    """Folder of a random generator that reads six frames at once."""
    network, whole = Network(dim=32, layers=2, ffn=64, patch=(16, 16), text_dim=16), Streaming(6, 6, 0)
    made = build(DistillConfig(seed=5, network=network, streaming=whole))
    torch.nn.init.normal_(made.transformer.proj_out.weight, std=0.3)
    folder = tmp_path_factory.mktemp("teacher")
    made.save(folder)
    return str(folder)


@pytest.fixture
def config(config, teacher):
    """The folder's, where what names a teacher finds one."""
    config.teacher = teacher  # read by ``told``
    return config


def told(config, name):
    """The test's configuration with a case's objective."""
    config, teacher = copy.deepcopy(config), config.teacher
    case = copy.deepcopy(CASES[name])
    if "dmd" in name:
        case["args"] = case["args"] | {"teacher": teacher}
    config.objective = Method(case.pop("target", name), case.pop("args"))
    for key, value in case.items():
        setattr(config, key, value)
    config.held_out.prompts = 6
    return config


def states(run):
    return {k: v.clone() for k, v in run.policies.state().items()}


def test_every_objective_is_here():
    assert {CASES[name].get("target", name) for name in CASES} == set(OBJECTIVES)


@pytest.mark.parametrize("name", CASES)
def test_an_iteration_trains_and_a_resumed_run_is_the_same_to_the_bit(name, config, tmp_path):
    config = told(config, name)
    straight = Run(config, Accelerator())
    start = states(straight)
    seen = [straight.step() for _ in range(2)]
    assert all(torch.isfinite(torch.tensor(v)) for row in seen for k, v in row.items() if k.startswith("train/"))
    assert seen[0]["train/grad_norm"] > 0
    first = Run(config, Accelerator())
    first.step()
    first.save(tmp_path / "run")
    again = Run(config, Accelerator())
    assert again.restore(tmp_path / "run")
    again.step()
    ends = [states(straight), states(again)]
    assert all(torch.equal(ends[0][k], ends[1][k]) for k in ends[0])
    assert any(not torch.equal(ends[0][k], start[k]) for k in start if k.startswith("current/"))


@pytest.mark.parametrize("name", [n for n in CASES if n != "nft" and "dmd" not in n])
def test_the_first_update_of_a_rollout_finds_a_ratio_of_one(name, config):
    config = told(config, name)
    config.updates = 1
    assert Run(config, Accelerator()).step()["train/ratio_off"] < 1e-5


@pytest.mark.parametrize("name", [n for n in CASES if n not in ("nft", "fpo") and "dmd" not in n])
def test_noise_of_refreshing_is_found_again_in_the_update(name, config, tmp_path):
    """Else the update's context is not the sampler's, and the ratio is not one."""
    generator = Generator.load(config.generator)
    generator.streaming = dataclasses.replace(generator.streaming, refresh_level=0.2)
    generator.save(tmp_path / "noisy")
    config = told(config, name)
    config.generator, config.updates = str(tmp_path / "noisy"), 1
    assert Run(config, Accelerator()).step()["train/ratio_off"] < 1e-5


def test_a_second_update_of_nft_still_has_the_policy_that_drew_as_the_old_one(config):
    config = told(config, "nft")
    config.updates, config.objective.args = 2, {}
    run = Run(config, Accelerator())
    row = run.step()
    assert row["train/x0_moved"] > 0 and row["train/context_gap"] > 0  # of the last update
    assert run.policies.old_is_current and Run(config, Accelerator()).policies.old_is_current


def test_a_second_update_moves_the_ratio(config):
    seen = Run(told(config, "grpo"), Accelerator()).step()
    assert seen["train/ratio_off"] > 1e-6 > seen["train/first_ratio_off"] - 1e-5


def test_a_ratio_that_is_not_one_at_the_first_update_is_told_once(config, capsys):
    run = Run(told(config, "grpo"), Accelerator())
    with torch.no_grad():  # what samples is no longer what trains
        for p in run.policies.parameters("old").values():
            p.add_(0.5)
    run.policies.old_is_current = False
    for _ in range(2):
        run.step()
        with torch.no_grad():
            for p in run.policies.parameters("old").values():
                p.add_(0.5)
        run.policies.old_is_current = False
    assert capsys.readouterr().out.count("a ratio is") == 1


@pytest.mark.parametrize("name", ["kv_routing", pytest.param("chunk_fork", marks=pytest.mark.slow),
                                  pytest.param("grpo", marks=pytest.mark.slow),
                                  pytest.param("dmd", marks=pytest.mark.slow)])  # fmt: skip
def test_two_processes_give_one_process_s_update(name, config, tmp_path):
    config = told(config, name)
    data = dataclasses.asdict(config) | {"iterations": 1, "lr": 1e-4}
    data["policy"] |= {"rank": 2, "targets": ["to_q", "to_v"]}
    data["probe"]["every"] = 0
    data["alarm"] = "off"
    path, env = tmp_path / "config.yaml", {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ends, norms = {}, {}
    for n in (1, 2):
        path.write_text(yaml.safe_dump({**data, "name": f"p{n}"}))
        if n == 1:  # here, without the start of an interpreter
            align(load(AlignConfig, str(path), []))
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "arvideo_rl"]
            done = subprocess.run([sys.executable, *launch, "align", str(path)], env=env, capture_output=True,
                                  text=True, timeout=300)  # fmt: skip
            assert done.returncode == 0, done.stderr[-2000:]
        ends[n] = load_checkpoint(checkpoints(tmp_path / f"p{n}")[-1]).tensors
        row = json.loads((tmp_path / f"p{n}" / "metrics.jsonl").read_text().splitlines()[0])
        norms[n] = row["train/grad_norm"]
    assert norms[1] == pytest.approx(norms[2], rel=1e-4)
    assert all((ends[1][k] - ends[2][k]).abs().max() < 1e-5 for k in ends[1])


def test_groups_taken_whole_are_not_split_over_processes(config):
    from arvideo_rl.training.settings import check_groups

    config = told(config, "chunk_fork")
    objective = build_objective(config.objective, 2)
    check_groups(config, objective, 2)
    with pytest.raises(ConfigError, match="prompts_per_step=2 groups do not divide over 3 processes; use 3"):
        check_groups(config, objective, 3)


@pytest.mark.parametrize(
    ("streaming", "frames", "message"),
    [(dict(recompute=True, sink=0), 18, "needs a window that is kept"), (dict(window=None), 18, "not unbounded"),
     (dict(window=7), 18, "nearest=2: of its past a chunk reads 1 frames besides the sinks, so use at most 1"),
     (dict(), 12, "no frame to fork at in 12 frames")],
    ids=str,
)  # fmt: skip
def test_routing_without_room_is_refused_before_anything_runs(streaming, frames, message, config, tmp_path):
    generator = Generator.load(config.generator)
    generator.streaming = dataclasses.replace(generator.streaming, **streaming)
    generator.save(tmp_path / "other")
    config = told(config, "kv_routing")
    config.generator, config.frames = str(tmp_path / "other"), frames
    with pytest.raises(ValueError, match=message):
        Run(config, Accelerator())


def test_a_first_frame_of_its_own_is_not_trained_on(config, tmp_path):
    generator = Generator.load(config.generator)
    generator.streaming = dataclasses.replace(generator.streaming, first_alone=True)
    generator.save(tmp_path / "other")
    config.generator = str(tmp_path / "other")
    with pytest.raises(ConfigError, match="first_alone=true: .* cannot be trained on here"):
        Run(config, Accelerator())


@pytest.mark.parametrize("path", sorted((presets() / "align").glob("*_tiny.yaml")), ids=lambda p: p.stem)
def test_every_recipe_builds_its_objective(path):
    config = load(AlignConfig, str(path), [])
    objective = build_objective(config.objective, config.frames // 3)
    assert objective.exploration and config.rewards
    assert config.name == path.stem or path.stem.startswith(("base", "debug", "naive"))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dmd", dict(args=dict(through_context=True), streaming=dict(compress=3)), "not streaming.compress; set it to"),
        ("dmd", dict(args=dict(through_context=True), streaming=dict(recompute=True, sink=0)), "streaming.recompute"),
        ("dmd", dict(args=dict(saliency=1.0), score="accuracy"), "rewards.actions .* as configured has no gradient"),
        ("dmd", dict(args=dict(balance=0.5, normalise=False)), "balance weighs several rewards .*, and one is trained"),
        ("dmd", dict(updates=2), "objective dmd is on-policy: use updates=1 lag=none, not updates=2"),
        ("grpo", dict(args=dict(trust="score")), "objective grpo with trust=score is on-policy: .*, not updates=2"),
        ("grpo", dict(args=dict(trust="score"), updates=1, lag="nft"), "not updates=1 lag=nft"),
        ("grpo", dict(args=dict(packed=True, context_writer="current"), streaming=dict(compress=3)), "packed=false"),
        ("kv_routing", dict(group=2), "group=2: kv_routing chooses between branches, .*; use 3 or more"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_loss_cannot_use_is_refused_before_anything_runs(name, change, message, config, tmp_path):
    generator = Generator.load(config.generator)
    generator.streaming = dataclasses.replace(generator.streaming, **change.pop("streaming", {}))
    generator.save(tmp_path / "other")
    config = told(config, name)
    config.generator = str(tmp_path / "other")
    config.rewards["actions"].args["score"] = change.pop("score", "expected_accuracy")
    config.objective.args |= change.pop("args", {})
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(ValueError, match=message):
        asked_for(config, Generator.load(config.generator), 1)


def test_a_run_does_not_go_on_with_another_teacher(config, tmp_path):
    config = told(config, "dmd")
    Run(config, Accelerator()).save(tmp_path / "run")
    other = Generator.load(config.objective.args["teacher"])
    other.transformer.proj_out.weight.data += 1e-3
    other.save(tmp_path / "teacher")
    config.objective.args["teacher"] = str(tmp_path / "teacher")
    with pytest.raises(ValueError, match="does not belong to .*: teacher was .* when it was saved"):
        Run(config, Accelerator()).restore(tmp_path / "run")


def test_processes_compare_their_critics_too(config, monkeypatch):
    run = Run(told(config, "dmd"), Accelerator())
    seen = []
    monkeypatch.setattr("arvideo_rl.training.align.gather_object", lambda x: seen.extend(x) or x)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    run.check_processes()
    next(iter(run.critic.policies.parameters().values())).data += 1e-3
    run.check_processes()
    assert seen[0] != seen[1]
