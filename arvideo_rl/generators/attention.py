"""The kernel that computes attention, through diffusers' dispatcher: chosen once, tried on the device, then said.

``native`` is torch's own choice and needs nothing else. The others are faster on some GPUs, and none of them may
silently compute something else: :func:`choose` compares each with exact attention before it is used.
"""

from __future__ import annotations

import importlib.metadata

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _check_attention_backend_requirements,
    dispatch_attention_fn,
)

from arvideo_rl.generators.transformer import CausalWan

BACKENDS = {  # ours: diffusers' name, and what brings it
    "native": ("native", "torch"),
    "math": ("_native_math", "torch"),
    "cudnn": ("_native_cudnn", "torch"),
    "flex": ("flex", "torch"),
    "flash": ("flash", "flash-attn"),
    "flash3": ("_flash_3", "flash-attn-3"),
    "sage": ("sage", "sageattention"),
    "xformers": ("xformers", "xformers"),
}
ERROR = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # relative, above which it is refused
QUANTISED = {"sage": 0.1}  # computes in 8 bits on purpose


def choose(transformer: CausalWan, name: str, *, trains: bool = False, masked: bool = False) -> str:
    """Make ``name`` the kernel of ``transformer`` and say so in one line. ValueError when it is unknown, not installed,
    does not run on the transformer's device and dtype, differs from exact attention, or, where the run ``trains`` or
    the window weakens the past (``masked``), lacks what that takes."""
    if name not in BACKENDS:
        raise ValueError(f"attention={name}: unknown; choose one of {', '.join(BACKENDS)}")
    weight = transformer.blocks[0].attn1.to_q.weight  # loading keeps norms and others in float32; this is what attends
    error = attempt(name, weight.device, weight.dtype, transformer.config.attention_head_dim, trains, masked)
    transformer.attention = AttentionBackendName(BACKENDS[name][0])
    said = f"attention {name} ({version_of(name)}, {str(weight.dtype)[6:]} on {weight.device.type})"
    return said if name == "math" else f"{said}: within {error:.0e} of exact"


def attempt(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int, trains: bool = False, masked: bool = False
) -> float:
    """Relative error of one small call against exact attention; ValueError with the reason when it cannot be used."""
    backend = AttentionBackendName(BACKENDS[name][0])
    source = torch.Generator().manual_seed(0)
    shapes = ((2, 128, 2, head_dim), (2, 384, 2, head_dim), (2, 384, 2, head_dim))  # more keys than queries
    q, k, v = (torch.randn(s, generator=source).to(device, dtype).requires_grad_(trains) for s in shapes)
    bias = torch.zeros(1, 1, 1, 384, device=device, dtype=dtype)
    bias[..., 64:256] = -1.2
    try:
        _check_attention_backend_requirements(backend)
        out = dispatch_attention_fn(q, k, v, attn_mask=bias if masked else None, backend=backend)
        if trains:
            out.float().sum().backward()
            if any(x.grad is None for x in (q, k, v)):
                raise ValueError("it gives no gradients")
    except Exception as fault:  # whatever a kernel raises is the finding
        first = (str(fault).strip().splitlines() or [type(fault).__name__])[0]
        raise ValueError(f"attention={name} does not work on {device.type} in {str(dtype)[6:]}: {first}") from None
    logits = torch.einsum("bqnd,bknd->bnqk", q.float(), k.float()) / head_dim**0.5
    weights = (logits + bias.float() if masked else logits).softmax(-1)
    exact = torch.einsum("bnqk,bknd->bqnd", weights, v.float())
    error = ((out.float() - exact).norm() / exact.norm()).item()
    bound = QUANTISED.get(name, ERROR.get(dtype, 1e-4))
    if not error < bound:
        off = f"{error:.2g} of exact attention; allowed {bound:g}"
        raise ValueError(f"attention={name} on {device.type} is off by {off}")
    return error


def version_of(name: str) -> str:
    """The package that brings a backend, with its version."""
    package = BACKENDS[name][1]
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return package
