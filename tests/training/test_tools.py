"""The benchmark tools run on any generator and print what they say."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "tools"


def lines(capsys, monkeypatch, tool, *words) -> list[str]:
    monkeypatch.setattr(sys, "argv", [tool, *map(str, words)])
    threads = torch.get_num_threads()
    try:
        runpy.run_path(str(TOOLS / tool), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return capsys.readouterr().out.splitlines()


def test_streaming_speed(small, capsys, monkeypatch):
    out = lines(capsys, monkeypatch, "bench_streaming.py", small, "--frames", 6, "--streams", 1, 2, "--threads", 1,
                "--repeats", 2)  # fmt: skip
    rows = [json.loads(x) for x in out if x.startswith("[")]
    assert len(rows) == 2 and rows[0][0]["ratio"] == 1 and len(rows[1][0]["seconds"]) == 2


def test_the_cache_against_computing_again(small, capsys, monkeypatch):
    out = lines(capsys, monkeypatch, "bench_streaming.py", small, "--history", 96, "--threads", 1, "--repeats", 3)
    cache, again = json.loads(out[-1])
    assert cache["case"] == "cache" and again["ratio"] > 1


def test_alignment_speed(small, capsys, monkeypatch):
    out = lines(capsys, monkeypatch, "bench_align.py", "align/tiny_nft", f"generator={small}", "prompts_per_step=1",
                "group=2", "frames=6", "--threads", 1, "--repeats", 1)  # fmt: skip
    assert set(json.loads(out[-1])["1"][0]) == {"rollout", "reward", "update"}


def test_a_stream_that_drifts_is_an_exit_code(small, capsys, monkeypatch):
    with pytest.raises(SystemExit) as end:
        lines(capsys, monkeypatch, "long_stream.py", small, "--frames", 18, "--segment", 6, "--streams", 2)
    out = capsys.readouterr().out.splitlines()
    verdict = out[-2]
    assert len(json.loads(out[-1])) == 3 and end.value.code == (0 if verdict.startswith("no drift") else 1)
