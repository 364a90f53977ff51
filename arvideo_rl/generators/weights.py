"""Read a Wan checkpoint in any layout that people publish, as tensors under diffusers' names; refuse what is odd.

Layouts: a diffusers folder (one file or shards), .safetensors, .pt/.pth/.bin/.ckpt with weights at the top or under
``generator_ema``, ``generator`` or ``model``, official or diffusers names, any wrapper prefix. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from arvideo_rl.generators.names import is_official, to_diffusers, unwrap

CONTAINERS = ("generator_ema", "generator", "model")  # in the order of preference; official inference takes the average
PICKLES = (".pt", ".pth", ".bin", ".ckpt")
HEAD = 128  # width of an attention head in every published Wan
SHOWN = 4  # names in an error


def read_state(path: Path, container: str | None = None) -> tuple[dict[str, Tensor], str]:
    """Tensors of a file or diffusers folder under unwrapped diffusers names, and which part of the file they came from
    ("" = the top). ``container`` chooses one of CONTAINERS where a file has several. ValueError in one line."""
    tensors, part = read_tensors(path, container)
    out: dict[str, Tensor] = {}
    names = {unwrap(k): k for k in tensors}
    if len(names) < len(tensors):
        raise ValueError(f"{path}: {len(tensors) - len(names)} tensors have the same name once wrappers are removed")
    translate = to_diffusers if is_official(names) else (lambda k: k)
    unknown = [k for k in names if translate(k) is None]
    if unknown:
        raise ValueError(f"{path} is no Wan checkpoint: it holds {listed(unknown)}")
    for short, key in names.items():
        out[translate(short)] = tensors[key]  # type: ignore[index]
    return out, part


def read_tensors(
    path: Path, container: str | None = None, containers: tuple[str, ...] = CONTAINERS
) -> tuple[dict[str, Tensor], str]:
    """Tensors of a file or folder under the names they have there, and which part of the file they came from."""
    if path.is_dir():
        return _read_folder(path), ""
    if not path.is_file():
        raise ValueError(f"no checkpoint at {str(path)!r}")
    if path.suffix == ".safetensors":
        return _safetensors(path), ""
    if path.suffix not in PICKLES:
        known = ", ".join((".safetensors", *PICKLES))
        raise ValueError(f"{path}: {path.suffix or 'no suffix'} is not a checkpoint's; known are {known}")
    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:
        raise ValueError(f"{path} holds more than tensors and could run code; convert it where you trust it") from None
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged or no checkpoint: {first_line(error)}") from None
    return _choose(path, data, container, containers)


def _choose(
    path: Path, data: object, container: str | None, containers: tuple[str, ...]
) -> tuple[dict[str, Tensor], str]:
    """The tensors of the right part of a loaded object."""
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not named tensors")
    there = [c for c in containers if isinstance(data.get(c), dict)]
    if container is not None and container not in there:
        raise ValueError(f"{path} has no {container!r}; it has {listed(there or data)}")
    part = container or (there[0] if there else "")
    found = data[part] if part else data
    odd = [k for k, v in found.items() if not isinstance(v, Tensor)]
    if odd or not found:
        raise ValueError(f"{path}: {part or 'the top level'} holds {listed(odd or ['nothing'])}, not only tensors")
    return found, part


def _read_folder(folder: Path) -> dict[str, Tensor]:
    """A diffusers folder's tensors, whole or in shards."""
    index = sorted(folder.glob("*.safetensors.index.json"))
    if index:
        try:
            names = sorted(set(json.loads(index[0].read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{index[0]} is not an index of shards") from None
        files = [folder / n for n in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [p.name for p in files if not p.is_file()]
    if missing or not files:
        raise ValueError(f"{folder}: {'missing ' + listed(missing) if missing else 'no .safetensors file in it'}")
    out: dict[str, Tensor] = {}
    for file in files:
        out |= _safetensors(file)
    return out


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {first_line(error)}") from None


def recognise(state: dict[str, Tensor], head_dim: int = HEAD) -> dict:
    """The CausalWan configuration that fits ``state`` (diffusers names): width, depth and the rest from the shapes.
    Only the width of a head cannot be seen there. ValueError when it is not a text-to-video Wan."""
    try:
        stem = state["patch_embedding.weight"]
        width, channels, patch = stem.shape[0], stem.shape[1], tuple(stem.shape[2:])
        layers = 1 + max(int(k.split(".")[1]) for k in state if k.startswith("blocks."))
        ffn = state["blocks.0.ffn.net.0.proj.weight"].shape[0]
        text = state["condition_embedder.text_embedder.linear_1.weight"].shape[1]
        freq = state["condition_embedder.time_embedder.linear_1.weight"].shape[1]
        out = state["proj_out.weight"].shape[0] // math.prod(patch)
    except (KeyError, ValueError) as error:
        raise ValueError(f"no Wan transformer: {error} is missing") from None
    if any("img_emb" in k or "image_embedder" in k or ".k_img" in k or ".add_k_proj" in k for k in state):
        raise ValueError("image-to-video weights: this generator takes text only")
    if width % head_dim:
        raise ValueError(f"width {width} is not a whole number of heads of {head_dim}; give head_dim")
    return dict(
        patch_size=patch, num_attention_heads=width // head_dim, attention_head_dim=head_dim, in_channels=channels,
        out_channels=out, text_dim=text, freq_dim=freq, ffn_dim=ffn, num_layers=layers,
        cross_attn_norm="blocks.0.norm2.weight" in state,
        linear_state="blocks.0.attn1.linear_proj.weight" in state,
        qk_norm="rms_norm_across_heads" if "blocks.0.attn1.norm_q.weight" in state else None,
    )  # fmt: skip


def load_strictly(module: torch.nn.Module, state: dict[str, Tensor], source: object) -> int:
    """Put ``state`` into ``module`` (which may be on the meta device), each tensor in the dtype it has. Missing,
    unexpected and wrongly shaped names are a ValueError that lists them. Returns how many tensors were loaded."""
    mine = module.state_dict()
    wrong = [f"{k} {tuple(state[k].shape)} for {tuple(mine[k].shape)}" for k in mine
             if k in state and state[k].shape != mine[k].shape]  # fmt: skip
    faults = {"missing": [k for k in mine if k not in state], "unexpected": [k for k in state if k not in mine],
              "wrongly shaped": wrong}  # fmt: skip
    if any(faults.values()):
        said = "; ".join(f"{len(names)} {what}: {listed(names)}" for what, names in faults.items() if names)
        raise ValueError(f"{source} does not fit: {said}")
    module.load_state_dict(state, assign=True)
    return len(mine)


def listed(names: Iterable) -> str:
    """The first few names, and how many more there are."""
    names = [str(n) for n in names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def first_line(error: BaseException) -> str:
    """The first line of what an exception says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
