"""Continue an image or a video: bring it to the generator's size and to whole chunks of clean latents."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from arvideo_rl import media
from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def read_start(path: Path, generator: Generator) -> tuple[Tensor, str]:
    """Clean latents [1, F, C, h, w] of an image or of the end of a video, and a line that says what was done to it.
    ConfigError or ValueError when there is no such file, or the video is too short for one chunk."""
    if not path.exists():
        raise ConfigError(f"start={path} does not exist; give an image, a video or a folder of images")
    still = path.suffix.lower() in IMAGES
    pixels = _image(path) if still else media.read_video(path, generator.streaming.fps)[0]
    streaming, codec = generator.streaming, generator.codec
    height, width = streaming.size, streaming.width or streaming.size
    said = f"start={path}: "
    if tuple(pixels.shape[2:]) != (height, width):
        said += f"{pixels.shape[3]}x{pixels.shape[2]} scaled and cut to {width}x{height}, "
        pixels = fit(pixels, height, width)
    first = streaming.attention_window().end_of(0)
    if still:
        pixels = pixels.expand(codec.pixel_frames(first), -1, -1, -1)
        said += f"a still of {len(pixels)} frame{'s' * (len(pixels) > 1)}, "
    frames = first
    while codec.pixel_frames(frames + streaming.chunk) <= len(pixels):
        frames += streaming.chunk
    needed = codec.pixel_frames(frames)
    if needed > len(pixels):
        raise ConfigError(f"start={path} has {len(pixels)} frames; one chunk takes {needed}")
    latents = codec.encode(pixels[-needed:][None].to(generator.transformer.device))
    return latents, said + f"continued after its last {needed} frames"


def fit(pixels: Tensor, height: int, width: int) -> Tensor:
    """Pixels [T, 3, H, W] scaled to cover height x width, the middle cut out."""
    scale = max(height / pixels.shape[2], width / pixels.shape[3])
    size = [max(height, round(pixels.shape[2] * scale)), max(width, round(pixels.shape[3] * scale))]
    large = torch.nn.functional.interpolate(pixels, size=size, mode="bilinear", antialias=True).clamp(0, 1)
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return large[:, :, top : top + height, left : left + width]


def _image(path: Path) -> Tensor:
    try:
        with Image.open(path) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)[None].float() / 255
    except (UnidentifiedImageError, OSError) as error:
        raise ConfigError(f"start={path} is not a readable image: {' '.join(str(error).split())}") from None
