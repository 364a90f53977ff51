"""What the tests of generators share."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "ball", "rolls", "&"]


def write_text_encoder(folder, seed=0):
    """Wan's text_encoder/ and tokenizer/ in ``folder``, small and random; returns ``folder``."""
    torch.manual_seed(seed)
    config = UMT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def make_text_encoder():
    """The function :func:`write_text_encoder`."""
    return write_text_encoder
