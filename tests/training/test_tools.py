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


def test_streaming_speed_of_two_cases_and_another_command(small, capsys, monkeypatch):
    other = f"""{sys.executable} -c 'print("noise\\n{{\\"seconds_per_chunk\\": 1000}}")'"""
    out = lines(capsys, monkeypatch, "bench_streaming.py", small, "--frames", 15, "--set", "window=6", "sink=3",
                "--vary", "in_place=0,1", "--repeats", 2, "--flops", "--beside", other)  # fmt: skip
    contexts, ring, beside = json.loads(out[-1])
    assert contexts["ratio"] == 1 and len(ring["each"]) == 2 and beside["ratio"] > 100
    assert len(set(ring["flops"].values())) == 1 and ring["floor_seconds"] > 0
    assert [a["past_bytes"] for a in ring["along"]] == [ring["along"][0]["past_bytes"]] * len(ring["along"])


def test_random_weights_of_a_named_size(capsys, monkeypatch):
    out = lines(capsys, monkeypatch, "bench_streaming.py", "--random", "reference", "--frames", 6, "--repeats", 1,
                "--set", "dtype=bfloat16", "size=8", "width=8", "steps=1000-500")  # fmt: skip
    assert json.loads(out[-1])[0]["frames_per_second"] > 0


def test_an_unknown_key_and_a_failing_command_are_told(small, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        lines(capsys, monkeypatch, "bench_streaming.py", small, "--vary", "windw=1,2")
    assert "unknown windw; known: threads, streams" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="ended with 3"):
        lines(capsys, monkeypatch, "bench_streaming.py", small, "--frames", 3, "--repeats", 1, "--beside",
              f"{sys.executable} -c 'raise SystemExit(3)'")  # fmt: skip


def test_the_cache_against_computing_again(small, capsys, monkeypatch):
    out = lines(capsys, monkeypatch, "bench_cache.py", small, "--history", 96, "--threads", 1, "--repeats", 3)
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
