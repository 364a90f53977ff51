"""Every kind of file that people really have, good and bad: a row with a number or a reason, and a summary that adds
up. Nothing here ends a command early."""

import csv
import json
import math
import os
import shutil
import subprocess
import threading
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from arvideo_rl import decoding
from arvideo_rl.cli.main import main
from arvideo_rl.media import write_video
from arvideo_rl.scoring import score_videos

LONG = "x" * 251 + ".mp4"  # 255 bytes, the most a name may have
MARKUP = "[red]a[bold]\n.mp4"
LATIN = os.fsdecode(b"caf\xe9.mp4")
GOOD = {  # file -> (frames, width, height, fps, what the note says)
    "alpha.mov": (6, 32, 48, 8, ""),
    "ten bit.mkv": (6, 32, 48, 8, ""),
    "odd.gif": (6, 33, 31, 8, ""),
    "one_frame.mp4": (1, 32, 48, 8, ""),
    "vary.mp4": (11, 32, 48, None, "the frame rate varies, 3.33 to 10 a second"),
    "rotated.mp4": (6, 48, 32, 8, ""),
    "animated.webp": (6, 32, 48, 8, ""),
    "ntsc.mp4": (6, 32, 48, 24000 / 1001, ""),
    "röt, 红 'quoted' \"球\".mp4": (6, 32, 48, 8, ""),
    LONG: (6, 32, 48, 8, ""),
    r"[red]a[bold]\x0a.mp4": (6, 32, 48, 8, ""),
    r"caf\xe9.mp4": (6, 32, 48, 8, ""),
    "size_changes.mpg": (25, 32, 48, 25, ""),  # shown at its first size, as players do
    "upper.MP4": (6, 32, 48, 8, ""),
    "link.mp4": (6, 32, 48, 8, ""),
}
BAD = {  # file -> (reason, part of the detail)
    "empty.mp4": ("content:empty", "the file is empty"),
    "cut.mp4": ("content:damaged", "cannot read"),
    "cut_late.mkv": ("content:damaged", "cannot read"),
    "zeros.mp4": ("content:damaged", "cannot read"),
    "text.mp4": ("content:damaged", "cannot read"),
    "page.webm": ("content:damaged", "cannot read"),
    "no_frames.avi": ("content:damaged", "cannot read"),
    "no_streams.mp4": ("content:no_video", "matches no streams"),
    "sound.mp4": ("content:no_video", "matches no streams"),
    "pipe.mp4": ("content:no_video", "neither a file nor a folder"),
    "cut.webp": ("content:damaged", "cannot read this animation"),
    "frames": ("input:fps", "states no frame rate"),
    "loop.mp4": ("system:no_file", "symbolic links"),
    "gone.mp4": ("system:no_file", "no such file"),
    "locked.mp4": ("system:not_readable", "change its rights"),
    "growing.ts": ("system:still_growing", "changed while it was read"),
    "note.mp4": ("input:note", "not readable JSON"),
    "note_latin.mp4": ("input:note", "not readable JSON"),
    "note_jump.mp4": ("input:note", "is no name"),
}
SKIPPED = (".hidden.mp4", "readme.txt", "still.webp", "one_image", "again")  # no videos, or not to be found twice


def ffmpeg(*arguments: object) -> None:
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", "-y", *map(str, arguments)]
    subprocess.run(command, check="-frames:v" not in arguments, stderr=subprocess.DEVNULL)  # none is an error to it


def picture(i: int) -> np.ndarray:
    return np.full((48, 32, 3), 40 * i, np.uint8)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A folder of all of them."""
    top = tmp_path_factory.mktemp("zoo")
    plain = write_video(top / "upper.MP4", torch.rand(6, 3, 48, 32, generator=torch.Generator().manual_seed(0)), 8)
    for name in ("röt, 红 'quoted' \"球\".mp4", LONG, MARKUP, LATIN, "locked.mp4", ".hidden.mp4", "note.mp4",
                 "note_latin.mp4", "note_jump.mp4"):  # fmt: skip
        shutil.copy(plain, top / name)
    (top / "note.mp4.json").write_text("{")
    (top / "note_latin.mp4.json").write_bytes(b'{"prompt": "caf\xe9"}')
    (top / "note_jump.mp4.json").write_text('{"actions": ["jump", null]}')
    write_video(top / "odd.gif", torch.rand(6, 3, 31, 33), 8)
    write_video(top / "one_frame.mp4", torch.rand(1, 3, 48, 32), 8)
    whole = write_video(top / "ntsc.mp4", torch.rand(6, 3, 48, 32), 24000 / 1001).read_bytes()
    (top / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    ffmpeg("-i", plain, "-c:v", "png", "-pix_fmt", "rgba", top / "alpha.mov")
    ffmpeg("-i", plain, "-c:v", "ffv1", "-pix_fmt", "yuv420p10le", top / "ten bit.mkv")
    late = (top / "ten bit.mkv").read_bytes()
    (top / "cut_late.mkv").write_bytes(late[: len(late) * 3 // 4])
    uneven = "select='lt(n,6)+not(mod(n,3))'"
    ffmpeg("-f", "lavfi", "-i", "testsrc=r=10:s=32x48:d=2", "-vf", uneven, "-fps_mode", "vfr", top / "vary.mp4")
    ffmpeg("-display_rotation", 90, "-i", plain, "-c", "copy", top / "rotated.mp4")
    ffmpeg("-f", "lavfi", "-i", "sine=d=0.2", top / "sound.mp4")
    ffmpeg("-i", plain, "-c:v", "mpeg4", "-frames:v", 0, top / "no_frames.avi")
    ffmpeg("-i", plain, "-frames:v", 0, top / "no_streams.mp4")
    mpeg = ("-c:v", "mpeg2video", "-r", 25)
    for i, size in enumerate(("32x48", "64x48")):
        ffmpeg("-f", "lavfi", "-i", f"testsrc=r=25:s={size}:d=0.5", *mpeg, "-f", "mpeg2video", top / f"{i}.part")
    (top / "size_changes.mpg").write_bytes((top / "0.part").read_bytes() + (top / "1.part").read_bytes())
    ffmpeg("-i", plain, *mpeg, top / "growing.ts")
    (top / "empty.mp4").touch()
    (top / "zeros.mp4").write_bytes(bytes(5000))
    (top / "text.mp4").write_text("not a video\n" * 99)
    (top / "page.webm").write_text("<html>404 not found</html>\n" * 9)
    (top / "readme.txt").write_text("x")
    first, *rest = [Image.fromarray(picture(i)) for i in range(6)]
    first.save(top / "animated.webp", save_all=True, append_images=rest, duration=125, lossless=True)
    animated = (top / "animated.webp").read_bytes()
    (top / "cut.webp").write_bytes(animated[: len(animated) * 2 // 3])
    first.save(top / "still.webp")
    for folder, count in (("frames", 3), ("one_image", 1)):
        (top / folder).mkdir()
        for i in range(count):
            Image.fromarray(picture(i)).save(top / folder / f"{i}.png")
    os.mkfifo(top / "pipe.mp4")
    (top / "loop.mp4").symlink_to("loop.mp4")
    (top / "gone.mp4").symlink_to("nowhere.mp4")
    (top / "link.mp4").symlink_to("upper.MP4")
    (top / "again").symlink_to(".")
    return top


@pytest.fixture
def faults(zoo, monkeypatch):
    """One file that may not be read and one that grows while it is."""
    access, gather = os.access, decoding._gather

    def denied(path, *rest):
        return Path(path).name != "locked.mp4" and access(path, *rest)

    def grow(path, *rest):
        if path.name == "growing.ts":
            with path.open("ab") as file:
                file.write(bytes(188))
        return gather(path, *rest)

    monkeypatch.setattr(os, "access", denied)  # root may read all files, so rights alone would not do
    monkeypatch.setattr(decoding, "_gather", grow)


def brightness(clips):
    return clips.frames.mean((1, 2, 3, 4))


def test_a_folder_of_all_kinds_gives_each_its_row(zoo, faults):
    result = score_videos(zoo, brightness)
    rows = {str(Path(r["file"]).relative_to(zoo)): r for r in result.rows}
    assert len(rows) == len(result.rows) and set(rows) == {*GOOD, *BAD}
    for name, (frames, width, height, fps, note) in GOOD.items():
        row = rows[name]
        assert row["reason"] == "" and 0.1 < row["value"] < 0.9, (name, row)
        assert (row["frames"], row["width"], row["height"]) == (frames, width, height), name
        assert fps is None or row["fps"] == pytest.approx(fps, rel=1e-3 if name != "odd.gif" else 0.05), name
        assert note in row["note"] and bool(note) == bool(row["note"]), name
    for name, (reason, detail) in BAD.items():
        row = rows[name]
        assert row["value"] is None and row["reason"] == reason and detail in row["detail"], (name, row)
        assert "\n" not in row["detail"]
    found = result.summary["brightness"]
    assert (found["files"], found["scored"], found["invalid"]) == (len(rows), len(GOOD), len(BAD))
    counted = [reason for reason, _ in BAD.values()]
    assert found["invalid_by_reason"] == {reason: counted.count(reason) for reason in counted}
    values = [rows[name]["value"] for name in GOOD]
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["se"] == pytest.approx(np.std(values, ddof=1) / len(values) ** 0.5)
    assert found["median"] == pytest.approx(np.median(values)) and found["min"] == min(values)
    assert rows[Path(found["worst"]).name]["value"] == min(values)


def test_the_command_line_says_the_same_in_a_table(zoo, faults, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("judges.py").write_text("def judge(clips): return clips.frames.mean((1, 2, 3, 4))\n")
    with pytest.raises(SystemExit) as end:
        main(["score", str(zoo), "reward=judges:judge", "out=s.csv", "batch=3"])
    out, err = capsys.readouterr()
    counts = sum(reason == "content:damaged" for reason, _ in BAD.values())
    assert end.value.code == 0 and err == ""
    assert f"{len(GOOD)} of {len(GOOD) + len(BAD)} files" in out and f"{counts} content:damaged" in out
    assert json.loads(Path("s.summary.json").read_text())["judges:judge"]["invalid"] == len(BAD)
    assert not Path("s.csv.partial").exists()


MANIFEST = [  # (row, reason)
    ({"path": "a.mp4", "prompt": "a red ball", "id": 7}, ""),
    ({"path": "a.mp4", "prompt": "a red ball", "id": 7}, "input:duplicate"),
    ({"path": "a.mp4", "id": 8}, "input:no_prompt"),
    ({"path": "a.mp4", "prompt": ""}, "input:no_prompt"),
    ({"path": "a.mp4", "prompt": 3}, "input:prompt"),
    ({"path": "a.mp4", "prompt": "x", "fps": 0}, "input:fps"),
    ({"path": "a.mp4", "prompt": "x", "fps": "fast"}, "input:fps"),
    ({"path": "a.mp4", "prompt": "x", "fps": float("nan")}, "input:fps"),
    ({"path": "a.mp4", "prompt": "x", "actions": ["jump"]}, ""),  # whose names they are is asked by a reward of actions
    ({"path": "a.mp4", "prompt": "x", "actions": ["jump", None]}, "input:actions"),
    ({"path": "a.mp4", "prompt": "x", "actions": {"a": 1}}, "input:actions"),
    ({"path": "a.mp4", "prompt": "x", "actions": [[0.5, math.inf]]}, "input:actions"),
    ({"path": "nowhere.mp4", "prompt": "x"}, "system:no_file"),
    ({"path": "a.mp4\0", "prompt": "x"}, "input:path"),
    ({"prompt": "x"}, "input:path"),
    ({"path": 3}, "input:path"),
    ([1], "input:row"),
    ("text", "input:row"),
    ({"path": "a.mp4", "prompt": "x", "fps": "24000/1001", "value": "lone \ud800"}, ""),
    ({"path": "a.mp4", "prompt": "x" * 200_000}, ""),
]


def length(clips):
    return torch.tensor([float(len(p)) for p in clips.prompts])


length.needs = {"prompts"}


def test_every_mistake_in_a_manifest_is_the_reason_in_its_row(tmp_path):
    write_video(tmp_path / "a.mp4", torch.rand(3, 3, 32, 32), 8)
    lines = [json.dumps(row) for row, _ in MANIFEST]
    (tmp_path / "m.jsonl").write_text("\ufeff" + "\r\n".join([*lines, '{"path": ', "", "[" * 100_000]) + "\n")
    rows = score_videos(tmp_path / "m.jsonl", length, out=str(tmp_path / "s.jsonl")).rows
    assert [r["reason"] for r in rows] == [reason for _, reason in MANIFEST] + ["input:row", "input:row"]
    for number, row in zip([*range(1, len(lines) + 2), len(lines) + 3], rows):
        assert (
            not row["reason"].startswith("input:") or "input:no_" in row["reason"] or f"line {number}" in row["detail"]
        )
    assert rows[0]["value"] == 10 and rows[0]["given"] == {"id": 7}
    fast = rows[18]
    assert fast["fps"] == pytest.approx(24000 / 1001) and "the file states 8" in fast["note"]
    written = [json.loads(x) for x in (tmp_path / "s.jsonl").read_text().splitlines()]
    assert written[0]["id"] == 7 and written[18]["given.value"] == "lone \ud800" and written[18]["value"] == 1


def test_a_table_as_people_write_it(tmp_path):
    write_video(tmp_path / "a b.mp4", torch.rand(3, 3, 32, 32), 8)
    text = 'path;prompt ;shot\n"a b.mp4";"red; ball";1\na b.mp4;two;;\na b.mp4;three\na b.mp4;three;"2\n3"\n'
    (tmp_path / "m.csv").write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows = score_videos(tmp_path / "m.csv", length).rows
    assert [r["value"] for r in rows] == [9, None, None, 5]
    assert [r["reason"] for r in rows] == ["", "input:row", "input:row", ""]
    assert "4 cells for 3 columns" in rows[1]["detail"] and "2 cells for 3 columns" in rows[2]["detail"]
    assert rows[0]["given"] == {"shot": "1"} and rows[3]["given"] == {"shot": "2\n3"}


@pytest.mark.parametrize("end", ["csv", "jsonl"])
def test_any_prompt_reaches_the_reward_and_the_rows_from_a_manifest(tmp_path, end):
    write_video(tmp_path / "a.mp4", torch.rand(2, 3, 32, 32), 8)
    prompts = [
        "a/b \\ c",
        "say \"hi\", 'you'",
        "50 % of ${HOME}; *?[x]",
        "two\nlines",
        "röt 红 🎾",
        "=1+1",
        " x ",
        "null",
    ]
    rows = [{"path": "a.mp4", "prompt": p} for p in prompts]
    if end == "csv":
        with (tmp_path / "m.csv").open("w", newline="", encoding="utf-8") as file:
            table = csv.DictWriter(file, ["path", "prompt"])
            table.writeheader()
            table.writerows(rows)
    else:
        (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    seen = []

    def judge(clips):
        seen.extend(clips.prompts)
        return length(clips)

    judge.needs = {"prompts"}
    score_videos(tmp_path / f"m.{end}", judge, out=str(tmp_path / "s.csv"))
    assert seen == prompts
    with (tmp_path / "s.csv").open(newline="", encoding="utf-8") as file:
        assert [r["prompt"] for r in csv.DictReader(file)] == prompts


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("m.csv", b"path,prompt\na.mp4,caf\xe9\n", "m.csv is not UTF-8 (line 2, byte 21); save it as UTF-8"),
        ("m.jsonl", b'\n{"path": "caf\xe9"}', "m.jsonl is not UTF-8 (line 2"),
        ("m.csv", b"name,prompt\na.mp4,b\n", "m.csv has no column 'path'; its first line is 'name,prompt'"),
        ("m.csv", b"", "m.csv has no column 'path'"),
        ("m.csv", b"path,id,id\na,1,2\n", "m.csv has the column 'id' twice"),
        ("m.csv", b'path,prompt\na.mp4,"open\n', "cannot be read as CSV: unexpected end"),
        ("m.csv", b"path\n", "m.csv holds no row"),
        ("m.jsonl", b"\n", "m.jsonl holds no row"),
    ],
)
def test_a_manifest_that_cannot_be_read_is_refused_before_anything_runs(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:
        score_videos(tmp_path / name, brightness, out=str(tmp_path / "s.csv"))
    assert says in str(error.value) and "\n" not in str(error.value)
    assert not (tmp_path / "s.csv").exists()


def test_a_decoder_that_hangs_is_given_up(tmp_path, monkeypatch):
    write_video(tmp_path / "a.mp4", torch.rand(3, 3, 32, 32), 8)
    monkeypatch.setattr(decoding, "command", lambda arguments: ["sleep", "60"])
    before = threading.active_count()
    row = score_videos(tmp_path / "a.mp4", brightness, seconds=0.2).rows[0]
    assert row["reason"] == "system:timeout" and threading.active_count() < before + 3


def test_a_clip_that_does_not_fit_is_refused_in_its_row_and_fits_when_made_smaller(tmp_path):
    write_video(tmp_path / "a.mp4", torch.rand(8, 3, 64, 96), 8)
    gib = 5 * 64 * 96 * 3 * 4 / 2**30
    row = score_videos(tmp_path / "a.mp4", brightness, gib=gib).rows[0]
    assert row["reason"] == "input:too_large" and "more than 5 frames of 96x64 do not fit" in row["detail"]
    small = score_videos(tmp_path / "a.mp4", brightness, gib=gib, short_side=32).rows[0]
    assert (small["frames"], small["width"], small["height"]) == (8, 48, 32) and small["reason"] == ""
    short = score_videos(tmp_path / "a.mp4", brightness, gib=gib, frames=5).rows[0]
    assert short["frames"] == 5 and short["reason"] == ""


def test_sampling_picks_frames_at_an_even_rate_from_every_kind(tmp_path):
    shades = torch.linspace(0.1, 0.9, 9)[:, None, None, None].expand(9, 3, 32, 32)
    write_video(tmp_path / "a.mp4", shades, 8)
    (tmp_path / "frames").mkdir()
    for i, shade in enumerate(shades):
        Image.fromarray((shade * 255).byte().permute(1, 2, 0).numpy()).save(tmp_path / "frames" / f"{i}.png")
    want = shades[::2, :, 0, 0]
    for path, fps in ((tmp_path / "a.mp4", None), (tmp_path / "frames", 8)):
        seen = decoding.decode(path, decoding.Reading(fps=fps, sample_fps=4))
        assert seen.fps == 4 and len(seen.frames) in (4, 5), path
        np.testing.assert_allclose(seen.frames.mean((1, 2)) / 255, want[: len(seen.frames)], atol=0.03)
        with pytest.raises(decoding.VideoError, match="some would be repeated"):
            decoding.decode(path, decoding.Reading(fps=fps, sample_fps=16))
    ffmpeg("-f", "lavfi", "-i", "testsrc=r=10:s=32x48:d=2", "-vf", "select='lt(n,6)+not(mod(n,3))'",
           "-fps_mode", "vfr", tmp_path / "vary.mp4")  # fmt: skip
    seen = decoding.decode(tmp_path / "vary.mp4", decoding.Reading(sample_fps=2))
    assert len(seen.frames) in (4, 5) and seen.fps == 2, "2 seconds at 2 a second"
