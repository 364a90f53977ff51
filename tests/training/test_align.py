"""One alignment iteration and what must hold between iterations, batches, resumes and processes."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator

from arvideo_rl.config import ConfigError, load
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.record import context_gap, walk
from arvideo_rl.training import rundir
from arvideo_rl.training.align import Run
from arvideo_rl.training.checkpoints import checkpoints, load_checkpoint
from arvideo_rl.training.launch import _finished, align
from arvideo_rl.training.prompts import held_out_prompts, own_prompts
from arvideo_rl.training.rollout import roll_out
from arvideo_rl.training.settings import AlignConfig, Method, check, held_out_of, lag_keep

ROOT = Path(__file__).parents[2]


def trained(run: Run) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in run.policies.state().items()}


def same(a: dict, b: dict, tolerance: float = 0.0) -> bool:
    assert a.keys() == b.keys()
    return all((a[k] - b[k]).abs().max() <= tolerance for k in a)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("lag", ["none", "nft"])
def test_k_resume_k_equals_2k_bit_for_bit(config, tmp_path, kind, lag):
    config.policy.kind, config.lag = kind, lag
    straight = Run(copy.deepcopy(config), Accelerator())
    for _ in range(4):
        straight.step()

    first = Run(copy.deepcopy(config), Accelerator())
    for _ in range(2):
        first.step()
    first.save(tmp_path)
    second = Run(copy.deepcopy(config), Accelerator())
    second.restore(tmp_path)
    for _ in range(2):
        second.step()

    assert second.iteration == straight.iteration == 4
    assert same(trained(second), trained(straight))
    a, b = (r.optimizer.state_dict()["state"] for r in (second, straight))
    assert all(torch.equal(a[i]["exp_avg_sq"], b[i]["exp_avg_sq"]) for i in b)
    assert not same(trained(first), trained(straight)), "two more iterations must have moved something"


def test_micro_batches_equal_the_large_batch(config):
    results, told = [], []
    for size in (3, 8):
        config.update_batch = size
        run = Run(copy.deepcopy(config), Accelerator())
        run.optimizer = torch.optim.SGD(run.policies.parameters().values(), lr=1.0)
        run.step()
        results.append(trained(run))
        told.append(run.step())
    assert same(*results, tolerance=1e-6)
    names = ("train/kl", "train/pull", "train/mean_signal", "train/policy_loss")
    assert [told[0][k] for k in names] == pytest.approx([told[1][k] for k in names], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("lag, looked", [("none", [True, True]), ("slow", [True, True]), ("nft", [True, False])])
def test_a_ratio_is_expected_to_be_one_while_the_old_policy_is_the_trained_one(config, lag, looked):
    config.objective, config.lag = Method("fpo", {"draws": 1}), lag
    run = Run(config, Accelerator())
    seen = [run.step() for _ in looked]
    assert ["train/first_ratio_off" in m for m in seen] == looked
    assert all(m.get("train/first_ratio_off", 0.0) < 1e-5 for m in seen) and not run.told


def test_before_the_first_update_all_policies_agree_and_the_kl_is_zero(config):
    config.lag = "frozen"  # keeps the old policy's forward in play
    run = Run(config, Accelerator())
    run.policies.old_is_current = False
    metrics = run.step()
    assert metrics["train/kl"] == 0 and metrics["train/x0_moved"] < 1e-12 and metrics["train/context_gap"] == 0
    metrics = run.step()
    assert metrics["train/kl"] > 0 and metrics["train/x0_moved"] > 0 and metrics["train/context_gap"] > 0


def test_the_shortcut_for_old_equal_to_current_changes_nothing(config):
    results = []
    for shortcut in (True, False):
        run = Run(copy.deepcopy(config), Accelerator())
        run.policies.old_is_current = shortcut
        run.step()
        results.append(trained(run))
    assert same(*results, tolerance=1e-7)


def test_the_update_walks_the_contexts_of_the_rollout_bit_for_bit(config):
    run = Run(config, Accelerator())
    record, _ = run._rollouts([0, 1])
    streaming = run.generator.streaming
    seen = []
    denoiser = Denoiser(run.policies, streaming.attention_window(), record.script)

    class Spy:
        window = denoiser.window
        start, denoise = staticmethod(denoiser.start), staticmethod(denoiser.denoise)

        def enter(self, context):
            seen.append(context)
            return denoiser.enter(context)

        def refresh(self, x0, context):
            return denoiser.refresh(x0, context)

    from samplers.stream import draw_from, stream

    chunks = denoiser.window.chunks(config.frames)
    list(stream(Spy(), chunks, streaming.levels, draw_from(record.keys, run.generator.latent_shape)))
    walked = [c for *_, c in walk(denoiser, record.latents, lambda: run.policies.using("old"))]
    assert len(walked) == len(seen) == 2 and walked[1].spans
    for a, b in zip(walked, seen):
        for s, r in zip(a.spans, b.spans):
            assert all(torch.equal(x, y) for x, y in zip((*s.keys, *s.values), (*r.keys, *r.values)))


def test_only_the_current_chunk_carries_a_graph_and_later_chunks_do_not_matter(config):
    config.frames = 12
    run = Run(config, Accelerator())
    record, _ = run._rollouts([0, 1])
    adv = torch.randn(len(record), 4)
    levels = run.generator.streaming.levels

    def losses(latents):
        latents = latents.clone().requires_grad_()
        part = record.__class__(latents, record.script, record.keys, record.groups)
        denoiser = Denoiser(run.policies, run.generator.streaming.attention_window(), record.script)
        out, saved = [], []
        steps = run.objective.losses(run.policies, denoiser, part, adv, levels)
        while True:
            count = []
            with torch.autograd.graph.saved_tensors_hooks(lambda x, c=count: c.append(x.numel()) or x, lambda x: x):
                loss = next(steps, None)
            if loss is None:
                break
            saved.append(sum(count))
            [grad] = torch.autograd.grad(loss[0], latents, retain_graph=False)
            touched = [k for k in range(4) if grad[:, 3 * k : 3 * k + 3].abs().max() > 0]
            out.append((loss[0].item(), touched))
        return out, saved

    found, saved = losses(record.latents)
    assert [touched for _, touched in found] == [[0], [1], [2], [3]]
    assert saved[3] < 2.5 * saved[1], "saved tensors must not add up over chunks"
    changed = record.latents.clone()
    changed[:, 6:9] += 1
    again, _ = losses(changed)
    assert [a for a, _ in again[:2]] == [a for a, _ in found[:2]] and again[3][0] != found[3][0]


def test_trained_levels_are_the_sampler_s_own_without_repetition(config):
    from arvideo_rl.objectives.nft import chunk_levels

    run = Run(config, Accelerator())
    record, _ = run._rollouts([0, 1])
    levels = run.generator.streaming.levels
    t = chunk_levels(record, 1, 3, levels)
    assert t.shape == (3, 8) and set(t.flatten().tolist()) <= set(torch.tensor(levels).tolist())
    assert all(len(set(column.tolist())) == 3 for column in t.T)


def test_chunks_before_from_chunk_get_only_the_pull_to_the_start(config):
    for weight, expected in ((0.0, False), (1.0, True)):
        config.objective.args = {"from_chunk": 1, "kl_weight": weight}
        run = Run(copy.deepcopy(config), Accelerator())
        with torch.no_grad():  # away from the start, or the pull would vanish
            for p in run.policies.parameters().values():
                p.add_(0.05)
        record, _ = run._rollouts([0, 1])
        denoiser = Denoiser(run.policies, run.generator.streaming.attention_window(), record.script)
        steps = run.objective.losses(
            run.policies, denoiser, record, torch.randn(len(record), 2), run.generator.streaming.levels
        )
        grads = []
        for loss, _ in steps:
            run.optimizer.zero_grad()
            loss.backward()
            grads.append(max(p.grad.abs().max().item() for p in run.policies.parameters().values()))
        assert (grads[0] > 0) is expected and grads[1] > 0


def test_train_levels_keeps_the_noisiest(config):
    config.objective.args = {"train_levels": 2, "levels_per_chunk": 4}
    metrics = Run(config, Accelerator()).step()
    levels = {k for k in metrics if k.startswith("train/loss_at/")}
    assert levels == {"train/loss_at/t1.000", "train/loss_at/t0.857"}


def test_a_branch_of_the_old_policy_replays_alone(config):
    run = Run(config, Accelerator())
    with torch.no_grad():  # apart from start and current, or any policy could have drawn it
        for p in run.policies.parameters("old").values():
            p.add_(0.05)
    record, prompts = run._rollouts([0, 1])
    with torch.no_grad(), run.policies.using("old") as model:
        alone = roll_out(run.generator, model, prompts.take([5]), record.keys[5:6], config.frames, record.groups[5:6])
    torch.testing.assert_close(alone.latents[0], record.latents[5], rtol=0, atol=1e-5)
    assert (record.latents[4] - record.latents[5]).abs().max() > 1e-3, "branches of a group must differ"


def test_gradient_accumulates_into_the_current_adapter_only(config):
    run = Run(config, Accelerator())
    base = {k: p.clone() for k, p in run.policies.model.named_parameters() if "lora_" not in k}
    before = trained(run)
    config.lag = "frozen"
    run.step()
    after = trained(run)
    assert not all(torch.equal(after[k], before[k]) for k in before if k.startswith("current/"))
    assert all(torch.equal(after[k], before[k]) for k in before if k.startswith("old/"))
    assert all(torch.equal(p, base[k]) for k, p in run.policies.model.named_parameters() if k in base)


def test_two_processes_give_one_process_s_update(config, tmp_path):
    import dataclasses

    config.policy.rank = 2
    data = dataclasses.asdict(config) | {"iterations": 2, "lr": 1e-4}
    data["held_out"]["prompts"] = 8
    path = tmp_path / "config.yaml"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ends = {}
    for n in (1, 2):
        path.write_text(
            yaml.safe_dump({**data, "name": f"p{n}", "policy": {**data["policy"], "targets": ["to_q", "to_v"]}})
        )
        if n == 1:  # here, without the start of an interpreter
            align(load(AlignConfig, str(path), []))
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "arvideo_rl"]
            command = [sys.executable, *launch, "align", str(path)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads((tmp_path / f"p{n}" / "environment.json").read_text())["processes"] == n
        ends[n] = load_checkpoint(checkpoints(tmp_path / f"p{n}")[-1]).tensors
    assert same(ends[1], ends[2], tolerance=1e-5)
    norms = [
        [json.loads(x)["train/grad_norm"] for x in (tmp_path / f"p{n}" / "metrics.jsonl").read_text().splitlines()]
        for n in (1, 2)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4), "Adam hides a wrong scale of the gradient, its norm does not"
    start = Run(config, Accelerator()).policies.state()
    assert max((ends[1][k] - start[k]).abs().max() for k in ends[1] if k in start and k.startswith("current/")) > 5e-5


def test_a_run_ends_with_everything_in_its_directory_and_can_be_continued(config):
    folder = align(config)
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "summary.json", "videos/before_after.png"):
        assert (folder / name).is_file(), name
    assert list((folder / "tensorboard").glob("events*"))
    summary = json.loads((folder / "summary.json").read_text())
    assert {"seed", "iterations", "seconds", "trained", "verifiers"} <= summary.keys()
    assert {"name", "before", "after", "delta", "se", "n"} <= summary["trained"].keys()
    assert {"frechet", "sharpness", "actions_other_judge"} <= {v["name"] for v in summary["verifiers"]}
    assert all("margin" in v for v in summary["verifiers"])
    config.lr = 0.5
    with pytest.raises(ValueError, match=r"another configuration \(lr: 0.001 there, 0.5 here\); choose another name="):
        align(config)
    config.lr, config.iterations = 1e-3, 3
    align(config)
    rows = [json.loads(x)["iteration"] for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == [0, 1, 2]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("frames", 10, "use 9 or 12"),
        ("group", 1, "2 or more"),
        ("rewards", {}, "no rewards"),
        ("advantage", "z", "group_z"),
        ("lag", "x", "frozen"),
        ("iterations", 0, "1 or more"),
    ],
)
def test_what_cannot_run_is_refused_with_what_can(config, key, value, says):
    setattr(config, key, value)
    with pytest.raises(ConfigError, match=says):
        check(config, 3, 1)


def test_branches_that_do_not_divide_over_processes_name_the_nearest_that_do(config):
    config.prompts_per_step, config.group = 5, 3
    with pytest.raises(ConfigError, match="prompts_per_step=4 or 6"):
        check(config, 3, 2)


def test_a_refused_start_leaves_the_name_free(config, tmp_path):
    config.group = 1
    with pytest.raises(ConfigError, match="2 or more"):
        align(config)
    assert not (tmp_path / config.name).exists()


def test_before_is_the_start_point_also_after_a_resume(config, tmp_path):
    from arvideo_rl.training.launch import _held_out

    run = Run(config, Accelerator())
    fresh = _held_out(run, tmp_path / "a.safetensors", "")
    with torch.no_grad():
        for p in run.policies.parameters().values():
            p.add_(0.1)
    again = _held_out(run, tmp_path / "b.safetensors", "")
    trained = _held_out(run, None, "")
    assert torch.equal(again.values["motion"], fresh.values["motion"])
    assert not torch.equal(trained.values["motion"], fresh.values["motion"])


def test_a_user_s_own_prompts_can_be_trained_on(config, tmp_path):
    texts = ("A red ball, rests.", "the blue cube rests", "a green ball rests")
    rows = [json.dumps({"prompt": t, "actions": ["turn left"] * 5}) + "\n" for t in texts]
    (tmp_path / "mine.jsonl").write_text("".join(rows))
    config.prompts.source = str(tmp_path / "mine.jsonl")
    metrics = Run(config, Accelerator()).step()
    assert "verifier/motion" in metrics and not any(v != v for v in metrics.values())


def test_a_reward_that_can_score_nothing_stops_the_run(config, tmp_path):
    (tmp_path / "mine.txt").write_text("a red ball rests\na blue cube rests\n")
    config.prompts.source = str(tmp_path / "mine.txt")  # no actions, so nothing to compare with
    with pytest.raises(ValueError, match="needs actions"):
        Run(config, Accelerator()).step()


def test_a_loss_that_is_nan_stops_at_that_iteration_and_changes_nothing(config, monkeypatch):
    run = Run(config, Accelerator())
    run.step()
    before, real = trained(run), run.objective.losses
    monkeypatch.setattr(run.objective, "losses", lambda *a: ((x * float("nan"), m) for x, m in real(*a)))
    with pytest.raises(FloatingPointError, match=r"gradient is nan at iteration 1, first in .*lora_.*; lower lr"):
        run.step()
    assert same(trained(run), before)


def test_rewards_are_combined_by_their_weighted_advantages(config):
    """By hand: two rewards on other scales, the second counted against."""
    run = Run(config, Accelerator())
    run.rewards = {"a": (None, 3.0), "b": (None, -1.0)}
    values = {"a": torch.tensor([[1.0], [3.0]]), "b": torch.tensor([[500.0], [100.0]])}
    content = {k: torch.zeros(2, 1, dtype=torch.bool) for k in values}
    record = SimpleNamespace(groups=torch.tensor([0, 0]))
    _, adv, _ = run._advantages(values, content, record)
    torch.testing.assert_close(adv, torch.tensor([[-1.0], [1.0]]))
    run.rewards["b"] = (None, 1.0)
    _, adv, _ = run._advantages(values, content, record)
    torch.testing.assert_close(adv, torch.tensor([[-0.5], [0.5]]))  # (3 - 1) / 4
    run.rewards["b"] = (None, 0.0)
    _, adv, metrics = run._advantages(values, content, record)
    torch.testing.assert_close(adv, torch.tensor([[-1.0], [1.0]]))
    assert metrics["reward/b"] == 300 and "reward/b/group_std" not in metrics  # measured, not trained on


def test_lag_laws():
    assert lag_keep("none", 9) == 0 and lag_keep("frozen", 9) == 1
    assert lag_keep("nft", 100) == pytest.approx(0.1) and lag_keep("nft", 9000) == 0.5
    assert lag_keep("slow", 75) == 0 and lag_keep("slow", 175) == pytest.approx(0.75) and lag_keep("slow", 999) == 0.999


def test_context_gap_is_zero_between_equal_policies(config):
    run = Run(config, Accelerator())
    record, _ = run._rollouts([0, 1])
    denoiser = Denoiser(run.policies, run.generator.streaming.attention_window(), record.script)
    old, current = (lambda n=n: run.policies.using(n) for n in ("old", "current"))
    assert context_gap(denoiser, record.latents, old, current) == 0


def own_file(path: Path, count: int) -> None:
    """``count`` different prompts of the small generator's words, with actions."""
    texts = [f"a {c} {s} {m}" for c in ("red", "green", "blue", "yellow") for s in ("ball", "cube")
             for m in ("rests", "slides left", "slides right")]  # fmt: skip
    rows = [json.dumps({"prompt": t, "actions": ["turn left*20"]}) for t in texts[:count]]
    path.write_text("\n".join(rows))


def test_a_run_on_a_file_is_compared_on_what_the_file_holds_out(config, tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    own_file(path, 20)
    config.prompts.source, config.held_out.prompts, config.held_out.noises, config.iterations = str(path), 8, 2, 1
    folder = align(config)
    said = capsys.readouterr().out
    assert f"note: {path}: 16 prompts to train on, 4 held out" in said
    assert "note: the comparison is on 4 prompts, not held_out.prompts=8" in said
    assert json.loads((folder / "summary.json").read_text())["trained"]["n"] == 4

    config.iterations = 2
    own_file(path, 21)  # another file under the same name is another configuration
    with pytest.raises(ValueError, match="what is in the prompt file has changed"):
        align(config)


def test_too_few_held_out_prompts_of_a_file_give_way_to_the_world_s_and_it_is_said(config, tmp_path):
    path = tmp_path / "mine.jsonl"
    own_file(path, 10)
    config.prompts.source = str(path)  # 2 held out x 1 noise x 11 changes are fewer than 64 features
    assert held_out_of(config).ids == held_out_prompts(8, 12, "joystick").ids
    config.held_out.noises = 8
    assert held_out_of(config).texts == own_prompts(path, 9)[1].texts


def test_a_damaged_file_of_a_run_is_named(config, tmp_path):
    (tmp_path / "summary.json").write_text('{"iterations"')
    with pytest.raises(ValueError, match="summary.json is damaged"):
        _finished(tmp_path, config)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\nnoise\n{"iteration": 1}\n')
    with pytest.raises(ValueError, match="metrics.jsonl line 2 is damaged; delete that line"):
        rundir.rows(tmp_path / "metrics.jsonl", "iteration", 2)


def test_a_damaged_identity_is_named(config, tmp_path):
    folder = tmp_path / config.name
    folder.mkdir()
    for content in ("{", "[]", "{}"):
        (folder / "identity.json").write_text(content)
        with pytest.raises(ValueError, match="identity.json is damaged; choose another name"):
            align(config)
