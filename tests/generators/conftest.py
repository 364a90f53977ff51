"""What the tests of generators share."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from arvideo_rl.generators.context import Context
from samplers.schedule import warped_levels

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


@torch.no_grad()
def make_roll_by_hand(model, g, read, chunks=8, adjacent=False):
    """Latents [1, F, C, H, W] of chunks of 3 frames from the golden noise, with neither window, denoiser nor stream:
    ``read(frames)`` lists the spans that the next chunk reads, from the clean frames so far, one span each."""
    levels, frames, out = warped_levels((1000, 750, 500, 250), 5), [], []
    for k in range(chunks):
        context = Context(tuple(read(frames)), 3 * k, text=g["text"], adjacent=adjacent)
        x = g["noise"][:, 3 * k : 3 * k + 3]
        for step, level in enumerate(levels):
            if step:
                x = (1 - level) * x + level * g["renoise"][3 * k + step - 1]
            x = model(x, torch.full((1,), level), context).x0
        span = model(x, torch.zeros(1), context, write=True).span
        frames += [span.crop(f, f + 1) for f in range(span.start, span.stop)]
        out.append(x)
    return torch.cat(out, 1)


@pytest.fixture(scope="session")
def roll_by_hand():
    """The function :func:`make_roll_by_hand`."""
    return make_roll_by_hand
