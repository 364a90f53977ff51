"""How much memory an alignment takes, from its configuration, before anything runs.

Three phases are estimated, and the largest counts: drawing rollouts, updating on them, measuring held out. Counted are
tensors that grow with sizes: weights, adapters and their optimizer, the past (keys and values as kept, and again as
read), what one chunk's graph or one forward holds, what is recorded, pixels. Not counted: models of rewards, a text
encoder (it is dropped before training), the activations of a decoder but for guidance, what allocators and libraries
waste.
docs/speed.md has it against measured runs.

What a block saves of a token for its backward, counted in `_block` of transformer.py and checked against measured bytes
in tests/training/test_memory.py: inputs of three norms and of seven linears, queries before and after norm and
rotation, keys before the norm, two attention outputs: 13 dim; the feed-forward 2 ffn; a LoRA its rank at eight linears.
Besides, of every row, the keys and values that it attended to, text included.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import torch

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import PolicyConfig, trained_parameters
from arvideo_rl.objectives.contract import Objective
from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.training.critic import outlined
from arvideo_rl.training.settings import AlignConfig, build_objective

CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
LOWER = {
    "weights": "policy.kind=lora keeps one copy of them",
    "adapters and optimizer": "lower policy.rank",
    "teacher and critic": "objective.args.critic_kind=lora keeps one copy of their weights",
    "context": "lower rollout_batch, update_batch and held_out.batch",
    "one chunk's graph": "lower update_batch or objective.args.levels_per_chunk, or set checkpointing=true",
    "one forward": "lower rollout_batch and held_out.batch",
    "rollout": "lower prompts_per_step, group or frames",
    "pixels": "lower prompts_per_step, group, frames or held_out.batch",
}
FLOAT = 4  # bytes: norms, adapters, latents and pixels are float32 in a bfloat16 model too
LOSS = 16  # copies of its latents that the loss of a row holds, most of them in float64


def estimate(config: AlignConfig, generator: Generator, trainable: int, processes: int = 1) -> dict[str, int]:
    """Bytes on one process by what they are for, in the phase that needs most where the network is (pixels are always
    in the machine's memory); ``trainable`` is the number of trained parameters."""
    here = generator.transformer.device.type == "cpu"
    found = phases(config, generator, trainable, processes)
    return max(found.values(), key=lambda parts: sum(n for k, n in parts.items() if here or k != "pixels"))


def phases(config: AlignConfig, generator: Generator, trainable: int, processes: int = 1) -> dict[str, dict[str, int]]:
    """The same for every phase: rollout, update, held out."""
    s, model, size = generator.streaming, generator.transformer, config.held_out
    net, lora = model.config, config.policy.kind == "lora"
    objective = build_objective(config.objective, config.frames // s.chunk)
    kinds = {p.element_size() for k, p in model.named_parameters() if "lora_" not in k}
    width = min(kinds, default=FLOAT)  # of what the blocks compute in
    _, p_h, p_w = net.patch_size
    _, channels, height, breadth = generator.latent_shape
    tokens, dim = (height // p_h) * (breadth // p_w), net.num_attention_heads * net.attention_head_dim
    words, chunk = generator.text_tokens, s.chunk * tokens
    held = {n: min(s.window or n, n) for n in (config.frames, size.frames)}

    def kept(streams: int, frames: int) -> int:  # the past as kept, and as read for one chunk
        return 2 * width * net.num_layers * (2 * held[frames] - s.chunk) * tokens * dim * streams

    def attended(frames: int) -> int:
        return _attended(held[frames] * tokens, words, dim, width)

    def forward(rows: int, frames: int) -> int:
        return rows * (chunk * (8 * dim + 2 * net.ffn_dim) * FLOAT + attended(frames))

    def text_read(streams: int) -> int:  # keys and values of the prompt, made once a stream
        return 2 * width * net.num_layers * words * dim * streams

    rows, streams = rows_at_once(config, objective, s.levels)
    extra = 8 * config.policy.rank if lora else 5 * dim
    block = chunk * (13 * dim + 2 * net.ffn_dim + extra) * FLOAT + attended(config.frames)
    blocks = net.num_layers * chunk * dim * width + 2 * block if config.checkpointing else (net.num_layers + 1) * block
    latents = channels * height * breadth
    alone = blocks  # one stream's
    if getattr(objective, "packed", False):  # all noisy chunks, and the clean ones that they read
        blocks *= 2 * config.frames // s.chunk - 1
    if getattr(objective, "through_context", False):  # one forward of every chunk
        blocks *= config.frames // s.chunk
    graph = rows * (blocks + LOSS * FLOAT * s.chunk * latents)
    branches = config.prompts_per_step * config.group // processes
    steps = recorded_steps(config, objective, len(s.levels), s.chunk)
    text = words * net.text_dim * width
    record = branches * (FLOAT * latents * (config.frames + 2 * steps) + text)
    pixels = {n: FLOAT * 3 * generator.codec.pixel_frames(n) * s.size * (s.width or s.size) for n in held}
    bare = _weight_bytes(model)
    moving = config.pull.reference == "dynamic"
    always = {
        "weights": bare * (1 if lora else 3 + moving) + generator.codec.weight_bytes,  # current, old, start (reference)
        # current, old, gradient, two moments
        "adapters and optimizer": (20 + 4 * moving if lora else 12) * trainable,
    }
    if isinstance(objective, DMD):
        always["teacher and critic"], whole_clips = critic_bytes(config, objective)
        graph = max(graph, whole_clips)  # the critic's graph is gone before the policy's is made
    rolled = min(config.rollout_batch, config.group if objective.exploration.forks else branches)
    one = forward(rolled, config.frames)
    if objective.exploration.guide is not None:  # a chunk after the frame before it, decoded with gradient
        seen = generator.codec.pixel_frames(s.chunk + 1) * s.size * (s.width or s.size)
        one = rolled * (alone + generator.codec.graph_bytes * seen)
    archive = kept(1, config.frames) if isinstance(objective, KVRouting) else 0
    batch = min(size.batch, size.prompts * size.noises)
    return {
        "rollout": always | {"context": kept(rolled, config.frames) + text_read(rolled) + archive,
                             "one forward": one, "rollout": record},
        "update": always | {"context": kept(streams, config.frames), "one chunk's graph": graph, "rollout": record,
                            "pixels": pixels[config.frames] * branches},
        "held out": always | {"context": kept(batch, size.frames) + text_read(batch),
                              "one forward": forward(batch, size.frames),
                              "rollout": batch * size.frames * latents * FLOAT,
                              "pixels": 2 * pixels[size.frames] * batch},
    }  # fmt: skip


def critic_bytes(config: AlignConfig, objective: DMD) -> tuple[int, int]:
    """(what teacher and critic hold, the graph of one micro-batch of the critic, which reads whole clips at once)."""
    teacher, lora = outlined(objective.teacher), objective.critic_kind == "lora"
    model, net = teacher.transformer, teacher.transformer.config
    _, p_h, p_w = net.patch_size
    _, _, height, breadth = teacher.latent_shape
    dim, here = net.num_attention_heads * net.attention_head_dim, config.frames * (height // p_h) * (breadth // p_w)
    policy = PolicyConfig(objective.critic_kind, objective.critic_rank, float(objective.critic_rank))
    width = min({p.element_size() for k, p in model.named_parameters() if "lora_" not in k}, default=FLOAT)
    extra = 8 * objective.critic_rank if lora else 5 * dim
    read = _attended(here, teacher.text_tokens, dim, width)
    block = here * (13 * dim + 2 * net.ffn_dim + extra) * FLOAT + read
    blocks = net.num_layers * here * dim * width + 2 * block if config.checkpointing else (net.num_layers + 1) * block
    moments = (20 if lora else 12) * trained_parameters(model, policy)
    clips = min(config.update_batch, config.prompts_per_step * config.group)
    return _weight_bytes(model) * (1 if lora else 3) + moments, clips * blocks


def _attended(keys: int, words: int, dim: int, width: int) -> int:
    return (2 * keys + 3 * words) * dim * width


def _weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for k, p in model.named_parameters() if "lora_" not in k)


def at_once(config: AlignConfig, objective: Objective) -> int:
    """Branches of one micro-batch: where branches are compared with each other in the loss, a whole group."""
    kind = objective.exploration.kind
    return config.group if kind in ("fork", "pair", "churn", "route") else config.update_batch


def rows_at_once(config: AlignConfig, objective: Any, levels: tuple[float, ...]) -> tuple[int, int]:
    """Rows in the update's largest graph, and streams whose past it reads."""
    _, m = objective.levels_trained(levels)
    if isinstance(objective, KVRouting):
        group = config.group - 1
        some = min(objective.at_once or group, group)
        return some * m, some * objective.chunks
    if config.objective.target == "chunk_fork":
        return min(objective.anchors, config.group) * m, 1
    if config.objective.target == "pairs":
        return 2 * m, 1
    most = config.group if objective.exploration.forks else config.prompts_per_step * config.group
    batch = min(at_once(config, objective), most)
    return batch * m, batch


def recorded_steps(config: AlignConfig, objective: Objective, levels: int, chunk: int) -> int:
    """Frames, counted once a step, of which a branch keeps input and prediction."""
    if not objective.exploration.steps:
        return 0
    if isinstance(objective, KVRouting):
        return objective.chunks * chunk * levels
    return (chunk if objective.exploration.forks else config.frames) * levels


def limit(device: torch.device) -> int:
    """Bytes that a process on ``device`` can have at most: of the GPU, or of the machine or its container."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    told = [path.read_text().strip() for path in CGROUP if path.is_file()]
    return min([psutil.virtual_memory().total, *(int(x) for x in told if x.isdigit())])


def check_memory(needed: dict[str, int], most: int, pixels: bool = True) -> None:
    """ConfigError when ``needed`` plainly exceeds ``most`` bytes; names the two largest parts and how to lower them.
    ``pixels``: whether they are there too, and not in another memory."""
    needed = needed if pixels else {k: v for k, v in needed.items() if k != "pixels"}
    if sum(needed.values()) <= most:
        return
    top = sorted(needed, key=lambda k: -needed[k])[:2]
    parts = "; ".join(f"{name} {size(needed[name])}: {LOWER[name]}" for name in top)
    raise ConfigError(f"needs about {size(sum(needed.values()))} of memory, there are {size(most)}: {parts}")


def size(count: int) -> str:
    """Bytes as people say them."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
