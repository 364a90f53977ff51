"""Videos to files: H.264 that browsers play, GIF, and contact sheets. Reading them back is in decoding.py.

Shape letters: B batch (1 here), T pixel frames, H W pixels. Pixels are RGB, float in [0, 1] or uint8.
ffmpeg comes with imageio-ffmpeg; it is run once per file, so that a failure of it is seen and reported.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from arvideo_rl.decoding import Rate, command, first_complaint, frame_rate
from arvideo_rl.decoding import read_video as read_video  # read and write from one place

WRITES = (".mp4", ".gif", ".png")
OVERSHOOT = 0.1  # decoders leave [0, 1] by a little and are clamped; [-1, 1] or [0, 255] is a mistake of the caller
GAP = 2  # pixels between the frames of a sheet
PAPER = 208  # grey behind the frames of a sheet, so that white frames stand out
SHEET_WIDTH = 1280  # a .png wraps its frames at about this width, but not below 4 in a row


def write_video(path: str | Path, pixels: Tensor | np.ndarray, fps: Rate, scale: int = 1) -> Path:
    """Write one video; the suffix of ``path`` chooses .mp4 (H.264 yuv420p), .gif or .png (a sheet of the frames).

    ``pixels`` [T, 3, H, W] or [1, T, 3, H, W], float in [0, 1] or uint8; ``fps`` in pixel frames a second;
    every pixel becomes ``scale`` x ``scale`` pixels. An mp4 of an odd size gets one more row or column, a copy of the
    last. The file appears whole or not at all. Returns the path; raises ValueError, and OSError if writing fails.
    """
    with writing(path, fps, scale) as add:
        add(pixels)
    return Path(path)


@contextmanager
def writing(path: str | Path, fps: Rate, scale: int = 1) -> Iterator[Callable[[Tensor | np.ndarray], None]]:
    """Write one video piece by piece, as :func:`write_video` does: hands out a function that adds the next frames
    (all of one size). The file appears when the block ends, and not at all if it raises or adds nothing. Memory does
    not grow with the length of an .mp4; for a .gif ffmpeg keeps all frames to choose colours, a sheet is one picture.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in WRITES:
        raise ValueError(f"{path}: cannot write a {suffix or 'file without a suffix'}; use .mp4, .gif or .png")
    rate = frame_rate(fps)
    if suffix == ".gif" and rate > 50:  # delays are in 1/100 s and browsers slow down anything shorter than 2 of them
        raise ValueError(f"{path}: fps is {fps}, but a .gif plays at most 50; use .mp4")
    _check_count("scale", scale)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}{suffix}")  # keeps the suffix: it tells ffmpeg the format
    sheet: list[np.ndarray] = []
    encoder: _Encoder | None = None

    def add(pixels: Tensor | np.ndarray) -> None:
        nonlocal encoder
        frames = enlarge(to_uint8(pixels), scale)
        if suffix == ".png":
            sheet.append(frames)
            return
        encoder = encoder or _Encoder(partial, frames.shape[1:3], rate, name=path)
        encoder.add(frames)

    try:
        yield add
        if not sheet and encoder is None:
            raise ValueError(f"{path}: no frame was given to write")
        if encoder is not None:
            encoder.finish()
        else:
            frames = np.concatenate(sheet)
            columns = max(4, (SHEET_WIDTH + GAP) // (frames.shape[2] + GAP))
            Image.fromarray(_grid(frames, columns)).save(partial)
        partial.replace(path)
    finally:
        if encoder is not None:
            encoder.close()
        partial.unlink(missing_ok=True)


def contact_sheet(
    videos: Sequence[Tensor | np.ndarray], labels: Sequence[str] | None = None, scale: int = 1, every: int = 1
) -> np.ndarray:
    """Draw one video a row, every ``every``-th frame from left to right, each row under its label if given.

    ``videos``: any number of [T, 3, H, W] of any sizes, float in [0, 1] or uint8. Returns uint8 [H', W', 3]; a label
    wider than the sheet is cut. Raises ValueError.
    """
    if len(videos) == 0:
        raise ValueError("videos is empty; pass at least one [T, 3, H, W]")
    if labels is not None and len(labels) != len(videos):
        raise ValueError(f"labels has {len(labels)} entries for {len(videos)} videos; pass one for each")
    _check_count("every", every)
    rows = [_grid(enlarge(to_uint8(video)[::every], scale)) for video in videos]
    width = max(row.shape[1] for row in rows)
    parts: list[np.ndarray] = []
    if labels is not None:
        width = max(width, 240)  # a short video of a small world still shows the start of its prompt
    for i, row in enumerate(rows):
        if labels is not None:
            parts.append(_text(labels[i], width))
        parts.append(np.pad(row, ((0, GAP), (0, width - row.shape[1]), (0, 0)), constant_values=PAPER))
    return np.concatenate(parts)


def write_sheet(path: str | Path, sheet: np.ndarray) -> Path:
    """Write what :func:`contact_sheet` drew, uint8 [H, W, 3], as a .png that appears whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.png")
    try:
        Image.fromarray(sheet).save(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def side_by_side(left: Tensor, right: Tensor, gap: int = 2) -> Tensor:
    """Join two videos [T, 3, H, W] with ``gap`` white columns between: [T, 3, H, W_left + gap + W_right].

    Raises ValueError when frames, heights or dtypes differ.
    """
    if left.ndim != 4 or right.ndim != 4 or left.shape[:3] != right.shape[:3] or left.dtype != right.dtype:
        seen = f"{tuple(left.shape)} {left.dtype} and {tuple(right.shape)} {right.dtype}"
        raise ValueError(f"cannot join {seen}; pass two [T, 3, H, W] of one dtype with equal T and H")
    white = left.new_full((*left.shape[:3], gap), 255 if left.dtype == torch.uint8 else 1)
    return torch.cat((left, white, right.to(left.device)), dim=3)


def to_uint8(pixels: Tensor | np.ndarray) -> np.ndarray:
    """Turn [T, 3, H, W] or [1, T, 3, H, W] into uint8 [T, H, W, 3]: floats x 255 and rounded, uint8 as it is.

    A little outside [0, 1] is clamped. Raises ValueError for NaN, another range, another shape or another dtype.
    """
    video = torch.as_tensor(pixels).detach()
    shape = tuple(video.shape)
    if video.ndim == 5:
        if shape[0] != 1:
            raise ValueError(f"pixels has shape {shape}, {shape[0]} videos; pass them one at a time, as [T, 3, H, W]")
        video = video[0]
    if video.ndim != 4 or video.shape[1] != 3:
        raise ValueError(f"pixels has shape {shape}; expected [T, 3, H, W]")
    if video.numel() == 0:
        raise ValueError(f"pixels has shape {shape}, which holds no pixel; pass at least one frame")
    if video.is_floating_point():
        video = video.float()
        bad = (~video.isfinite()).flatten(1).any(1).nonzero()
        if len(bad):
            raise ValueError(f"pixels is not finite in {len(bad)} of {len(video)} frames, first in frame {int(bad[0])}")
        low, high = (float(v) for v in torch.aminmax(video))
        if low < -OVERSHOOT or high > 1 + OVERSHOOT:
            raise ValueError(f"pixels spans [{low:.3g}, {high:.3g}]; expected floats in [0, 1], or uint8")
        video = (video.clamp(0, 1) * 255).round().to(torch.uint8)
    elif video.dtype != torch.uint8:
        raise ValueError(f"pixels is {video.dtype}; pass floats in [0, 1], or uint8")
    return np.ascontiguousarray(video.permute(0, 2, 3, 1).cpu().numpy())


def enlarge(frames: np.ndarray, scale: int) -> np.ndarray:
    """Repeat every pixel of [T, H, W, 3] ``scale`` times both ways, so that tiny clips stay sharp when seen large."""
    _check_count("scale", scale)
    return frames.repeat(scale, axis=1).repeat(scale, axis=2)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} is {value!r}; pass a whole number, 1 or more")


def _grid(frames: np.ndarray, columns: int | None = None) -> np.ndarray:
    """Lay frames [T, H, W, 3] in rows of at most ``columns`` (None: one row) with a thin gap between."""
    t, h, w, _ = frames.shape
    columns = min(t, columns or t)
    rows = -(-t // columns)
    sheet = np.full((rows * (h + GAP) - GAP, columns * (w + GAP) - GAP, 3), PAPER, np.uint8)
    for i, frame in enumerate(frames):
        y, x = (i // columns) * (h + GAP), (i % columns) * (w + GAP)
        sheet[y : y + h, x : x + w] = frame
    return sheet


def _text(label: str, width: int) -> np.ndarray:
    """One line of black text, cut to ``width`` pixels: uint8 [H, width, 3]."""
    font = ImageFont.load_default(size=13)
    line = " ".join(str(label).split())
    whole = line
    while line and font.getlength(line + "…" * (line != whole)) > width - 2 * GAP:
        line = line[:-1]
    image = Image.new("RGB", (width, 20), (PAPER,) * 3)
    ImageDraw.Draw(image).text((GAP, 2), line + "…" * (line != whole), fill=(0, 0, 0), font=font)
    return np.asarray(image)


class _Encoder:
    """An ffmpeg that turns raw frames into ``target`` (.mp4 or .gif) as they come; errors speak of ``name``."""

    def __init__(self, target: Path, size: tuple[int, int], rate: Fraction, name: Path) -> None:
        self.size, self.name = size, name
        if target.suffix.lower() == ".mp4":
            # The matrix is stated: left out, players guess it from the size and colours shift.
            colours = "setparams=color_primaries=bt709:color_trc=bt709:colorspace=bt709"
            options = f"-vf scale=out_color_matrix=bt709:out_range=tv,format=yuv420p,{colours}"
            options += " -c:v libx264 -crf 12 -movflags +faststart"
            self.pad = (size[0] % 2, size[1] % 2)  # yuv420p halves both sides
        else:
            options = "-filter_complex split[a][b];[a]palettegen[p];[b][p]paletteuse -loop 0"
            self.pad = (0, 0)
        h, w = size[0] + self.pad[0], size[1] + self.pad[1]
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{w}x{h}", "-r", str(rate), "-i", "-"]
        words = command([*source, *options.split(), "-y", str(target.resolve())])
        self.said = tempfile.TemporaryFile()  # a pipe nobody reads could fill up and stop it
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self.said)

    def add(self, frames: np.ndarray) -> None:
        """Hand over uint8 [T, H, W, 3]."""
        if frames.shape[1:3] != self.size:
            (h, w), (h0, w0) = frames.shape[1:3], self.size
            raise ValueError(f"{self.name}: a frame of {w}x{h} after frames of {w0}x{h0}; a video has one size")
        frames = np.pad(frames, ((0, 0), (0, self.pad[0]), (0, self.pad[1]), (0, 0)), mode="edge")
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(frames.data)
        except BrokenPipeError:
            self.finish()
            raise

    def finish(self) -> None:
        """Let it end; OSError with its own words if it failed."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        if self.process.wait():
            self.said.seek(0)
            raise OSError(f"{self.name}: cannot write: ffmpeg says: {first_complaint(self.said.read())}")

    def close(self) -> None:
        """Stop it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        with suppress(BrokenPipeError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.said.close()
