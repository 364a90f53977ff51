"""An objective in a file of one's own: the page's example is run as it stands, and what is none is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from arvideo_rl.config import ConfigError
from arvideo_rl.training.settings import Method, build_objective

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "objectives" / "your_own.md").read_text(encoding="utf-8")


def shown(language):
    """The page's one block in a language."""
    (block,) = re.findall(rf"```{language}\n(.+?)```", PAGE, re.S)
    return block


def test_the_example_of_the_page_trains(small, tmp_path):
    (tmp_path / "reward_weighted.py").write_text(shown("python"))
    (tmp_path / "mine.yaml").write_text(shown("yaml"))
    fewer = (
        f"generator={small} iterations=1 prompts_per_step=2 group=3 frames=6 prompts.count=8 probe.every=0 alarm=off"
    )
    held_out = "held_out.prompts=6 held_out.noises=1 held_out.frames=12"
    command = [sys.executable, "-m", "arvideo_rl", "align", "mine.yaml", *fewer.split(), *held_out.split()]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads((tmp_path / "runs" / "reward_weighted" / "metrics.jsonl").read_text().splitlines()[0])
    assert row["train/grad_norm"] > 0 and row["train/policy_distance"] > 0 and row["train/error"] > 0


def test_what_is_no_objective_is_refused(tmp_path, monkeypatch):
    source = "from dataclasses import dataclass\n@dataclass\nclass Half:\n    credit: str = 'chunk'\n"
    (tmp_path / "odd.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for target, message in (
        ("nowhere:Thing", "objective 'nowhere:Thing': there is no module 'nowhere'"),
        ("odd:Halve", "'odd' has no 'Halve'; did you mean 'Half'"),
        ("odd:Half", "objective.target=odd:Half: lacks from_chunk, exploration"),
        ("gpro", "objective.target=gpro: did you mean grpo?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_objective(Method(target), 3)


def test_its_arguments_are_checked_like_any_other_s(tmp_path, monkeypatch):
    (tmp_path / "reward_weighted.py").write_text(shown("python"))
    monkeypatch.syspath_prepend(tmp_path)
    for args, message in (({"temperatur": 1}, "did you mean objective.args.temperature"),
                          ({"temperature": "hot"}, "temperature=hot: must be a number"),
                          ({"temperature": 0}, "objective.args.temperature=0.0: use"),
                          ({"from_chunk": 3}, "leaves no chunk to train")):  # fmt: skip
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_objective(Method("reward_weighted:RewardWeighted", args), 3)
