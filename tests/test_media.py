"""Videos are written and read back: count, size, rate and colour; wrong input and broken files are one clear line."""

from __future__ import annotations

import os
import subprocess
from fractions import Fraction
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from PIL import Image

from arvideo_rl import media
from arvideo_rl.media import contact_sheet, read_video, side_by_side, to_uint8, write_video, writing

COLOURS = torch.tensor([[0.9, 0.1, 0.1], [0.1, 0.8, 0.2], [0.2, 0.2, 0.9], [0.5, 0.5, 0.5], [1, 1, 1], [0, 0, 0]])
MP4_MEAN = 0.012  # mean colour of a frame, at crf 12 with halved chroma: three levels of 255
GIF_MAX = 0.004  # any pixel, while the video has at most 256 colours: rounding to 8 bits and one level of slack


def clip(h: int = 32, w: int = 32) -> torch.Tensor:
    """[6, 3, h, w]: one flat colour a frame, with a square of another."""
    video = COLOURS[:, :, None, None].repeat(1, 1, h, w)
    video[:, :, 8:16, 8:16] = COLOURS.flip(0)[:, :, None, None]
    return video


def stream_line(path: Path) -> str:
    """What ffmpeg says of the video stream of a file."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-i", str(path)]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    return next(line for line in said.splitlines() if "Video:" in line)


@pytest.mark.parametrize("scale", [1, 3])
def test_mp4_reads_back(tmp_path, scale):
    path = write_video(tmp_path / "new folder" / "a.mp4", clip(), 16, scale=scale)
    pixels, fps = read_video(path)
    assert pixels.shape == (6, 3, 32 * scale, 32 * scale) and pixels.dtype == torch.float32
    assert fps == 16
    torch.testing.assert_close(pixels.mean((2, 3)), clip().mean((2, 3)), atol=MP4_MEAN, rtol=0)
    inside = pixels[:, :, 10 * scale : 14 * scale, 10 * scale : 14 * scale].mean((2, 3))  # not only the mean: in place
    torch.testing.assert_close(inside, COLOURS.flip(0), atol=2 * MP4_MEAN, rtol=0)


def test_mp4_is_what_browsers_play(tmp_path):
    said = stream_line(write_video(tmp_path / "a.mp4", clip(), 16))
    assert "h264" in said and "yuv420p(tv, bt709, " in said


def test_gif_reads_back(tmp_path):
    pixels, fps = read_video(write_video(tmp_path / "a.gif", clip(), 16, scale=2))
    want = clip().repeat_interleave(2, 2).repeat_interleave(2, 3)
    torch.testing.assert_close(pixels, want, atol=GIF_MAX, rtol=0)
    assert fps == pytest.approx(16, rel=0.03)  # a gif counts in 1/100 s: six delays of 6 or 7 for 6.25


def test_still_video_keeps_its_frames(tmp_path):
    for name in ("a.mp4", "a.gif"):
        assert len(read_video(write_video(tmp_path / name, torch.zeros(5, 3, 16, 16), 10))[0]) == 5


def test_png_is_a_sheet_of_the_frames(tmp_path):
    sheet = np.asarray(Image.open(write_video(tmp_path / "a.png", clip(), 16, scale=2)))
    assert sheet.shape == (64, 6 * 66 - 2, 3)
    np.testing.assert_array_equal(sheet[0, 66:130], np.broadcast_to(to_uint8(clip())[1, 0, 0], (64, 3)))
    assert (sheet[:, 64:66] == media.PAPER).all()
    wrapped = np.asarray(Image.open(write_video(tmp_path / "b.png", clip(16, 400), 16)))
    assert wrapped.shape == (2 * 18 - 2, 4 * 402 - 2, 3)
    np.testing.assert_array_equal(wrapped[18:, :400], to_uint8(clip(16, 400))[4])


def test_odd_sizes_are_padded_not_resized(tmp_path):
    pixels, _ = read_video(write_video(tmp_path / "a.mp4", clip(31, 33), 16))
    assert pixels.shape == (6, 3, 32, 34)
    torch.testing.assert_close(pixels[:, :, -1, -1], COLOURS, atol=2 * MP4_MEAN, rtol=0)
    assert read_video(write_video(tmp_path / "a.gif", clip(31, 33), 16))[0].shape == (6, 3, 31, 33)


@pytest.mark.parametrize(
    "fps, want",
    [(8, 8), (7.5, 7.5), (Fraction(24000, 1001), 24000 / 1001), (24000 / 1001, 24000 / 1001), (np.float32(30), 30)]
    + [(np.int64(12), 12), (np.float64(0.5), 0.5), (torch.tensor(16.0), 16)],
)
def test_every_kind_of_fps_is_kept(tmp_path, fps, want):
    assert read_video(write_video(tmp_path / "a.mp4", clip(), fps))[1] == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), "16", None, True, np.ones(2), 1e-9])
def test_wrong_fps_is_refused(tmp_path, fps):
    with pytest.raises(ValueError, match="^fps is .*positive finite"):
        write_video(tmp_path / "a.mp4", clip(), fps)
    assert not list(tmp_path.iterdir())


def test_gif_refuses_more_than_it_plays(tmp_path):
    with pytest.raises(ValueError, match="fps is 60.*at most 50; use .mp4"):
        write_video(tmp_path / "a.gif", clip(), 60)


def test_floats_are_rounded_and_uint8_untouched():
    every = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(2, 3, 1, 1)
    np.testing.assert_array_equal(to_uint8(every), every.permute(0, 2, 3, 1))
    np.testing.assert_array_equal(to_uint8(every[None].numpy()), every.permute(0, 2, 3, 1))
    np.testing.assert_array_equal(to_uint8(every.float() / 255), every.permute(0, 2, 3, 1))
    np.testing.assert_array_equal(to_uint8(every.double()[None] / 255), every.permute(0, 2, 3, 1))
    assert to_uint8(torch.full((1, 3, 1, 1), 0.5 / 255 + 1e-4)).max() == 1  # rounded, not cut
    np.testing.assert_array_equal(to_uint8(torch.tensor([-0.05, 0.5, 1.05]).reshape(1, 3, 1, 1)), [[[[0, 128, 255]]]])
    assert to_uint8(torch.full((1, 3, 2, 2), 0.25, dtype=torch.bfloat16, requires_grad=True)).max() == 64


@pytest.mark.parametrize(
    "pixels, says",
    [
        (clip().index_fill(0, torch.tensor([3]), float("nan")), r"not finite in 1 of 6 frames, first in frame 3"),
        (clip() * 2 - 1, r"spans \[-1, 1\]; expected floats in \[0, 1\]"),
        (clip() * 255, r"spans \[0, 255\]"),
        (clip().long(), "pixels is torch.int64"),
        (clip()[:0], "holds no pixel"),
        (clip()[0], r"shape \(3, 32, 32\); expected \[T, 3, H, W\]"),
        (clip().permute(0, 2, 3, 1), r"shape \(6, 32, 32, 3\); expected"),
        (clip().expand(2, 6, 3, 32, 32), "2 videos; pass them one at a time"),
    ],
)
def test_wrong_pixels_are_refused(tmp_path, pixels, says):
    with pytest.raises(ValueError, match=says):
        write_video(tmp_path / "a.mp4", pixels, 16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.webm", "a"])
def test_wrong_suffix_names_the_right_ones(tmp_path, name):
    with pytest.raises(ValueError, match="use .mp4, .gif or .png"):
        write_video(tmp_path / name, clip(), 16)


@pytest.mark.parametrize("scale", [0, 1.5, True])
def test_wrong_scale_is_refused(tmp_path, scale):
    with pytest.raises(ValueError, match="^scale is .*whole number"):
        write_video(tmp_path / "a.mp4", clip(), 16, scale=scale)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png"])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, name):
    path = write_video(tmp_path / name, clip(), 16)
    before = path.read_bytes()

    def half(target: Path) -> None:
        target.write_bytes(before[:10])
        raise OSError("disk full")

    monkeypatch.setattr(media._Encoder, "finish", lambda self: half(Path(self.process.args[-1])))
    monkeypatch.setattr(Image.Image, "save", lambda self, target: half(target))
    with pytest.raises(OSError, match="disk full"):
        write_video(path, clip(), 16)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == before


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png"])
def test_pieces_give_the_same_file_as_the_whole(tmp_path, name):
    video = clip()
    write_video(tmp_path / name, video, 16, scale=3)
    with writing(tmp_path / f"pieces-{name}", 16, scale=3) as add:
        for piece in (video[:3], video[3:4], video[4:6]):
            add(piece)
    assert (tmp_path / f"pieces-{name}").read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png"])
def test_a_broken_off_video_leaves_no_file_and_no_process(tmp_path, name):
    with pytest.raises(KeyboardInterrupt), writing(tmp_path / name, 16) as add:
        add(clip())
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    assert not children.exists() or "ffmpeg" not in " ".join(
        Path(f"/proc/{pid}/comm").read_text() for pid in children.read_text().split()
    )


def test_a_video_has_frames_and_one_size(tmp_path):
    with pytest.raises(ValueError, match="a.mp4: no frame"), writing(tmp_path / "a.mp4", 16):
        pass
    with pytest.raises(ValueError, match="frame of 10x8 after frames of 8x8"), writing(tmp_path / "a.mp4", 16) as add:
        add(torch.rand(2, 3, 8, 8))
        add(torch.rand(2, 3, 8, 10))
    assert not list(tmp_path.iterdir())


def test_a_failing_ffmpeg_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", lambda: "false")
    with pytest.raises(OSError, match="a.mp4: cannot write: ffmpeg says: nothing"):
        write_video(tmp_path / "a.mp4", clip(), 16)
    assert not list(tmp_path.iterdir())


def test_unreadable_files_are_one_line(tmp_path):
    whole = write_video(tmp_path / "whole.mp4", torch.rand(30, 3, 64, 64), 16).read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("not a video\n" * 99)
    (tmp_path / "notes.txt").write_text("ffmpeg would draw this\n" * 99)
    write_video(tmp_path / "sheet.png", clip(), 16)
    ffmpeg = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error"]
    subprocess.run([*ffmpeg, "-f", "lavfi", "-i", "sine=d=0.2", str(tmp_path / "sound.mp4")], check=True)
    says = {
        "cut.mp4": "cannot read: ffmpeg says",
        "empty.mp4": "the file is empty",
        "text.mp4": "cannot read: ffmpeg says",
        "notes.txt": ".txt is not a video; expected one of .mp4",
        "sheet.png": ".png is not a video; pass the folder of images",
        "sound.mp4": "cannot read: ffmpeg says",
        "absent.mp4": "no such file",
    }
    for name, what in says.items():
        with pytest.raises(ValueError) as error:
            read_video(tmp_path / name)
        assert str(error.value).startswith(f"{tmp_path / name}: {what}") and "\n" not in str(error.value)


def test_a_folder_of_images_is_a_video(tmp_path):
    frames = to_uint8(clip())
    for i, frame in zip((1, 2, 10, 20, 100, 101), frames, strict=True):
        Image.fromarray(frame).save(tmp_path / f"frame_{i}.png")
    pixels, fps = read_video(tmp_path, fps=12)
    np.testing.assert_array_equal(to_uint8(pixels), frames)
    assert fps == 12
    with pytest.raises(ValueError, match="states no frame rate; pass fps"):
        read_video(tmp_path)
    Image.fromarray(frames[0, :8]).save(tmp_path / "frame_200.png")
    with pytest.raises(ValueError, match="frame_200.png: 32x8, but frame_1.png is 32x32"):
        read_video(tmp_path, fps=12)
    (tmp_path / "frame_200.png").write_bytes(b"no")
    with pytest.raises(ValueError, match="frame_200.png: cannot read this image"):
        read_video(tmp_path, fps=12)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="holds no image"):
        read_video(tmp_path / "none", fps=12)


def test_fps_given_replaces_what_the_file_states(tmp_path):
    assert read_video(write_video(tmp_path / "a.mp4", clip(), 16), fps=Fraction(25))[1] == 25


def test_a_varying_rate_gives_the_frames_there_are(tmp_path):
    path = str(tmp_path / "a.mp4")
    source = ["-f", "lavfi", "-i", "testsrc=r=10:s=64x48:d=2", "-vf", "select='lt(n,6)+not(mod(n,3))'"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-v", "error", *source, "-fps_mode", "vfr", path]
    subprocess.run(command, check=True)
    pixels, fps = read_video(path)
    assert len(pixels) == 11 and fps < 9  # 6 frames at 10 a second, then every third


def test_contact_sheet_is_one_row_a_video():
    sheet = contact_sheet([clip(), clip()[:3]], scale=2, every=2)
    assert sheet.shape == (2 * 66, 3 * 66 - 2, 3) and sheet.dtype == np.uint8
    np.testing.assert_array_equal(sheet[0, 66], to_uint8(clip())[2, 0, 0])
    assert (sheet[66:, 2 * 66 :] == media.PAPER).all()  # the second video has two frames to show
    labelled = contact_sheet([clip(), clip()], labels=["a red square", "long " * 99])
    assert labelled.shape[1] == 240 and (labelled[: labelled.shape[0] // 2 - 34] < 128).any()
    np.testing.assert_array_equal(labelled[-34:, :202], contact_sheet([clip()]))
    cut = labelled[-54:-34]
    assert (cut[:, 200:] < 128).any() and (cut[:, -media.GAP :] == media.PAPER).all()  # ends whole, within the sheet
    with pytest.raises(ValueError, match="labels has 1 entries for 2 videos"):
        contact_sheet([clip(), clip()], labels=["one"])
    with pytest.raises(ValueError, match="videos is empty"):
        contact_sheet([])
    with pytest.raises(ValueError, match="every is 0"):
        contact_sheet([clip()], every=0)


def test_side_by_side():
    for left, white in ((clip(), 1), (torch.zeros(6, 3, 32, 8, dtype=torch.uint8), 255)):
        joined = side_by_side(left, left[..., :5], gap=3)
        assert joined.dtype == left.dtype and joined.shape == (6, 3, 32, left.shape[3] + 8)
        assert (joined[..., left.shape[3] : left.shape[3] + 3] == white).all()
        assert torch.equal(joined[..., -5:], left[..., :5])
    with pytest.raises(ValueError, match="cannot join"):
        side_by_side(clip(), clip()[:3])
