"""Rewrite published weights for other programs: a Wan checkpoint of any layout, or a LoRA file, and prove it whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig
from safetensors.torch import save_file

from arvideo_rl.generators.hub import locate
from arvideo_rl.generators.lora import CONTAINERS as LORA_CONTAINERS
from arvideo_rl.generators.lora import merge, read_lora
from arvideo_rl.generators.pretrained import build, save_official, stored_dtype
from arvideo_rl.generators.weights import CONTAINERS, load_strictly, read_state, read_tensors, recognise
from arvideo_rl.training.checkpoints import aside

LORA_FORMS = {"diffusers": ("pytorch_lora_weights.safetensors", "transformer."),
              "peft": ("adapter_model.safetensors", "base_model.model.")}  # fmt: skip


def is_lora(path: Path) -> bool:
    """Whether a file or folder holds a LoRA and no whole weights; ValueError when it holds neither."""
    if path.is_dir():
        if not any(path.glob("*.safetensors")):
            raise ValueError(f"{path}: no .safetensors file in it")
        return (path / "adapter_model.safetensors").is_file()
    return any("lora_" in k for k in read_tensors(path, containers=LORA_CONTAINERS + CONTAINERS)[0])


def convert_weights(
    source: str, out: Path, form: str, *, container: str | None = None, dtype: torch.dtype | None = None,
    lora: str | None = None, lora_alpha: float | None = None, head_dim: int = 128,
) -> str:  # fmt: skip
    """Write the checkpoint ``source`` to ``out``: ``official``, one .safetensors or .pt file, or ``diffusers``, a
    folder for WanTransformer3DModel.from_pretrained. ``lora`` is merged first; ``dtype`` None keeps what the file has.
    What was written is read again and compared. Returns one line; ValueError in one line, with nothing written."""
    path = locate(source)
    state, part = read_state(path, container)
    model = build(recognise(state, head_dim))
    count = load_strictly(model, {k: v.to(stored_dtype(k, dtype)) if dtype else v for k, v in state.items()}, path)
    del state
    merged = f", LoRA merged into {merge(model, read_lora(locate(lora), lora_alpha))} modules" if lora else ""
    if form != "official" and model.config.linear_state:
        raise ValueError(
            f"{source} has a linear state (linear_proj), for which diffusers has no place; use format=official"
        )
    mine = model.state_dict()
    with _file_aside(out) if form == "official" else aside(out) as target:
        if form == "official":
            save_official(model, target)
        else:
            with torch.device("meta"):
                sizes = {k: model.config[k] for k in recognise(mine, head_dim) if k != "linear_state"}
                theirs = WanTransformer3DModel(**sizes)
            theirs.load_state_dict(mine, assign=True)
            theirs.save_pretrained(target)
        again, _ = read_state(target)
        equal = sum(k in again and torch.equal(again[k], mine[k]) for k in mine)
        if not equal == len(mine) == len(again):
            raise ValueError(f"{out} was not written: {equal} of {len(mine)} tensors read back equal")
    where = f"{part} of {path}" if part else str(path)
    return f"wrote {out}: {count} tensors of {where}{merged}, read back equal"


@contextmanager
def _file_aside(final: Path) -> Iterator[Path]:
    """A temporary file that becomes ``final`` when the block ends well, and is gone when it does not."""
    draft = final.with_name(f".draft.{final.name}")
    try:
        yield draft
        draft.replace(final)
    finally:
        draft.unlink(missing_ok=True)


def convert_lora(source: str, out: Path, form: str, alpha: float | None = None) -> str:
    """Write the LoRA ``source`` to folder ``out`` as ``peft`` or ``diffusers`` read it (alpha is multiplied into the
    second factor for diffusers, whose readers take it to be the rank). Returns one line that says what was written."""
    lora = read_lora(locate(source), alpha)
    ranks = {(len(v), lora.alpha[k]) for k, v in lora.down.items()}
    if form == "peft" and len(ranks) > 1:
        raise ValueError(f"{source}: modules differ in rank or alpha, which PEFT cannot hold; use format=diffusers")
    name, prefix = LORA_FORMS[form]
    tensors = {}
    for k in lora.down:
        scale = lora.alpha[k] / len(lora.down[k]) if form == "diffusers" else 1.0
        tensors[f"{prefix}{k}.lora_A.weight"] = lora.down[k].contiguous()
        tensors[f"{prefix}{k}.lora_B.weight"] = (lora.up[k] * scale).contiguous()
    with aside(out) as draft:
        save_file(tensors, draft / name, {"format": "pt"})
        if form == "peft":
            ((rank, scale),) = ranks
            LoraConfig(r=rank, lora_alpha=scale, target_modules=sorted(lora.down)).save_pretrained(draft)  # type: ignore
        again = read_lora(draft if form == "peft" else draft / name)
        if again.down.keys() != lora.down.keys():
            raise ValueError(f"{out} was not written: {len(again.down)} of {len(lora.down)} modules read back")
        gap = max((again.delta(k) - lora.delta(k)).norm() / lora.delta(k).norm().clamp_min(1e-12) for k in lora.down)
        if not gap < 1e-2:  # what bfloat16 rounds is below that
            raise ValueError(f"{out} was not written: read back its change of the weights is off by {gap:.1e}")
    return f"wrote {out}: LoRA of {len(lora.down)} modules, read back equal within {gap:.0e}"
