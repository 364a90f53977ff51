"""Sharpness without weights: how much of a picture's change from pixel to pixel is fine detail and not noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from rewards.claims import Claims
from rewards.contract import Clips, Scores

LUMA = (0.299, 0.587, 0.114)
BINOMIAL = (1 / 16, 4 / 16, 6 / 16, 4 / 16, 1 / 16)  # the blur that fine detail does not survive
NOISE_KEPT = 28 * 70 / 2 / 256**2  # gradient energy of white noise after that blur, as a share of before
LEAST = 1e-6  # gradient energy (grey in [0, 1]) below which a frame holds nothing: half a grey level of 256 at an edge
MAD = 0.6745  # of a standard normal variable


def sharpness(clips: Clips, quantile: float = 0.25) -> Scores:
    """Share of gradient energy that a small blur removes and that is not noise, in [0, 1], at a low quantile of the
    frames, so that one good frame does not buy a clip. NaN, ``content:no_texture``, where frames hold nothing."""
    if not 0 <= quantile <= 1:
        raise ValueError(f"sharpness: quantile is {quantile}; it is a share of the frames, in [0, 1]")
    if min(clips.frames.shape[-2:]) < 8:
        raise ValueError(f"sharpness: frames are {tuple(clips.frames.shape[-2:])}; it needs 8 pixels or more a side")
    rows = [frame_sharpness(frames.detach().float().cpu()) for frames in clips.frames]
    empty = [bool((energy < LEAST).double().mean() > quantile) for _, energy, _ in rows]
    low = torch.stack([share.quantile(quantile) for share, _, _ in rows])
    value = low.masked_fill(torch.tensor(empty), math.nan).to(clips.frames.device)
    raw = {"gradient_energy": torch.stack([e.mean() for _, e, _ in rows]),
           "noise": torch.stack([n.mean() for _, _, n in rows])}  # fmt: skip
    return Scores(value, ~value.isnan(), ["content:no_texture" if e else None for e in empty], raw=raw)


def frame_sharpness(frames: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of ``frames`` [F, 3, H, W] in [0, 1]: share of fine detail [F], gradient energy [F], standard deviation of the
    noise [F]. White noise of that size is taken out of the gradients before and after the blur."""
    grey, blurred = _blurred(frames)
    before, after, noise = _energy(grey), _energy(blurred), noise_level(grey)
    detail = (before - after) - 4 * noise.square() * (1 - NOISE_KEPT)
    return (detail / before.clamp_min(LEAST)).clamp(0, 1), before, noise


def _blurred(frames: Tensor) -> tuple[Tensor, Tensor]:
    """Grey [F, 1, H, W] of ``frames`` [F, 3, H, W], and that after a small blur."""
    grey = (frames * torch.tensor(LUMA)[:, None, None]).sum(1, keepdim=True)
    taps = torch.tensor(BINOMIAL)
    return grey, conv2d(pad(grey, (2, 2, 2, 2), mode="replicate"), torch.outer(taps, taps)[None, None])


def detail(clips: Clips, quantile: float = 0.25) -> dict[str, Tensor]:
    """``detail``, to look at: each frame over the size of what the blur takes from it, white from .1 on; pictures
    [B, F, 3, 2 H, W]."""
    frames = clips.frames.detach().float().cpu()
    grey, blurred = _blurred(frames.flatten(0, 1))
    lost = ((grey - blurred).abs() / 0.1).clamp(0, 1).unflatten(0, frames.shape[:2])
    return {"detail": torch.cat([frames, lost.expand_as(frames)], 3)}


def noise_level(grey: Tensor) -> Tensor:
    """Standard deviation [F] of white noise in ``grey`` [F, 1, H, W]: the median of the finest diagonal detail, which
    edges hardly reach (Donoho's estimate, with the mask of Immerkaer 1996)."""
    second = torch.tensor([1.0, -2.0, 1.0])
    detail = conv2d(grey, torch.outer(second, second)[None, None])
    return detail.abs().flatten(1).median(1).values / (6 * MAD)


def _energy(grey: Tensor) -> Tensor:
    """Mean squared difference of neighbours, down plus across, [F]; white noise of variance s has 4 s."""
    down, across = grey.diff(dim=2), grey.diff(dim=3)
    return down.square().mean((1, 2, 3)) + across.square().mean((1, 2, 3))


sharpness.formula = (  # type: ignore[attr-defined]
    "share of gradient energy that a small blur removes, less noise; low quantile of frames"
)
sharpness.cost = "about 10 ms a frame at 256 x 448, on one CPU thread"  # type: ignore[attr-defined]
sharpness.value_range = (0.0, 1.0)  # type: ignore[attr-defined]
sharpness.licence = "the package's own, no weights"  # type: ignore[attr-defined]
sharpness.hacked_by = "grids, hard outlines, over-sharpening; one sharp frame held still"  # type: ignore[attr-defined]
sharpness.maps = detail  # type: ignore[attr-defined]
sharpness.claims = Claims(  # type: ignore[attr-defined]
    notices=("blurred", "texture_free", "noisy"),
    withstands=("darkened", "flickering", "reversed", "mirrored"),
    blind_to=("frozen", "half_frozen", "shuffled", "looped", "saturated"),
)
