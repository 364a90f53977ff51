"""A generator survives saving exactly, and a folder that does not fit its config is refused, never filled in."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from arvideo_rl.generators.bundle import Generator, Streaming
from arvideo_rl.generators.codec import IdentityCodec
from arvideo_rl.generators.policies import Policies, PolicyConfig
from arvideo_rl.generators.text import WordEncoder
from arvideo_rl.generators.window import Window

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def generator(tiny):
    torch.manual_seed(0)
    encoder = WordEncoder(words=("a", "ball", "blue", "red"), length=5, dim=8, heads=2).eval()
    streaming = Streaming(2, 7, 1, "absolute", (1000, 500), 5.0, 12.0, 4, 10)
    return Generator(tiny(), encoder, IdentityCodec(0.4, 0.3), streaming)


@pytest.fixture
def folder(generator, tmp_path):
    generator.save(tmp_path / "made")
    return tmp_path / "made"


def plain(config):
    """A config as JSON has it, without diffusers' own entries."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in config.items() if not k.startswith("_")}


def test_a_saved_generator_loads_exactly_in_float32(generator, folder):
    loaded = Generator.load(folder)
    for name in ("transformer", "text_encoder"):
        mine, other = getattr(generator, name), getattr(loaded, name)
        assert plain(mine.config) == plain(other.config)
        assert mine.state_dict().keys() == other.state_dict().keys()
        assert all(torch.equal(a, b) for a, b in zip(mine.state_dict().values(), other.state_dict().values()))
        assert not other.training


def test_the_streaming_settings_and_codec_survive(generator, folder):
    loaded = Generator.load(folder)
    assert loaded.streaming == generator.streaming and loaded.codec == generator.codec


def test_a_loaded_generator_predicts_the_same(generator, folder, randn):
    loaded, x = Generator.load(folder), randn(1, 3, 3, 4, 4)
    outputs = []
    for g in (generator, loaded):
        script = g.script(["a red ball"], torch.tensor([[0, 1, 2]]))
        context = Window().start().condition(script.prompt_at(0)[1], script.actions_in(0, 3))
        with torch.no_grad():
            outputs.append(g.transformer(x, torch.tensor([0.5]), context).x0)
    assert torch.equal(*outputs)


def test_saving_in_bfloat16_rounds_the_file_and_not_the_network(generator, tmp_path):
    before = {k: v.clone() for k, v in generator.transformer.state_dict().items()}
    generator.save(tmp_path / "half", torch.bfloat16)
    loaded = Generator.load(tmp_path / "half").transformer.state_dict()
    assert load_file(tmp_path / "half" / "transformer" / WEIGHTS)["proj_out.weight"].dtype == torch.bfloat16
    for k, v in generator.transformer.state_dict().items():
        assert torch.equal(v, before[k])
        assert loaded[k].dtype == torch.float32 and torch.equal(loaded[k], v.bfloat16().float())


def missing(state):
    del state["blocks.0.attn1.to_q.weight"]


def extra(state):
    state["blocks.9.attn1.to_q.weight"] = torch.zeros(2)


def misshapen(state):
    state["blocks.0.attn1.to_q.weight"] = torch.zeros(48, 47)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(missing, "blocks.0.attn1.to_q.weight"), (extra, "blocks.9.attn1.to_q.weight"), (misshapen, "(48, 47)")],
)
def test_weights_that_do_not_fit_the_config_are_refused(damage, words, folder):
    path = folder / "transformer" / WEIGHTS
    state = load_file(path)
    damage(state)
    save_file(state, path)
    with pytest.raises(ValueError) as error:
        Generator.load(folder)
    assert words in str(error.value) and "/transformer" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_text_weight_is_refused_too(folder):
    path = folder / "text_encoder" / WEIGHTS
    state = load_file(path)
    del state["place"]
    save_file(state, path)
    with pytest.raises(ValueError, match="place"):
        Generator.load(folder)


def test_a_name_that_is_no_generator_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError) as error:
        Generator.load(str(tmp_path / "nothing"))
    assert "nothing" in str(error.value) and "tiny" in str(error.value)


def test_the_shipped_tiny_generator_loads_by_name_and_speaks_of_its_window():
    generator = Generator.load("tiny")
    assert generator.streaming.attention_window() == Window(3, 12, 3, "adjacent")
    assert generator.latent_shape == (3, 3, 32, 32)


def test_steps_are_written_as_given_and_warped_when_read(folder, generator):
    assert json.loads((folder / "generator.json").read_text())["streaming"]["steps"] == [1000, 500]
    assert generator.streaming.levels == pytest.approx((1, 5 / 6))


def test_the_script_holds_a_prompt_switch(generator):
    script = generator.script(["a red ball"], None, ((6, ["a blue ball"]),))
    with torch.no_grad():
        expected = generator.text_encoder(generator.text_encoder.tokens(["a blue ball"]))
    assert torch.equal(script.prompt_at(6)[1], expected) and not torch.equal(script.prompt_at(5)[1], expected)
    assert not script.prompt_at(6)[1].requires_grad


def test_the_codec_inverts_and_clamps(randn):
    codec, pixels = IdentityCodec(0.4, 0.3), torch.linspace(0, 1, 96).view(1, 2, 3, 4, 4)
    torch.testing.assert_close(codec.decode(codec.encode(pixels)), pixels)
    assert codec.encode(torch.tensor(0.7)).item() == pytest.approx(1.0)
    assert codec.decode(torch.tensor([-9.0, 9.0])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("generator.json", b'{"codec": {', "is damaged"),
        ("generator.json", b"\xff\xfe{}", "is damaged"),
        ("generator.json", b"[]", "is not such a file"),
        ("generator.json", b'{"codec": {}}', "no 'streaming'"),
        ("generator.json", b'{"codec": {}, "streaming": {"steps": [1000], "chnk": 3}}', "chnk"),
        ("transformer/config.json", b"not json", "is damaged"),
        ("transformer/config.json", None, "is missing"),
        (f"transformer/{WEIGHTS}", b"not weights", "is damaged"),
        (f"transformer/{WEIGHTS}", None, "is missing"),
        (f"text_encoder/{WEIGHTS}", b"", "is damaged"),
    ],
)
def test_a_damaged_file_is_named_with_the_way_out(name, content, says, folder):
    path = folder / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError) as error:
        Generator.load(folder)
    line = str(error.value)
    assert str(path) in line and says in line and "make or copy the generator again" in line and "\n" not in line


def test_weights_cut_short_are_named(folder):
    path = folder / "transformer" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"transformer/{WEIGHTS} is damaged"):
        Generator.load(folder)


def test_a_generator_with_adapters_attached_is_not_saved(generator, tmp_path):
    Policies(generator.transformer, PolicyConfig(rank=2))
    with pytest.raises(ValueError, match="adapters are attached.*arvideo convert"):
        generator.save(tmp_path / "mixed")
    assert not (tmp_path / "mixed").exists()


def test_settings_that_do_not_go_together_or_with_the_weights_are_refused(generator, folder):
    wrong = {
        "refresh_level=1.0 must be": dict(refresh_level=1.0),
        "chunks of one size": dict(joint=True, first_alone=True),
        "run again is never refreshed": dict(refresh_level=0.1, recompute=True),
    }
    for says, bad in wrong.items():
        with pytest.raises(ValueError, match=says):
            Streaming(**bad)
    told = json.loads((folder / "generator.json").read_text())
    told["streaming"] |= {"linear": True, "positions": "adjacent"}
    (folder / "generator.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match="streaming.linear=true, but these weights have no linear_proj"):
        Generator.load(folder)
