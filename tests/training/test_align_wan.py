"""A Wan is aligned end to end: a user's prompts and reward, four pixel frames to a latent one, and no world."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors import safe_open

from arvideo_rl.cli.main import main
from arvideo_rl.config import ConfigError, load
from arvideo_rl.training.align import Run
from arvideo_rl.training.checkpoints import checkpoints
from arvideo_rl.training.judges import LOOKS
from arvideo_rl.training.launch import accelerate_on_known_ground
from arvideo_rl.training.settings import AlignConfig, Method

ROOT = Path(__file__).parents[2]
TEXTS = [f"a {a} {b} {c}" for a in ("red", "ball", "rolls") for b in ("red", "ball") for c in ("a", "rolls")]
MEASURED = {"reward/light", *LOOKS}


@pytest.fixture
def recipe(published, tmp_path, monkeypatch) -> Path:
    """A recipe of two iterations in a directory with the user's prompts and reward; the present one for the test."""
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "my_light.py").write_text("def light(clips):\n    return clips.frames.mean((1, 2, 3, 4))\n")
    told = {
        "name": "wan", "generator": str(published / "student.yaml"), "prompts": {"source": "prompts.txt"},
        "rewards": {"light": {"target": "my_light:light"}}, "prompts_per_step": 2, "group": 2, "frames": 6,
        "iterations": 2, "policy": {"rank": 2, "alpha": 2}, "lr": 1e-3, "probe": {"every": 1, "prompts": 2},
        "held_out": {"prompts": 2, "noises": 2, "frames": 6, "batch": 3},
        "objective": {"target": "nft", "args": {"levels_per_chunk": 1}},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(told))
    yield path
    sys.modules.pop("my_light", None)


def arvideo(*words) -> int:
    with pytest.raises(SystemExit) as end:
        main([str(w) for w in words])
    return end.value.code or 0


def test_from_prompts_to_a_compared_exported_checkpoint(recipe, capsys):
    assert arvideo("align", recipe) == 0
    said, folder = capsys.readouterr().out, recipe.parent / "runs" / "wan"
    assert "compared by the rewards and by sharpness, motion" in said and "nan" not in said.lower()
    summary = json.loads((folder / "summary.json").read_text())
    names = [v["name"] for v in summary["verifiers"]]
    assert set(names) == {*LOOKS, "variety"} and summary["trained"]["n"] == 2
    assert all(v["n"] == 2 and v["before"] != v["after"] for v in summary["verifiers"])
    assert {p.name for p in (folder / "videos").iterdir()} == {"00.mp4", "01.mp4", "before_after.png", "videos.json"}
    [shown, _] = json.loads((folder / "videos" / "videos.json").read_text())
    assert shown["prompt"] == TEXTS[4] and shown["actions"] == "" and MEASURED <= shown["before"].keys()
    rows = [json.loads(x) for x in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"verifier/sharpness", "verifier/motion", "picture/contrast", "probe/change/brightness"} <= rows[-1].keys()
    assert not any("colour_present" in k or "other_judge" in k for k in rows[-1])
    with safe_open(str(folder / "held_out_before.safetensors"), "pt") as kept:
        assert kept.get_tensor("pixels").shape == (2, 21, 3, 16, 32) and "features" not in kept.keys()  # noqa: SIM118

    assert arvideo("align", folder / "config.yaml", "iterations=3") == 0
    assert "continuing" in capsys.readouterr().out and [p.name for p in checkpoints(folder)][-1].endswith("3")
    assert arvideo("convert", folder, "out=whole", "format=merged") == 0
    assert (recipe.parent / "whole" / "generator.json").is_file() and (folder / "adapter").is_dir()
    assert arvideo("evaluate", "generator=whole", f"against={recipe.parent / 'runs' / 'wan'}", "prompts=prompts.txt",
                   "reward=my_light:light", "held_out.prompts=2", "held_out.frames=6") == 0  # fmt: skip
    assert "+0.000" in capsys.readouterr().out, "merged, it is the same policy"


def test_videos_are_decoded_one_by_one_and_only_a_few_are_kept(recipe, monkeypatch):
    config = load(AlignConfig, str(recipe), ["held_out.batch=4"])
    run = Run(config, accelerate_on_known_ground())
    sizes, decode = [], run.generator.codec.decode
    monkeypatch.setattr(run.generator.codec, "decode", lambda z: sizes.append(len(z)) or decode(z))
    found = module_measure(run, shown=1)
    assert set(sizes) == {1} and len(sizes) == 4
    assert found.values["reward/light"].shape == (2, 2) and len(found.pixels) == 1 and found.features is None
    assert run.generator.text_encoder._model is None, "the text encoder is not kept once all prompts are known"


def test_a_reward_of_decoded_pixels_guides(recipe):
    with (recipe.parent / "my_light.py").open("a") as file:
        file.write("light.differentiable = True\n")
    light, ratio = [], []
    for guide in ({}, {"guide": {"reward": "light", "strength": 0.1, "steps": 3}}):
        config = load(AlignConfig, str(recipe), [])
        config.objective = Method("grpo", {"steps_per_chunk": 3, **guide})
        run = Run(config, accelerate_on_known_ground())
        metrics = run.step()
        light.append(metrics["reward/light"])
        ratio.append(metrics["train/ratio_off"])
    assert light[1] > light[0] and max(ratio) < 1e-5


@torch.no_grad()
def module_measure(run: Run, shown: int):
    from arvideo_rl.training.compare import measure

    with run.policies.using("current") as model:
        return measure(run.generator, model, run.held_out, run.rewards, run.config.held_out, "", shown)


@pytest.mark.parametrize(
    ("item", "says"),
    [("prompts.source=world", "does not show it; give a file"), ("held_out.prompts=1", "too small for a comparison")],
)  # fmt: skip
def test_what_needs_the_world_is_refused(recipe, item, says):
    with pytest.raises(ConfigError, match=says):
        Run(load(AlignConfig, str(recipe), [item]), accelerate_on_known_ground())


def test_a_file_that_holds_nothing_out_is_refused(recipe):
    (recipe.parent / "prompts.txt").write_text("\n".join(TEXTS[:9]))
    with pytest.raises(ConfigError, match="holds out 0 prompts, and a comparison needs 2"):
        Run(load(AlignConfig, str(recipe), []), accelerate_on_known_ground())


def test_a_bfloat16_base_trains_a_float32_adapter(recipe, published):
    told = json.loads((published / "student.yaml").read_text())
    told["wan"] |= {"dtype": "bfloat16", "base": str(published / "base"), "transformer": str(published / "student.pt")}
    half = recipe.with_name("half.yaml")
    half.write_text(json.dumps(told))
    run = Run(load(AlignConfig, str(recipe), [f"generator={half}"]), accelerate_on_known_ground())
    before = {k: v.clone() for k, v in run.policies.state().items() if k.startswith("current/")}
    assert run.step()["train/grad_norm"] > 0
    assert {v.dtype for v in before.values()} == {torch.float32}
    assert any(not torch.equal(v, run.policies.state()[k]) for k, v in before.items())


@pytest.mark.parametrize("kind", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_run_on_a_base_of_low_precision_ends_well_and_can_be_converted(kind, recipe, published, capsys):
    """Which merging rounds, as loading an adapter in diffusers does."""
    told = json.loads((published / "student.yaml").read_text())
    told["wan"] |= {"dtype": kind, "base": str(published / "base"), "transformer": str(published / "student.pt")}
    half = recipe.with_name("half.yaml")
    half.write_text(json.dumps(told))
    items = ("iterations=1", "lr=0.01", "probe.every=0", "held_out.noises=1")
    assert arvideo("align", recipe, f"generator={half}", *items) == 0, capsys.readouterr().err
    folder = recipe.parent / "runs" / "wan"
    assert (folder / "summary.json").is_file() and (folder / "adapter").is_dir()
    for form in ("peft", "merged", "official"):
        assert arvideo("convert", folder, f"out={form}", f"format={form}") == 0, capsys.readouterr().err


def test_a_teacher_of_a_wan_matches_and_its_text_encoder_is_not_kept(recipe, published):
    told = json.loads((published / "student.yaml").read_text())
    told["wan"] |= {"dtype": "bfloat16", "base": str(published / "base"), "transformer": str(published / "student.pt")}
    told["streaming"] |= {"chunk": 6, "window": 6, "sink": 0}  # all frames of a clip at once
    (recipe.parent / "teacher.yaml").write_text(json.dumps(told))
    args = dict(teacher="teacher.yaml", critic_kind="lora", critic_rank=2, critic_updates=1, negative="rolls")
    objective = {"objective": {"target": "dmd", "args": args}}
    recipe.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | objective))
    with pytest.raises(ConfigError, match="critic_kind=full would train bfloat16 weights"):
        Run(load(AlignConfig, str(recipe), ["objective.args.critic_kind=full"]), accelerate_on_known_ground())
    run = Run(load(AlignConfig, str(recipe), []), accelerate_on_known_ground())
    assert run.critic.teacher.text_encoder._model is None
    row = run.step()
    assert row["train/grad_norm"] > 0 and row["critic/grad_norm"] > 0 and row["train/x0_moved"] < 1e-9
    assert run.critic.teacher.text_encoder._model is None, "all that is asked was known before"


@pytest.mark.slow
def test_two_processes_measure_what_one_does_and_the_main_one_has_the_videos(recipe):
    """A minute."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{recipe.parent}"}
    found = {}
    for n in (1, 2):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n), "-m", "arvideo_rl"]
        command = [sys.executable, *launch, "align", str(recipe), f"name=p{n}", "iterations=1"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-2000:]
        with safe_open(str(recipe.parent / "runs" / f"p{n}" / "held_out_before.safetensors"), "pt") as kept:
            found[n] = {k: kept.get_tensor(k) for k in kept.keys()}  # noqa: SIM118
    assert found[1].keys() == found[2].keys() and len(found[1]["pixels"]) == 2
    for key, value in found[1].items():
        torch.testing.assert_close(value, found[2][key], rtol=1e-4, atol=1 if key == "pixels" else 1e-4)
