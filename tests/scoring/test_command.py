"""``arvideo score`` as it is called: what it prints, keeps when it is stopped, and what its page shows."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from arvideo_rl.cli.main import main
from arvideo_rl.media import write_video
from arvideo_rl.scoring import run as running

ACTIONS = "turn left*2, forward*3"


def said(capsys, *line):
    with pytest.raises(SystemExit) as end:
        main(list(line))
    return (end.value.code or 0, *capsys.readouterr())


def test_the_pictures_of_a_shipped_reward_and_where_the_worst_one_is(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grain = torch.rand(3, 48, 48, generator=torch.Generator().manual_seed(0))
    for name, blur in (("fine", 1), ("soft", 5)):
        picture = torch.nn.functional.avg_pool2d(grain[None], blur, 1, blur // 2)
        write_video(tmp_path / f"{name}.mp4", picture.expand(3, -1, -1, -1), 8)
    code, out, err = said(capsys, "score", "fine.mp4", "soft.mp4", "reward=sharpness", "maps=m", "out=s.csv")
    assert code == 0 and not err
    lowest = "fine" if "lowest fine.mp4" in out else "soft"
    assert f"pictures of 2 clips; of the lowest: m/{lowest}.sharpness.*.png" in out
    assert sorted(p.name for p in Path("m").iterdir()) == ["fine.sharpness.detail.png", "soft.sharpness.detail.png"]
    assert "m/soft.sharpness.*.png" in Path("s.csv").read_text()


def test_the_command_line_scores_with_several_rewards_and_names_worst_and_best(clips, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["score", str(clips), f"actions={ACTIONS}", "prompt=a red ball", "rewards.moves.target=inverse_dynamics",
            "rewards.moves.args.score=accuracy", "rewards.red.target=naive_colour", "out=s.jsonl"]  # fmt: skip
    code, out, err = said(capsys, *line)
    assert code == 0 and not err
    assert "red: mean " in out and "moves: not scored: 1 content:damaged" in out and "red: lowest " in out
    rows = [json.loads(x) for x in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert {r["reward"] for r in rows} == {"moves", "red"} and len(rows) == 16
    summary = json.loads((tmp_path / "s.summary.json").read_text())["red"]
    lowest = min((r for r in rows if r["reward"] == "red" and r["value"] is not None), key=lambda r: r["value"])
    assert summary["worst"] == lowest["file"] and math.isclose(summary["min"], lowest["value"])
    assert said(capsys, *line, "--dry-run")[1].startswith("would score 8 files with moves, red on cpu")


def test_a_table_with_many_columns_cuts_no_name(clips, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(clips / "clip_0.gif", tmp_path / "a_name_of_some_length.gif")
    rewards = "reward=inverse_dynamics,flicker,dynamic_degree,sharpness"
    code, out, err = said(capsys, "score", "a_name_of_some_length.gif", f"actions={ACTIONS}", rewards)
    cells = [[c.strip() for c in line.split("│")[1:3]] for line in out.splitlines() if line.startswith("│")]
    assert code == 0 and "…" not in "".join(c for row in cells for c in row)
    assert "".join(file for file, _ in cells) == 4 * "a_name_of_some_length.gif"
    assert "".join(reward for _, reward in cells) == rewards.removeprefix("reward=").replace(",", "")


def test_a_name_is_shown_as_it_is_and_an_interruption_says_how_to_go_on(clips, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(clips / "clip_0.gif", tmp_path / "[red]a[bold].gif")
    code, out, err = said(capsys, "score", "[red]a[bold].gif", f"actions={ACTIONS}")
    assert code == 0 and "[red]a[bold].gif" in out

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "score_batch", interrupted)
    code, out, err = said(capsys, "score", str(clips), f"actions={ACTIONS}", "out=s.csv")
    assert code == 130 and "0 of 8 files are in s.csv.partial; the same command goes on" in err and not out
    assert "with out=scores.csv" in said(capsys, "score", str(clips), f"actions={ACTIONS}")[2]


def test_a_recipe_may_hold_the_settings(clips, tmp_path, capsys):
    (tmp_path / "judge.yaml").write_text(f"reward: inverse_dynamics\nargs: {{score: accuracy}}\nactions: {ACTIONS}\n")
    code, out, err = said(capsys, "score", str(clips), str(tmp_path / "judge.yaml"), "batch=1")
    assert code == 0 and "mean" in out and not err


@pytest.mark.slow
def test_killed_and_continued_equals_uninterrupted(clips, tmp_path):
    """The real thing: SIGKILL in the middle, then the same command."""
    (tmp_path / "slow_judge.py").write_text(
        "import time\ndef judge(clips):\n    time.sleep(0.4)\n    return clips.frames.mean((1, 2, 3, 4))\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    command = [sys.executable, "-m", "arvideo_rl", "score", str(clips), "reward=slow_judge:judge", "batch=1"]
    subprocess.run([*command, "out=whole.csv"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    journal = tmp_path / "cut.csv.partial"
    process = subprocess.Popen([*command, "out=cut.csv"], cwd=tmp_path, env=environment)
    while not journal.exists() or journal.read_text().count("\n") < 4:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cut.csv").exists()
    done = subprocess.run([*command, "out=cut.csv"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "were scored before the command was stopped" in done.stdout
    assert (tmp_path / "cut.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_the_two_lines_of_the_documentation_work(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "videos", 2)
    page = (Path(__file__).parents[2] / "docs" / "score.md").read_text()
    lines = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in lines.splitlines() if line]) == 2
    scope: dict = {}
    exec(lines, scope)
    assert scope["result"].summary["inverse_dynamics"]["scored"] == 2


def test_scoring_starts_without_the_libraries_of_training():
    """They take longer to import than a few clips take to score."""
    check = (
        "import arvideo_rl.scoring, sys; print({'diffusers', 'transformers', 'accelerate', 'peft'} & set(sys.modules))"
    )
    root = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", check], env=os.environ | root, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
