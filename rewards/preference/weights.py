"""Weights of preference rewards: found on disk or on the Hugging Face hub, and taken only where every key fits.

Public reward code loads with ``strict=False`` or trusts ``from_pretrained``, so that a renamed key leaves a random head
that still gives numbers. Here a key that is missing, left over or of another shape is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SHOWN = 3  # keys named in a message


def located(reward: str, weights: str | Path, files: Sequence[str], fetch: bool = True) -> Path:
    """The file or folder ``weights`` if there is one, else the local copy of the hub repository of that name, fetching
    ``files`` (names or patterns) where they are not here, unless ``fetch`` is off. ValueError when they cannot be
    had."""
    path = Path(weights).expanduser()
    if path.exists():
        return path
    name = str(weights)
    if name.count("/") != 1 or name.startswith(("/", ".", "~")) or path.suffix in (".pt", ".pth", ".safetensors"):
        raise ValueError(f"{reward}: there are no weights at {name}; give a file, a folder or a name on the hub")
    from huggingface_hub import snapshot_download

    try:
        if not fetch and not all(cached(name, file) for file in files):
            raise FileNotFoundError("nothing is fetched unasked")
        return Path(snapshot_download(name, allow_patterns=list(files), local_files_only=not fetch))
    except Exception as error:  # of the hub, the network, the disk
        said = " ".join(str(error).split()).partition(". ")[0]
        raise ValueError(f"{reward}: the weights {name} are not here ({said[:160]}); "
                         f"fetch them with '{command(name, files)}' or give weights=FOLDER") from None  # fmt: skip


def cached(repo: str, file: str) -> int | None:
    """Bytes of ``file`` (a name or a pattern) of a hub repository if it is on this disk; nothing is fetched."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return max((found.stat().st_size for found in folder.glob(file)), default=None)


def command(name: str, files: Sequence[str]) -> str:
    """The command line that fetches ``files`` of the hub repository ``name``."""
    patterns = any(set(f) & set("*?[") for f in files)
    return f"hf download {name} " + " ".join(f"--include '{f}'" if patterns else f for f in files)


def one_of(reward: str, path: Path, files: Sequence[str]) -> Path:
    """``path`` if it is a file, else the first of ``files`` in that folder; ValueError without any."""
    if path.is_file():
        return path
    for file in files:
        if (path / file).is_file():
            return path / file
    raise ValueError(f"{reward}: the folder {path} holds none of {', '.join(files)}")


def read(reward: str, path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or torch file by name, without an outer ``state_dict``. No code of it is run."""
    from safetensors.torch import load_file

    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # damaged files raise whatever their reader meets
        raise ValueError(f"{reward}: cannot read weights {path}: {' '.join(str(error).split())[:160]}") from None
    inner = found.get("state_dict", found) if isinstance(found, Mapping) else None
    if not isinstance(inner, Mapping) or not inner or not all(isinstance(v, Tensor) for v in inner.values()):
        raise ValueError(f"{reward}: {path} holds no tensors by name")
    return {k.removeprefix("module."): v for k, v in inner.items()}


def fit(reward: str, network: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> nn.Module:
    """``network`` with exactly those ``tensors``, frozen; ValueError names keys that are missing, left over or of
    another shape. A network without memory (on the device meta) takes the tensors themselves, in their own type."""
    own = network.state_dict()
    shapes = [f"{k} is {list(tensors[k].shape)}, not {list(v.shape)}" for k, v in own.items()
              if k in tensors and tensors[k].shape != v.shape]  # fmt: skip
    refuse(reward, path, own.keys() - tensors.keys(), tensors.keys() - own.keys(), shapes)
    network.load_state_dict(tensors, strict=True, assign=any(v.is_meta for v in own.values()))
    return network.eval().requires_grad_(False)


def refuse(reward: str, path: Path, missing: Any, unexpected: Any, shapes: Any = ()) -> None:
    """Raise ValueError unless all three are empty."""
    for what, keys in (("lacks", missing), ("has the unknown", unexpected), ("does not fit:", shapes)):
        if keys := sorted(str(k) for k in keys):
            more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
            raise ValueError(f"{reward}: {path} is not of this network: it {what} {', '.join(keys[:SHOWN])}{more}")
