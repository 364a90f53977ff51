"""A Wan put together from published parts: a causal transformer, and the base model's VAE and text encoder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from arvideo_rl.generators.codec import WanCodec
from arvideo_rl.generators.hub import locate
from arvideo_rl.generators.lora import merge, read_lora
from arvideo_rl.generators.pretrained import build, load_transformer, stored_dtype
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.umt5 import Umt5
from arvideo_rl.generators.weights import load_strictly, read_tensors
from arvideo_rl.world.dataset import cache_dir

PARTS = ("vae/*", "text_encoder/*", "tokenizer/*")  # what is taken of the base model
SIZES: dict[str, dict[str, int]] = {  # of the transformers over these bases
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": dict(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": dict(num_attention_heads=40, ffn_dim=13824, num_layers=40),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class WanParts:
    """Where a Wan generator's parts are: paths, or names on the Hub (hub.py)."""

    transformer: str = ""  # a checkpoint in any layout of weights.py
    base: str = "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"  # diffusers folder with vae/, text_encoder/ and tokenizer/
    lora: str | None = None  # merged into the transformer
    lora_alpha: float | None = None  # where the file does not say it
    container: str | None = None  # which weights of a file that holds several
    dtype: str = "bfloat16"
    head_dim: int = 128
    licence: str = "see the model's page"


def load_parts(parts: WanParts, near: Path | None = None) -> tuple[CausalWan, Umt5, WanCodec, str]:
    """Load everything but the text encoder, which waits for its first unknown prompt. Also returns one line that says
    what was loaded. ValueError in one line for what is missing, offline, or does not fit."""
    if parts.dtype not in DTYPES:
        raise ValueError(f"dtype={parts.dtype}: choose one of {', '.join(DTYPES)}")
    if not parts.transformer:
        raise ValueError("wan.transformer= is missing: a checkpoint's path, or owner/name/file on the Hub")
    path = locate(parts.transformer, near)
    transformer, said = load_transformer(path, DTYPES[parts.dtype], container=parts.container, head_dim=parts.head_dim)
    if parts.lora:
        lora_path = locate(parts.lora, near)
        count = merge(transformer, read_lora(lora_path, parts.lora_alpha))
        said += f"; LoRA {lora_path} merged into {count} modules"
    base = locate(parts.base, near, PARTS)
    text = Umt5(base / "text_encoder", base / "tokenizer", cache_dir() / "text", dtype=DTYPES[parts.dtype])
    return transformer, text, WanCodec(load_vae(base / "vae")), f"{said} (licence: {parts.licence})"


def outline(parts: WanParts) -> tuple[CausalWan, WanCodec]:
    """Transformer and codec of a published base without memory for their weights (meta device), in the dtypes that they
    are loaded in: enough to say sizes. ValueError for a base that is not known."""
    if parts.base not in SIZES:
        raise ValueError(f"the sizes of {parts.base} are not known; known are {', '.join(SIZES)}")
    model = build(dict(SIZES[parts.base]))
    for key, p in model.named_parameters():
        p.data = p.data.to(stored_dtype(key, DTYPES[parts.dtype]))
    with torch.device("meta"):
        vae = AutoencoderKLWan()
    with torch.device("cpu"):
        return model, WanCodec(vae)


def load_vae(folder: Path) -> AutoencoderKLWan:
    """Wan's VAE in float32, strictly."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"no VAE at {folder}; a Wan folder in diffusers' layout has vae/config.json")
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(AutoencoderKLWan.load_config(folder))
    state, _ = read_tensors(folder)
    load_strictly(vae, {k: v.float() for k, v in state.items()}, folder)
    return vae.eval()
