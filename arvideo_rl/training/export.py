"""Take a trained policy out of its run, in the forms other programs read, and prove that it came through whole.

What was written is loaded into a fresh base through the library that would load it, and must give the same output.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import save_file
from torch import Tensor

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.context import Context
from arvideo_rl.generators.pretrained import load_transformer, save_official
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.training.aligned import DEVICE, Aligned, add_policy, load_aligned
from arvideo_rl.training.checkpoints import aside
from arvideo_rl.training.rundir import write_json

# Of the largest output. A base of low precision rounds what is merged into it, and diffusers an adapter that it loads.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
PEFT_FILE = "adapter_model.safetensors"
OFFICIAL_FILE = "generator.safetensors"


def export(source: str, out: Path, form: str, merge: str = "") -> str:
    """Write the policy of ``source`` (see aligned.py) to folder ``out`` as ``diffusers`` or ``peft`` adapter, as
    ``merged`` generator, or merged under Wan's own names (``official``). ``merge``, RUN:SCALE, adds SCALE times what
    another run on the same base changed; only for the two last. Returns one line that says what was written and
    checked; ValueError, with nothing written, when the copy does not give the policy's output."""
    if form not in FORMS:
        raise ConfigError(f"format={form}: choose one of {', '.join(FORMS)}")
    policy, added = load_aligned(source), None
    whole = form in ("merged", "official")
    if not whole and policy.config.policy.kind != "lora":
        raise ConfigError(f"format={form}: {source} trained all weights, so there is no adapter; use format=merged")
    if merge:
        if not whole:
            raise ConfigError(f"format={form}: two runs are merged into the weights; use format=merged or official")
        other, scale = parse_merge(merge)
        added = {"from": str(add_policy(policy, other, scale)), "scale": scale}
    expected = outputs(policy.generator, policy.generator.transformer)
    kinds = (p.dtype for k, p in policy.generator.transformer.named_parameters() if "lora_" not in k)
    tolerance = TOLERANCE[min(kinds, key=lambda kind: kind.itemsize)]
    write, read = FORMS[form]
    with aside(out) as draft:
        written = write(policy, draft)
        fresh, model = read(policy, draft)
        found = _adapter(fresh) if not whole else fresh.transformer.state_dict()
        count = sum(k in found and torch.equal(found[k].cpu(), v.to(found[k].dtype)) for k, v in written.items())
        if not count == len(written) == len(found) or not count:
            raise ValueError(f"{out} was not written: only {count} of {len(written)} tensors of {source} got through")
        gap = (outputs(fresh, model) - expected).abs().max() / expected.abs().max()
        if not gap <= tolerance:
            raise ValueError(f"{out} was not written: loaded again its output differs by {gap:.1e} of the largest")
        about = {"format": form, "from": str(policy.checkpoint), "generator": policy.config.generator,
                 "base": policy.base, "tensors": count}  # fmt: skip
        write_json(draft / "export.json", about | ({"merged": added} if added else {}))
    said = f"{policy.checkpoint} + {added['scale']:g} * {added['from']}" if added else str(policy.checkpoint)
    return f"wrote {out}: {count} tensors, output equal to {said} within {gap:.0e} in a fresh base"


def parse_merge(text: str) -> tuple[str, float]:
    """Run and scale of RUN:SCALE."""
    run, _, scale = text.rpartition(":")
    try:
        value = float(scale)
    except ValueError:
        value = math.nan
    if not run or not math.isfinite(value):
        raise ConfigError(f"merge={text}: give another run and a scale, e.g. merge=runs/other:0.8")
    return run, value


@torch.no_grad()
def outputs(generator: Generator, model: Callable) -> Tensor:
    """What ``model`` predicts from fixed noise and text at two noise levels [2, F, C, H, W]."""
    source = torch.Generator().manual_seed(0)
    text = torch.randn(2, 8, generator.transformer.config.text_dim, generator=source)
    x = torch.randn(2, *generator.latent_shape, generator=source)
    return model(x.to(DEVICE), torch.tensor([0.9, 0.5], device=DEVICE), Context(text=text.to(DEVICE))).x0


def _adapter(generator: Generator) -> dict[str, Tensor]:
    """LoRA tensors by module and factor, whatever the adapter is called: blocks.0.attn1.to_q.lora_A."""
    found = ((re.fullmatch(r"(.+\.lora_[AB])\..+\.weight", k), p) for k, p in generator.transformer.named_parameters())
    return {match[1]: p.detach().cpu().contiguous() for match, p in found if match}


def _write_diffusers(policy: Aligned, folder: Path) -> dict[str, Tensor]:
    """alpha is multiplied into B, because readers that find no alpha take it to be the rank."""
    scale = policy.config.policy.alpha / policy.config.policy.rank
    tensors = {k: v * scale if k.endswith("lora_B") else v for k, v in _adapter(policy.generator).items()}
    save_file({f"transformer.{k}.weight": v for k, v in tensors.items()}, folder / DIFFUSERS_FILE, {"format": "pt"})
    return tensors


def _read_diffusers(policy: Aligned, folder: Path) -> tuple[Generator, Callable]:
    fresh = Generator.load(policy.config.generator).to(DEVICE)
    fresh.transformer.load_lora_adapter(str(folder), weight_name=DIFFUSERS_FILE, local_files_only=True)
    return fresh, fresh.transformer


def _write_peft(policy: Aligned, folder: Path) -> dict[str, Tensor]:
    told, tensors = policy.config.policy, _adapter(policy.generator)
    LoraConfig(
        r=told.rank, lora_alpha=told.alpha, target_modules=sorted({k.rpartition(".")[0] for k in tensors}),
        inference_mode=True, base_model_name_or_path=policy.config.generator,
    ).save_pretrained(folder)  # fmt: skip
    save_file({f"base_model.model.{k}.weight": v for k, v in tensors.items()}, folder / PEFT_FILE, {"format": "pt"})
    return tensors


def _read_peft(policy: Aligned, folder: Path) -> tuple[Generator, Callable]:
    fresh = Generator.load(policy.config.generator).to(DEVICE)
    return fresh, PeftModel.from_pretrained(fresh.transformer, str(folder)).eval()


def _merged(policy: Aligned) -> CausalWan:
    transformer = policy.generator.transformer
    if policy.config.policy.kind == "lora":
        transformer.fuse_lora()
        transformer.unload_lora()
    return transformer


def _write_merged(policy: Aligned, folder: Path) -> dict[str, Tensor]:
    transformer = _merged(policy)
    policy.generator.save(folder)
    return {k: v.cpu() for k, v in transformer.state_dict().items()}


def _read_merged(policy: Aligned, folder: Path) -> tuple[Generator, Callable]:
    fresh = Generator.load(folder).to(DEVICE)
    return fresh, fresh.transformer


def _write_official(policy: Aligned, folder: Path) -> dict[str, Tensor]:
    transformer = _merged(policy)
    save_official(transformer, folder / OFFICIAL_FILE)
    return {k: v.cpu() for k, v in transformer.state_dict().items()}


def _read_official(policy: Aligned, folder: Path) -> tuple[Generator, Callable]:
    fresh = Generator.load(policy.config.generator)
    mine = fresh.transformer.config
    fresh.transformer, _ = load_transformer(
        folder / OFFICIAL_FILE, fresh.transformer.dtype, head_dim=mine.attention_head_dim, prediction=mine.prediction
    )
    return fresh.to(DEVICE), fresh.transformer


FORMS = {
    "diffusers": (_write_diffusers, _read_diffusers),
    "peft": (_write_peft, _read_peft),
    "merged": (_write_merged, _read_merged),
    "official": (_write_official, _read_official),
}
