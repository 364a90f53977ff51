"""Videos from files: any format ffmpeg reads, animated webp, and folders of images.

Shape letters: T pixel frames, H W pixels. Frames are RGB uint8, turned upright where the file says that the camera lay
on its side. ffmpeg comes with imageio-ffmpeg and runs as a process of its own, so that threads decode side by side.
"""

from __future__ import annotations

import errno
import math
import os
import re
import stat
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from pathlib import Path
from typing import IO

import cv2
import imageio_ffmpeg
import numpy as np
import torch
from PIL import Image, ImageSequence
from torch import Tensor

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".gif", ".mpg", ".mpeg", ".ts", ".ogv", ".flv", ".wmv")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
UNEVEN = 0.25  # how far the gap between two frames may lie from the usual one before a rate counts as varying
TIMESTAMP = 2e-3  # seconds; some containers count in milliseconds, so that even gaps differ by one

Rate = float | Fraction  # int and numpy scalars too


class VideoError(ValueError):
    """A video that cannot be read. ``kind`` is a short reason that can be counted: ``content:*`` is the file's own
    fault, ``system:*`` the machine's, ``input:*`` that of what was asked."""

    def __init__(self, path: Path, kind: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.kind, self.message = kind, message


@dataclass(frozen=True)
class Reading:
    """How to read a video; the defaults take all of it as it is."""

    fps: Rate | None = None  # replaces what the file states; a folder of images needs it
    frames: int | None = None  # only the first so many
    sample_fps: float | None = None  # pick frames at this even rate
    short_side: int | None = None  # shrink to this many pixels; never enlarged
    most: int | None = None  # refuse more bytes of uint8 pixels than this
    seconds: float | None = None  # give up after decoding for so long


@dataclass(frozen=True)
class Video:
    """What was read."""

    frames: np.ndarray  # uint8 [T, H, W, 3]
    fps: float  # pixel frames a second
    note: str = ""  # what a careful reader would want to know of it


def read_video(path: str | Path, fps: Rate | None = None) -> tuple[Tensor, float]:
    """Read a video file, or a folder of images in the natural order of their names, as float32 [T, 3, H, W] in [0, 1].

    Returns (pixels, frames a second). ``fps`` is needed for a folder and replaces what a file states. A file of a
    varying rate gives its frames as they are, with the mean rate. Raises ValueError when there is no whole video.
    """
    video = decode(path, Reading(fps=fps))
    return torch.from_numpy(video.frames).permute(0, 3, 1, 2).float() / 255, video.fps


def decode(path: str | Path, how: Reading = Reading()) -> Video:
    """Read a video as ``how`` says. Raises VideoError when there is no whole video, ValueError for a wrong rate."""
    path = Path(path)
    given = None if how.fps is None else float(frame_rate(how.fps))
    before = _look(path)
    if stat.S_ISDIR(before.st_mode):
        return _still(path, _folder(path), given, how)
    if path.suffix.lower() == ".webp" and is_animated(path):
        return _still(path, _animation(path), given or _delays(path), how)
    video = _file(path, given, how)
    after = _look(path)
    if (after.st_size, after.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
        raise VideoError(path, "system:still_growing", "the file changed while it was read; score it when it is whole")
    return video


def is_animated(path: Path) -> bool:
    """Whether a .webp says that it holds more than one picture; a damaged one may."""
    try:
        with path.open("rb") as file:
            head = file.read(21)
    except OSError:
        return False
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X" and bool(head[20] & 2)


def frame_rate(fps: Rate) -> Fraction:
    """Turn an int, float, Fraction or numpy scalar into the exact rate given to ffmpeg. ValueError unless > 0."""
    if isinstance(fps, (np.ndarray, Tensor)) and fps.ndim == 0:
        fps = fps.item()
    rate = Fraction(0)
    if isinstance(fps, Real) and not isinstance(fps, bool) and math.isfinite(fps):
        rate = Fraction(fps if isinstance(fps, Fraction) else float(fps)).limit_denominator(100_000)
    if rate <= 0:
        raise ValueError(f"fps is {fps!r}; pass one positive finite number, in pixel frames a second")
    return rate


def command(arguments: list[str]) -> list[str]:
    """An ffmpeg command line."""
    return [imageio_ffmpeg.get_ffmpeg_exe(), "-hide_banner", "-nostdin", "-v", "error", *arguments]


def first_complaint(said: bytes) -> str:
    """ffmpeg's first line, without which part of it speaks and that part's address in memory."""
    return re.sub(r"^\[.*?\] ", "", (said.decode(errors="replace").strip() or "nothing").splitlines()[0])


def _look(path: Path) -> os.stat_result:
    """What the file system says of ``path``; VideoError for what is not there, not readable, or neither file nor
    folder (a pipe would be waited for without end)."""
    try:
        seen = os.stat(path)
    except OSError as error:
        said = "no such file" if error.errno == errno.ENOENT else f"cannot open: {error.strerror}"
        raise VideoError(path, "system:no_file", said) from None
    if not (stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)):
        raise VideoError(path, "content:no_video", "neither a file nor a folder")
    if not os.access(path, os.R_OK):
        raise VideoError(path, "system:not_readable", "no right to read it; change its rights")
    return seen


def _file(path: Path, given: float | None, how: Reading) -> Video:
    """A video file, through ffmpeg."""
    if path.suffix.lower() not in VIDEOS:  # ffmpeg would draw a text file as a video
        hint = "pass the folder of images" if path.suffix.lower() in IMAGES else f"expected one of {' '.join(VIDEOS)}"
        what = f"{path.suffix or 'a file without a suffix'} is not a video; {hint}"
        raise VideoError(path, "content:no_video", what)
    if path.stat().st_size == 0:
        raise VideoError(path, "content:empty", "the file is empty")
    filters = []
    if how.sample_fps:  # a given rate replays the frames at another speed, before they are picked
        filters = [f"setpts=N/({frame_rate(given)})/TB"] if given else []
        filters += [f"fps={frame_rate(how.sample_fps)}"]
    with tempfile.TemporaryDirectory() as notes:
        with closing(_ffmpeg(path, filters, Path(notes), how.seconds)) as stream:
            frames = _gather(path, stream, how)
        stated, note = _rate(path, Path(notes), sampled=bool(filters))
    if how.sample_fps:
        if how.sample_fps > (given or stated) * 1.001 > 0:
            raise VideoError(path, "input:sample_fps", _too_fast(how.sample_fps, given or stated))
        return Video(frames, float(how.sample_fps))
    if given is None and not stated:
        raise VideoError(path, "content:no_rate", "the file states no frame rate; pass fps")
    if given is not None and stated and abs(given / stated - 1) > 0.01:
        note = f"fps {given:g} was given, the file states {stated:.6g}"
    return Video(frames, given or stated, note)


def _ffmpeg(path: Path, filters: list[str], notes: Path, seconds: float | None) -> Generator[np.ndarray, None, None]:
    """The frames as they are decoded, uint8 [H, W, 3]. The folder ``notes`` gets what :func:`_rate` reads."""
    # PPM pictures carry their own size. passthrough: no frame is repeated or dropped. xerror: no half-read file.
    chosen = ["-vf", ",".join(filters)] if filters else ["-fps_mode", "passthrough"]
    stats = ["-stats_enc_pre", str(notes / "moments"), "-stats_enc_pre_fmt", "{ptsi} {tbi}"]
    pictures = ["-map", "0:v:0", *chosen, "-c:v", "ppm", "-pix_fmt", "rgb24", *stats, "-f", "image2pipe", "-"]
    # A second output of one frame, whose head holds the stated rate as a fraction.
    stated = ["-map", "0:v:0", "-frames:v", "1", "-pix_fmt", "gray", "-f", "yuv4mpegpipe", str(notes / "head")]
    with tempfile.TemporaryFile() as said:  # a pipe nobody reads could fill up and stop it
        process = subprocess.Popen(
            command(["-xerror", "-i", os.path.abspath(path), *pictures, *stated]),
            stdout=subprocess.PIPE, stderr=said, bufsize=1 << 20,
        )  # fmt: skip
        assert process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(seconds or threading.TIMEOUT_MAX, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield from _pictures(path, process.stdout)
            failed = process.wait()
            said.seek(0)
            complaint = said.read()
            if not failed and b"ended prematurely" in complaint:  # a cut .mkv is no error to ffmpeg
                raise VideoError(path, "content:damaged", "cannot read: the file is cut off")
            if failed:
                if late.is_set():
                    raise VideoError(path, "system:timeout", f"decoding took more than {seconds:g} s")
                kind = "content:no_video" if b"matches no streams" in complaint else "content:damaged"
                raise VideoError(path, kind, f"cannot read: ffmpeg says: {first_complaint(complaint)}")
        finally:
            timer.cancel()
            process.kill()  # nothing to it that has ended
            process.stdout.close()
            process.wait()


def _pictures(path: Path, stream: IO[bytes]) -> Iterator[np.ndarray]:
    """Frames out of a stream of PPM pictures; a cut one ends it, because ffmpeg then says why."""
    while (header := stream.readline()) == b"P6\n":
        w, h = (int(x) for x in stream.readline().split())
        stream.readline()  # 255
        pixels = stream.read(h * w * 3)
        if len(pixels) < h * w * 3:
            return
        yield np.frombuffer(pixels, np.uint8).reshape(h, w, 3)
    if header:
        raise VideoError(path, "content:damaged", "the decoder gave something else than pictures")


def _gather(path: Path, stream: Iterator[np.ndarray], how: Reading) -> np.ndarray:
    """The frames of a stream as one uint8 [T, H, W, 3], as many and as large as asked for."""
    frames: list[np.ndarray] = []
    size = 0
    for frame in stream:
        frame = _shrink(frame, how.short_side)
        if frames and frame.shape != frames[0].shape:
            (h, w), (h0, w0) = frame.shape[:2], frames[0].shape[:2]
            what = f"frame {len(frames)} is {w}x{h}, those before {w0}x{h0}; a video has one size"
            raise VideoError(path, "content:size_changes", what)
        frames.append(frame)
        size += frame.nbytes
        if how.most is not None and size > how.most:
            what = f"more than {len(frames) - 1} frames of {frame.shape[1]}x{frame.shape[0]} do not fit"
            raise VideoError(path, "input:too_large", f"{what}; set frames, sample_fps or short_side, or raise gib")
        if len(frames) == how.frames:
            break
    if not frames:
        raise VideoError(path, "content:no_frames", "the file holds no video frame")
    return np.stack(frames)


def _shrink(frame: np.ndarray, short_side: int | None) -> np.ndarray:
    h, w = frame.shape[:2]
    if short_side is None or min(h, w) <= short_side:
        return frame
    by = short_side / min(h, w)
    return cv2.resize(frame, (round(w * by), round(h * by)), interpolation=cv2.INTER_AREA)


def _still(path: Path, stream: Iterator[np.ndarray], rate: float | None, how: Reading) -> Video:
    """A video out of single pictures; ``rate`` is theirs."""
    if not rate:
        raise VideoError(path, "input:fps", "a folder of images states no frame rate; pass fps")
    if not how.sample_fps:
        return Video(_gather(path, stream, how), rate)
    step = rate / how.sample_fps
    if step < 0.999:
        raise VideoError(path, "input:sample_fps", _too_fast(how.sample_fps, rate))
    picked = (x for i, x in enumerate(stream) if math.floor((i + 1) / step - 1e-9) > math.floor(i / step - 1e-9))
    return Video(_gather(path, picked, how), float(how.sample_fps))


def _too_fast(asked: float, there: float) -> str:
    return f"sample_fps={asked:g} is more than the {there:g} frames a second there are; some would be repeated"


def _folder(folder: Path) -> Iterator[np.ndarray]:
    """The images of a folder, frame_2 before frame_10: uint8 [H, W, 3] each."""
    names = images_of(folder)
    if not names:
        raise VideoError(folder, "content:empty", f"the folder holds no image ({' '.join(IMAGES)})")
    first = None
    for name in names:
        try:
            with Image.open(name) as image:
                frame = np.asarray(image.convert("RGB"))
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise VideoError(name, "content:damaged", f"cannot read this image: {error}") from None
        first = frame.shape if first is None else first
        if frame.shape != first:
            (h, w), (h0, w0) = frame.shape[:2], first[:2]
            what = f"{w}x{h}, but {names[0].name} is {w0}x{h0}; a video has one size"
            raise VideoError(name, "content:size_changes", what)
        yield frame


def images_of(folder: Path) -> list[Path]:
    """Images directly in a folder, in the natural order of their names."""
    names = [p for p in folder.iterdir() if p.suffix.lower() in IMAGES and not p.name.startswith(".")]
    return sorted(names, key=lambda p: [int(s) if s.isdecimal() else s for s in re.split(r"(\d+)", p.name)])


def _animation(path: Path) -> Iterator[np.ndarray]:
    """The pictures of an animated webp, which ffmpeg does not read."""
    try:
        with Image.open(path) as image:
            for frame in ImageSequence.Iterator(image):
                yield np.asarray(frame.convert("RGB"))
    except (OSError, ValueError, EOFError) as error:
        raise VideoError(path, "content:damaged", f"cannot read this animation: {error}") from None


def _rate(path: Path, notes: Path, sampled: bool) -> tuple[float, str]:
    """(mean frames a second, 0 if unknown; a note when it varies) of a file that was decoded, by its own word where
    that agrees with the moments of the frames. No other library opens the file here: what ffmpeg survives as a process
    of its own may end this one."""
    if path.suffix.lower() == ".gif":  # its last delay counts too
        return _delays(path), ""
    head = (notes / "head").read_bytes()[:200] if (notes / "head").exists() else b""
    said = re.search(rb" F(\d+):(\d+) ", head)
    stated = int(said[1]) / int(said[2]) if said and int(said[2]) else 0.0
    if sampled:
        return stated, ""
    lines = [line.split() for line in (notes / "moments").read_text().splitlines()]
    moments = [int(n) * Fraction(unit) for n, unit in lines if n.lstrip("-").isdigit()]
    span = moments[-1] - moments[0] if len(moments) > 1 else Fraction(0)
    if span <= 0:
        return stated, ""
    mean = float((len(moments) - 1) / span)
    note = _uneven(moments)
    agrees = abs(float(span) - (len(moments) - 1) / stated) <= max(0.01 * float(span), TIMESTAMP) if stated else False
    return (stated, "") if agrees and not note else (mean, note)


def _delays(path: Path) -> float:
    """Mean frames a second of an animated picture, 0 where it states no delays."""
    try:
        with Image.open(path) as image:
            delays = []
            for i in range(getattr(image, "n_frames", 1)):
                image.seek(i)
                image.load()  # a webp knows the delay of a picture only when it is decoded
                delays.append(image.info.get("duration", 0))
    except (OSError, ValueError, EOFError) as error:
        raise VideoError(path, "content:damaged", f"cannot read this animation: {error}") from None
    return 1000 * len(delays) / sum(delays) if sum(delays) else 0.0


def _uneven(moments: list[Fraction]) -> str:
    """A note when the gaps between ``moments`` (seconds) differ."""
    gaps = [float(b - a) for a, b in zip(moments, moments[1:])]
    usual = statistics.median(gaps)
    if max(abs(g - usual) for g in gaps) <= max(UNEVEN * usual, TIMESTAMP) or min(gaps) <= 0:
        return ""
    return f"the frame rate varies, {1 / max(gaps):.3g} to {1 / min(gaps):.3g} a second; sample_fps makes it even"
