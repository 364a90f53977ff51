"""The held-out comparison: fixed prompts x fixed noises, measured before and after, errors clustered by prompt.

"It learned": the paired gain of the trained reward exceeds 3 standard errors. "Nothing was sacrificed": for every
verifier the bad end of the 95 % interval of the paired change stays within a margin stated beforehand.
Of a generator that does not show the embedded world (a Wan) there are no verifiers of it: it is compared by the trained
rewards and by how its videos look (judges.py), and those may not change by much either way.
Shape letters: P prompts, N noises per prompt, T pixel frames, D features.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor

from arvideo_rl.config import ConfigError, check_ranges
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.progress import hidden
from arvideo_rl.training.judges import LOOKS, look, shows_world
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import clips_of, reward_table, roll_out
from arvideo_rl.world.verify import VERIFIERS, frechet
from rewards.contract import Reward
from rewards.inverse_dynamics import FEATURES, InverseDynamics
from samplers.randomness import Key

NOISE_SEED = 77_000_001  # fixed for ever: before and after see the same noise
RESAMPLES = 400
HELD_OUT_MOST = 400_000_000  # prompts there are before seeds would run into others
MARGINS = {  # wider than the rest, because at 64 prompts x 2 noises their error alone is 5 to 10 % of their value
    "frechet": 0.15,  # a distance between sets
    "variety": 0.30,  # few palettes, so differences of two clips are coarse
    "direction_correct": 0.25,  # yes or no per object
    "brightness": 0.25, "contrast": 0.25, "saturation": 0.25,  # a look may change; by a quarter it is another picture
}  # fmt: skip
RISE = {
    name: 0.25 for name in LOOKS
}  # noise and flicker, bleached and gaudy pictures: no rise by more than this either
SHOWN = 6  # the first prompts, never chosen by how they look: their videos are kept, all others only measured


@dataclass
class HeldOut:
    """Size and margins of the comparison, stated before the run."""

    prompts: int = 64
    skip: int = 0  # leave out the first so many held-out prompts: a set that no setting was chosen on
    noises: int = 2
    frames: int = 18
    batch: int = 32  # clips generated at once
    margin: float = 0.05  # share of the value before that a verifier may lose
    margins: dict[str, float] = field(default_factory=lambda: dict(MARGINS))  # exceptions, by verifier


def check_held_out(size: HeldOut, processes: int = 1, world: bool = True) -> None:
    """ConfigError for a comparison that cannot be made; ``world``: of videos that show the embedded world."""
    counts = {k: "[1, inf)" for k in ("prompts", "noises", "frames", "batch")}
    check_ranges(size, counts | {"skip": f"[0, {HELD_OUT_MOST}]", "margin": "[0, inf)"}, "held_out.")
    known = (*dict.fromkeys((*VERIFIERS, *LOOKS)), "actions_other_judge", "variety", "frechet")
    for name in size.margins:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"unknown key held_out.margins.{name}; {hint}known here: {', '.join(known)}")
    check_ranges(size.margins, dict.fromkeys(size.margins, "[0, inf)"), "held_out.margins.")
    least = least_prompts(size, processes, world)
    if size.frames < 2 or size.prompts < least:
        few = f"a Frechet distance in {FEATURES} dimensions" if world else "a comparison"
        raise ConfigError(
            f"held_out of {size.prompts} prompts x {size.noises} noises x {size.frames} frames is too small for {few}; "
            f"use frames of 2 or more and {least} prompts or more"
        )


def least_prompts(size: HeldOut, processes: int = 1, world: bool = True) -> int:
    """Fewest held-out prompts: two for an error, one a process, and with the world more changes than features for a
    covariance."""
    rows = size.noises * (size.frames - 1) if world else 0
    return max(2, processes, FEATURES // rows + 1 if rows else 0)


@dataclass(frozen=True)
class Measured:
    """Everything measured on one generator."""

    values: dict[str, Tensor]  # name -> [P, N]
    features: Tensor | None  # [P, N, T-1, D] of the held-out inverse-dynamics model; None without the world
    pixels: Tensor  # [at most SHOWN, T, 3, H, W] uint8, of the first prompts under their first noise

    def tensors(self) -> dict[str, Tensor]:
        """For saving."""
        features = {} if self.features is None else {"features": self.features}
        return {f"values/{k}": v for k, v in self.values.items()} | features | {"pixels": self.pixels}

    @classmethod
    def from_tensors(cls, data: dict[str, Tensor]) -> Measured:
        """What :meth:`tensors` gave."""
        values = {k.removeprefix("values/"): v for k, v in data.items() if k.startswith("values/")}
        return cls(values, data.get("features"), data["pixels"])

    @classmethod
    def join(cls, parts: list[Measured]) -> Measured:
        """Put together what was measured on consecutive prompts."""
        tensors = [part.tensors() for part in parts]
        return cls.from_tensors({k: torch.cat([t[k] for t in tensors]) for k in tensors[0]})


def measure(
    generator: Generator, model, prompts: Prompts, rewards: dict[str, tuple[Reward, float]], size: HeldOut, title: str,
    shown: int = SHOWN,
) -> Measured:  # fmt: skip
    """Generate every prompt under every fixed noise and measure all rewards and judges. At most ``size.batch`` videos
    are in memory at once, and of the first ``shown`` prompts one is kept."""
    judge = InverseDynamics("idm_heldout", score="accuracy") if shows_world(generator) else None
    rows = [(p, n) for p in range(len(prompts)) for n in range(size.noises)]
    blocks = [rows[i : i + size.batch] for i in range(0, len(rows), size.batch)]
    whole = math.ceil(size.frames / generator.streaming.chunk) * generator.streaming.chunk
    found: dict[str, list[Tensor]] = {}
    features, colours, pixels = [], [], []
    for block in track(blocks, title, disable=hidden(), transient=True):
        some = prompts.take([p for p, _ in block])
        keys = [Key(NOISE_SEED, 0, prompts.ids[p], n) for p, n in block]
        groups = torch.tensor([p for p, _ in block])
        record = roll_out(generator, model, some, keys, whole, groups)
        record = replace(record, latents=record.latents[:, : size.frames])
        clips = clips_of(generator, record, some)
        values, _ = reward_table(rewards, clips)
        for name, value in values.items():
            found.setdefault(f"reward/{name}", []).append(value.nanmean(1))
        for name, value in look(generator, clips.frames, some).items():
            found.setdefault(name, []).append(value)
        if judge is not None:
            found.setdefault("actions_other_judge", []).append(judge(clips).value)
            features.append(judge.features(clips.frames))
        colours.append(sky_and_ground(clips.frames))
        first = [i for i, (p, n) in enumerate(block) if p < shown and n == 0]
        pixels.append((clips.frames[first] * 255).round().to(torch.uint8))
    shape = (len(prompts), size.noises)
    if size.noises > 1:
        found["variety"] = [variety(torch.cat(colours).unflatten(0, shape)).flatten()]
    return Measured(
        {k: torch.cat(v).reshape(shape) for k, v in found.items()},
        torch.cat(features).unflatten(0, shape) if features else None, torch.cat(pixels),
    )  # fmt: skip


def sky_and_ground(pixels: Tensor) -> Tensor:
    """Mean colours of the top and the bottom quarter of clips [..., T, 3, H, W]: [..., 6]."""
    quarter = pixels.shape[-2] // 4
    return torch.cat([x.mean((-4, -2, -1)) for x in (pixels[..., :quarter, :], pixels[..., -quarter:, :])], -1)


def variety(colours: Tensor) -> Tensor:
    """How different a prompt's videos under different noise are [P, N], from the sky and ground colours [P, N, 6] of
    each: mean distance of a clip's to those of the prompt's other clips, times 100. A policy that settles on one look
    loses it, which no measure of single clips can see."""
    apart = torch.cdist(colours, colours)  # [P, N, N], 0 on the diagonal
    return 100 * apart.sum(-1) / (colours.shape[1] - 1)


def paired(before: Tensor, after: Tensor) -> dict[str, float]:
    """Before, after, mean paired change and its standard error clustered by prompt, from [P, N] values. Prompts that
    are NaN on either side are left out and n says how many remain."""
    change = (after - before).double().nanmean(1)
    used = ~change.isnan()
    n = int(used.sum())
    se = (change[used].std() / math.sqrt(n)).item() if n > 1 else math.nan
    b, a = (x.double().nanmean(1)[used].mean().item() for x in (before, after))
    return {"before": b, "after": a, "delta": change[used].mean().item(), "se": se, "n": n}


def paired_frechet(before: Tensor, after: Tensor, reference: tuple[Tensor, Tensor]) -> dict[str, float]:
    """The same for the Frechet distance of features [P, N, T-1, D]; the error comes from resampling prompts."""

    def distance(features: Tensor, rows: np.ndarray) -> float:
        return frechet(features[rows].flatten(0, -2), *reference)

    everything = np.arange(before.shape[0])
    b, a = distance(before, everything), distance(after, everything)
    rng = np.random.default_rng(0)
    draws = []
    for _ in range(RESAMPLES):
        rows = rng.integers(0, len(everything), len(everything))
        draws.append(distance(after, rows) - distance(before, rows))
    return {"before": b, "after": a, "delta": a - b, "se": float(np.std(draws, ddof=1)), "n": len(everything)}


def compare(before: Measured, after: Measured, trained: dict[str, float], size: HeldOut) -> dict[str, Any]:
    """The verdict. ``trained`` maps reward names to weights. Returns ``trained`` and ``verifiers`` (lists of objects
    with name, before, after, delta, se, n; verifiers also margin and ok) and the two judgements."""
    total = sum(abs(w) for w in trained.values())

    def mixed(m: Measured) -> Tensor:
        return torch.stack([w / total * m.values[f"reward/{k}"] for k, w in trained.items()]).sum(0)

    name = "+".join(trained)
    gain: dict[str, Any] = {"name": name, **paired(mixed(before), mixed(after))}
    gain["margin"] = 3 * gain["se"]  # what the gain must exceed
    verifiers: list[dict[str, Any]] = []
    for key in after.values:  # in the order measured; "before" may come from a file, which sorts
        if key.startswith("reward/"):
            continue
        found = paired(before.values[key], after.values[key])
        if found["n"]:  # some verifiers read what only prompts or actions of the world say
            verifiers.append({"name": key, **found})
    if before.features is not None and after.features is not None:
        reference = InverseDynamics("idm_heldout").frechet_reference
        verifiers.append({"name": "frechet", **paired_frechet(before.features, after.features, reference)})
    for v in verifiers:
        sign = -1 if v["name"] == "frechet" else 1  # lower is better there
        v["margin"] = size.margins.get(v["name"], size.margin)
        worst = sign * v["delta"] - 1.96 * v["se"]
        v["better"] = "lower" if sign < 0 else "higher"
        risen = (v["delta"] - 1.96 * v["se"]) / abs(v["before"]) if v["before"] else 0.0
        v["ok"] = bool(worst > -v["margin"] * abs(v["before"])) and not risen > RISE.get(v["name"], math.inf)
    return {
        "trained": gain,
        "verifiers": verifiers,
        "learned": bool(gain["delta"] > gain["margin"]),
        "nothing_sacrificed": all(v["ok"] for v in verifiers),
    }
