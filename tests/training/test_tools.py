"""The benchmark tools run on any generator and print what they say."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
import yaml

TOOLS = Path(__file__).resolve().parents[2] / "tools"
RESULTS = runpy.run_path(str(TOOLS / "results.py"))


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


@pytest.mark.parametrize(
    ("item", "message"),
    [("in_place=yes", "in_place=yes: use 0 or 1"), ("dtype=bf16", "dtype=bf16: use float32"),
     ("window", "write KEY=VALUE"), ("sink=x", "sink=x")],
)  # fmt: skip
def test_a_value_that_cannot_be_read_is_refused(item, message, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        lines(capsys, monkeypatch, "bench_streaming.py", "tiny", "--set", item)
    assert message in capsys.readouterr().err


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


def test_policies_are_streamed_once_and_drawn_together(small, tmp_path, capsys, monkeypatch):
    words = ("policies.py", small, "--frames", 18, "--segment", 6, "--streams", 2, "--out", tmp_path)
    lines(capsys, monkeypatch, *words, "--policies", "linear")
    written = (tmp_path / "linear.json").stat().st_mtime_ns
    lines(capsys, monkeypatch, *words, "--policies", "linear", "infinity_rope")
    assert (tmp_path / "linear.json").stat().st_mtime_ns == written, "streamed again"
    linear, rope = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("linear", "infinity_rope"))
    assert len(linear["segments"]) == 3 and set(linear["segments"][0]) > {"edges", "contrast", "saturation", "actions"}
    assert rope["asked"]["streaming"]["window"] == 6 and linear["segments"] != rope["segments"]
    assert (tmp_path / "drift.svg").read_text().count("<polyline") == 2 * 5
    assert all((tmp_path / f"{name}.png").is_file() for name in ("linear", "infinity_rope"))
    with pytest.raises(SystemExit, match="linear.json was measured with other settings; choose another --out"):
        lines(capsys, monkeypatch, *words, "--streams", 3, "--policies", "linear")


def test_every_cache_policy_streams(small, tmp_path, capsys, monkeypatch):
    lines(capsys, monkeypatch, "policies.py", small, "--frames", 18, "--segment", 18, "--streams", 1, "--out", tmp_path)
    found = {p.stem: json.loads(p.read_text())["segments"] for p in tmp_path.glob("*.json")}
    assert len(found) == 12 and found["linear"] == found["adjacent"], "its projection is zero until it is trained"
    del found["linear"], found["adaptive"]  # which may find no sink to replace
    assert len({str(x) for x in found.values()}) == 10


def test_what_a_policy_costs(small, tmp_path, capsys, monkeypatch):
    lines(capsys, monkeypatch, "policies.py", small, "--cost", "--frames", 27, "--streams", 2, "--out", tmp_path,
          "--policies", "plain", "linear", "motionstream")  # fmt: skip
    plain, linear, short = json.loads((tmp_path / "cost.json").read_text())["policies"].values()
    token = 2 * 2 * 32 * 4  # a key and a value in each of two layers, 32 wide, in float32
    assert plain["ratio"] == 1 and len(plain["seconds"]) == 9 - 5
    assert plain["bytes"] == 9 * 4 * token and short["bytes"] == 6 * 4 * token and linear["bytes"] > plain["bytes"]


def test_a_switch_is_taken_in_every_way_from_one_past(small, tmp_path, capsys, monkeypatch):
    lines(capsys, monkeypatch, "policies.py", small, "--switch", "--frames", 18, "--at", 12, "--streams", 2,
          "--out", tmp_path)  # fmt: skip
    found = json.loads((tmp_path / "switch.json").read_text())["seen"]
    assert set(found) == {"keep", "recache", "recache_joint", "flush", "cut", "(world)"}
    assert len(found["keep"]["new"]) == 18 and len({one["jump"] for one in found.values()}) == 6
    assert found["(world)"]["new"][12] == 1 and found["(world)"]["old"][12] == 0 and (tmp_path / "switch.png").is_file()


def test_what_the_policies_cannot_be_run_with_is_one_line(small, tmp_path, capsys, monkeypatch):
    for words, says in (
        (["--policies", "plain", "ring"], "policy 'ring' is unknown; choose from: plain, absolute, adjacent"),
        (["--switch", "--policies", "plain"], "policy 'plain' is unknown; choose from: keep, recache"),
        (["--switch", "--frames", 12, "--at", 4], "switch at frame 4: it must begin a chunk of 3"),
        (["--cost", "--frames", 15], "--frames 15: use 21 or more, to fill windows"),
        (["--segment", 7], "segment of 7 frames: use a multiple of 3"),
        (["--streams", 0], "--streams 0: use 1 or more"),
    ):
        with pytest.raises(SystemExit, match=says):
            lines(capsys, monkeypatch, "policies.py", small, *words, "--out", tmp_path)
    assert not list(tmp_path.iterdir())


def finished(folder, seed, delta, weight=8, **more):
    """What tools/results.py reads of a run."""
    folder.mkdir()
    trained = {"before": 0.5, "after": 0.5 + delta, "delta": delta, "se": 0.01}
    lost = [{"name": "motion", "ok": seed != 1, "before": 1.0, "delta": 0.0, "se": 0.1}]
    told = {"seed": seed, "trained": trained, "verifiers": lost, "iterations": 7, "seconds": 60.0}
    (folder / "summary.json").write_text(json.dumps(told))
    rewards = {"a": {"target": "sharpness", "weight": 1.0}, "b": {"target": "flicker", "weight": 1.0, "held_out": True}}
    config = {"name": folder.name, "seed": seed, "objective": {"target": "nft", "args": {"beta": weight}},
              "rewards": rewards, "prompts_per_step": 2, "group": 4} | more  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "config_given.yaml").write_text(f"# override: seed={seed}\n# override: name=x\nname: tiny_nft\n")
    rows = [json.dumps({"iteration": i, "reward/a": 0.1 * i}) for i in range(7)]
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    return RESULTS["row"](folder)


def test_rows_of_the_same_settings_are_one_line_and_one_curve(tmp_path):
    rows = [finished(tmp_path / str(s), s, 0.02 + 0.01 * s, weight=(8, 8.0, 8)[s], lr=1) for s in range(3)]
    rows.append(finished(tmp_path / "other", 3, 0.5, weight=2, lr=1))
    assert len({r["settings"] for r in rows}) == 2 and rows[0]["videos"] == 56 and rows[0]["reward"] == "sharpness"
    assert rows[1]["command"] == "arvideo align align/tiny_nft seed=1" and rows[1]["lost"] == ["motion"]
    (group,) = RESULTS["repeated"](rows)
    assert [r["seed"] for r in group] == [0, 1, 2]
    (line,) = RESULTS["summary"](rows).splitlines()[2:]
    assert "| +0.020, +0.030, +0.040 | +0.030 | 0.010 | 0.010 | 56 | 1.0 | motion |" in line
    svg = RESULTS["drawn"](rows)
    assert svg.count("<polyline") == 1 and "sharpness, against videos scored" in svg and ">nft<" in svg


def test_a_folder_that_is_no_finished_run_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no summary.json"):
        RESULTS["row"](tmp_path)
