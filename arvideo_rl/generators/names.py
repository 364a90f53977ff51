"""Parameter names of Wan: official <-> diffusers, and what wrappers put around them. Text only, no tensors.

Source: huggingface/diffusers scripts/convert_wan_to_diffusers.py, the Wan2.1 repository. The trap: official norm3
(affine, before cross-attention) is diffusers' norm2, and the official norm2 has no weights.
"""

from __future__ import annotations

import re

TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
}
BLOCK = {
    **{f"{a}.{x}": f"{b}.{y}" for a, b in (("self_attn", "attn1"), ("cross_attn", "attn2"))
       for x, y in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"),
                    ("norm_q", "norm_q"), ("norm_k", "norm_k"))},
    "self_attn.linear_proj": "attn1.linear_proj",  # Hybrid Forcing's
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "modulation": "scale_shift_table",
}  # fmt: skip
WRAPPERS = ("base_model", "model", "module", "diffusion_model", "transformer", "generator",
            "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")  # fmt: skip


def unwrap(key: str) -> str:
    """``key`` without what FSDP, checkpointing, torch.compile, DDP, PEFT and other tools put into it, wherever."""
    return ".".join(part for part in key.split(".") if part not in WRAPPERS)


def _translate(key: str, top: dict[str, str], block: dict[str, str]) -> str | None:
    inside = re.fullmatch(r"(blocks\.\d+\.)(.+)", key)
    head, rest, table = (inside[1], inside[2], block) if inside else ("", key, top)
    for name, other in table.items():
        if rest == name or rest.startswith(name + "."):
            return head + other + rest[len(name) :]
    return None


def to_diffusers(key: str) -> str | None:
    """The diffusers name of an official parameter, or of a LoRA weight on it; None when it is no part of Wan."""
    return _translate(key, TOP, BLOCK)


def to_official(key: str) -> str | None:
    """The official name of a diffusers parameter, or of a LoRA weight on it; None when Wan has no such part."""
    return _translate(key, {b: a for a, b in TOP.items()}, {b: a for a, b in BLOCK.items()})


def is_official(keys) -> bool:
    """Whether names (unwrapped) are the official ones."""
    part = re.compile(
        r"(head|time_embedding|text_embedding|time_projection)\.|blocks\.\d+\.(self_attn|cross_attn|ffn\.\d)\."
    )
    return any(part.match(k) for k in keys)
