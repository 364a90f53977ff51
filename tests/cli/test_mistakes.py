"""What a new user gets wrong, on every command: one line that names value and way out, the right exit code, no file."""

import json
import shlex
from pathlib import Path

import pytest
import torch

from arvideo_rl.cli import errors
from arvideo_rl.cli.main import main

TINY = "align align/tiny_nft --dry-run "
COLOUR = "align align/naive_colour_tiny --dry-run "
BALL = "generate prompt='a red ball rests' "
MISTAKES = [  # (command line, exit code, what the line says)
    # how things are written
    ("align --iterations=3", 2, "written iterations=3"),
    ("align --held-out.prompts 3", 2, "written held_out.prompts=VALUE"),
    ("align align/tiny_nft --dry-rnu", 2, "did you mean --dry-run?"),
    ("align align/tiny_nft iterations = 3", 2, "without spaces"),
    ("align align/tiny_nft rollout-batch=3", 1, "did you mean rollout_batch?"),
    ("generate a red ball", 2, "put prompts in quotes"),
    (TINY + "prompts=x.txt", 1, "did you mean prompts.source=x.txt?"),
    (TINY + "policy=lora", 1, "did you mean policy.kind=lora?"),
    (TINY + "objective=nft", 1, "did you mean objective.target=nft?"),
    (TINY + "rewards=inverse_dynamics", 1, "did you mean rewards.NAME.target=inverse_dynamics?"),
    (TINY + "rewards.actions=inverse_dynamics", 1, "did you mean rewards.actions.target=inverse_dynamics?"),
    (TINY + "style=smooth", 1, "did you mean prompts.style?"),
    ("evaluate prompts=3", 1, "prompt file '3' does not exist"),
    (TINY + "objective.weight=2", 1, "unknown key objective.weight"),
    (TINY + "objective.args=3", 1, "objective.args.KEY=VALUE"),
    # wrong types
    (TINY + "seed=1.5", 1, "seed=1.5: must be a whole number"),
    (TINY + "lr=null", 1, "lr=null: must be a number"),
    (TINY + "policy.targets=to_q", 1, "policy.targets=to_q: must be a list"),
    (TINY + "objective.args.kl_weight=strong", 1, "objective.args.kl_weight=strong: must be a number"),
    ("distill distill/tiny streaming.steps=[1000,a]", 1, "streaming.steps=[1000, 'a']: each item must be a number"),
    ("distill distill/tiny network.patch=[8,8,8]", 1, "network.patch=[8, 8, 8]: give 2 items"),
    # limits
    (TINY + "seed=-1", 1, "seed=-1: use 0 to 4294967295"),
    (TINY + "seed=5000000000", 1, "seed=5000000000: use 0 to 4294967295"),
    (TINY + "lr=.nan", 1, "lr=nan: use a finite number above 0"),
    (TINY + "policy.alpha=.inf", 1, "policy.alpha=inf: use a finite number above 0"),
    (TINY + "group=1", 1, "group=1: use 2 or more"),
    (TINY + "frames=10", 1, "use 9 or 12"),
    (TINY + "weight_decay=.nan", 1, "weight_decay=nan"),
    (TINY + "objective.args.beta=.nan", 1, "objective.args.beta=nan: use a finite number above 0"),
    (TINY + "objective.args.levels_per_chunk=0", 1, "objective.args.levels_per_chunk=0: use 1 or more"),
    (TINY + "held_out.margin=-1", 1, "held_out.margin=-1.0: use 0 or more"),
    (TINY + "held_out.margins.sharpness=.nan", 1, "held_out.margins.sharpness=nan"),
    (TINY + "held_out.margins.sharpnes=.1", 1, "unknown key held_out.margins.sharpnes; did you mean sharpness?"),
    (TINY + "update_batch=100000000 group=1000000", 1, "lower update_batch"),
    (TINY + "name=..", 1, "name='..'"),
    ("distill distill/tiny steps=0", 1, "steps=0: use 1 or more"),
    ("distill distill/tiny seed=-1", 1, "seed=-1"),
    ("distill distill/tiny ema=1", 1, "ema=1.0: use 0 or more and below 1"),
    ("distill distill/tiny muon_lr=-1", 1, "muon_lr=-1.0: use a finite number above 0"),
    ("distill distill/tiny adam_lr=.nan", 1, "adam_lr=nan"),
    ("distill distill/tiny drop_actions=2", 1, "drop_actions=2.0: use 0 to 1"),
    ("distill distill/tiny floor=0", 1, "floor=0.0: use above 0 and at most 1"),
    ("distill distill/tiny decay=-1", 1, "decay=-1.0: use 0 to 1"),
    ("distill distill/tiny streaming.window=4", 1, "set window to 6 or more"),
    ("distill distill/tiny streaming.positions=near", 1, "streaming.positions=near: choose one of adjacent, absolute"),
    ("distill distill/tiny streaming.steps=[500,750]", 1, "falling numbers"),
    ("distill distill/tiny streaming.fps=0", 1, "streaming.fps=0.0"),
    ("distill distill/tiny streaming.trained_frames=10", 1, "use 9 or 12"),
    ("distill distill/tiny network.text_dim=6", 1, "multiple of 4"),
    ("rewards train-idm steps=0", 1, "steps=0"),
    ("rewards train-idm lr=.inf", 1, "lr=inf"),
    ("rewards train-idm seed=-4 --dry-run", 1, "seed=-4"),
    ("rewards train-idm augment=mian", 1, "did you mean main?"),
    ("rewards train-geometry scenes=0", 1, "scenes=0"),
    ("rewards train-geometry out=x.pt --dry-run", 1, "must end with .safetensors"),
    ("evaluate held_out.batch=0", 1, "held_out.batch=0: use 1 or more"),
    ("evaluate held_out.skip=-1", 1, "held_out.skip=-1"),
    ("evaluate held_out.prompts=2 held_out.frames=3", 1, "17 prompts or more"),
    ("evaluate style=fast", 1, "style=fast: choose one of joystick, smooth"),
    (BALL + "frames=-3", 1, "frames=-3: use 1 or more"),
    (BALL + "seconds=.nan", 1, "seconds=nan"),
    (BALL + "seconds=1 frames=3", 1, "not both"),
    (BALL + "scale=1000", 1, "scale=1000: use 1 to 64"),
    (BALL + "seed=-1", 1, "seed=-1"),
    ("score notes.txt fps=-1", 1, "fps=-1.0: use a finite number above 0"),
    ("score notes.txt actions=jump", 1, "turn left"),
    ("score notes.txt batch=0", 1, "batch=0: use 1 or more"),
    ("score notes.txt workers=0", 1, "workers=0: use 1 to 256"),
    ("score notes.txt frames=0", 1, "frames=0: use 1 or more"),
    ("score notes.txt gib=.nan", 1, "gib=nan: use a finite number above 0"),
    ("score notes.txt dtype=float31", 1, "did you mean float32?"),
    ("score notes.txt device=gpu", 1, "device=gpu: not here"),
    ("score notes.txt reward=,", 1, "names no reward"),
    ("score notes.txt reward=inverse_dynamics,naive_colour args.score=accuracy", 1, "Write rewards.NAME.target="),
    ("score notes.txt rewards.a.args.score=accuracy", 1, "rewards.a has no target"),
    ("score notes.txt rewards.a.target=inverse_dynamics reward=naive_colour", 1, "use one of the two ways"),
    ("score notes.txt rewards.a.target=inverse_dinamics", 1, "rewards.a: reward 'inverse_dinamics' is unknown"),
    ("score notes.txt args.granularity=chunk", 1, "score wants one a clip"),
    ("score notes.txt maps=pictures", 1, "inverse_dynamics cannot draw pictures; leave maps out"),
    ("score notes.txt compare=gone", 1, "no file or folder at 'gone'"),
    ("score notes.txt compare=two.txt", 1, "partners have one name"),
    ("score *.mp4", 1, "nothing matches '*.mp4'"),
    ("score latin.csv", 1, "latin.csv is not UTF-8 (line 3, byte 10)"),
    ("score empty.yaml", 2, "score takes video files"),
    ("rewards info", 2, "list, info NAME"),
    ("rewards info epipola", 1, "did you mean 'epipolar'?"),
    ("rewards info epipolar frames=3", 1, "unknown key frames; known here: args"),
    ("rewards info epipolar args.frame=3", 1, "did you mean 'frames'?"),
    ("rewards info remote args.url=http://127.0.0.1:1 args.reward=x args.retries=0", 1, "is it running?"),
    ("rewards doctor now", 2, "no shipped reward 'now'"),
    ("rewards doctor epipolar now", 2, "list, info NAME"),
    ("rewards calibrate four_d", 2, "calibrate NAME VIDEOS|world|generator=NAME"),
    ("rewards calibrate four_b world", 1, "did you mean 'four_d'?"),
    ("rewards calibrate epipolar world", 1, "nothing to calibrate; four_d has"),
    ("rewards calibrate four_d gone", 1, "no file or folder at 'gone'"),
    ("rewards calibrate four_d world out=x.yaml", 1, "must end with .json"),
    ("rewards calibrate four_d world out=blocked/x.json", 1, "blocked is not a folder"),
    ("rewards calibrate four_d world clips=1", 1, "clips=1: use 2 to 100000"),
    ("rewards calibrate four_d world size=16 --dry-run", 1, "size=16: use 32 to 1024"),
    ("rewards calibrate four_d world args.calibration=x.json", 1, "leave it out"),
    ("rewards calibrate four_d world args.window=0", 1, "four_d: window is 0"),
    ("rewards calibrate four_d world frame=3", 1, "did you mean frames?"),
    ("rewards calibrate four_d world real=gone", 1, "no file or folder at 'gone'"),
    ("score notes.txt reward=four_d args.calibration=gone.json", 1, "arvideo rewards calibrate makes one"),
    ("score notes.txt reward=four_d args.calibration=notes.txt", 1, "calibration notes.txt: is not JSON"),
    ("score notes.txt reward=four_d args.part=anchor", 1, "part=anchor needs a calibration"),
    ("serve", 2, "arvideo serve rewards inverse_dynamics"),
    ("serve reward", 2, "arvideo serve rewards inverse_dynamics"),
    ("serve rewards", 2, "serve rewards takes rewards"),
    ("serve rewards a.yaml b.yaml", 2, "at most one YAML file"),
    ("serve rewards epipola", 1, "did you mean 'epipolar'?"),
    ("serve rewards rewards.x.args.frames=3", 1, "rewards.x has no target"),
    ("serve rewards rewards.x.target=epipolar rewards.x.args.frames=1", 1, "rewards.x: epipolar: frames is 1"),
    ("serve rewards epipolar port=70000", 1, "port=70000: use 0 to 65535"),
    ("serve rewards epipolar queue=0", 1, "queue=0: use 1 to 1024"),
    ("serve rewards epipolar timeout=0", 1, "timeout=0.0: use a finite number above 0"),
    ("serve rewards epipolar host=0.0.0.0", 1, "token=REWARDS_TOKEN"),
    ("serve rewards epipolar host=:: token=NOT_SET_ANYWHERE", 1, "must hold 16 or more"),
    ("serve rewards epipolar token=NOT_SET_ANYWHERE", 1, "must hold 16 or more"),
    ("serve rewards epipolar host=127.0.0.300 token=LONG_TOKEN", 1, "host=127.0.0.300 port=8100: "),
    ("score notes.txt reward=remote args.url=http://127.0.0.1:1 args.reward=x args.retries=0", 1, "is it running?"),
    # where it goes: asked before any work
    (TINY + "out=blocked", 1, "blocked is not a folder"),
    ("align align/debug_tiny out=blocked", 1, "blocked is not a folder"),
    ("distill distill/tiny out=blocked", 1, "blocked is not a folder"),
    ("rewards train-idm out=blocked/x.safetensors", 1, "blocked is not a folder"),
    ("rewards train-idm out=x.pt", 1, "must end with .safetensors"),
    ("score notes.txt out=blocked/x.csv", 1, "blocked is not a folder"),
    ("score notes.txt out=x.txt", 1, "e.g. out=x.csv"),
    ("score notes.txt out=table.csv", 1, "is a folder"),
    ("evaluate out=blocked/x.json", 1, "blocked is not a folder"),
    ("evaluate out=x.txt", 1, "must end with .json"),
    ("convert gone out=blocked/x", 1, "blocked is not a folder"),
    (BALL + "out=blocked/x.mp4", 1, "blocked is not a folder"),
    (BALL + "out=x.webm", 1, "must end with .mp4 or .gif or .png"),
    (BALL + "out=x.mp4 format=gif", 1, "format=gif is for a folder"),
    ("generate prompts=two.txt out=x.mp4", 1, "give a folder"),
    # files that are not there or not what they should be
    ("align gone.yaml", 1, "no configuration at 'gone.yaml'"),
    ("align latin.yaml", 1, "latin.yaml is not UTF-8 (byte 9)"),
    ("align list.yaml", 1, "list.yaml must hold keys and values"),
    ("align twice.yaml", 1, "key lr stands in line 1 and again in line 3"),
    ("align empty.yaml", 1, "no rewards"),
    (TINY + "prompts.source=gone.txt", 1, "'gone.txt' does not exist"),
    (TINY + "prompts.source=empty.txt", 1, "empty.txt holds no prompt"),
    (TINY + "prompts.source=latin.txt", 1, "latin.txt is not UTF-8 (byte 3)"),
    (TINY + "prompts.source=two.txt", 1, "prompts_per_step=8: there are 2 prompts to train on; use 2 or fewer"),
    (TINY + "prompts.source=two.txt prompts_per_step=2", 1, "two.txt has none; use a .jsonl"),
    (COLOUR + "prompts.source=purple.txt prompts_per_step=1", 1, "purple.txt: prompt word 'purple' is unknown"),
    ("generate prompts=empty.txt", 1, "empty.txt holds no prompt"),
    ("generate prompts=folder", 1, "prompt file 'folder'"),
    (TINY + "generator=folder", 1, "no generator at 'folder' (seen from "),
    (BALL + "generator=cut", 1, "cut/generator.json is damaged"),
    (BALL + "generator=gone@best", 1, "RUN@best"),
    ("evaluate against=gone", 1, "no generator at 'gone'"),
    ("score folder", 1, "no video files in folder"),
    ("convert folder out=x", 1, "'folder' is not an alignment run, nor weights to convert"),
    ("status folder", 1, "is not a run"),
    (
        TINY + "rewards.actions.args.weights=gone.safetensors",
        1,
        "rewards.actions: inverse_dynamics: cannot read weights",
    ),
    (TINY + "rewards.actions.args.weights=notes.txt", 1, "cannot read weights notes.txt"),
    (TINY + "rewards.actions.args.floor=low", 1, "rewards.actions: reward 'inverse_dynamics' cannot be built with"),
    (TINY + "rewards.mine.weight=2", 1, "rewards.mine has no target"),
    (TINY + "rewards.mine.target=gone:judge", 1, "no module 'gone' on the Python path or in the working directory"),
    (TINY + "rewards.mine.target=my_judge:juge", 1, "did you mean 'judge'?"),
    (TINY + "rewards.mine.target=my_judge:Bare", 1, "lacks name, needs, granularity"),
    (TINY + "rewards.mine.target=needy_judge:judge", 1, "imports 'nowhere_at_all', which is not installed"),
    (TINY + "rewards.mine.target=broken_judge:judge", 1, "cannot be imported (SyntaxError"),
    ("score notes.txt args.weights=gone.safetensors", 1, "cannot read weights gone.safetensors"),
]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working directory with the files the mistakes are made with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LONG_TOKEN", "0123456789abcdef")
    files = {
        "blocked": b"x", "notes.txt": b"x", "latin.yaml": b"name: caf\xe9", "list.yaml": b"- 1", "empty.yaml": b"",
        "twice.yaml": b"lr: 1\nseed: 1\nlr: 2\n", "empty.txt": b"\xef\xbb\xbf\r\n\r\n", "latin.txt": b"caf\xe9",
        "latin.csv": b"path\na\ncaf\xe9",
        "two.txt": b"a red ball rests\na blue cube rests\na red ball rests\n", "purple.txt": b"a purple ball rests\n",
        "my_judge.py": b"def judge(clips): return clips.frames.mean((1, 2, 3, 4))\n"
                       b"def fails(clips): return clips.fames\nclass Bare: pass\n",
        "needy_judge.py": b"import nowhere_at_all\n", "broken_judge.py": b"def judge(:\n",
        "folder/readme": b"", "table.csv/x": b"", "cut/generator.json": b'{"codec": {',
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def said(capsys, line: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(shlex.split(line))
    return (end.value.code or 0, *capsys.readouterr())


@pytest.mark.parametrize(("line", "code", "says"), MISTAKES, ids=[line for line, _, _ in MISTAKES])
def test_one_line_that_names_the_way_out_and_no_file(line, code, says, desk, capsys):
    before = contents(desk)
    ended, _, err = said(capsys, line)
    assert says in err
    assert err.startswith("arvideo: ") and len(err.strip().splitlines()) == 1
    assert "may be a fault of arvideo" not in err
    assert ended == code
    assert contents(desk) == before and {p.name for p in desk.iterdir()} <= {
        *(p.relative_to(desk).parts[0] for p in before),
        "__pycache__",
    }


def test_a_reward_beside_the_user_is_found_from_the_installed_command(desk, capsys, monkeypatch):
    """The console script has its own folder on sys.path, not the working directory."""
    import sys

    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(desk))])
    (desk / "beside_judge.py").write_text("def judge(clips): return clips.frames.mean((1, 2, 3, 4))\n")
    code, out, err = said(capsys, TINY + "rewards.mine.target=beside_judge:judge")
    assert code == 0, err
    assert "target: beside_judge:judge" in out


def test_paths_in_a_yaml_are_relative_to_where_the_command_runs(desk, capsys):
    """Only base: is relative to its file."""
    (desk / "recipes").mkdir()
    (desk / "recipes" / "base.yaml").write_text("rewards: {a: {target: inverse_dynamics}}\nprompts_per_step: 2\n")
    prompts = [json.dumps({"prompt": f"a red {s} rests", "actions": ["back"]}) for s in ("ball", "cube")]
    (desk / "mine.jsonl").write_text("\n".join(prompts))
    recipe = desk / "recipes" / "mine.yaml"
    recipe.write_text("base: base.yaml\nprompts: {source: mine.jsonl}\n")
    code, out, err = said(capsys, "align recipes/mine.yaml --dry-run")
    assert code == 0, err
    assert "2 prompts to train on" in out
    recipe.write_text("base: base.yaml\ngenerator: ../gone\n")
    assert f"no generator at '../gone' (seen from {desk})" in said(capsys, "align recipes/mine.yaml --dry-run")[2]


def test_dry_run_says_what_goes_past_the_trained_length_and_what_nothing_reads(desk, capsys):
    code, out, err = said(capsys, TINY + "frames=24 held_out.frames=48 policy.kind=full policy.rank=8")
    flat = " ".join(out.replace("│", " ").split())
    assert code == 0, err
    assert "frames=24 goes past the 18 frames the generator was trained on" in flat
    assert "held_out.frames=48 goes past the 18 frames" in flat
    assert "policy.rank=8 is not used with policy.kind=full" in flat


def test_help_of_align_names_every_part(capsys):
    out = said(capsys, "align --help")[1]
    for key in ("rewards.NAME.target=", "rewards.NAME.args=", "objective.target=nft", "objective.args.beta=1.0"):
        assert key in out


@pytest.mark.parametrize(
    ("beside", "says"),
    [
        ("[1, 2]", 'ball.mp4.json must hold an object with "prompt" and "actions", not a list'),
        ("{", "ball.mp4.json is not readable JSON"),
        ('{"actions": ["jump"]}', "action 'jump' is unknown; choose from: null, stay"),
        ('{"prompt": 3}', "ball.mp4.json: prompt 3 is not text"),
    ],
)
def test_a_sidecar_that_is_no_sidecar_is_the_reason_in_its_row(beside, says, desk, capsys):
    code, _, err = said(capsys, BALL + "out=ball.mp4 frames=3 scale=1")
    assert code == 0, err
    (desk / "ball.mp4.json").write_text(beside)
    code, out, err = said(capsys, "score ball.mp4 out=rows/scores.csv")
    assert code == 1 and not err
    assert says in (desk / "rows" / "scores.csv").read_text().replace('""', '"')


def test_a_prompt_of_any_characters_reaches_the_reward(desk, capsys):
    (desk / "prompt_judge.py").write_text(
        "import torch\n"
        "def judge(clips): return torch.tensor([float(len(p)) for p in clips.prompts])\n"
        "judge.needs = {'prompts'}\n"
    )
    prompt = 'a "red" ball/cube, 50 % off; ümlaut \\ $HOME'
    said(capsys, BALL + "out=b.mp4 frames=3 scale=1")
    (desk / "b.mp4.json").write_bytes(
        b"\xef\xbb\xbf" + json.dumps({"prompt": prompt}).encode()
    )  # as some editors write
    code, _, err = said(capsys, "score b.mp4 reward=prompt_judge:judge out=s.csv")
    assert code == 0, err
    assert f",{float(len(prompt))}," in (desk / "s.csv").read_text()


def test_a_full_disk_is_one_line_and_leaves_nothing(desk, capsys, monkeypatch):
    import errno
    import os

    said(capsys, BALL + "out=b.mp4 frames=3 scale=1 actions=back")
    (desk / "scores.csv").write_text("old")
    before = contents(desk)

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = said(capsys, "score b.mp4 out=scores.csv")
    assert code == 1 and err == "arvideo: scores.csv: No space left on device; free some space or write elsewhere\n"
    assert contents(desk) == before


def test_out_of_memory_is_one_line_with_the_keys_to_lower(desk, capsys, monkeypatch):
    from arvideo_rl.training import launch

    def too_much(config, given=None):
        torch.empty(10**15)

    monkeypatch.setattr(launch, "align", too_much)
    code, _, err = said(capsys, "align align/debug_tiny")
    assert code == 1 and len(err.strip().splitlines()) == 1
    assert err.startswith("arvideo: out of memory (process peak ") and "GiB more were asked for" in err
    assert "lower update_batch, rollout_batch, held_out.batch" in err
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 1 GiB")
    assert "2.5 GiB more were asked for" in errors.explain(gpu, "batch")
    assert errors.explain(RuntimeError("boom")).startswith("RuntimeError: boom (--debug")


def test_a_fault_of_the_user_s_reward_is_said_to_be_one(desk, capsys):
    said(capsys, BALL + "out=b.mp4 frames=3 scale=1")
    code, out, err = said(capsys, "score b.mp4 reward=my_judge:fails")
    assert code == 1 and not err
    flat = " ".join(out.replace("│", " ").split())
    assert "reward 'my_judge:fails' failed (AttributeError:" in flat and "'fames'" in flat


def test_the_example_reward_of_the_documentation_works(desk, capsys):
    page = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    (desk / "doc_judge.py").write_text(code)
    said(capsys, BALL + "out=b.mp4 frames=3 scale=1")
    ended, out, err = said(capsys, "score b.mp4 reward=doc_judge:brightness out=s.csv")
    assert ended == 0 and not err
    assert 0 < float((desk / "s.csv").read_text().splitlines()[1].split(",")[1]) < 1
