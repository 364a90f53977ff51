"""Train the text-video network on the embedded world, measure it on held-out clips, and write its weights.

A caption of the world and copies with words exchanged are told apart word by word. Besides plain clips it sees such as
a policy under pressure may make: an object missing, frozen, cut to another scene half-way, painted over.
Shape letters: N clips, T frames, R captions a clip, L tokens.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor

from arvideo_rl.config import SEEDS, check_ranges
from arvideo_rl.outputs import check_file
from arvideo_rl.training.fit import fit, on_half, write
from arvideo_rl.world.captions import ATTRIBUTES, Shown, alter, caption_of, exchange, judge_words
from arvideo_rl.world.dataset import HELD_OUT, SIZE, to_uint8
from arvideo_rl.world.dataset import load_clips as load_pixels
from arvideo_rl.world.render import render
from arvideo_rl.world.scene import ACTIONS, CAMERA_WORDS, COLOURS, MOTION_WORDS, SHAPES, WORDS, Object, sample_scenes
from rewards import contract
from rewards.text_video import LENGTH, PADDING, WHOLE, WINDOW, TextVideo, TextVideoNet

LACKING = 700_000_000  # first seed of the scenes that are rendered without one of their objects
ALTERNATIVES = {
    "colour": [*COLOURS], "shape": [*SHAPES],
    "motion": sorted({w for words in MOTION_WORDS.values() for w in words.split()}),
    "camera": sorted({w for words in CAMERA_WORDS.values() for w in words.split()}),
}  # fmt: skip
ANOTHER = "another scene's"  # the wrong captions of the headline number
TOKEN = {word: i + 2 for i, word in enumerate(WORDS)}
IN_MIRROR, BACKWARDS = np.array([0, 1, 3, 2, 4, 5]), np.array([0, 1, 3, 2, 5, 4])  # actions as they are then seen
STEERING = 0.3  # weight of learning the actions
CAPTIONS = 5  # a clip and step: one as it is, the rest altered
SHORTEST = 9  # frames of a training window
LATEST = 3  # first frame of a training window; later on objects have left the view


@dataclass
class TextVideoConfig:
    """Fields of ``arvideo rewards train-text-video``."""

    out: str = "text_video.safetensors"  # weights; the report is written beside them as .json
    seed: int = 0
    half: int = 0  # 0 or 1: which half of the scenes; the shipped judge is trained on the other one
    steps: int = 1700
    batch: int = 32  # clips a step
    lr: float = 2e-3  # highest learning rate (AdamW, cosine)
    smooth: int = 8192  # training clips of style smooth, of which a half is used
    joystick: int = 4096  # training clips of style joystick, of which a half is used
    lacking: int = 768  # training clips rendered without one of their objects
    held_out: int = 256  # clips of each style to measure with
    frames: int = 18  # pixel frames a clip

    def check(self) -> None:
        """Raise ValueError for a setting that cannot be."""
        check_file(Path(self.out), suffixes=(".safetensors",))
        counts = dict.fromkeys(("steps", "batch", "lacking"), "[1, inf)")
        pairs = dict.fromkeys(("smooth", "joystick", "held_out"), "[2, inf)")
        rest = {"seed": SEEDS, "half": "[0, 1]", "lr": "(0, inf)", "frames": f"[{SHORTEST}, {WINDOW}]"}
        check_ranges(self, counts | pairs | rest)


@dataclass(frozen=True)
class Clips:
    """Pixels with what is seen in them."""

    pixels: np.ndarray  # [B, T, 3, H, W] uint8
    objects: tuple[tuple[Object, ...], ...]
    actions: np.ndarray  # [B, T]


def load_clips(first_seed: int, count: int, frames: int, style: str, half: int | None, progress: bool) -> Clips:
    """Rendered clips, all of them or every second one from ``half`` on."""
    pixels = load_pixels(first_seed, count, frames=frames, style=style, progress=progress).pixels
    scenes = sample_scenes(range(first_seed, first_seed + count), frames, style=style)
    rows = slice(half, None, None if half is None else 2)
    return Clips(pixels[rows], scenes.objects[rows], scenes.actions.numpy()[rows])


def lacking_clips(first_seed: int, count: int, frames: int, progress: bool) -> Clips:
    """Clips of scenes without their first object: it is neither seen nor true of them."""
    out = np.empty((count, frames, 3, SIZE, SIZE), np.uint8)
    objects, actions = [], []
    bars = Console(stderr=True)
    for at in track(range(0, count, 8), "rendering scenes that lack an object", console=bars, disable=not progress):
        scenes = sample_scenes(range(first_seed + at, first_seed + min(at + 8, count)), frames)
        present = scenes.present.clone()
        present[:, 0] = False
        out[at : at + 8] = to_uint8(render(replace(scenes, present=present), SIZE))
        objects += [o[1:] for o in scenes.objects]
        actions.append(scenes.actions.numpy())
    return Clips(out, tuple(objects), np.concatenate(actions))


def run(config: TextVideoConfig) -> dict[str, Any]:
    """Train, evaluate, write ``config.out`` and its .json. Returns the report."""
    config.check()
    seen = Console(stderr=True).is_terminal
    train = [load_clips(0, config.smooth, config.frames, "smooth", config.half, seen),
             load_clips(config.smooth, config.joystick, config.frames, "joystick", config.half, seen),
             lacking_clips(LACKING + config.half * config.lacking, config.lacking, config.frames, seen)]  # fmt: skip
    held_out = {s: load_clips(HELD_OUT, config.held_out, config.frames, s, None, seen) for s in ("smooth", "joystick")}
    start = time.monotonic()
    net = train_text_video(train, seed=config.seed, steps=config.steps, batch=config.batch, lr=config.lr, progress=seen)
    report: dict[str, Any] = {
        "words": list(WORDS), "alternatives": ALTERNATIVES, "size": net.size, "config": asdict(config),
        "seconds": round(time.monotonic() - start, 1),
        "command": "arvideo rewards train-text-video " + " ".join(f"{k}={v}" for k, v in asdict(config).items()),
    }  # fmt: skip
    tensors = {k: v.half() for k, v in net.state_dict().items()}
    write(Path(config.out), tensors, report)  # measured from the file, as a user will
    reward = TextVideo(config.out)
    report["auroc"] = {style: aurocs(reward, clips) for style, clips in held_out.items()}
    report["probes"] = {style: probe(reward, clips) for style, clips in held_out.items()}
    write(Path(config.out), tensors, report)
    return report


def train_text_video(clips: list[Clips], *, seed: int, steps: int, batch: int = 32, lr: float = 2e-3,
                     progress: bool = False) -> TextVideoNet:  # fmt: skip
    """Train on ``clips``: of every eight steps the last draws from the last set, the others from the rest in turn.
    Returns the network, frozen; the global random state is untouched.

    Beside the captions the actions are learned, from what is seen as a whole, by a layer that is then dropped: few
    captions speak of the camera, and which way an object went can only be told by who knows how the camera moved.
    """
    draw, noise = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = TextVideoNet(len(WORDS), size=clips[0].pixels.shape[-1])
        steer = torch.nn.Linear(net.when.shape[1], 2 * len(ACTIONS))
    net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def loss_of(step: int) -> Tensor:
        source = clips[-1] if step % 8 == 7 else clips[step % (len(clips) - 1)]
        frames, tokens, target, actions = sample_batch(source, batch, draw)
        asked = ~target.isnan()
        whole, places = net.watch(disturb(frames, noise, min(1.0, 2 * step / steps)))
        logits = net.answer(whole, places, tokens, asked)
        loss = F.binary_cross_entropy_with_logits(logits[asked], target[asked])
        starts = net.starts(frames.shape[1])
        drives = torch.stack([actions[:, starts], actions[:, starts + 1]], 2)  # the two changes of each tube
        steered = F.cross_entropy(steer(whole).view(-1, len(ACTIONS)), drives.flatten(), ignore_index=0)
        return loss + STEERING * steered

    return fit(net, loss_of, steps=steps, lr=lr, warm_up=0.02, about="the text-video model",
               beside=steer.parameters(), progress=progress)  # fmt: skip


def sample_batch(clips: Clips, n: int, draw: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw frames [n, T, 3, H, W], tokens [n, CAPTIONS, L], for each the share of the clip in which it is right
    [n, CAPTIONS, L], NaN where nothing is asked, and the actions [n, T-1] that are seen, 0 where none is."""
    count, most = clips.pixels.shape[:2]
    length = int(draw.integers(SHORTEST, most + 1))
    starts = draw.integers(0, min(LATEST, most - length) + 1, size=n)
    rows = draw.permutation(count)[:n] if n <= count else draw.integers(count, size=n)
    frames, shown, actions = [], [], np.zeros((n, length - 1), np.int64)
    for i, (row, at) in enumerate(zip(rows, starts)):
        span = slice(at, at + length)
        clip, what = clips.pixels[row, span], Shown.of(clips.objects[row], clips.actions[row, span].tolist())
        actions[i] = clips.actions[row, span][1:]
        if draw.random() < 0.5:
            clip, what, actions[i] = clip[..., ::-1], what.mirrored(), IN_MIRROR[actions[i]]
        if draw.random() < 0.5:
            clip, what, actions[i] = clip[::-1], what.reversed(), BACKWARDS[actions[i, ::-1]]
        if draw.random() < 0.06:
            clip, what, actions[i] = np.repeat(clip[draw.integers(length)][None], length, 0), what.frozen(), 1
        frames.append(clip)
        shown.append(what)
    pixels = torch.from_numpy(np.stack(frames)).float() / 255

    tokens = np.full((n, CAPTIONS, 1 + LENGTH), PADDING)
    target = np.full((n, CAPTIONS, 1 + LENGTH), np.nan, np.float32)
    last = np.where(draw.random(n) < 0.15, draw.integers(length // 3, length - length // 3 + 1, size=n), length)
    paint = torch.from_numpy(np.where(draw.random(n) < 0.05, draw.uniform(0.75, 1.0, n), 0.0)).float()
    tint = torch.tensor([[COLOURS[str(draw.choice([*COLOURS]))] for _ in range(n)]])[0]
    own = actions.copy()
    for i in range(n):
        other = (i + 1) % n
        if last[i] < length:
            actions[i, last[i] - 1], actions[i, last[i] :] = 0, own[other, last[i] :]
        pixels[i, last[i] :] = torch.from_numpy(frames[other][last[i] :].copy()).float() / 255
        parts = [(last[i] / length, shown[i]), (1 - last[i] / length, shown[other])]
        if paint[i] > 0:
            parts, actions[i] = [(1.0, Shown((), ()))], 0
        for r in range(CAPTIONS):
            told = shown[i] if r == 0 else alter(shown[i], shown[int(draw.integers(n))], draw)
            told = told.retold(draw)
            words = [WHOLE, *(TOKEN[w] for w in caption_of(told).split())]
            tokens[i, r, : len(words)] = words
            judged = [share * np.array(judge_words(told, what)) for share, what in parts if share]
            target[i, r, : len(words)] = sum(judged)
    pixels = torch.lerp(pixels, tint[:, None, :, None, None].expand_as(pixels), paint[:, None, None, None, None])
    longest = int((tokens != PADDING).sum(-1).max())
    said = torch.from_numpy(tokens[..., :longest]), torch.from_numpy(target[..., :longest])
    return pixels, *said, torch.from_numpy(actions)


def disturb(frames: Tensor, noise: torch.Generator, strength: float = 1.0) -> Tensor:
    """Disturb ``frames`` [N, T, 3, H, W] as generated and encoded video is, mostly alike in all frames of a clip; each
    effect on a random half of the clips, all of them ``strength`` times. Colours keep their names."""
    n, t, _, h, w = frames.shape
    some = on_half(n, noise, strength)
    ghost = 0.5 * some(1, 1, 1, 1, low=0)  # of the frame before
    frames = torch.lerp(frames, torch.cat([frames[:, :1], frames[:, :-1]], 1), ghost)
    for _ in range(2):
        soft = F.avg_pool2d(frames.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(frames)
        frames = frames.lerp(soft, some(1, 1, 1, 1, low=0) * (1 - 0.3 * some(t, 1, 1, 1, low=0)))
    gain = 0.3 * some(1, 1, 1, 1) + 0.08 * some(1, 3, 1, 1) + 0.1 * some(t, 1, 1, 1)
    frames = frames * gain.exp()
    blotches = 0.05 * some(1, 1, 1, 1, low=0) * torch.randn(n, t, 3, h // 4, w // 4, generator=noise)
    frames = frames + F.interpolate(blotches.flatten(0, 1), (h, w), mode="bilinear").view_as(frames)
    grain = 0.06 * some(1, 1, 1, 1, low=0) * torch.randn(frames.shape, generator=noise)
    return (frames + grain).clamp(0, 1)


def auroc(right: Tensor, wrong: Tensor) -> float:
    """Probability that a value of ``right`` [n] exceeds one of ``wrong`` [m], ties counting half."""
    above = (right[:, None] > wrong).double() + 0.5 * (right[:, None] == wrong).double()
    return float(above.mean())


def aurocs(reward: TextVideo, clips: Clips, seed: int = 0) -> dict[str, dict[str, float]]:
    """Right captions against wrong ones of the same clips, by what is wrong: AUROC of the value over all clips, and the
    share of clips whose own right caption scores higher (what counts inside a group)."""
    draw = np.random.default_rng(seed)
    frames = torch.from_numpy(clips.pixels).float() / 255
    shown = [Shown.of(o, a) for o, a in zip(clips.objects, clips.actions)]
    told = [s.retold(draw) for s in shown]

    def value(said: list[Shown], rows: list[int]) -> Tensor:
        return contract.score(reward, contract.Clips(frames[rows], prompts=[caption_of(s) for s in said])).value

    everything = list(range(len(frames)))
    wrong: dict[str, list[Shown | None]] = {ANOTHER: [told[(i + 1) % len(told)] for i in everything]}
    for name in ATTRIBUTES:
        wrong[name] = [replace(s, objects=(exchange(s.objects[0], name, draw, [o.colour for o in s.objects]),
                                           *s.objects[1:])) for s in told]  # fmt: skip
    wrong["direction"] = [replace(s, objects=sides) if s.objects != sides else None
                          for s, sides in ((s, _sides(s.objects)) for s in told)]  # fmt: skip
    wrong["camera"] = [replace(s, camera=(int(draw.choice([a for a in CAMERA_WORDS if a not in s.camera])),
                                          *s.camera[1:])) if s.camera else None for s in told]  # fmt: skip
    swapped = [tuple(replace(o, colour=p.colour) for o, p in zip(s.objects, s.objects[::-1])) for s in told]
    wrong["colours of two objects swapped"] = [
        replace(s, objects=o) if len(o) == 2 and (o[0].shape, o[0].motion) != (o[1].shape, o[1].motion) else None
        for s, o in zip(told, swapped)
    ]
    wrong["an object left out"] = [replace(s, objects=s.objects[:1]) if len(s.objects) == 2 else None for s in told]
    right = value(told, everything)
    out = {}
    for name, said in wrong.items():
        rows = [i for i in everything if (s := said[i]) is not None and caption_of(s) != caption_of(told[i])]
        if rows:
            bad = value([s for i in rows if (s := said[i]) is not None], rows)
            own = (right[rows] > bad).double().mean()
            out[name] = {"auroc": round(auroc(right[rows], bad), 4), "own": round(float(own), 4), "clips": len(rows)}
    return out


def _sides(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    return Shown(objects, ()).mirrored().objects


def probe(reward: TextVideo, clips: Clips) -> dict[str, dict[str, float]]:
    """Mean value and attributes on real clips and on ones that should score low, or should still score high."""
    frames = torch.from_numpy(clips.pixels).float() / 255
    prompts = [caption_of(replace(Shown.of(o, a), camera=())) for o, a in zip(clips.objects, clips.actions)]
    t, dice = frames.shape[1], torch.Generator().manual_seed(0)
    blurred = F.avg_pool2d(frames.flatten(0, 1), 3, 1, 1, count_include_pad=False).view_as(frames)
    gain = 1 + 0.15 * (2 * torch.rand(len(frames), t, 1, 1, 1, generator=dice) - 1)
    own = torch.tensor([COLOURS[o[0].colour] for o in clips.objects])[:, None, :, None, None].expand_as(frames)
    cases = {
        "real": frames, "another clip": frames.roll(1, 0), "frozen": frames[:, :1].expand_as(frames),
        "second half another clip's": torch.cat([frames[:, : t // 2], frames.roll(1, 0)[:, t // 2 :]], 1),
        "reversed": frames.flip(1), "shuffled": frames[:, torch.randperm(t, generator=dice)],
        "painted in the colour": own, "half painted": (frames + own) / 2, "flat grey": torch.full_like(frames, 0.5),
        "noise only": torch.rand(frames.shape, generator=dice), "darkened x 0.3": frames * 0.3,
        "blurred 3 x 3": blurred, "flicker .15": (frames * gain).clamp(0, 1),
        "noise .05": (frames + 0.05 * torch.randn(frames.shape, generator=dice)).clamp(0, 1),
    }  # fmt: skip
    out = {}
    for name, seen in cases.items():
        scores = contract.score(reward, contract.Clips(seen.contiguous(), prompts=prompts))
        parts = {"value": scores.value, **scores.components}
        out[name] = {k: round(float(v.nanmean()), 4) for k, v in parts.items() if not v.isnan().all()}
    return out
