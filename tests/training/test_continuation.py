"""An image or a video is continued: what follows is what would have followed, and what was given comes first."""

import numpy as np
import pytest
import torch
from PIL import Image

from arvideo_rl import media
from arvideo_rl.cli.main import main
from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.continuation import fit, read_start
from arvideo_rl.training.generation import GenerateConfig, parse_switches, prepare, run

RED = "a red ball rests"


@pytest.fixture(scope="module")
def tiny():
    return Generator.load("tiny")


def made(**settings) -> torch.Tensor:
    """Pixels of a generated video."""
    job = prepare(GenerateConfig(prompt=RED, scale=1, **settings))
    (path,) = run(job)
    return media.read_video(path)[0]


def frames_folder(pixels: torch.Tensor, folder):
    folder.mkdir()
    for i, frame in enumerate((pixels * 255).round().byte().permute(0, 2, 3, 1).numpy()):
        Image.fromarray(frame).save(folder / f"{i:03d}.png")
    return folder


def test_what_follows_is_what_would_have_followed(tmp_path):
    actions = "forward*5, turn left*12"
    whole = made(actions=actions, out=str(tmp_path / "whole.mp4"))
    start = frames_folder(whole[:9], tmp_path / "start")
    again = made(start=str(start), actions="turn left*9", frames=18, out=str(tmp_path / "again.mp4"))
    assert again.shape == whole.shape
    # the commands into the given frames are not known any more, and mp4 loses a little
    near, far = (again[9:] - whole[9:]).abs().mean(), (whole[9:] - whole[:9]).abs().mean()
    assert (again[:9] - whole[:9]).abs().mean() < 0.02 and near < 0.5 * far


def test_an_image_becomes_the_first_chunk(tmp_path, tiny):
    picture = np.zeros((64, 96, 3), np.uint8)
    picture[:, 32:64] = (200, 100, 50)
    Image.fromarray(picture).save(tmp_path / "p.png")
    latents, said = read_start(tmp_path / "p.png", tiny)
    assert latents.shape == (1, 3, 3, 32, 32) and "96x64 scaled and cut to 32x32, a still of 3 frames" in said
    assert torch.equal(latents[:, 0], latents[:, 2])
    middle = tiny.codec.decode(latents)[0, 0, :, 16, 16] * 255
    assert middle.tolist() == pytest.approx([200, 100, 50], abs=2)
    assert len(made(start=str(tmp_path / "p.png"), frames=9, out=str(tmp_path / "o.mp4"))) == 9


def test_the_end_of_a_video_is_continued_in_whole_chunks(tmp_path, tiny):
    pixels = torch.linspace(0.2, 0.8, 8)[:, None, None, None].expand(8, 3, 32, 32)
    latents, said = read_start(frames_folder(pixels, tmp_path / "v"), tiny)
    assert latents.shape[1] == 6 and "after its last 6 frames" in said
    assert tiny.codec.decode(latents)[0, :, 0, 0, 0].tolist() == pytest.approx(pixels[2:, 0, 0, 0].tolist(), abs=0.01)


def test_fit_covers_and_cuts_the_middle():
    wide = torch.zeros(1, 3, 4, 12)
    wide[..., 4:8] = 1
    assert fit(wide, 4, 4).min() > 0.99 and fit(wide.transpose(2, 3), 4, 4).min() > 0.99
    assert fit(torch.rand(2, 3, 5, 7), 8, 6).shape == (2, 3, 8, 6)


def test_what_cannot_be_continued_is_one_line(tmp_path, tiny, capsys):
    (tmp_path / "bad.png").write_bytes(b"x")
    short = frames_folder(torch.rand(2, 3, 32, 32), tmp_path / "short")
    for path, says in ((tmp_path / "gone.mp4", "does not exist"), (tmp_path / "bad.png", "not a readable image"),
                       (short, "has 2 frames; one chunk takes 3")):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            read_start(path, tiny)
    start = frames_folder(torch.rand(9, 3, 32, 32), tmp_path / "nine")
    wrong = [
        (["frames=9"], "no more than the 9 that start= gives"),
        (["switch=6: a blue cube rests"], "frames 9 to 17 are generated"),
        (["frames=12", "actions=forward*4"], "12 frames have 3"),
    ]
    for extra, says in wrong:
        with pytest.raises(SystemExit):
            main(["generate", f"prompt={RED}", f"start={start}", f"out={tmp_path / 'x.mp4'}", *extra])
        assert says in capsys.readouterr().err
    assert not (tmp_path / "x.mp4").exists()


def test_with_a_first_frame_of_its_own_prompts_change_where_its_chunks_begin():
    text = "7: a blue cube rests"
    assert parse_switches(text, 3, 1) == [(7, "a blue cube rests")] and parse_switches("1: a", 3, 1) == [(1, "a")]
    for at, near in ((6, "4 or 7"), (8, "7 or 10"), (2, "1 or 4")):
        with pytest.raises(ConfigError, match=f"switch at frame {at}: .* use {near}"):
            parse_switches(f"{at}: a blue cube rests", 3, 1)
