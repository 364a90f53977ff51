"""``arvideo rewards calibrate``: constants from videos or from the world, where they came from, and who takes them."""

import json
from hashlib import sha256

import pytest
import torch

from arvideo_rl.cli.main import main
from arvideo_rl.media import write_video
from arvideo_rl.scoring import score_videos
from arvideo_rl.scoring.calibrate import moving_scenes
from arvideo_rl.world.render import render
from rewards.four_d.calibration import read
from rewards.four_d.reward import FourD


def run(capsys, *words):
    """(exit code, standard output, standard error) of ``arvideo rewards calibrate four_d ...``."""
    with pytest.raises(SystemExit) as end:
        main(["rewards", "calibrate", "four_d", *words])
    return end.value.code or 0, *capsys.readouterr()


@pytest.fixture
def videos(tmp_path, monkeypatch):
    """A folder with three videos of the world, one too short and one that is none."""
    monkeypatch.chdir(tmp_path)
    for i, clip in enumerate(render(moving_scenes(3, 5, seed=2), 64)):
        write_video(tmp_path / "base" / f"{i}.mp4", clip[None], 8)
    write_video(tmp_path / "base" / "short.mp4", torch.rand(1, 2, 3, 64, 64), 8)
    (tmp_path / "base" / "torn.mp4").write_bytes(b"no video")
    return tmp_path


def test_constants_of_a_folder_say_what_they_are_of_and_are_taken_by_the_reward(videos, capsys):
    code, said, _ = run(capsys, "base", "out=base.json", "args.share=0.1", "real=base")
    assert code == 0 and "only 3 clips" in said and "wrote base.json" in said and "1 content:damaged" in said
    assert "yours" in said and said.count("no room to improve") == 8  # the same clips on both sides
    found = read("base.json")
    source = found.source
    assert source["measured"] == 3 and source["date"].startswith("20")
    assert sorted(source["not_measured"].values()) == [1, 1] and source["not_measured"]["content:damaged"] == 1
    assert source["command"] == "arvideo rewards calibrate four_d base out=base.json args.share=0.1 real=base"
    named = {f["name"]: f.get("sha256") for f in source["files"]}
    assert named["base/1.mp4"] == sha256((videos / "base/1.mp4").read_bytes()).hexdigest() and len(named) == 5
    assert found.short_side == (64, 64) and found.time_step == (0.125, 0.125) and found.backend == "classical"
    args = {"calibration": "base.json", "share": 0.1}
    rows = score_videos(["base/0.mp4", "base/1.mp4"], reward="four_d", args=args).rows
    assert all(r["value"] > 0 and r["components"]["anchor"] > 0 for r in rows)
    (row,) = score_videos("base/0.mp4", reward="four_d", args=args, short_side=24).rows
    assert row["reason"] == "system:reward_failed" and "24x24" in row["detail"]
    (row,) = score_videos("base/0.mp4", reward="four_d", args=args, fps=12.0).rows
    assert "0.125 to 0.125 s apart" in row["detail"]


def test_constants_of_the_world_are_the_same_every_time(videos, capsys):
    words = ("world", "clips=2", "size=64", "frames=5")
    assert run(capsys, *words, "--dry-run")[1] == "would measure 2 clips of the world and write calibration.json\n"
    assert not (videos / "calibration.json").exists()
    for out in ("a.json", "b.json"):
        assert run(capsys, *words, f"out={out}")[0] == 0
    a, b = (json.loads((videos / x).read_text()) for x in ("a.json", "b.json"))
    assert a["source"]["world"] == {"clips": 2, "size": 64, "frames": 5, "seed": 0}
    assert {k: v for k, v in a.items() if k != "source"} == {k: v for k, v in b.items() if k != "source"}


def test_clips_that_cannot_be_measured_end_in_one_line_and_no_file(videos, capsys):
    code, _, error = run(capsys, "base/short.mp4", "base/torn.mp4")
    assert code == 1 and error.count("\n") == 1 and "0 of 2 clips could be measured" in error and "2 frames" in error
    assert not (videos / "calibration.json").exists()


@pytest.mark.parametrize("key", ["calibration", "constants"])
def test_what_it_measures_is_not_given(key, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = {"calibration": "args.calibration=old.json", "constants": "args.constants.k=1"}[key]
    code, _, said = run(capsys, "world", "clips=2", given)
    assert code == 1 and f"args.{key} is what this command makes" in said and not list(tmp_path.iterdir())


def test_constants_of_a_generator_s_own_clips(videos, capsys):
    words = ("generator=tiny", "clips=3", "frames=5", "args.backend=network")
    assert run(capsys, *words, "--dry-run")[1] == "would measure 3 clips of tiny and write calibration.json\n"
    found = []
    for more in (("out=a.json",), ("out=b.json",), ("out=c.json", "seed=1")):
        assert run(capsys, *words, *more)[0] == 0
        found.append(read(more[0].removeprefix("out=")))
    assert found[0].m_nat == found[1].m_nat != found[2].m_nat
    made = found[0].source["generator"]
    assert made["generator"] == "tiny" and made["frames"] == 5 and made["prompts"]["style"] == "joystick"
    assert found[0].short_side == (32, 32) and found[0].backend == "network"
    code, _, said = run(capsys, "world", "generator=tiny")
    assert code == 1 and "one of them" in said


@pytest.mark.parametrize(
    "words, says",
    [
        (("generator=wrong",), "wrong"),
        (("generator=tiny", "prompts.source=gone.txt"), "'gone.txt' does not exist"),
        (("generator=tiny", "size=200"), "size is for world, and the clips are of the generator"),
        (("generator=tiny", "fps=60"), "fps is for videos, and the clips are of the generator"),
        (("world", "prompts.count=3"), "prompts is for generator, and the clips are of the world"),
        (("base", "seed=1"), "seed is for world or generator, and the clips are of the videos"),
    ],
)
def test_what_would_not_be_read_is_refused_before_anything_is_measured(videos, capsys, words, says):
    code, _, said = run(capsys, *words, "--dry-run")
    assert code == 1 and says in said and said.count("\n") == 1


def test_a_calibration_belongs_to_the_settings_of_its_backend(videos, capsys):
    wide = "args.backend={target: classical, args: {field_of_view: 65}}"
    assert run(capsys, "base", wide, "out=wide.json")[0] == 0
    assert read("wide.json").backend == "classical field_of_view=65.0"
    with pytest.raises(ValueError, match="made with backend=classical field_of_view=65.0, used with backend=classical"):
        FourD(calibration="wide.json")


def test_a_shipped_calibration_is_not_taken_for_a_file_of_that_name(videos, capsys):
    assert run(capsys, "base", "out=c.json")[0] == 0
    (videos / "c.json").rename(videos / "four_d_tiny")
    with pytest.raises(ValueError, match="say ./four_d_tiny for the file"):
        read("four_d_tiny")
    assert read("./four_d_tiny").backend == "classical"


def test_the_shipped_calibration_is_of_the_tiny_generator():
    found = read("four_d_tiny")
    assert found.source["generator"]["generator"] == "tiny" and found.source["measured"] == 256 and found.features
