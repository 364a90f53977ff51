"""Verifiers: what can be measured on any clip of the world without training on it.

They judge a run from outside: none is ever a reward. Each takes pixels [B, T, 3, H, W] in [0, 1] with the clip's
caption and commanded actions [B, T] and returns one number per clip [B], NaN where the caption is not one of the
world's; higher is better. The Frechet distance is a
property of a set of clips and lower is better.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from arvideo_rl.world.render import intrinsics
from arvideo_rl.world.scene import COLOURS, STEP, TURN, parse_caption

HUES = {"red": 2.0, "yellow": 52.0, "green": 126.0, "blue": 229.0}  # degrees
TYPICAL_DEPTH = 4.2  # metres; objects start 3 to 6 m away
STILL = 0.22  # pixels a frame at 32 pixels width; a slower object counts as not travelling


def colour_mask(pixels: Tensor, colour: str) -> Tensor:
    """Where pixels [..., 3, H, W] have the hue of ``colour`` and are as saturated as objects: bool [..., H, W]."""
    r, g, b = pixels.unbind(-3)
    high, low = pixels.amax(-3), pixels.amin(-3)
    chroma = (high - low).clamp_min(1e-6)
    hue = torch.where(
        high == r, (g - b) / chroma % 6, torch.where(high == g, (b - r) / chroma + 2, (r - g) / chroma + 4)
    )
    apart = ((hue * 60 - HUES[colour] + 180) % 360 - 180).abs()
    return (apart < 26) & (chroma / high.clamp_min(1e-6) > 0.5) & (high > 0.15)


def captioned(text: str) -> tuple:
    """The objects of a caption, or none when the sentence is not one of the world's (a user's own prompt)."""
    try:
        return parse_caption(text)
    except ValueError:
        return ()


def colour_present(pixels: Tensor, captions: list[str], actions: Tensor) -> Tensor:
    """Share of the first six frames in which every captioned colour fills a plausible part of the frame (0.4 % to
    25 %), averaged over objects. Painting the whole frame scores 0."""
    out = []
    for clip, text in zip(pixels[:, :6], captions):
        areas = [colour_mask(clip, o.colour).float().mean((-1, -2)) for o in captioned(text)]
        seen = [((a > 0.004) & (a < 0.25)).float().mean() for a in areas]
        out.append(torch.stack(seen).mean() if seen else torch.tensor(torch.nan))
    return torch.stack(out)


def object_motion(clip: Tensor, colour: str, actions: Tensor) -> tuple[float, float, int]:
    """Mean sideways speed of a coloured object in pixels of a 32-pixel-wide frame per frame, corrected for the
    commanded camera; the spread of its height in pixels; and the number of transitions it was seen in."""
    t, _, h, w = clip.shape
    mask = colour_mask(clip, colour).float()
    area = mask.sum((-1, -2))
    x = (mask.sum(-2) * (torch.arange(w) + 0.5)).sum(-1) / area.clamp_min(1) * 32 / w - 16
    y = (mask.sum(-1) * (torch.arange(h) + 0.5)).sum(-1) / area.clamp_min(1) * 32 / h - 16
    inside = (area >= 4) & (x.abs() < 13.5)
    pairs = inside[1:] & inside[:-1]
    focal = intrinsics()[0, 0].item() * 32
    a = actions[1:t]
    turned = focal * TURN * ((a == 2).float() - (a == 3).float())
    zoomed = x[:-1] * STEP / TYPICAL_DEPTH * ((a == 4).float() - (a == 5).float())
    speed = (x[1:] - x[:-1] - turned - zoomed)[pairs]
    spread = y[inside].std(correction=0).item() if inside.any() else 0.0
    return (speed.mean().item() if pairs.any() else 0.0), spread, int(pairs.sum())


def direction_correct(pixels: Tensor, captions: list[str], actions: Tensor) -> Tensor:
    """Share of captioned objects that travel as the caption says: left, right, or (rest, bounce) nowhere. An object
    that cannot be found in at least three transitions is wrong."""
    out = []
    for clip, text, act in zip(pixels, captions, actions):
        right = []
        for o in captioned(text):
            speed, _, seen = object_motion(clip, o.colour, act)
            said = {"left": speed < -STILL, "right": speed > STILL}.get(o.motion, abs(speed) <= STILL)
            right.append(float(said and seen >= 3))
        out.append(sum(right) / len(right) if right else float("nan"))
    return torch.tensor(out)


def sharpness(pixels: Tensor, captions: list[str], actions: Tensor) -> Tensor:
    """Mean absolute difference between neighbouring pixels, in both directions, times 100; blur lowers it."""
    across = (pixels[..., 1:] - pixels[..., :-1]).abs().mean((1, 2, 3, 4))
    down = (pixels[..., 1:, :] - pixels[..., :-1, :]).abs().mean((1, 2, 3, 4))
    return 50 * (across + down)


def motion(pixels: Tensor, captions: list[str], actions: Tensor) -> Tensor:
    """Mean absolute change from frame to frame, times 100; a frozen clip scores 0."""
    return 100 * (pixels[:, 1:] - pixels[:, :-1]).abs().mean((1, 2, 3, 4))


VERIFIERS: dict[str, Callable[[Tensor, list[str], Tensor], Tensor]] = {
    "colour_present": colour_present,
    "direction_correct": direction_correct,
    "sharpness": sharpness,
    "motion": motion,
}
assert set(HUES) == set(COLOURS)


def frechet(features: Tensor, mean: Tensor, cov: Tensor) -> float:
    """Frechet distance between a Gaussian fitted to ``features`` [n, D] and the one given by mean [D] and cov [D, D].
    Lower is better; in the squared units of the features. Source of the formula: FID, arXiv 1706.08500."""
    x = features.double()
    if x.shape[0] <= x.shape[1]:
        few = f"more than {x.shape[1]} feature vectors, not {x.shape[0]} as here"
        raise ValueError(f"a Frechet distance in {x.shape[1]} dimensions needs {few}")
    mu, sigma = x.mean(0), torch.cov(x.T)
    root = np.linalg.eigvals((sigma @ cov.double()).numpy())
    cross = np.sqrt(np.clip(root.real, 0, None)).sum()
    return float((mu - mean.double()).square().sum() + sigma.trace() + cov.double().trace() - 2 * cross)
