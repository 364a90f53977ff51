"""LoRA files in the layouts people publish: read, merged into the weights, or attached as an adapter.

Layouts: PEFT (``lora_A.weight``), adapter-named PEFT (``lora_A.default.weight``), kohya (``lora_down``, ``lora_up``,
``alpha``), at the top of a file or under ``generator_lora``; official or diffusers names of the modules.
The change of a weight is (alpha / rank) B A.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, set_peft_model_state_dict
from torch import Tensor, nn

from arvideo_rl.generators.names import is_official, to_diffusers, unwrap
from arvideo_rl.generators.weights import listed, read_tensors

CONTAINERS = ("generator_lora",)
PART = re.compile(r"(.+)\.(lora_A|lora_B|lora_down|lora_up)(?:\.[^.]+)?\.weight|(.+)\.(alpha)")


@dataclass(frozen=True)
class Lora:
    """``down`` [rank, in] and ``up`` [out, rank] by the diffusers name of the module; ``alpha`` by the same name."""

    down: dict[str, Tensor]
    up: dict[str, Tensor]
    alpha: dict[str, float]

    def delta(self, name: str) -> Tensor:
        """What is added to the weight of module ``name``, in float32."""
        down, up = self.down[name].float(), self.up[name].float()
        return self.alpha[name] / down.shape[0] * (up @ down)


def read_lora(path: Path, alpha: float | None = None) -> Lora:
    """Read a LoRA file or PEFT folder. ``alpha`` is for files that do not say it: else the folder's
    adapter_config.json counts, then the file's own numbers, then alpha = rank. ValueError in one line."""
    stated = alpha
    if path.is_dir():
        stated = alpha if alpha is not None else _stated_alpha(path / "adapter_config.json")
        path = path / "adapter_model.safetensors"
    tensors, _ = read_tensors(path, containers=CONTAINERS)
    names = {unwrap(k): v for k, v in tensors.items()}
    parts: dict[str, dict[str, Tensor]] = {"down": {}, "up": {}, "alpha": {}}
    official = is_official(names)
    for key, tensor in names.items():
        found = PART.fullmatch(key)
        module = found and (found[1] or found[3])
        name = to_diffusers(module) if module and official else module
        if found is None or name is None:
            raise ValueError(f"{path} is no LoRA of a Wan transformer: it holds {key!r}")
        kind = {"lora_A": "down", "lora_down": "down", "lora_B": "up", "lora_up": "up"}.get(found[2] or "", "alpha")
        parts[kind][name] = tensor
    half = sorted(set(parts["down"]) ^ set(parts["up"]))
    if half or not parts["down"]:
        raise ValueError(f"{path}: {'one half only of ' + listed(half) if half else 'no LoRA weight in it'}")
    alphas = {
        name: stated if stated is not None else float(parts["alpha"].get(name, torch.tensor(float(down.shape[0]))))
        for name, down in parts["down"].items()
    }
    return Lora(parts["down"], parts["up"], alphas)


def _stated_alpha(path: Path) -> float:
    try:
        return float(json.loads(path.read_text("utf-8"))["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} does not say lora_alpha; give alpha") from None


def _modules(model: nn.Module, lora: Lora) -> dict[str, nn.Linear]:
    """The linears that ``lora`` changes; every one of its names must be one, with the right sizes."""
    mine = {k: m for k, m in model.named_modules() if isinstance(m, nn.Linear)}
    unknown = [k for k in lora.down if k not in mine]
    if unknown:
        raise ValueError(f"{len(unknown)} of {len(lora.down)} LoRA modules are not in this model: {listed(unknown)}")
    for k in lora.down:
        given, needed = (lora.up[k].shape[0], lora.down[k].shape[1]), tuple(mine[k].weight.shape)
        if given != needed:
            raise ValueError(f"LoRA of {k} is for a {given} weight, but this model's is {needed}")
    return {k: mine[k] for k in lora.down}


@torch.no_grad()
def merge(model: nn.Module, lora: Lora) -> int:
    """Add the LoRA to the weights in place, in float32 rounded once; returns how many modules it changed."""
    modules = _modules(model, lora)
    for name, module in modules.items():
        delta = lora.delta(name).to(module.weight.device)
        module.weight.copy_((module.weight.float() + delta).to(module.weight.dtype))
    return len(modules)


def attach(model: nn.Module, lora: Lora, name: str) -> int:
    """Add the LoRA as adapter ``name`` in float32 and make it the active one; returns how many modules it is on. All
    its modules must agree on rank and alpha, as adapters do."""
    modules = _modules(model, lora)
    shapes = {(lora.down[k].shape[0], lora.alpha[k]) for k in modules}
    if len(shapes) > 1:
        raise ValueError(f"LoRA modules differ in (rank, alpha): {listed(sorted(shapes))}; merge it instead")
    ((rank, alpha),) = shapes
    model.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules)), adapter_name=name)  # type: ignore
    state = {f"{k}.lora_A.weight": v for k, v in lora.down.items()} | {
        f"{k}.lora_B.weight": v for k, v in lora.up.items()
    }
    result = set_peft_model_state_dict(model, state, adapter_name=name)
    if result.unexpected_keys:
        raise ValueError(f"LoRA tensors that found no place: {listed(result.unexpected_keys)}")
    for key, p in model.named_parameters():
        if f".{name}.weight" in key and "lora_" in key:
            p.data = p.data.float()
    model.set_adapter(name)  # type: ignore[operator]
    return len(modules)
