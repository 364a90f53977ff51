"""Wan's text encoder (UMT5) with a cache on disk, so that training and scoring never hold its 11 GB in memory twice.

512 tokens; vectors past the true length are zero and attention gets no mask, as Wan was trained: the zeros pass through
a biased layer and act as constant registers, so trimming them would change the output.
"""

from __future__ import annotations

import hashlib
import html
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, UMT5EncoderModel

LENGTH = 512  # tokens; Wan2.1
SAMPLE = 1 << 20  # bytes of a weight file that go into its fingerprint


def clean(prompt: str) -> str:
    """The prompt as Wan's pipeline reads it: HTML entities resolved, runs of white space made one."""
    return " ".join(html.unescape(html.unescape(prompt)).split())


class Umt5:
    """Prompts to [B, 512, dim] with zeros past the true length. ``encoder`` and ``tokenizer`` are diffusers' folders of
    these names; the encoder is loaded when the first unknown prompt comes."""

    def __init__(
        self, encoder: Path, tokenizer: Path, cache: Path, *, length: int = LENGTH, dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        for folder in (encoder, tokenizer):
            if not folder.is_dir():
                raise ValueError(f"no text encoder part at {folder}; a Wan folder has text_encoder/ and tokenizer/")
        self.folder, self.length, self.dtype, self.device = encoder, length, dtype, device
        self.tokenizer = AutoTokenizer.from_pretrained(tokenizer)
        self.cache = cache / fingerprint(encoder, tokenizer, length, dtype)
        self._model: nn.Module | None = None

    def embed(self, prompts: list[str]) -> Tensor:
        """Embeddings [B, length, dim] in the encoder's dtype."""
        return torch.stack([self._one(clean(p)) for p in prompts])

    def nothing(self, count: int) -> Tensor:
        """What stands for no prompt: the empty one, as Wan's own guidance has it where none is given."""
        return self.embed([""] * count)

    def _one(self, prompt: str) -> Tensor:
        path = self.cache / f"{hashlib.sha256(prompt.encode()).hexdigest()}.safetensors"
        if path.is_file():
            rows = load_file(path)["rows"]
        else:
            rows = self._encode(prompt)
            self.cache.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            save_file({"rows": rows}, draft, {"prompt": prompt})
            draft.replace(path)
        return nn.functional.pad(rows, (0, 0, 0, self.length - len(rows)))

    @torch.no_grad()
    def _encode(self, prompt: str) -> Tensor:
        """Vectors of the true tokens [n, dim]."""
        if self._model is None:
            model, report = UMT5EncoderModel.from_pretrained(self.folder, dtype=self.dtype, output_loading_info=True)
            absent = sorted(report["missing_keys"])
            if absent:  # transformers would fill them at random
                raise ValueError(f"{self.folder} lacks {len(absent)} tensors of the text encoder: {absent[0]} ...")
            self._model = model.to(self.device).eval()
        tokens = self.tokenizer([prompt], padding="max_length", max_length=self.length, truncation=True,
                                return_tensors="pt")  # fmt: skip
        ids, mask = tokens["input_ids"].to(self.device), tokens["attention_mask"].to(self.device)
        out = self._model(ids, mask).last_hidden_state[0]
        return out[: int(mask.sum())].cpu().contiguous()

    def to(self, device: torch.device | str) -> Umt5:
        """Where the encoder is to run."""
        self.device = device
        if self._model is not None:
            self._model.to(device)
        return self

    def forget(self) -> None:
        """Free the encoder's memory; it is loaded again when needed."""
        self._model = None


def fingerprint(encoder: Path, tokenizer: Path, length: int, dtype: torch.dtype) -> str:
    """Names what the cached vectors depend on: both folders' small files, the start and size of the large ones."""
    digest = hashlib.sha256(f"{length} {dtype}".encode())
    for folder in (encoder, tokenizer):
        for path in sorted(p for p in folder.iterdir() if p.is_file()):
            with path.open("rb") as file:
                digest.update(f"{path.name} {path.stat().st_size} ".encode() + file.read(SAMPLE))
    return digest.hexdigest()[:24]
