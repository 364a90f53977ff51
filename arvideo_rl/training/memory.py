"""How much memory an alignment takes, from its configuration: of float32 tensors, estimated, before anything runs."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.settings import AlignConfig, build_objective

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
LOWER = {
    "weights": "policy.kind=lora keeps one copy of them",
    "adapters and optimizer": "lower policy.rank",
    "context": "lower rollout_batch, update_batch and held_out.batch",
    "one chunk's graph": "lower update_batch or objective.args.levels_per_chunk",
    "rollout": "lower prompts_per_step, group or frames",
}


def estimate(config: AlignConfig, generator: Generator, trainable: int) -> dict[str, int]:
    """Bytes on one process by what they are for; ``trainable`` is the number of trained parameters."""
    s, model = generator.streaming, generator.transformer
    objective = build_objective(config.objective, config.frames // s.chunk)
    _, levels = objective.levels_trained(s.levels)
    _, p_h, p_w = model.config.patch_size
    _, channels, height, width = generator.latent_shape
    tokens = (height // p_h) * (width // p_w)
    dim = model.config.num_attention_heads * model.config.attention_head_dim
    longest = max(config.frames, config.held_out.frames)
    held = min(s.window or longest, longest)
    weights = sum(p.numel() for k, p in model.named_parameters() if "lora_" not in k)
    at_once = config.group if objective.exploration.forks else config.update_batch  # a fork is taken group by group
    streams = max(config.rollout_batch, at_once, config.held_out.batch)
    rows = at_once * levels * s.chunk * tokens
    if getattr(objective, "packed", False):  # all noisy chunks, and the clean ones that they read
        chunks = config.frames // s.chunk
        rows = rows * chunks + at_once * (chunks - 1) * s.chunk * tokens
    steps = 2 * len(s.levels) if objective.exploration.steps else 0
    branches, moving = config.prompts_per_step * config.group, config.pull.reference == "dynamic"
    latents = config.frames * channels * height * width
    pixels = generator.codec.pixel_frames(config.frames) * 3 * s.size * (s.width or s.size)
    return {
        "weights": 4 * weights * (1 if config.policy.kind == "lora" else 3 + moving),  # current, old and start
        # old or gradient, and two moments, besides the weight itself
        "adapters and optimizer": 4 * trainable * (4 + (moving and config.policy.kind == "lora")),
        "context": 2 * 4 * model.config.num_layers * held * tokens * dim * streams,
        "one chunk's graph": 4 * rows * model.config.num_layers * (14 * dim + 2 * model.config.ffn_dim),
        "rollout": 4 * branches * (latents * (1 + steps) + pixels),
    }


def limit(device: torch.device) -> int:
    """Bytes that a process on ``device`` can have at most: of the GPU, or of the machine or its container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    told = [path.read_text().strip() for path in CGROUP if path.is_file()]
    return min([psutil.virtual_memory().total, *(int(x) for x in told if x.isdigit())])


def check_memory(needed: dict[str, int], most: int) -> None:
    """ConfigError when ``needed`` plainly exceeds ``most`` bytes; names the two largest parts and how to lower them."""
    if sum(needed.values()) <= most:
        return
    top = sorted(needed, key=lambda k: -needed[k])[:2]
    parts = "; ".join(f"{name} {size(needed[name])}: {LOWER[name]}" for name in top)
    raise ConfigError(f"needs about {size(sum(needed.values()))} of memory, there are {size(most)}: {parts}")


def size(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
