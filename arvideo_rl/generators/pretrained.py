"""Build a causal Wan from a checkpoint, and write one in the names other tools read."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from arvideo_rl.generators.names import to_official
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.weights import load_strictly, read_state, recognise

FLOAT32 = tuple(n for n in CausalWan._keep_in_fp32_modules or () if n != "rope")  # norms, time embedder, modulation


def stored_dtype(key: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of parameter ``key`` in a model of ``dtype``: what diffusers keeps in float32 stays there."""
    return torch.float32 if any(part in FLOAT32 for part in key.split(".")) else dtype


def build(config: dict) -> CausalWan:
    """A causal Wan without memory for its weights (meta device), to be loaded into."""
    with torch.device("meta"):
        return CausalWan(**config).eval()


def load_transformer(
    path: Path, dtype: torch.dtype = torch.float32, *, container: str | None = None, head_dim: int = 128,
    prediction: str = "v",
) -> tuple[CausalWan, str]:  # fmt: skip
    """Load a checkpoint of any layout of weights.py; its size is recognised. Returns the model and one line that says
    what was loaded. ValueError in one line when anything is missing, left over or of another shape."""
    state, part = read_state(path, container)
    model = build({**recognise(state, head_dim), "prediction": prediction})
    state = {k: v.to(stored_dtype(k, dtype)) for k, v in state.items()}
    count = load_strictly(model, state, path)
    size = sum(p.numel() for p in model.parameters())
    where = f"{part} of {path}" if part else str(path)
    return model, f"loaded {count} tensors, {size / 1e6:,.1f} M parameters, from {where}"


def official_state(model: CausalWan) -> dict[str, Tensor]:
    """The weights under their official names, as other tools load them; ValueError when the model has parts that Wan
    lacks."""
    names = {k: to_official(k) for k in model.state_dict()}
    ours = [k for k, v in names.items() if v is None]
    if ours:
        raise ValueError(f"official Wan has no {', '.join(ours)}: save this generator as a folder instead")
    return {names[k]: v.detach().cpu().contiguous() for k, v in model.state_dict().items()}  # type: ignore[misc]


def save_official(model: CausalWan, path: Path) -> None:
    """Write the weights under official names: .safetensors, or .pt with them under ``generator``. Written aside and
    renamed."""
    state = official_state(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if path.suffix == ".safetensors":
            save_file(state, draft, {"format": "pt"})
        elif path.suffix == ".pt":
            torch.save({"generator": state}, draft)
        else:
            raise ValueError(f"{path}: official weights are written as .safetensors or .pt")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
