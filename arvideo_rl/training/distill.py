"""Make the tiny generator: teacher-forced flow matching in the streaming context.

Chunks are walked in order. Each is denoised at several noise levels against the context that streaming would give it
(same window, sinks, positions), then refreshed at t = 0 and committed *with* gradient, so the window is gathered, no
dense mask is built, and training equals streaming by construction. After ``own_history_from`` the refreshed chunk is,
for a share of the clips, the network's own prediction instead of the clip: it then learns to repair its own errors
(scheduled sampling), which plain teacher forcing never shows it.

Loss: x0 error weighted by 1 / max(t, floor)^2, that is the velocity error with a floor.
Shape letters: B clips, M noise levels per chunk, F frames, C H W latent.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from arvideo_rl.config import SEEDS, ConfigError, check_choice, check_ranges
from arvideo_rl.generators.bundle import Generator, Streaming
from arvideo_rl.generators.codec import IdentityCodec
from arvideo_rl.generators.denoiser import Denoiser, Script
from arvideo_rl.generators.text import WordEncoder
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.outputs import check_folder
from arvideo_rl.progress import hidden
from arvideo_rl.training import rundir
from arvideo_rl.training.checkpoints import aside, load_checkpoint, newest, save_checkpoint, tidy
from arvideo_rl.training.interrupt import Stop
from arvideo_rl.world.dataset import OTHER, SIZE, SWITCHES, Clips, load_clips
from arvideo_rl.world.scene import ACTIONS, WORDS
from samplers.kernels import forward
from samplers.schedule import shift_level


@dataclass
class Network:
    """Size of the network to make."""

    dim: int = 192  # model width; heads are 32 wide
    layers: int = 6
    ffn: int = 576
    patch: tuple[int, int] = (8, 8)  # pixels of a token, height and width
    text_dim: int = 96


@dataclass
class DistillConfig:
    """What ``arvideo distill`` reads."""

    out: str = "runs/tiny"  # where checkpoints, curves and the finished generator go
    seed: int = 0
    start: str | None = None  # a generator to go on from, whose network it then is; null = from nothing
    steps: int = 2600
    clips: int = 8192  # rendered once and cached
    switch_clips: int = 2048  # more clips, in which the prompt changes on the way; 0 = none
    joystick_clips: int = 0  # more clips, with a new command every few frames
    batch: int = 3  # clips per step
    levels: int = 2  # noise levels per chunk, stratified
    muon_lr: float | None = 4e-3  # of Muon on the hidden matrices; null = AdamW takes them too
    adam_lr: float = 2e-3  # everything else
    warmup: int = 50
    decay: float = 0.35  # the last share of the steps, in which the rates fall linearly to zero
    ema: float = 0.995
    train_shift: float = 4.0  # warps uniform noise levels towards 1, where motion is decided; 1 = uniform
    pure_noise: float = 0.2  # share of rows at exactly t = 1, where the few-step sampler starts
    floor: float = 0.5  # of t in the loss weight
    first_weight: float = 2.0  # of the first chunk's loss, where it is decided what there is to see; later chunks: 1
    history_noise: float = 0.08  # at most this much noise is mixed into refreshed chunks
    own_history: float = 0.5  # share of clips whose history is the network's own prediction
    own_history_from: float = 0.7  # share of the steps after which that begins
    drop_actions: float = 0.15  # share of clips trained with no actions, so that captions alone can steer
    drop_all: float = 0.0  # share trained with neither caption nor actions, for a teacher that is guided away from that
    save_every: int = 100
    keep_last: int = 2  # checkpoints kept
    network: Network = field(default_factory=Network)
    streaming: Streaming = field(default_factory=Streaming)


COUNT, SHARE, POSITIVE = "[1, inf)", "[0, 1]", "(0, inf)"
RANGES = {
    "seed": SEEDS, "steps": COUNT, "clips": f"[1, {OTHER}]", "switch_clips": f"[0, {OTHER}]",
    "joystick_clips": f"[0, {OTHER}]", "batch": COUNT,
    "levels": COUNT, "muon_lr": POSITIVE, "adam_lr": POSITIVE, "warmup": COUNT, "decay": SHARE, "ema": "[0, 1)",
    "train_shift": POSITIVE, "pure_noise": SHARE, "floor": "(0, 1]", "first_weight": POSITIVE, "history_noise": SHARE,
    "own_history": SHARE, "own_history_from": SHARE, "drop_actions": SHARE, "drop_all": SHARE,
    "save_every": COUNT, "keep_last": COUNT,
    "network.layers": COUNT, "network.ffn": COUNT, "network.text_dim": COUNT, "streaming.chunk": COUNT,
    "streaming.window": COUNT, "streaming.sink": "[0, inf)", "streaming.shift": POSITIVE, "streaming.fps": POSITIVE,
    "streaming.trained_frames": COUNT,
}  # fmt: skip
FREE_ON_RESUME = ("out", "save_every", "keep_last")  # steps is not free: the rates fall towards its end


def check(config: DistillConfig) -> None:
    """Refuse what cannot be trained, in one line."""
    check_ranges(config, RANGES)
    check_choice("streaming.positions", config.streaming.positions, ("adjacent", "absolute"))
    steps, frames, chunk = config.streaming.steps, config.streaming.trained_frames, config.streaming.chunk
    if not steps or not all(1000 >= a > b for a, b in zip(steps, (*steps[1:], 0))):
        raise ConfigError(f"streaming.steps={list(steps)}: give falling numbers from 1000 down, above 0")
    if frames % chunk:
        near = f"{frames // chunk * chunk or chunk} or {(frames // chunk + 1) * chunk}"
        raise ConfigError(f"streaming.trained_frames={frames} is not whole chunks of {chunk}; use {near}")
    if config.network.text_dim % 4:
        raise ConfigError(
            f"network.text_dim={config.network.text_dim}: the text encoder has 4 heads, use a multiple of 4"
        )
    check_folder(Path(config.out))
    if config.streaming.size != SIZE:
        raise ValueError(f"streaming.size={config.streaming.size}: the world is rendered at {SIZE}")
    if config.network.dim < 32 or config.network.dim % 32:
        raise ValueError(f"network.dim={config.network.dim}: heads are 32 wide, use a multiple of 32")
    if any(p < 1 or SIZE % p for p in config.network.patch):
        raise ValueError(f"network.patch={list(config.network.patch)}: both must divide {SIZE}")
    config.streaming.attention_window()  # refuses a window below sink + chunk
    s = config.streaming
    untrained = {k: getattr(s, k) for k in ("recompute", "linear", "first_alone", "joint", "refresh_level")}
    for key, used in (untrained | {"at_switch": s.at_switch.startswith("recache")}).items():
        if used:
            raise ConfigError(f"streaming.{key}={getattr(s, key)} cannot be trained from nothing here; leave it out")


def build(config: DistillConfig) -> Generator:
    """A freshly initialised generator, or the one to start from, to be streamed as ``config`` says."""
    torch.manual_seed(config.seed)
    if config.start is not None:
        known = Generator.load(config.start)
        if not isinstance(known.text_encoder, WordEncoder):
            raise ConfigError(f"start={config.start} is not a small generator, which is all that is trained here")
        return replace(known, streaming=config.streaming)
    n = config.network
    transformer = CausalWan(
        patch_size=(1, *n.patch), num_attention_heads=n.dim // 32, attention_head_dim=32, in_channels=3,
        out_channels=3, text_dim=n.text_dim, freq_dim=128, ffn_dim=n.ffn, num_layers=n.layers, prediction="x0",
        num_actions=len(ACTIONS), places=(config.streaming.chunk, *(config.streaming.size // p for p in n.patch)),
    )  # fmt: skip
    nn.init.normal_(transformer.action_embedding.weight, std=0.02)
    nn.init.zeros_(transformer.proj_out.weight)
    encoder = WordEncoder(words=WORDS, dim=n.text_dim)
    return Generator(transformer, encoder, IdentityCodec(), config.streaming)


def optimizers(generator: Generator, config: DistillConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks unless it is off, AdamW for all other parameters."""
    assert isinstance(generator.text_encoder, WordEncoder)
    named = list(generator.transformer.named_parameters())
    muon_lr = config.muon_lr
    hidden = [p for k, p in named if muon_lr is not None and k.startswith("blocks.") and p.ndim == 2]
    chosen = {id(p) for p in hidden}
    other = [p for _, p in named if id(p) not in chosen] + list(generator.text_encoder.parameters())
    adam = torch.optim.AdamW(other, lr=config.adam_lr, betas=(0.9, 0.99), weight_decay=0.01)
    return [adam] if muon_lr is None else [torch.optim.Muon(hidden, lr=muon_lr, weight_decay=0.01), adam]


def rate(step: int, config: DistillConfig) -> float:
    """Learning-rate factor: warm-up, plateau, linear decay to zero."""
    decay_steps = max(1, int(config.decay * config.steps))
    return min(1.0, (step + 1) / config.warmup, (config.steps - step) / decay_steps)


def draw_levels(rng: np.random.Generator, rows: int, config: DistillConfig) -> Tensor:
    """Noise levels [M, rows], stratified over M, warped, some of them exactly 1."""
    m = config.levels
    u = (np.arange(m)[:, None] + rng.random((m, rows))) / m
    t = np.vectorize(shift_level)(np.clip(u, 1e-3, 1.0), config.train_shift)
    t[-1][rng.random(rows) < config.pure_noise * m] = 1.0
    return torch.from_numpy(t).float()


def clip_loss(
    generator: Generator, clips: Clips, rows: np.ndarray, step: int, config: DistillConfig
) -> tuple[Tensor, dict[str, float]]:
    """Loss of the clips in ``rows`` and its parts by noise level."""
    rng = np.random.default_rng((config.seed, step, 1))
    latents = generator.codec.encode(clips.batch(rows))
    b = latents.shape[0]
    texts = {f: clips.captions_at(rows, f) for f in (0, *SWITCHES)}
    changes = [f for i, f in enumerate(texts) if i == 0 or texts[f] != list(texts.values())[i - 1]]
    nothing = torch.from_numpy(np.random.default_rng((config.seed, step, 2)).random(b) < config.drop_all)
    embedded = {f: generator.text_encoder.embed(texts[f]) for f in changes}
    encoded = tuple((f, text.masked_fill(nothing[:, None, None], 0.0)) for f, text in embedded.items())
    dropped = torch.from_numpy(rng.random(b) < config.drop_actions) | nothing
    actions = torch.where(dropped[:, None], 0, clips.actions[rows])
    window = generator.streaming.attention_window()
    denoiser = Denoiser(generator.transformer, window, Script(encoded, actions))
    own = torch.from_numpy(rng.random(b) < config.own_history * (step >= config.own_history_from * config.steps))
    context, total, parts = window.start(), torch.zeros(()), []
    bounds = window.chunks(latents.shape[1])
    for start, stop in bounds:
        context = denoiser.enter(context)
        x0 = latents[:, start:stop]
        t = draw_levels(rng, b, config)  # [M, B]
        noise = torch.from_numpy(rng.standard_normal((config.levels, *x0.shape), dtype=np.float32))
        x = forward(x0, noise, t[:, :, None, None, None, None]).flatten(0, 1)
        out = generator.transformer(x, t.flatten(), context).x0.unflatten(0, (config.levels, b))
        error = (out - x0).square().mean((2, 3, 4, 5))  # [M, B]
        weight = config.first_weight if start == 0 else 1.0
        total = total + weight * (error / t.clamp_min(config.floor) ** 2).mean()
        parts.append(torch.stack([t.flatten(), error.detach().flatten()], -1))
        if stop == bounds[-1][1]:
            break  # nothing reads the last chunk

        history = torch.where(own[:, None, None, None, None], out[0].detach(), x0)
        level = torch.from_numpy(rng.random(b).astype(np.float32) * config.history_noise)
        eps = torch.from_numpy(rng.standard_normal(x0.shape, dtype=np.float32))
        refreshed = forward(history, eps, level[:, None, None, None, None])
        span = generator.transformer(refreshed, torch.zeros(b), context, write=True).span
        context = window.commit(context, span)
    seen = torch.cat(parts)
    metrics = {}
    for low, high in ((0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 0.999), (0.999, 1.1)):
        inside = (seen[:, 0] > low) & (seen[:, 0] <= high)
        if inside.any():
            metrics[f"x0_error/t{min(high, 1.0):.2f}"] = seen[inside, 1].mean().item()
    return total / (len(bounds) - 1 + config.first_weight), metrics


def train(
    generator: Generator, clips: Clips, config: DistillConfig, folder: Path, stop: Stop, progress: bool = True
) -> None:
    """Train in place and leave the moving average in ``generator``; continues from ``folder`` when it can."""
    parameters = {
        f"{name}.{k}": p
        for name in ("transformer", "text_encoder")
        for k, p in getattr(generator, name).named_parameters()
    }
    average = {k: p.detach().clone() for k, p in parameters.items()}
    opts = optimizers(generator, config)
    first, spent = _resume(folder, parameters, average, opts, config.keep_last)
    log = rundir.rows(folder / "metrics.jsonl", "step", first)
    begun = time.time() - spent
    for step in track(range(first, config.steps), "training", disable=not progress or hidden()):
        rows = np.random.default_rng((config.seed, step)).integers(0, len(clips.captions), config.batch)
        loss, metrics = clip_loss(generator, clips, rows, step, config)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"gradient is not finite at step {step}; resume from {folder} with a lower rate")
        for opt in opts:
            base = (config.muon_lr or 0.0) if isinstance(opt, torch.optim.Muon) else config.adam_lr
            for group in opt.param_groups:
                group["lr"] = base * rate(step, config)
            opt.step()
            opt.zero_grad(set_to_none=True)
        decay = min(config.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in parameters.values()], 1 - decay)
        row = {"step": step, "loss": loss.item(), "grad_norm": norm.item(), "seconds": time.time() - begun, **metrics}
        log.write(json.dumps(row) + "\n")
        log.flush()
        if stop.asked() or (step + 1) % config.save_every == 0 or step + 1 == config.steps:
            os.fsync(log.fileno())
            _save(folder, step + 1, parameters, average, opts, row["seconds"], config.keep_last)
        if stop.asked():
            raise stop.interrupted(f"saved after step {step + 1} of {config.steps}")
    with torch.no_grad():
        for k, p in parameters.items():
            p.copy_(average[k])


def _save(folder: Path, step: int, parameters: dict, average: dict, opts: list, seconds: float, keep_last: int) -> None:
    tensors = {f"live.{k}": p.detach() for k, p in parameters.items()} | {f"ema.{k}": p for k, p in average.items()}
    states = [opt.state_dict() for opt in opts]
    save_checkpoint(folder, step, tensors, states, {"seconds": seconds}, keep_last=keep_last)


def _resume(folder: Path, parameters: dict, average: dict, opts: list, keep_last: int) -> tuple[int, float]:
    """(steps done, seconds spent on them); clears away what a run that died left in ``folder``."""
    found = newest(folder, load_checkpoint, print)
    tidy(folder, found and found.path, keep_last)
    if found is None:
        return 0, 0.0
    with torch.no_grad():
        for k, p in parameters.items():
            p.copy_(found.tensors[f"live.{k}"])
            average[k].copy_(found.tensors[f"ema.{k}"])
    for opt, data in zip(opts, found.optimizer):
        opt.load_state_dict(data)
    print(f"continuing {folder} after step {found.state['step']}")
    return found.state["step"], found.state.get("seconds", 0.0)


def run(config: DistillConfig, progress: bool = True) -> Path:
    """Train and write the generator to ``<out>/generator``; returns that folder. A finished run is left as it is;
    Interrupted, after saving, on Ctrl-C or SIGTERM."""
    check(config)
    folder, written = Path(config.out), Path(config.out) / "generator"
    if rundir.look(folder, "distill", asdict(config), FREE_ON_RESUME) and written.is_dir():
        print(f"{folder} is finished; its schedule ends with steps={config.steps}, to train more take another out=")
        return written
    with Stop(f"arvideo distill {folder / 'config.yaml'}") as stop:
        rundir.claim(folder, "distill", asdict(config), FREE_ON_RESUME)
        rundir.start(folder, None, asdict(config))
        frames = config.streaming.trained_frames
        clips = load_clips(0, config.clips, frames=frames, progress=progress)
        first = config.clips
        for style, count in (("switch", config.switch_clips), ("joystick", config.joystick_clips)):
            if count:
                clips = Clips.join(clips, load_clips(first, count, frames=frames, style=style, progress=progress))
                first += count
        generator = build(config)
        with stop.later():
            train(generator, clips, config, folder, stop, progress)
        with aside(written) as draft:
            generator.save(draft, torch.float16)
    return written


def plan(config: DistillConfig) -> dict[str, str]:
    """Sizes that follow from the configuration, as text by name (``--dry-run``)."""
    check(config)
    generator = build(config)
    count = sum(p.numel() for p in generator.transformer.parameters())
    chunks = len(generator.streaming.attention_window().chunks(config.streaming.trained_frames))
    rows = config.batch * (config.levels + 1)
    number = config.clips + config.switch_clips + config.joystick_clips
    size = number * config.streaming.trained_frames * 3 * config.streaming.size**2
    return {
        "parameters": f"{count:,} (float16 on disk: {2 * count / 2**20:.1f} MiB)",
        "noise levels of the sampler": ", ".join(f"{t:.4g}" for t in generator.streaming.levels),
        "forwards per step": f"{chunks} chunks x {rows} rows",
        "clips on disk": f"{number} clips, {size / 2**20:.0f} MiB, rendered once",
    }
