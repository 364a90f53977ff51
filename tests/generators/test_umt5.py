"""The text encoder: what Wan was trained on, and a cache that is never stale."""

import pytest
import torch
from transformers import UMT5EncoderModel

from arvideo_rl.generators.umt5 import Umt5, clean


@pytest.fixture
def wan(tmp_path, make_text_encoder):
    return make_text_encoder(tmp_path / "wan")


def encoder(wan, tmp_path, **settings):
    settings = {"length": 12, "dtype": torch.float32} | settings
    return Umt5(wan / "text_encoder", wan / "tokenizer", tmp_path / "cache", **settings)


def test_rows_past_the_true_length_are_zero_and_the_rest_is_the_encoder_with_its_mask(wan, tmp_path):
    out = encoder(wan, tmp_path).embed(["a red ball", "a red ball rolls a"])
    assert out.shape == (2, 12, 16)
    assert [(row.abs().sum(-1) > 0).tolist() for row in out] == [[i < n for i in range(12)] for n in (3, 5)]
    model = UMT5EncoderModel.from_pretrained(wan / "text_encoder").eval()
    with torch.no_grad():
        alone = model(torch.tensor([[3, 4, 5]])).last_hidden_state[0]
    torch.testing.assert_close(out[0, :3], alone)


def test_a_known_prompt_needs_no_model(wan, tmp_path, monkeypatch):
    first = encoder(wan, tmp_path).embed(["a red ball"])
    monkeypatch.setattr(UMT5EncoderModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    again = encoder(wan, tmp_path)
    assert torch.equal(again.embed(["a  red\n ball "]), first)
    assert not list((tmp_path / "cache").rglob(".*"))
    with pytest.raises(pytest.fail.Exception):
        again.embed(["a ball"])


@pytest.mark.parametrize("what", ["weights", "length", "dtype"])
def test_what_the_vectors_depend_on_makes_another_cache(wan, tmp_path, what, make_text_encoder):
    first = encoder(wan, tmp_path)
    first.embed(["a red ball"])
    if what == "weights":
        make_text_encoder(wan, seed=1)
    other = encoder(wan, tmp_path, **{"length": dict(length=13), "dtype": dict(dtype=torch.bfloat16)}.get(what, {}))
    assert other.cache != first.cache and not other.cache.exists()
    if what == "dtype":
        assert other.embed(["a"]).dtype == torch.bfloat16


def test_prompts_are_cleaned_as_wan_does():
    assert clean(" a &amp;amp; b\t\n c ") == "a & b c"


def test_a_missing_part_is_named(tmp_path):
    with pytest.raises(ValueError, match="no text encoder part at .*text_encoder; a Wan folder has"):
        encoder(tmp_path, tmp_path)
