"""Clips to score."""

from pathlib import Path

import pytest
import torch

from arvideo_rl.media import write_video


@pytest.fixture(scope="session")
def make():
    """``make(folder, count)``: the folder with clips of two sizes and two lengths in turn."""

    def made(folder: Path, count: int) -> Path:
        source = torch.Generator().manual_seed(0)
        for i in range(count):
            size, t = (32, 48)[i % 2], (4, 6)[i % 3 == 0]
            write_video(folder / f"clip_{i}.gif", torch.rand(t, 3, size, size, generator=source), 8)
        return folder

    return made


@pytest.fixture(scope="session")
def clips(make, tmp_path_factory):
    """A folder of seven clips and a file that is none; not to be written to."""
    folder = make(tmp_path_factory.mktemp("clips"), 7)
    (folder / "clip_3b.mp4").write_text("no video")
    return folder
