"""Search while generating: any reward as the verifier, the cost told beforehand, the tree written beside the video."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arvideo_rl.config import ConfigError, check_choice, check_ranges
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Script
from arvideo_rl.training.rundir import read_json, write_json
from arvideo_rl.training.settings import Method
from rewards import registry
from rewards.contract import Clips, Reward, score
from samplers.plan import KINDS, Plan, cost
from samplers.randomness import Key
from samplers.search import Found, branch_noise, search
from samplers.stream import draw_from


@dataclass
class SearchConfig:
    """Candidates of one video and the reward that chooses among them (docs/search.md)."""

    kind: str = ""  # best, first, greedy, path or beam; empty: no search
    candidates: int = 8  # of a video, a chunk or a re-noise draw, as the kind says
    beams: int = 2  # contexts that kind=beam goes on from
    window: int = 2  # chunks that are scored together, the candidate's own included; kind=best scores the whole video
    batch: int = 0  # candidates denoised at once; 0: all
    reward: Method = field(default_factory=Method)  # what chooses; args by search.reward.args.NAME=
    held_out: Method = field(default_factory=Method)  # only measured, on the winner and on the plain video


@dataclass(frozen=True)
class Search:
    """A search that can be made: checked and loaded."""

    plan: Plan
    reward: Reward
    held_out: Reward | None
    config: SearchConfig
    forwards: int  # for one video
    note: str  # what it costs


def prepare(
    config: SearchConfig, generator: Generator, actions: Tensor, chunks: list[tuple[int, int]], frames: int
) -> Search | None:
    """Check, load and price a search of the ``chunks`` to be generated, up to frame ``frames``, under ``actions``
    [B, F]; None where there is none. ConfigError or ValueError for what cannot be searched."""
    if not config.kind:
        if config != SearchConfig():
            raise ConfigError(f"search. is set, but search.kind is not; choose one of {', '.join(KINDS)}")
        return None
    _check(config, generator)
    streaming, codec = generator.streaming, generator.codec
    whole = codec.pixel_frames(frames)
    end = chunks[0][1] if config.kind == "first" else frames
    window = codec.pixel_frames(min(end, config.window * streaming.chunk))  # what is seen of a candidate at most
    built = [
        _built(f"search.{name}", method, generator, actions, whole, shown)
        for name, method, shown in (
            ("reward", config.reward, whole if config.kind == "best" else window),
            ("held_out", config.held_out, whole),
        )
        if method.target
    ]
    plan = Plan(config.kind, config.candidates, config.beams, config.window, config.batch)
    price, plain = cost(plan, len(chunks), len(streaming.levels)), _plain(chunks, streaming.levels)
    shape = f"{plan.beams} x {plan.candidates}" if plan.kind == "beam" else f"{plan.candidates}"
    note = (
        f"search {plan.kind} of {shape} by {config.reward.target}: a video takes {price.forwards} forwards and "
        f"{price.scores} scores, {price.forwards / plain:.1f} times the {plain} forwards of plain streaming"
    )
    if len(built) > 1:
        note += f"; {plain} more for the plain video to compare with"
    return Search(plan, built[0], built[1] if len(built) > 1 else None, config, price.forwards, note)


def _check(config: SearchConfig, generator: Generator) -> None:
    """ConfigError for settings that are wrong in themselves or for this generator."""
    check_choice("search.kind", config.kind, KINDS)
    counts = {"candidates": "[1, 65536]", "beams": "[1, 65536]", "window": "[1, inf)", "batch": "[0, inf)"}
    check_ranges(config, counts, "search.")
    if generator.streaming.joint:
        raise ConfigError("search: this generator denoises chunks jointly (streaming.joint), which cannot be searched")
    if config.kind == "path" and len(generator.streaming.levels) < 2:
        raise ConfigError("search.kind=path chooses re-noise draws, and this generator has one step; choose another")
    if not config.reward.target:
        raise ConfigError("search.reward.target is missing: what chooses? e.g. search.reward.target=inverse_dynamics")
    if config.held_out == config.reward:
        raise ConfigError("search.held_out is the reward that chooses; name another, or other args")


def _plain(chunks: list[tuple[int, int]], levels: tuple[float, ...]) -> int:
    """Forwards of plain streaming."""
    return cost(Plan("greedy", 1), len(chunks), len(levels)).forwards


def _built(key: str, method: Method, generator: Generator, actions: Tensor, whole: int, shown: int) -> Reward:
    """The reward, loaded; ConfigError where it cannot judge what it will be shown, ``shown`` pixel frames at most."""
    reward = registry.build(method.target, **method.args)
    if reward.granularity == "group":
        raise ConfigError(f"{key}.target={method.target} compares the clips of a group; choose one that scores a clip")
    if "cameras" in reward.needs:
        raise ConfigError(f"{key}.target={method.target} needs cameras, which generate is not given; choose another")
    if "actions" in reward.needs and whole != actions.shape[1]:
        raise ConfigError(f"{key}.target={method.target} needs an action for every change between pixel frames, "
                          f"but this generator's are one a latent frame; choose another")  # fmt: skip
    if "actions" in reward.needs and not actions[:, 1:].any(1).all():
        raise ConfigError(
            f"{key}.target={method.target} needs actions; give actions='...', or a .jsonl with \"actions\""
        )
    if shown < (fewest := getattr(reward, "fewest", 1)):
        raise ConfigError(f"{key}.target={method.target} needs {fewest} pixel frames and would see {shown}; raise "
                          "search.window, or choose another search.kind")  # fmt: skip
    registry.prepare(reward)
    return reward


class Verifier:
    """A reward as the judge of one prompt's candidates. What it is shown is decoded as a video of its own, under the
    prompt in force at its end. ``texts`` are (frame, prompt), ``actions`` [1, F]."""

    def __init__(self, generator: Generator, reward: Reward, texts: list[tuple[int, str]], actions: Tensor) -> None:
        self.generator, self.reward, self.texts, self.actions = generator, reward, texts, actions
        self.reasons: Counter[str] = Counter()  # why candidates had no score
        self.scored = 0

    def __call__(self, latents: Tensor, first: int) -> Tensor:
        """Scores [n] of clean latents [n, F, C, h, w] that begin at frame ``first``, NaN where there is none. Clips
        with fewer frames than the reward can read, such as a first chunk of one frame, have none."""
        n, frames, codec = latents.shape[0], latents.shape[1], self.generator.codec
        pixels = codec.decode(latents).float().cpu()
        count = pixels.shape[1]
        if count < getattr(self.reward, "fewest", 1):
            self.reasons["content:too_short"] += n
            return torch.full((n,), math.nan)
        bounds = self.generator.streaming.attention_window().chunks(first + frames)
        starts = [max(a - first, 0) for a, b in bounds if b > first]
        text = [t for at, t in self.texts if at <= bounds[-1][0]][-1]
        clips = Clips(
            pixels,
            self.generator.streaming.fps,
            [text] * n,
            self.actions[:, first + 1 : first + count].expand(n, -1).contiguous() if count == frames else None,
            chunk_starts=tuple(codec.pixel_frames(a) for a in starts),
        )
        scores = score(self.reward, clips)
        values = scores.value if scores.value.ndim == 1 else scores.value.nanmean(1)
        self.reasons.update(r for r, v in zip(scores.reasons, values) if r is not None and v.isnan())
        self.scored += int((~values.isnan()).sum())
        return values.cpu()


def run(
    job: Search,
    generator: Generator,
    model: Any,
    script: Script,
    texts: list[tuple[int, str]],
    actions: Tensor,
    key: Key,
    frames: int,
    *,
    context: Any = None,
    past: Tensor | None = None,
    tick: Callable[[int], None] | None = None,
) -> tuple[Tensor, dict]:
    """Search one video. Returns its latents [1, F, C, h, w], without the ``past``, and what is to be written of the
    search. ValueError where not one candidate could be scored."""
    streaming, device = generator.streaming, generator.transformer.device
    draw, start = draw_from([key], generator.latent_shape, device), 0 if past is None else past.shape[1]
    chunks = [c for c in streaming.attention_window().chunks(frames) if c[0] >= start]
    judge = Verifier(generator, job.reward, texts, actions)
    found = search(
        generator.denoiser(model, script, draw, fixed=True), chunks, streaming.levels,
        branch_noise(key, generator.latent_shape, device), judge, job.plan,
        frames=frames, context=context, past=past, tick=tick,
    )  # fmt: skip
    if not judge.scored:
        why = ", ".join(f"{r} {n}" for r, n in judge.reasons.most_common(3))
        raise ValueError(f"search.reward.target={job.config.reward.target} could score none of {found.cost.scores} "
                         f"candidates ({why}); choose another reward, or another search.window")  # fmt: skip
    videos = {"winner": found.latents}
    if job.held_out is not None:
        plain = generator.stream(model, script, draw, frames, context=context, start=start, trim=True)
        videos["plain"] = torch.cat([c.latents for c in plain], 1)
    measures = {"reward": job.reward} | ({"held_out": job.held_out} if job.held_out is not None else {})
    measured: dict[str, dict[str, float | None]] = {}
    for video, latents in videos.items():
        whole = latents if past is None else torch.cat([past, latents], 1)
        measured[video] = {
            name: _number(Verifier(generator, reward, texts, actions)(whole, 0).item())
            for name, reward in measures.items()
        }
    return found.latents, _tree(job, found, judge, key, measured, _plain(chunks, streaming.levels))


def _tree(job: Search, found: Found, judge: Verifier, key: Key, measured: dict, plain: int) -> dict:
    """Everything about a search, as JSON."""
    return {
        "search": asdict(job.config), "key": asdict(key), "branches": {str(k): b for k, b in found.branches.items()},
        "cost": {**asdict(found.cost), "plain_forwards": plain}, "not_scored": dict(judge.reasons),
        "reward": _number(found.reward), "whole_video": measured,
        "curve": [{"forwards": f, "reward": _number(r)} for f, r in found.curve],
        "candidates": [asdict(n) | {"score": _number(n.score), "mean": _number(n.mean)} for n in found.nodes],
    }  # fmt: skip


def _number(value: float) -> float | None:
    """What JSON can hold."""
    return value if math.isfinite(value) else None


def tree_of(video: Path) -> Path:
    """Where the tree of a video stands."""
    return video.with_name(video.name + ".search.json")


def write(video: Path, tree: dict) -> None:
    """Write the tree beside its video."""
    write_json(tree_of(video), tree)


def told(video: Path) -> str:
    """What a user is told of a search that is done, in one line."""
    tree = read_json(tree_of(video), "search")
    names = {k: tree["search"][k]["target"] for k in ("reward", "held_out")}
    said = []
    for name, winner in tree["whole_video"]["winner"].items():
        plain = tree["whole_video"].get("plain", {}).get(name)
        before = f"{_shown(plain)} -> " if "plain" in tree["whole_video"] else ""
        said.append(f"{names[name]}{' (held out)' * (name == 'held_out')} {before}{_shown(winner)}")
    lost = sum(tree["not_scored"].values())
    if lost:
        said.append(f"{lost} of {tree['cost']['scores']} candidates could not be scored")
    change = "plain -> searched, " if "plain" in tree["whole_video"] else ""
    return f"{change}whole video: {', '.join(said)}; {tree['cost']['forwards']} forwards; tree in {tree_of(video)}"


def _shown(value: float | None) -> str:
    return "not measurable" if value is None else f"{value:.4g}"
