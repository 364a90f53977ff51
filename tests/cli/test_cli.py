"""The command line as a user runs it: right and wrong arguments, exit codes, files that open."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import constants

from arvideo_rl.cli import doctor
from arvideo_rl.cli.main import COMMANDS, main
from arvideo_rl.media import read_video
from rewards.contract import Clips, score
from rewards.inverse_dynamics import InverseDynamics
from rewards.registry import available, build

ROOT = Path(__file__).parents[2]
PRESETS = sorted(p for kind in ("align", "distill") for p in (ROOT / "configs" / kind).rglob("*.yaml"))


def arvideo(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "arvideo_rl", *args]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)


def in_process(capsys, *args: str) -> subprocess.CompletedProcess:
    """The same without a new interpreter, whose start is most of the time."""
    with pytest.raises(SystemExit) as end:
        main(list(args))
    out, err = capsys.readouterr()
    return subprocess.CompletedProcess(args, end.value.code or 0, out, err)


def test_help_names_every_command_and_every_command_has_help(capsys):
    shown = arvideo("--help")
    assert shown.returncode == 0 and all(name in shown.stdout for name in COMMANDS)
    for name in COMMANDS:
        done = in_process(capsys, name, "--help")
        assert done.returncode == 0 and done.stdout.startswith(f"arvideo {name}"), done.stderr


@pytest.mark.parametrize("path", PRESETS, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_every_shipped_yaml_dry_runs(path, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "prompts.txt").write_text("\n".join(f"a cat walks past house {i}" for i in range(80)))
    command = path.relative_to(ROOT / "configs").parts[0]
    done = in_process(capsys, command, str(path), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "what follows" in done.stdout
    if "wan" in path.name:
        flat = " ".join(done.stdout.replace("│", " ").split())
        for said in ("hf download", "from the published sizes", "on one H100 or H200", "at most: weights 3.1 GiB",
                     "of 1,418,996,800"):  # fmt: skip
            assert said in flat, said
        assert "nan" not in flat and "trained on: quality may drift" not in flat
    assert [p.name for p in tmp_path.iterdir()] == ["prompts.txt"], "a dry run writes nothing"


def test_a_dry_run_shows_window_sinks_and_derived_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = in_process(capsys, "align", "align/debug_tiny", "prompts_per_step=3", "group=5", "frames=9", "--dry-run")
    flat = " ".join(done.stdout.replace("│", " ").split())
    for said in (
        "window 12 frames, sink 3, adjacent",
        "3 prompts x 5 = 15",
        "9 frames / 3 = 3",
        "1, 0.8571, 0.6667, 0.4",
    ):
        assert said in flat, said
    assert "at most: weights 14 MiB" in flat and "FLOP, counted" in flat and "here" in flat


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ((), 2, ""),
        (("algin",), 2, "did you mean 'align'"),
        (("align",), 2, "takes one YAML file"),
        (("align", "nowhere.yaml"), 1, "align/tiny_nft"),
        (("align", "align/tiny_nft", "group=1"), 1, "2 or more"),
        (("align", "align/tiny_nft", "grop=4"), 1, "did you mean group"),
        (("align", "align/tiny_nft", "frames=10"), 1, "use 9 or 12"),
        (("align", "align/tiny_nft", "generator=nothing"), 1, "tiny"),
        (("align", "align/tiny_nft", "objective.args.bta=1"), 1, "beta"),
        (("align", "align/tiny_nft", "rewards.actions.target=inverse_dynamic"), 1, "did you mean"),
        (("align", "align/tiny_nft", "--dryrun"), 2, "unknown flag"),
        (("generate",), 1, "exactly one of"),
        (("generate", "prompt=a purple ball rests"), 1, "purple"),
        (("generate", "prompt=a red ball rests", "out=x.webm"), 1, ".mp4"),
        (("generate", "prompt=a red ball rests", "frames=0"), 1, "1 or more"),
        (("generate", "prompt=a red ball rests", "actions=jump"), 1, "turn left"),
        (("generate", "prompt=a red ball rests", "switch=4: a blue cube rests"), 1, "use 3 or 6"),
        (("generate", "prompt=a red ball rests", "frames=6", "switch=24: a blue cube rests"), 1, "has 6 frames"),
        (("generate", "prompt=a red ball rests", "frames=4", "actions=back*9"), 1, "9 actions"),
        (("generate", "prompt=a red ball rests", "seconds=.inf"), 1, "seconds="),
        (("generate", "prompts=nowhere.txt"), 1, "does not exist"),
        (("align", "align/tiny_nft", "objective.args.kl_weight=strong"), 1, "objective.args.kl_weight"),
        (("align", "align/tiny_nft", "max_grad_norm=-1"), 1, "above 0"),
        (("align", "align/tiny_nft", "frames=3"), 1, "from_chunk"),
        (("align", "align/tiny_nft", "policy.targets=[to_q,to_zz]"), 1, "to_zz"),
        (("align", "align/tiny_nft", "rewards.actions.args.weights=idm_heldout"), 1, "judge"),
        (("align", "align/tiny_nft", "held_out.prompts=1"), 1, "Frechet"),
        (("distill", "distill/tiny", "network.dim=100"), 1, "multiple of 32"),
        (("score", "nowhere.mp4"), 1, "no file"),
        (("score", "README.md", "reward=pretty"), 1, "inverse_dynamics"),
        (("evaluate", "runs/x"), 2, "key=value"),
        (("rewards",), 2, "rewards list"),
    ],
)
def test_mistakes_end_in_one_line_and_the_right_code(args, code, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("not a video")
    done = in_process(capsys, *args)
    assert done.returncode == code, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 1


def test_generate_then_score(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = in_process(
        capsys,
        "generate",
        "prompt=a red ball rolls left",
        "actions=turn left*3, forward*3",
        "frames=7",
        "out=a.mp4",
        "scale=2",
    )
    assert made.returncode == 0, made.stderr
    pixels, fps = read_video(tmp_path / "a.mp4")
    assert pixels.shape == (7, 3, 64, 64) and fps == 8
    beside = json.loads((tmp_path / "a.mp4.json").read_text())
    assert beside["prompt"] == "a red ball rolls left" and beside["actions"] == [2, 2, 2, 4, 4, 4]

    scored = in_process(capsys, "score", "a.mp4", "out=s.csv")
    assert scored.returncode == 0, scored.stderr
    header, row = (tmp_path / "s.csv").read_text().splitlines()
    assert header.startswith("file,value,log_likelihood")
    commands = torch.tensor([[2, 2, 2, 4, 4, 4]])  # one for each change between frames, none shifted
    expected = score(InverseDynamics(), Clips(pixels[None], actions=commands)).value.item()
    assert float(row.split(",")[1]) == pytest.approx(expected, abs=1e-5)

    (tmp_path / "bad.mp4").write_text("no video")
    both = in_process(capsys, "score", ".")
    assert both.returncode == 0 and "1 of 2 files" in both.stdout
    alone = arvideo("score", "bad.mp4", cwd=tmp_path)  # the code reaches the shell
    assert alone.returncode == 1, "nothing could be scored"


def test_generate_is_repeatable_and_a_switch_changes_only_what_follows(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ("generate", "prompt=a red ball rests", "frames=12", "scale=1", "seed=3")
    for name, more in (("a.gif", ()), ("b.gif", ()), ("c.gif", ("switch=6: a blue cube rests",))):
        done = in_process(capsys, *base, f"out={name}", *more)
        assert done.returncode == 0, done.stderr
    a, b, c = (read_video(tmp_path / n)[0] for n in ("a.gif", "b.gif", "c.gif"))
    assert (a == b).all()
    assert (a[:6] - c[:6]).abs().mean() < 0.02 < (a[6:] - c[6:]).abs().max()


def test_prompts_file_to_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text(
        '{"prompt": "a red ball rests"}\n{"prompt": "a blue cube rests", "actions": ["back"]}\n'
    )
    done = in_process(capsys, "generate", "prompts=p.jsonl", "out=v", "format=png", "frames=3", "scale=1")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "v").glob("*.png")) == ["0000.png", "0001.png"]


def test_doctor_and_rewards_list(capsys):
    done = in_process(capsys, "doctor")
    assert done.returncode == 0, done.stdout
    assert (
        "attention native: torch" in done.stdout
        and "attention flash: not here" in done.stdout
        and "generator tiny" in done.stdout
        and "ffmpeg" in done.stdout
    )
    listed = in_process(capsys, "rewards", "list").stdout
    assert "inverse_dynamics" in listed and "licence" in listed and "Apache" in listed
    assert "geometry backends: classical, network, depth_anything_3, vggt" in listed


def test_rewards_info_and_doctor_say_what_a_reward_is_and_lacks(capsys, monkeypatch):
    said = in_process(capsys, "rewards", "info", "inverse_dynamics", "args.score=accuracy", "args.granularity=chunk")
    for line in ("formula       share where p is the largest", "range         0 to 1, higher is better", "a chunk",
                 "needs         actions", "weights=idm", "idm.safetensors, 0.56 MiB",
                 "docs/rewards/inverse_dynamics.md"):  # fmt: skip
        assert line in said.stdout, line
    assert "url=(required)" in in_process(capsys, "rewards", "info", "remote").stdout
    fine = in_process(capsys, "rewards", "doctor")
    spare = fine.stdout.count("not here (optional)")  # what has weights to fetch; four backends and serving come on top
    assert fine.returncode == 0 and fine.stdout.count("ready") == len(available()) - spare + 5
    assert "geometry network   ready" in fine.stdout and "geometry vggt      not here (optional)" in fine.stdout
    monkeypatch.setattr("rewards.geometry.base.GeometricReward.modules", {"cv9": "pip install cv9"})
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    bad = in_process(capsys, "rewards", "doctor")
    assert bad.returncode == 1 and "epipolar           CANNOT RUN\n  Python module cv9: pip install cv9" in bad.stdout
    assert "naive_colour       ready" in bad.stdout and "without uvicorn (optional): pip install 'arvi" in bad.stdout
    refused = in_process(capsys, "serve", "rewards", "naive_colour")
    assert refused.returncode == 1 and "serving needs uvicorn; pip install 'arvideo-rl[serve]'" in refused.stderr


def test_serve_rewards_serves_until_it_is_stopped(capsys):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    words = ("serve", "rewards", "naive_colour", "rewards.moves.target=inverse_dynamics", "port=0", "device=cpu")
    command = [sys.executable, "-m", "arvideo_rl", *words]
    child = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))  # fmt: skip
    try:
        first = child.stdout.readline()
        url = re.fullmatch(r"serving naive_colour, moves at (http://127\.0\.0\.1:\d+) on cpu; Ctrl-C stops\n", first)[1]
        clips = Clips(torch.rand(2, 3, 3, 32, 32), prompts=["red", "x"], actions=torch.ones(2, 2, dtype=torch.int64))
        moves = build("remote", url=url, reward="moves", retries=8)  # it listens a little before it answers
        assert torch.equal(score(moves, clips).value, score(InverseDynamics(), clips).value)
        colour = score(build("remote", url=url, reward="naive_colour"), clips)
        assert list(colour.reasons) == [None, "content: the prompt names no colour"]
        taken = in_process(capsys, "serve", "rewards", "naive_colour", f"port={url.rpartition(':')[2]}")
        assert taken.returncode == 1 and "choose another, port=0 takes any free one" in taken.stderr
    finally:
        child.send_signal(signal.SIGINT)
        rest, _ = child.communicate(timeout=60)
    assert child.returncode == 0 and rest == "stopped\n"


def test_align_evaluate_and_generate_from_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    align = ("align", "align/debug_tiny", "name=r", f"out={tmp_path}")
    done = in_process(capsys, *align)
    assert done.returncode == 0, done.stderr
    assert "held-out comparison" in done.stdout and (tmp_path / "r" / "summary.json").is_file()
    again = in_process(capsys, *align)
    assert again.returncode == 0 and "finished after 2 iterations" in again.stdout and "iterations=" in again.stdout
    made = in_process(
        capsys, "generate", "prompt=a red ball rests", f"generator={tmp_path / 'r'}", "frames=3", "out=x.png"
    )
    assert made.returncode == 0 and "aligned by" in made.stdout, made.stderr
    sizes = ("held_out.prompts=6", "held_out.noises=1", "held_out.frames=12")
    compared = in_process(capsys, "evaluate", f"generator={tmp_path / 'r'}", "against=tiny", "out=e.json", *sizes)
    assert compared.returncode == 0, compared.stderr
    assert "verifiers" in json.loads((tmp_path / "e.json").read_text())
    config = yaml.safe_load((tmp_path / "r" / "config.yaml").read_text())["held_out"]
    same = [f"held_out.{key}={config[key]}" for key in ("prompts", "noises", "frames", "batch")]
    once_more = ("evaluate", f"generator={tmp_path / 'r'}", "against=tiny", "reward=run", "out=again.json", *same)
    assert in_process(capsys, *once_more).returncode == 0
    own = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert json.loads((tmp_path / "again.json").read_text())["trained"] == own["trained"]
    for wrong, said in (("args.score=accuracy", "leave it out"), ("generator=tiny", "not an alignment run")):
        refused = in_process(capsys, *once_more, wrong)
        assert refused.returncode and said in refused.stderr


def test_doctor_looks_for_exactly_what_the_project_asks_for():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    def names(lines: list[str]) -> set[str]:
        return {re.match(r"[\w-]+", line)[0] for line in lines}

    assert set(doctor.REQUIRED) == names(project["dependencies"])
    extras = {k: names(v) for k, v in project["optional-dependencies"].items() if k != "dev"}
    assert {k: set(v) for k, v in doctor.EXTRAS.items()} == extras
