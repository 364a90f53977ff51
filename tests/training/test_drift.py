"""Long streams: what is measured of a segment, what counts as drift, and that nothing grows with length."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.generators.policies import Policies, PolicyConfig
from arvideo_rl.objectives.nft import NFT
from arvideo_rl.training.drift import long_actions, measure, segments, verdict
from arvideo_rl.training.prompts import held_out_prompts
from arvideo_rl.training.rollout import roll_out
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import sample_scenes
from rewards.inverse_dynamics import InverseDynamics
from samplers.randomness import Key
from samplers.stream import draw_from, stream


@pytest.fixture(scope="module")
def real():
    """Pixels and actions of rendered clips."""
    scenes = sample_scenes(range(70, 74), 12)
    return render(scenes, 32), scenes.actions


def numbers(pixels, actions):
    return {
        k: v.mean().item()
        for k, v in measure(
            pixels, actions, range(0, 12, 3), InverseDynamics("idm_heldout", score="accuracy"), 8.0
        ).items()
    }


def test_each_kind_of_drift_moves_its_own_number(real):
    pixels, actions = real
    good = numbers(pixels, actions)
    assert numbers(pixels * 0.7, actions)["brightness"] == pytest.approx(0.7 * good["brightness"], rel=1e-4)
    assert numbers(0.5 + (pixels - 0.5) * 0.5, actions)["contrast"] == pytest.approx(0.5 * good["contrast"], rel=1e-4)
    blurred = torch.nn.functional.avg_pool2d(pixels.flatten(0, 1), 3, 1, 1, count_include_pad=False).unflatten(
        0, pixels.shape[:2]
    )
    assert numbers(blurred, actions)["edges"] < 0.8 * good["edges"]
    assert good["actions"] > 0.9 > 0.6 > numbers(pixels, actions.roll(1, 0))["actions"]
    assert 0.8 < good["seam"] < 1.25
    jumping = pixels.clone()
    jumping[:, 3:6] -= 0.2
    jumping[:, 9:] -= 0.2
    assert numbers(jumping.clamp(0, 1), actions)["seam"] > 2
    assert numbers(pixels[:, :1].expand_as(pixels), actions)["motion"] == 0


def test_what_counts_as_drift():
    def found(**last):
        first = dict(brightness=0.5, contrast=0.1, edges=0.04, motion=0.02, seam=1.0, actions=0.8)
        return [{k: torch.tensor([v, v]) for k, v in d.items()} for d in (first, first | last)]

    assert verdict(found(brightness=0.57, edges=0.035, actions=0.65, motion=0.0)) == []
    assert verdict(found(brightness=0.58)) == ["brightness of segment 1 is 1.16 of the first"]
    assert verdict(found(edges=0.033)) == ["edges of segment 1 is 0.82 of the first"]
    assert verdict(found(actions=0.6)) == ["actions of the last segment are 0.75 of the first"]
    assert len(verdict(found(contrast=float("nan")))) == 1


def test_segments_are_the_stream_cut_in_pieces(small):
    generator = Generator.load(small)
    prompts, actions = held_out_prompts(2, 18, "joystick"), long_actions(2, 15, "joystick")
    with torch.no_grad():
        whole = segments(generator, generator.transformer, prompts, actions, 15)
        cut = segments(generator, generator.transformer, prompts, actions, 6)
    assert len(whole) == 1 and len(cut) == 3
    lengths = torch.tensor([6.0, 6.0, 3.0])
    mean = (torch.stack([s["brightness"] for s in cut], -1) * lengths).sum(-1) / 15
    torch.testing.assert_close(mean, whole[0]["brightness"])
    with pytest.raises(ValueError, match="segment of 7 frames: use a multiple of 3"):
        segments(generator, generator.transformer, prompts, actions, 7)


def storages(context) -> tuple[int, int]:
    """(tensors, bytes) that a context keeps alive, views counted by the storage behind them."""
    held = [t for s in context.spans for t in (*s.keys, *s.values)]
    held += [t for pair in context._rotated.get("view", ()) for t in pair]
    return len(held), sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}.values())


@pytest.mark.parametrize("positions", ["adjacent", "absolute"])
def test_the_cache_does_not_grow_with_length(small, positions):
    generator = Generator.load(small)
    settings = dataclasses.replace(generator.streaming, positions=positions)
    window = settings.attention_window()
    prompts, actions = held_out_prompts(1, 18, "joystick"), long_actions(1, 240, "joystick")
    denoiser = Denoiser(generator.transformer, window, generator.script(list(prompts.texts), actions), fixed=True)
    draw = draw_from([Key(1)], generator.latent_shape)
    sizes = [storages(c.context) for c in stream(denoiser, window.chunks(240), settings.levels, draw)]
    assert len(set(sizes[4:])) == 1  # full after four chunks of a window of four
    assert sizes[0] < sizes[1] < sizes[2]  # the count sees growth where there is some


def saved_per_chunk(small, frames) -> list[int]:
    """Bytes autograd keeps for one chunk's loss, chunk by chunk, from a record of ``frames`` frames."""
    generator = Generator.load(small)
    policies = Policies(generator.transformer, PolicyConfig(rank=4, alpha=4.0))
    prompts = held_out_prompts(2, frames, "joystick")
    groups = torch.tensor([0, 0])
    record = roll_out(generator, policies, prompts, [Key(1, 0, 0, g) for g in (0, 1)], frames, groups)
    denoiser = Denoiser(policies, generator.streaming.attention_window(), record.script)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t):
        counts = []
        adv = torch.tensor([[1.0], [-1.0]]).expand(2, frames // 3)
        for loss, _ in NFT(kl_weight=1.0).losses(policies, denoiser, record, adv, generator.streaming.levels):
            loss.backward()
            counts.append(sum(saved))
            saved.clear()
    return counts


def test_what_autograd_keeps_is_one_chunk_whatever_the_length(small):
    short, long = saved_per_chunk(small, 24), saved_per_chunk(small, 96)
    assert len(long) == 32 and max(long[4:]) - min(long[4:]) < 64  # but for how many scalars a chunk's metrics take
    assert short[0] + 1000 < short[3]  # the count sees the window filling up
    assert long[:8] == pytest.approx(short, abs=64)


MEMORY = """
import resource, sys
from arvideo_rl.cli import main
try:
    main(["generate", "prompt=a red ball rolls left", f"generator={sys.argv[1]}", f"out={sys.argv[2]}", "scale=4",
          f"frames={sys.argv[3]}"])
except SystemExit as end:
    code = end.code
print("PEAK", code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_is_flat_while_a_long_video_is_written(small, tmp_path):
    def peak(frames: int) -> int:
        command = [sys.executable, "-c", MEMORY, small, str(tmp_path / f"{frames}.mp4"), str(frames)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        code, kibibytes = said.split("PEAK ")[1].split()
        assert code == "0"
        return int(kibibytes)

    short, long = peak(480), peak(4800)
    pixels = 4320 * 32 * 32 * 16 * 3 // 1024  # KiB that keeping the frames of the difference would take
    assert long - short < pixels // 8


@pytest.mark.slow
def test_tiny_does_not_drift_in_4800_frames():
    generator = Generator.load("tiny")
    prompts, actions = held_out_prompts(2, 18, "joystick", skip=1000), long_actions(2, 4800, "joystick")
    with torch.no_grad():
        found = segments(generator, generator.transformer, prompts, actions, 300)
    assert len(found) == 16 and verdict(found) == []


def test_a_first_frame_of_its_own_is_refused(small):
    generator = Generator.load(small)
    generator.streaming = dataclasses.replace(generator.streaming, first_alone=True)
    with pytest.raises(ValueError, match="first_alone=true: segments are whole chunks"):
        segments(
            generator, generator.transformer, held_out_prompts(1, 12, "smooth"), torch.zeros(1, 12, dtype=torch.long), 6
        )
