"""Semi-on-policy training: a replay is what the initial policy would have drawn, whole or not there."""

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
from safetensors.torch import load_file

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training import align as module
from arvideo_rl.training.align import Run
from arvideo_rl.training.checkpoints import checkpoints, load_checkpoint
from arvideo_rl.training.launch import dry_run
from arvideo_rl.training.settings import Method

ROOT = Path(__file__).resolve().parents[2]
OBJECTIVES = {
    "chunk_fork": dict(args=dict(anchors=2)),
    "grpo": dict(args=dict(trust="mask")),
    "fpo": dict(args=dict(draws=2)),
    "pairs": dict(args=dict(apart=0.3), group=2, advantage="centre"),
    "kv_routing": dict(args=dict(routed=1, nearest=2, chunks=1), group=3, frames=18),
}


@pytest.fixture
def config(config, tmp_path):
    config.objective, config.lag = Method("chunk_fork", {"anchors": 2}), "frozen"
    config.replay.path, config.replay.groups = str(tmp_path / "replay"), 4
    config.policy.targets = ("to_q", "ffn.net.2")
    return config


def tensors(run: Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.policies.state().items()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def watched(run: Run, monkeypatch) -> list:
    """What is trained on from now on."""
    seen, real = [], Run._update
    monkeypatch.setattr(Run, "_update", lambda self, *a: seen.append(a) or real(self, *a))
    return seen


def test_a_replay_holds_what_the_initial_policy_draws_in_the_first_iterations(config):
    fresh = copy.deepcopy(config)
    fresh.replay.path = ""
    run = Run(fresh, Accelerator())
    drawn, _ = run._rollouts(module.prompt_rows(8, 2, 0, 0))
    stored = Run(config, Accelerator())
    found = stored.replay().read([0, 1], ["actions"], stored.generator)
    assert torch.equal(found.record.latents, drawn.latents) and found.record.keys == drawn.keys
    assert all(torch.equal(getattr(found.record.steps, n), getattr(drawn.steps, n)) for n in ("x", "x0", "first"))
    assert torch.equal(found.record.script.texts[0][1], drawn.script.texts[0][1])
    assert torch.equal(found.record.script.actions, drawn.script.actions)
    assert found.record.groups.tolist() == [0] * 4 + [1] * 4
    assert {k.iteration for k in stored.replay().read([2], ["actions"], stored.generator).record.keys} == {1}


def test_processes_share_the_branches_of_an_iteration_in_order(config):
    replay, names, generator = Run(config, Accelerator()).replay(), ["actions"], Generator.load(config.generator)
    whole = replay.read([2, 0, 3], names, generator)
    for processes in (1, 2, 3, 4, 6):  # of 12 branches
        parts = [replay.share([2, 0, 3], names, generator, i, processes) for i in range(processes)]
        assert {len(record) for record, *_ in parts} == {12 // processes}
        assert torch.equal(torch.cat([record.latents for record, *_ in parts]), whole.record.latents)
        assert [k for record, *_ in parts for k in record.keys] == whole.record.keys
        assert torch.equal(torch.cat([values["actions"] for _, values, _ in parts]), whole.values["actions"])


def test_it_is_recorded_once_and_never_renewed(config, monkeypatch):
    run = Run(config, Accelerator())
    seen = watched(run, monkeypatch)
    run.step()
    monkeypatch.setattr(module, "roll_out", lambda *_: pytest.fail("rolled out again"))
    rows = [run.step() for _ in range(3)]
    groups = [set(record.groups.tolist()) for record, _ in seen]
    assert groups[0] | groups[1] == groups[2] | groups[3] == {0, 1, 2, 3} and groups[0] != groups[2]  # two epochs
    first, again = ({g: r.latents[r.groups == g] for r, _ in some for g in range(4) if (r.groups == g).any()}
                    for some in (seen[:2], seen[2:]))  # fmt: skip
    assert all(torch.equal(first[g], again[g]) for g in range(4))
    assert all(row["train/ratio_off"] > 0 and "train/first_ratio_off" not in row for row in rows)
    assert not any(k.startswith("verifier/") for k in rows[0]) and "reward/actions" in rows[0]
    other = copy.deepcopy(config)
    other.seed, other.policy.rank, other.objective.args = 5, 2, {"anchors": 3, "clip": 0.1}
    Run(other, Accelerator()).step()  # another run on the same replay


def test_the_first_iteration_is_that_of_a_run_on_policy(config):
    """Same groups, same draws: one update apart from where the rollouts lay."""
    ends = []
    for path in (config.replay.path, ""):
        one = copy.deepcopy(config)
        one.replay.path, one.replay.groups = path, 2
        run = Run(one, Accelerator())
        metrics = run.step()
        assert metrics["train/first_ratio_off"] < 1e-5
        ends.append((metrics["train/grad_norm"], metrics["reward/actions"]))
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_a_replayed_group_is_trained_on_with_new_draws(config, monkeypatch):
    run = Run(config, Accelerator())
    keys, real = [], run.objective.losses
    monkeypatch.setattr(
        run.objective, "losses", lambda p, d, record, *a: keys.append(record.keys) or real(p, d, record, *a)
    )
    for _ in range(3):
        run.step()
    assert [{k.iteration for k in some} for some in keys] == [{0}, {0}, {1}, {1}, {2}, {2}]


@pytest.mark.parametrize(
    "name", [n if n in ("chunk_fork", "grpo") else pytest.param(n, marks=pytest.mark.slow) for n in OBJECTIVES]
)
def test_every_objective_with_a_ratio_takes_a_replay_and_resumes_to_the_bit(name, config, tmp_path):
    case = dict(OBJECTIVES[name])
    config.objective = Method(name, case.pop("args"))
    for key, value in case.items():
        setattr(config, key, value)
    config.replay.groups = 2
    straight = Run(config, Accelerator())
    start = tensors(straight)
    straight.step()
    straight.save(tmp_path / "run")
    straight.step()
    again = Run(config, Accelerator())
    again.restore(tmp_path / "run")
    again.step()
    ends = tensors(straight)
    assert same(ends, tensors(again)) and not same(ends, start)
    assert all(torch.equal(ends[k], start[k]) for k in start if k.startswith("old/")), (
        "old is the initial policy for ever"
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: setattr(c, "objective", Method("nft")), "objective nft has no ratio that holds the policy"),
        (
            lambda c: setattr(c, "objective", Method("grpo", {"trust": "score"})),
            "objective grpo with trust=score has no",
        ),
        (
            lambda c: setattr(c, "objective", Method("grpo", {"window": {"size": 1, "moves": 1}})),
            "window.moves=1: the steps",
        ),
        (lambda c: setattr(c, "lag", "none"), "needs lag=frozen, not lag=none"),
        (lambda c: setattr(c.replay, "groups", 5), "replay.groups=5 are not whole steps of 2 groups; use 4 or 6"),
        (lambda c: setattr(c.replay, "groups", 0), "replay.groups=0"),
        (lambda c: setattr(c.replay, "path", c.generator + "/generator.json"), "replay.path=.* is not a folder"),
    ],
)
def test_what_cannot_be_trained_on_a_replay_is_refused(change, says, config, tmp_path):
    change(config)
    with pytest.raises(ConfigError, match=says):
        Run(config, Accelerator())
    assert not (tmp_path / "replay").exists()


def test_a_replay_of_another_making_is_refused_with_what_differs(config, tmp_path):
    Run(config, Accelerator()).replay()
    other = Generator.load(config.generator)
    other.transformer.patch_embedding.weight.data[0] += 1e-3
    other.save(tmp_path / "other")
    cases = [
        ("weights is .* here and .* there", lambda c: setattr(c, "generator", str(tmp_path / "other"))),
        ("frames is 9 here and 6 there", lambda c: setattr(c, "frames", 9)),
        ("exploration.sigma is 0.9 here and 0.5 there", lambda c: c.objective.args.update(sigma=0.9)),
        ("from_chunk is 1 here and 0 there", lambda c: c.objective.args.update(from_chunk=1)),
        ("rewards.actions is .*log_likelihood.*", lambda c: c.rewards["actions"].args.update(score="log_likelihood")),
        ("rewards.b is .* and not in it there", lambda c: c.rewards.update(b=copy.copy(c.rewards["actions"]))),
    ]
    for says, change in cases:
        one = copy.deepcopy(config)
        change(one)
        with pytest.raises(ConfigError, match=f"was made otherwise: {says}; choose another replay.path or delete it"):
            Run(one, Accelerator())


def test_a_damaged_replay_is_refused_and_a_half_written_one_is_none(config, tmp_path, monkeypatch):
    folder, real = tmp_path / "replay", Run._group
    monkeypatch.setattr(Run, "_group", lambda run, n: real(run, n) if n < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Run(config, Accelerator()).replay()
    assert not list(tmp_path.glob("replay*"))
    monkeypatch.undo()
    run = Run(config, Accelerator())
    run.replay()
    file = folder / "group-000002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match="group-000002.safetensors is damaged: it does not match its checksum"):
        for _ in range(2):
            run.step()
    file.write_bytes(whole[:-1])
    with pytest.raises(ConfigError, match="a file has another size"):
        Run(config, Accelerator())
    (folder / "index.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Run(config, Accelerator())


def test_a_run_does_not_go_on_with_another_replay(config, tmp_path):
    run = Run(config, Accelerator())
    run.replay()
    run.save(tmp_path / "run")
    index = tmp_path / "replay" / "index.json"
    index.write_text(index.read_text() + " ")
    again = Run(config, Accelerator())
    again.restore(tmp_path / "run")
    with pytest.raises(ConfigError, match="is not the one that this run was trained on"):
        again.replay()


def test_the_files_are_as_documented(config, tmp_path):
    assert "4 groups in" in dry_run(config)["replay"] and not (tmp_path / "replay").exists()
    Run(config, Accelerator()).replay()
    names = sorted(p.name for p in (tmp_path / "replay").iterdir())
    assert names == [*(f"group-{n:06d}.safetensors" for n in range(4)), "index.json"]
    index = json.loads((tmp_path / "replay" / "index.json").read_text())
    assert index.keys() == {"format", "made", "entries"} and len(index["entries"]) == 4
    assert index["entries"][0].keys() == {"file", "bytes", "sha256", "prompt", "actions", "id", "seed", "iteration"}
    group = load_file(tmp_path / "replay" / names[0])
    shapes = {k: tuple(v.shape) for k, v in group.items()}
    assert shapes == {"latents": (4, 6, 3, 32, 32), "x": (4, 1, 4, 3, 3, 32, 32), "x0": (4, 1, 4, 3, 3, 32, 32),
                      "first": (4,), "value/actions": (4, 2), "content/actions": (4, 2)}  # fmt: skip


@pytest.mark.slow
def test_two_processes_record_and_train_like_one(config, tmp_path):
    config.objective, config.iterations = Method("grpo"), 2
    data = dataclasses.asdict(config) | {"lr": 1e-4, "prompts_per_step": 1, "alarm": "off"}
    data["policy"]["targets"], data["probe"]["every"], data["held_out"]["prompts"] = ["to_q"], 0, 6
    path, env = tmp_path / "config.yaml", {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ends, stored = {}, {}
    for n in (1, 2):  # a group of four is split over two
        data["replay"]["path"] = str(tmp_path / f"replay{n}")
        path.write_text(yaml.safe_dump({**data, "name": f"p{n}"}))
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n), "-m", "arvideo_rl"]
        done = subprocess.run([sys.executable, *launch, "align", str(path)], env=env, capture_output=True, text=True,
                              timeout=300)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        ends[n] = load_checkpoint(checkpoints(tmp_path / f"p{n}")[-1]).tensors
        stored[n] = (tmp_path / f"replay{n}" / "index.json").read_text()
    assert stored[1] == stored[2], "to the bit, checksums of the files included"
    assert all((ends[1][k] - ends[2][k]).abs().max() < 1e-5 for k in ends[1])
