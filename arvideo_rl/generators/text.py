"""A word-level text encoder for the tiny generator, trained with it.

Words are looked up, given a place, and mixed by one transformer layer so that "a red ball and a blue cube" keeps
colours with their shapes. Vectors past the true length are zero, as Wan has it.
"""

from __future__ import annotations

import difflib

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import Tensor, nn


class WordEncoder(ModelMixin, ConfigMixin):
    """Prompts to [B, length, dim]. ``words`` is the vocabulary, ``length`` the longest prompt in words."""

    @register_to_config
    def __init__(self, words: tuple[str, ...] = (), length: int = 24, dim: int = 96, heads: int = 4) -> None:
        super().__init__()
        self.index = {w: i + 1 for i, w in enumerate(words)}  # 0 is padding
        self.embedding = nn.Embedding(len(words) + 1, dim)
        self.place = nn.Parameter(torch.randn(length, dim) * 0.02)
        self.mix = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)

    def tokens(self, prompts: list[str]) -> Tensor:
        """Word indices [B, length]; ValueError names an unknown word or a prompt that is too long or empty."""
        rows = torch.zeros(len(prompts), self.config.length, dtype=torch.long)
        for row, prompt in zip(rows, prompts):
            words = prompt.lower().replace(",", " ").replace(".", " ").split()
            if not 1 <= len(words) <= self.config.length:
                raise ValueError(
                    f"prompt {prompt!r} has {len(words)} words; this encoder takes 1 to {self.config.length}"
                )
            for i, word in enumerate(words):
                if word not in self.index:
                    near = difflib.get_close_matches(word, self.index, 1)
                    hint = f"did you mean {near[0]!r}? " if near else ""
                    raise ValueError(f"prompt word {word!r} is unknown; {hint}known words: {' '.join(self.index)}")
                row[i] = self.index[word]
        return rows

    def embed(self, prompts: list[str]) -> Tensor:
        """Prompts to [B, length, dim]."""
        return self(self.tokens(prompts).to(self.place.device))

    def nothing(self, count: int) -> Tensor:
        """What stands for no prompt, [count, length, dim]: zeros, as at padding."""
        return self.place.new_zeros(count, self.config.length, self.config.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """Word indices [B, length] to vectors [B, length, dim], zero at padding."""
        padding = tokens == 0
        x = self.embedding(tokens) + self.place
        # one pass of a pre-norm layer; padding is never attended to
        x = self.mix(x, src_key_padding_mask=padding)
        return x.masked_fill(padding[..., None], 0.0)
