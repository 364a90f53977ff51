"""A Wan is put together from published parts, streams, decodes piece by piece, and survives saving; what is missing or
offline is one line with the command that gets it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from arvideo_rl.config import presets
from arvideo_rl.generators import hub
from arvideo_rl.generators.bundle import Described, Generator, find_generator, load
from arvideo_rl.generators.names import to_official
from arvideo_rl.generators.pretrained import build
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import clips_of, roll_out
from samplers.randomness import Key
from samplers.stream import draw_from


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ARVIDEO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def generator(published):
    return Generator.load(published / "student.yaml")


def video(generator, frames=6):
    script = generator.script(["a red ball"])
    draw = draw_from([Key(1, 0, 0)], generator.latent_shape)
    return torch.cat([c.latents for c in generator.stream(generator.transformer, script, draw, frames)], 1)


def test_it_streams_and_says_what_it_is(generator):
    assert "tensors" in generator.said and "generator_ema" in generator.said and "licence: none" in generator.said
    assert generator.latent_shape == (3, 16, 2, 4)
    latents = video(generator)
    assert latents.shape == (1, 6, 16, 2, 4) and bool(latents.isfinite().all())
    assert generator.codec.decode(latents).shape == (1, 21, 3, 16, 32)


def test_saved_it_loads_the_same_and_finds_its_other_parts(generator, published, tmp_path):
    parts = replace(generator.wan, base=str(published / "base"))
    replace(generator, wan=parts).save(tmp_path / "saved")
    assert not (tmp_path / "saved" / "text_encoder").exists()
    again = Generator.load(tmp_path / "saved")
    assert again.streaming == generator.streaming and torch.equal(video(again), video(generator))


def test_a_lora_of_the_preset_is_merged(generator, published, tmp_path):
    told = json.loads((published / "student.yaml").read_text())
    told["wan"] |= {"lora": str(published / "lora.safetensors"), "base": str(published / "base"),
                    "transformer": str(published / "student.pt")}  # fmt: skip
    (tmp_path / "with_lora.yaml").write_text(json.dumps(told))
    changed = Generator.load(tmp_path / "with_lora.yaml")
    assert "merged into 1 modules" in changed.said
    apart = [
        k for k, v in changed.transformer.state_dict().items() if not v.equal(generator.transformer.state_dict()[k])
    ]
    assert apart == ["blocks.0.attn1.to_q.weight"]


def test_a_rollout_becomes_clips_with_pixel_frames(generator):
    prompts = Prompts(("a red ball", "a ball rolls"), torch.zeros(2, 7, dtype=torch.long), (0, 1))
    keys = [Key(1, 0, i) for i in (0, 1)]
    record = roll_out(generator, generator.transformer, prompts, keys, 6, torch.tensor([0, 1]))
    clips = clips_of(generator, record, prompts)
    assert clips.frames.shape == (2, 21, 3, 16, 32) and clips.chunk_starts == (0, 9)
    assert clips.fps == 16 and clips.actions is None


def test_joint_denoising_streams_and_cannot_be_trained_on(generator):
    joint = replace(generator, streaming=replace(generator.streaming, joint=True))
    assert video(joint).shape == (1, 6, 16, 2, 4) and not torch.equal(video(joint), video(generator))
    with pytest.raises(ValueError, match=r"streaming\.joint=true"):
        roll_out(joint, joint.transformer, Prompts(("a ball",), torch.zeros(1, 6).long(), (0,)), [Key(1, 0, 0)], 6,
                 torch.zeros(1).long())  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transformer": ""}, "wan.transformer= is missing"),
        ({"transformer": "nowhere.pt"}, "no file or folder 'nowhere.pt'"),
        ({"transformer": "someone/model/file.pt"}, "hf download someone/model file.pt"),
        ({"base": "someone/base"}, "hf download someone/base --include 'vae/*' --include 'text_encoder/*'"),
        ({"dtype": "int8"}, "dtype=int8"),
        ({"head_dim": 7}, "heads of 7"),
        ({"container": "critic"}, "no 'critic'"),
        ({"tranformer": "x"}, "did you mean wan.transformer?"),
    ],
)
def test_what_is_wrong_is_one_line(published, tmp_path, monkeypatch, change, words):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    told = json.loads((published / "student.yaml").read_text())
    told["wan"] |= change
    path = published / f"{tmp_path.name}.yaml"
    path.write_text(json.dumps(told))
    with pytest.raises(ValueError) as error:
        Generator.load(path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_repository_that_is_cached_in_part_is_asked_for_again(tmp_path, monkeypatch):
    asked = []

    def snapshot(repo, allow_patterns, local_files_only):
        asked.append(local_files_only)
        (tmp_path / "vae").mkdir(exist_ok=True)
        (tmp_path / "vae" / "config.json").touch()
        if not local_files_only:
            (tmp_path / "text").mkdir()
            (tmp_path / "text" / "config.json").touch()
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert hub.locate("a/b", patterns=("vae/*", "text/*")) == tmp_path and asked == [True, False]
    assert hub.locate("a/b", patterns=("vae/*", "text/*")) == tmp_path and asked == [True, False, True]


@pytest.mark.parametrize("path", sorted((presets() / "generators").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_preset_is_whole_and_names_its_licence(path):
    told = load(Described, str(find_generator(path.stem)), [])
    assert told.wan and told.wan.transformer.count("/") >= 2 and told.wan.licence
    told.streaming.attention_window()
    assert Path(told.wan.transformer).suffix in (".pt", ".safetensors")
    assert "hf download" in path.read_text()


def test_bfloat16_streams_nearly_what_float32_does(generator, published):
    told = json.loads((published / "student.yaml").read_text())
    told["wan"]["dtype"] = "bfloat16"
    (published / "half.yaml").write_text(json.dumps(told))
    half = Generator.load(published / "half.yaml")
    assert half.transformer.proj_out.weight.dtype == torch.bfloat16
    assert half.transformer.scale_shift_table.dtype == torch.float32
    exact, near = video(generator), video(half)
    assert near.dtype == torch.float32 and 0 < (near - exact).norm() / exact.norm() < 0.05


@pytest.mark.slow
def test_a_checkpoint_of_the_published_size_loads_in_bfloat16_and_streams_a_chunk(published, tmp_path):
    """2.8 GB on disk, about a minute."""
    model = build(dict(num_attention_heads=12, attention_head_dim=128, text_dim=16, ffn_dim=8960, num_layers=30))
    state = {to_official(k): torch.empty(v.shape, dtype=torch.bfloat16).normal_(0, 0.02)
             for k, v in model.state_dict().items()}  # fmt: skip
    torch.save({"generator": state}, tmp_path / "big.pt")
    del state
    told = {"wan": {"transformer": "big.pt", "base": str(published / "base")},
            "streaming": json.loads((published / "student.yaml").read_text())["streaming"]}  # fmt: skip
    (tmp_path / "big.yaml").write_text(json.dumps(told))
    generator = Generator.load(tmp_path / "big.yaml")
    kept = {p.dtype for p in generator.transformer.parameters()}
    assert kept == {torch.bfloat16, torch.float32} and "1,41" in generator.said
    latents = video(generator, 3)
    assert latents.shape == (1, 3, 16, 2, 4) and bool(latents.isfinite().all()) and latents.std() > 0.01
