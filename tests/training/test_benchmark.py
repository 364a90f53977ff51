"""The streaming benchmark: its numbers are those of the measures it is made of, and its table can be pasted."""

import json
from dataclasses import replace

import pytest
import torch

from arvideo_rl.cli.main import main
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.benchmark import StreamingConfig, check, markdown, stream_benchmark, summary, switch
from arvideo_rl.training.drift import long_actions, segments
from arvideo_rl.training.following import continuations, seen, switch_scenes
from arvideo_rl.training.prompts import held_out_prompts

SIZES = StreamingConfig(streams=2, frames=24, segment=12, switch_at=6, timed=15)


class Twice:
    """A codec that makes two pixel frames of each frame; nothing of the embedded world."""

    channels, stride, weight_bytes, graph_bytes = 3, 1, 0, 0

    def decoder(self):
        return self.decode

    def decode(self, latents):
        return (latents * 0.2 + 0.5).clamp(0, 1).repeat_interleave(2, 1)

    def pixel_frames(self, frames):
        return 2 * frames


@pytest.fixture
def generator(small):
    return Generator.load(small)


def test_drift_is_that_of_the_segments_and_the_switch_that_of_the_continuation(generator):
    prompts = held_out_prompts(3, 18, "joystick")
    found = stream_benchmark(generator, generator.transformer, prompts, SIZES, "joystick")
    with torch.no_grad():
        cut = segments(generator, generator.transformer, prompts.take([0, 1]), long_actions(2, 24, "joystick"), 12)
    assert found["streams"] == 2 and [s["edges"] for s in found["drift"]] == [summary(s["edges"]) for s in cut]
    assert found["drift"][1]["actions"]["n"] <= 2 and len(found["drift"]) == 2
    before, after = switch_scenes(2, 57, 6)
    pixels = continuations(generator, before, after, 6, ["keep"])
    for who, name in (("stream", "keep"), ("world", "(world)")):
        new = seen(pixels[name], after.captions)
        assert found["switch"][who]["new_after_1_s"] == summary(new[:, 14])
        assert found["switch"][who]["new_after_6_s"] == summary(new[:, 54])
    assert found["switch"]["world"]["new_after_1_s"]["value"] > 0.5 > found["switch"]["world"]["old_at_end"]["value"]
    rate = found["speed"]["frames_per_second"]
    assert rate > 0 and found["speed"]["real_time"] == rate / 8 and found["speed"]["first_seconds"] > 0


def test_a_generator_of_other_pictures_has_drift_and_speed_and_no_more(generator):
    other = replace(generator, codec=Twice())
    prompts = held_out_prompts(2, 18, "joystick")
    found = stream_benchmark(other, other.transformer, prompts, SIZES, "joystick")
    assert found["switch"] is None and "actions" not in found["drift"][0]
    # each frame is shown twice, so nothing moves inside a pair: of 5 steps in a chunk's 6 pixel frames 2 move
    assert found["drift"][0]["seam"]["value"] > 1.5 and found["drift"][0]["motion"]["n"] == 2
    table = markdown({"other": {"held_out": {"sharpness": {"value": 1.0, "se": 0.5, "n": 4}}, "stream": found}})
    assert "switch" not in table and "actions" not in table and "| quality: sharpness | 1.000 ± 0.500 |" in table


def test_a_stream_that_stops_for_good_is_summarised_without_what_is_not_a_number():
    assert summary(torch.tensor([1.0, torch.nan, 3.0])) == {"value": 2.0, "se": pytest.approx(1.0), "n": 2}


def test_the_switch_is_measured_as_the_generator_takes_it(generator):
    flushing = replace(generator, streaming=replace(generator.streaming, at_switch="flush"))
    assert switch(flushing, 1, 3)["way"] == "flush"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"segment": 10}, "streaming.segment=10: use a multiple of 3 frames, a chunk, e.g. 9"),
        ({"segment": 3}, "streaming.segment=3: use a multiple of 3 frames, a chunk, e.g. 6"),
        ({"frames": 12}, "drift wants two segments of 12 or more"),
        ({"switch_at": 7}, "streaming.switch_at=7"),
        ({"streams": 0}, "streaming.streams=0: use 1 or more"),
    ],
)
def test_sizes_that_cannot_be_streamed_are_refused_with_the_nearest(generator, change, says):
    with pytest.raises(ValueError, match=says):
        check(replace(SIZES, **change), generator)


def test_the_command_prints_one_table_with_a_column_for_each_generator(small, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["held_out.prompts=8", "held_out.noises=1", "streaming.streams=1", "streaming.frames=12",
             "streaming.segment=6", "streaming.switch_at=3", "streaming.timed=9"]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(["evaluate", "benchmark=streaming", f"generator={small}", f"against={small}", "out=b.json", *sizes])
    out, err = capsys.readouterr()
    assert not end.value.code, err
    rows = [line for line in out.splitlines() if line.startswith("|")]
    assert {row.count("|") for row in rows} == {3} and rows[1] == "| --- | --- |", "named twice it is one column"
    for start in ("quality: reward inverse_dynamics", "quality: frechet (lower is better)", "drift: actions, first ->",
                  "switch: new colours seen after 3 s", "speed: frames/s"):  # fmt: skip
        assert sum(row.startswith(f"| {start}") for row in rows) == 1, start
    told = json.loads((tmp_path / "b.json").read_text(), parse_constant=pytest.fail)[str(small)]  # NaN is no JSON
    assert set(told) == {"held_out", "stream"} and len(told["stream"]["drift"]) == 2
    assert told["stream"]["drift"][0]["edges"]["se"] is None, "one stream has no error"
    with pytest.raises(SystemExit) as end:
        main(["evaluate", "benchmark=stream"])
    assert end.value.code == 1 and "benchmark=stream: did you mean streaming?" in capsys.readouterr().err
