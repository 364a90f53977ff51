"""Train the inverse-dynamics network on the embedded world, measure it on held-out clips, and write its weights.

Besides neighbouring frames it sees pairs that no single action explains (frames skipped, cuts to another clip), with
the uniform distribution as the target: so motion at the wrong speed, or none of this world's, earns chance, not credit.
Shape letters: N pairs, A actions, H W pixels.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from arvideo_rl.config import SEEDS, ConfigError, check_choice, check_ranges
from arvideo_rl.outputs import check_file
from arvideo_rl.training.fit import fit, on_half, seeded, write
from arvideo_rl.world.dataset import HELD_OUT, Clips, load_clips
from arvideo_rl.world.scene import ACTIONS
from rewards import contract
from rewards.idm_network import InverseDynamicsNet, pack
from rewards.inverse_dynamics import InverseDynamics

LABELS = ACTIONS[1:]
HUGE = 1e9  # nats: no two networks disagree so much
REVERSED = [0, 2, 1, 4, 3]  # played backwards, the camera undoes its action: left <-> right, forward <-> back
MIRRORED = [0, 2, 1, 3, 4]
MOTION = np.array([[0, 0], [0, 0], [-1, 0], [1, 0], [0, 1], [0, -1]])  # turns and steps of each of ACTIONS


@dataclass(frozen=True)
class Augment:
    """Largest strengths of the disturbances; those of a pair are mostly shared by its two frames."""

    noise: float  # standard deviation of gaussian noise, per frame
    blur: int  # times a 3 x 3 box is applied, per frame
    light: float  # log of gain, contrast, gamma and of each colour's gain
    flicker: float  # log of a gain per frame
    coarse: float  # probability of halving the resolution
    reverse: bool  # half of the pairs played backwards
    mirror: bool  # half of the pairs seen in a mirror


AUGMENTS = {
    "main": Augment(noise=0.06, blur=2, light=0.4, flicker=0.15, coarse=0.0, reverse=True, mirror=False),
    "other": Augment(noise=0.08, blur=1, light=0.25, flicker=0.2, coarse=0.15, reverse=False, mirror=True),
    # for somebody's own videos, whose actions need not turn round with them
    "own": Augment(noise=0.06, blur=2, light=0.4, flicker=0.15, coarse=0.0, reverse=False, mirror=False),
    "own other": Augment(noise=0.08, blur=1, light=0.25, flicker=0.2, coarse=0.15, reverse=False, mirror=False),
}


@dataclass
class IdmConfig:
    """Fields of ``arvideo rewards train-idm``."""

    out: str = "idm.safetensors"  # weights; the report is written beside them as .json
    data: str = ""  # your videos with actions: a folder, glob or manifest; empty: clips of the embedded world
    size: int = 64  # pixels a side to which own videos are brought; VPT: 128
    members: int = 1  # networks of an ensemble, each with another seed and in turn another augmentation
    seed: int = 0
    steps: int = 1000
    batch: int = 256  # pairs a step
    lr: float = 2e-3  # highest learning rate (AdamW, cosine)
    augment: str = "main"  # main, or other: for a second network that only measures
    unexplained: float = 0.2  # share of pairs with skipped frames or a cut
    smooth: int = 8192  # training clips of style smooth
    joystick: int = 1024  # training clips of style joystick
    held_out_smooth: int = 512
    held_out_joystick: int = 256
    frames: int = 18  # pixel frames a clip

    def check(self) -> None:
        """Raise ValueError for a setting that cannot be."""
        check_choice("augment", self.augment, ("main", "other"))
        check_file(Path(self.out), suffixes=(".safetensors",))
        counts = dict.fromkeys(("steps", "batch", "smooth", "joystick"), "[1, inf)")
        counts |= {"size": "[16, 512]", "members": "[1, 16]"}
        if self.size % 8:
            low = self.size // 8 * 8
            raise ConfigError(f"size={self.size} is no multiple of 8; use {max(low, 16)} or {low + 8}")
        held_out = dict.fromkeys(("held_out_smooth", "held_out_joystick"), "[1, inf)")
        rest = {"seed": SEEDS, "lr": "(0, inf)", "unexplained": "[0, 1)", "frames": "[6, inf)"}  # frames are skipped
        check_ranges(self, counts | held_out | rest)
        for key in ("unexplained", "smooth", "joystick", "held_out_smooth", "held_out_joystick", "frames"):
            if self.data and (told := getattr(self, key)) != getattr(IdmConfig, key):
                raise ConfigError(f"{key}={told} is of clips of the embedded world; leave it out with data={self.data}")


def run(config: IdmConfig) -> dict[str, Any]:
    """Train, evaluate, write ``config.out`` and its .json. Returns the report."""
    config.check()
    seen = Console(stderr=True).is_terminal
    train = [load_clips(0, config.smooth, frames=config.frames, progress=seen),
             load_clips(0, config.joystick, frames=config.frames, style="joystick", progress=seen)]  # fmt: skip
    held_out = {
        "smooth": load_clips(HELD_OUT, config.held_out_smooth, frames=config.frames, progress=seen),
        "joystick": load_clips(HELD_OUT, config.held_out_joystick, frames=config.frames, style="joystick",
                               progress=seen),
    }  # fmt: skip
    start = time.monotonic()
    both = ("main", "other") if config.augment == "main" else ("other", "main")
    nets = [train_idm(train, seed=config.seed + i, steps=config.steps, batch=config.batch, lr=config.lr,
                      augment=AUGMENTS[both[i % 2]], unexplained=config.unexplained, progress=seen)
            for i in range(config.members)]  # fmt: skip
    seconds = time.monotonic() - start

    features, logits, truth = {}, {}, {}
    for style, clips in held_out.items():
        batches = clips.batch(np.arange(len(clips.pixels))).split(64)
        pairs = [(b[:, :-1].flatten(0, 1), b[:, 1:].flatten(0, 1)) for b in batches]
        features[style] = torch.cat([nets[0].features(first, second) for first, second in pairs])
        outputs = [torch.cat([net(first, second) for first, second in pairs]).softmax(-1) for net in nets]
        logits[style] = torch.stack(outputs).mean(0).clamp_min(1e-12).log()  # of all together
        truth[style] = clips.actions[:, 1:].flatten() - 1
    accuracy_of = {s: measure(logits[s], truth[s])["accuracy"] for s in held_out}
    told = torch.cat([c.actions[:, 1:].flatten() - 1 for c in train])
    counts = torch.bincount(told, minlength=len(LABELS)).clamp_min(1)
    report = {
        "labels": list(LABELS), "size": nets[0].size, "config": asdict(config), "seconds": round(seconds, 1),
        "command": "arvideo rewards train-idm " + " ".join(f"{k}={v}" for k, v in asdict(config).items()),
        "class_frequency": (counts / counts.sum()).tolist(), "accuracy_of": accuracy_of, "disagreement_95": HUGE,
        **measure(torch.cat([*logits.values()]), torch.cat([*truth.values()])),
    }  # fmt: skip
    reference = features["smooth"].double()  # the style that the tiny generator is trained on
    tensors = pack(nets, {
        "class_frequency": (counts / counts.sum()).float(),
        "frechet.mean": reference.mean(0),
        "frechet.cov": reference.T.cov(),
    })  # fmt: skip
    write(Path(config.out), tensors, report)  # the rest is scored from the file, as a user will
    if config.members > 1:
        reward, apart = InverseDynamics(config.out), []
        for clips in held_out.values():
            for rows in np.array_split(np.arange(len(clips.pixels)), -(-len(clips.pixels) // 64)):
                shown = contract.Clips(clips.batch(rows), actions=clips.actions[rows, 1:].contiguous())
                apart.append(contract.score(reward, shown).components["disagreement"])
        report["disagreement_95"] = float(torch.cat(apart).quantile(0.95))
    report["probes"] = {style: probe(InverseDynamics(config.out), clips) for style, clips in held_out.items()}
    write(Path(config.out), tensors, report)
    return report


def train_idm(clips: list[Clips], *, seed: int, steps: int, batch: int = 256, lr: float = 2e-3,
              augment: Augment = AUGMENTS["main"], unexplained: float = 0.2,
              progress: bool = False) -> InverseDynamicsNet:  # fmt: skip
    """Train on pairs of ``clips``, drawn evenly from each set. Returns the network, frozen; global RNG is untouched."""
    draw, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    net = seeded(seed, lambda: InverseDynamicsNet(len(LABELS), size=clips[0].pixels.shape[-1]))

    def loss_of(step: int) -> Tensor:
        pairs, target = sample_pairs(clips[step % len(clips)], batch, draw, unexplained)
        pairs, target = disturb(pairs, target, augment, noise)
        return F.cross_entropy(net(pairs[:, 0], pairs[:, 1]), target)

    return fit(net, loss_of, steps=steps, lr=lr, warm_up=0.1, about="the inverse dynamics", progress=progress)


def sample_pairs(clips: Clips, n: int, draw: np.random.Generator, unexplained: float) -> tuple[Tensor, Tensor]:
    """Draw pairs [n, 2, 3, H, W] and targets [n, A]: the action where one explains the pair, else the uniform."""
    count, frames = clips.pixels.shape[:2]
    rows, at = draw.integers(count, size=n), draw.integers(frames - 1, size=n)
    odd = draw.random(n) < unexplained
    gap = np.where(odd, draw.integers(2, 6, size=n), 1)
    at = np.minimum(at, frames - 1 - gap)
    cut = odd & (draw.random(n) < 0.3)
    other = np.where(cut, (rows + draw.integers(1, max(count, 2), size=n)) % count, rows)
    pairs = np.stack([clips.pixels[rows, at], clips.pixels[other, at + gap]], 1)

    moved = np.concatenate([np.zeros((count, 1, 2), int), MOTION[clips.actions[:, 1:].numpy()].cumsum(1)], 1)
    net_motion = moved[rows, at + gap] - moved[rows, at]
    match = (MOTION[None, 1:] == net_motion[:, None]).all(-1) & ~cut[:, None]  # [n, A]
    target = np.where(match.any(1, keepdims=True), match, 1 / len(LABELS))
    return torch.from_numpy(pairs).float() / 255, torch.from_numpy(target).float()


def disturb(pairs: Tensor, target: Tensor, a: Augment, noise: torch.Generator) -> tuple[Tensor, Tensor]:
    """Disturb ``pairs`` [N, 2, 3, H, W] as generated and encoded video is; each effect on a random half of them."""
    n = len(pairs)
    some = on_half(n, noise)
    for wanted, permutation in ((a.reverse, REVERSED), (a.mirror, MIRRORED)):
        if wanted:
            on = torch.rand(n, generator=noise) < 0.5
            turned = pairs.flip(1) if permutation is REVERSED else pairs.flip(-1)
            pairs = torch.where(on[:, None, None, None, None], turned, pairs)
            target = torch.where(on[:, None], target[:, permutation], target)
    dark = torch.rand(n, 1, 1, 1, 1, generator=noise) < 0.1  # exposure far off
    gain = a.light * (some(1, 1, 1, 1) + some(1, 3, 1, 1)) + a.flicker * some(2, 1, 1, 1) - dark * 1.2
    pairs = pairs.clamp_min(1e-4).pow((a.light * some(1, 1, 1, 1)).exp()) * gain.exp()
    middle = pairs.mean((1, 2, 3, 4), keepdim=True)
    pairs = (middle + (pairs - middle) * (a.light * some(1, 1, 1, 1)).exp()).clamp(0, 1)
    for _ in range(a.blur):
        soft = F.avg_pool2d(pairs.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(pairs)
        pairs = pairs.lerp(soft, some(1, 1, 1, 1, low=0) * (1 - 0.3 * some(2, 1, 1, 1, low=0)))
    if a.coarse:
        half = F.interpolate(F.avg_pool2d(pairs.flatten(0, 1), 2), scale_factor=2, mode="bilinear").view_as(pairs)
        pairs = torch.where(torch.rand(n, 1, 1, 1, 1, generator=noise) < a.coarse, half, pairs)
    pairs = pairs + a.noise * some(1, 1, 1, 1, low=0) * torch.randn(pairs.shape, generator=noise)
    steps = 1 / (255 - 215 * some(1, 1, 1, 1, low=0))
    return ((pairs / steps).round() * steps).clamp(0, 1), target


def measure(logits: Tensor, truth: Tensor) -> dict[str, Any]:
    """Held-out numbers of ``logits`` [N, A] against ``truth`` [N]; rows of the confusion matrix are the truth."""
    size = logits.shape[-1]
    confusion = torch.bincount(truth * size + logits.argmax(-1), minlength=size * size).view(size, size)
    return {
        "accuracy": float(confusion.trace() / confusion.sum()),
        "balanced_accuracy": float((confusion.diagonal() / confusion.sum(1))[confusion.sum(1) > 0].mean()),
        "log_likelihood": float(-F.cross_entropy(logits, truth)),
        "majority_baseline": float(confusion.sum(1).max() / confusion.sum()),
        "transitions": int(confusion.sum()),
        "confusion": confusion.tolist(),
    }


def probe(reward: InverseDynamics, clips: Clips, count: int = 128) -> dict[str, dict[str, float]]:
    """Mean scores on real clips and on clips that should not pass, or should still pass, for them (rewards.md 5, 8)."""
    frames, actions = clips.batch(np.arange(min(count, len(clips.pixels)))), clips.actions[:count, 1:]
    t, dice = frames.shape[1], torch.Generator().manual_seed(0)
    shuffle = torch.randperm(t, generator=dice)
    blurred = F.avg_pool2d(frames.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(frames)
    grain = 0.05 * torch.randn(frames.shape, generator=dice)
    gain = 1 + 0.15 * (2 * torch.rand(len(frames), t, 1, 1, 1, generator=dice) - 1)
    back = torch.tensor(REVERSED)[actions - 1].flip(1) + 1  # what a clip played backwards really does
    cases = {
        "real": (frames, actions), "static": (frames[:, :1].expand_as(frames), actions),
        "wrong clip": (frames.roll(1, 0), actions), "shuffled": (frames[:, shuffle], actions),
        "reversed": (frames.flip(1), actions.flip(1)), "reversed, actions undone": (frames.flip(1), back),
        "flat grey": (torch.full_like(frames, 0.5), actions),
        "noise only": (torch.rand(frames.shape, generator=dice), actions),
        "double speed": (frames[:, ::2], actions[:, 1::2]), "darkened x 0.3": (frames * 0.3, actions),
        "blurred 3 x 3": (blurred, actions), "noise .05": ((frames + grain).clamp(0, 1), actions),
        "flicker .15": ((frames * gain).clamp(0, 1), actions),
    }  # fmt: skip
    out = {}
    for name, (seen, told) in cases.items():
        told = told[:, : seen.shape[1] - 1]
        scores = contract.score(reward, contract.Clips(seen, actions=told.contiguous()))
        out[name] = {k: round(float(v.mean()), 4) for k, v in scores.components.items()}
    return out
