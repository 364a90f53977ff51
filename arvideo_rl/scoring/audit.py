"""``arvideo audit``: what it is told, what is checked before any work, and the audit of each reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from arvideo_rl.config import SEEDS, ConfigError, check_choice, check_ranges
from arvideo_rl.outputs import check_file
from arvideo_rl.scoring import audit_clips
from arvideo_rl.scoring.settings import DEFAULT, Named, build, find_device
from arvideo_rl.training.prompts import spoken_actions
from arvideo_rl.world.scene import ACTIONS
from rewards import registry
from rewards.adversarial import CHANGES, Change, mirror
from rewards.audit import Audit, Limits, audit
from rewards.claims import claims_of
from rewards.contract import NEEDS, Reward, check_needs

SWAPPED = tuple(ACTIONS.index({"turn left": "turn right", "turn right": "turn left"}.get(a, a)) for a in ACTIONS)
MIRROR = replace(CHANGES["mirrored"], make=partial(mirror, actions=SWAPPED))
TOLD = "give {}=, a manifest, or FILE.json beside the file"
WAYS = {"prompts": TOLD.format("prompt"), "actions": TOLD.format("actions"),
        "cameras": "files have none: leave them out, or videos=rooms"}  # need -> how clips get it  # fmt: skip


@dataclass
class AuditConfig:
    """What ``arvideo audit`` reads."""

    reward: str = DEFAULT  # a short name or module:attribute; several parted by commas; all = all that can
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward
    rewards: dict[str, Named] = field(default_factory=dict)  # several, each with a name and arguments, instead
    videos: str = "world"  # without files: world, rooms (still, with known cameras), or a generator (tiny, a run)
    clips: int = 16  # how many; of more files as many, evenly spread
    frames: int = 18  # of each clip
    size: int = 32  # pixels a side, of world and rooms; classical geometry wants 96
    short_side: int | None = None  # files: shrink to this many pixels first
    prompt: str = ""  # files: prompt for every one; else a manifest's or FILE.json's
    actions: str = ""  # files: actions for every one; else a manifest's or FILE.json's
    fps: float | None = None  # files: replaces what they state
    changes: list[str] = field(default_factory=list)  # only these, e.g. [frozen,reversed]; default: all that apply
    noticed: float = 0.95  # AUROC from which a change counts as noticed
    stays: float = 0.1  # largest move that counts as staying, as a share of the largest move of any corruption
    batch: int = 8  # clips scored together
    device: str = "auto"  # auto, cpu, cuda, cuda:1, mps
    seed: int = 0  # of the changes, and of a generator's noise
    fail: bool = False  # exit with 1 when a reward fails its own claims
    shown: int = 2  # clips shown on the page in every change
    out: str = "audit.html"  # the page; NAME.csv and NAME.json are written beside it


@dataclass(frozen=True)
class Job:
    """All that is needed, loaded and checked."""

    config: AuditConfig
    rewards: Mapping[str, Reward]
    clips: audit_clips.Found
    changes: Mapping[str, Change]
    device: torch.device
    notes: list[str]  # rewards and clips that were left out

    @property
    def steps(self) -> int:
        """How often :func:`run` tells, at most: changes that a reward does not see are passed over."""
        return len(self.rewards) * len(self.clips.batches) * (len(self.changes) + 1)


def prepare(config: AuditConfig, words: list[str]) -> Job:
    """Build the rewards and make or read the clips; ConfigError or ValueError for what cannot be audited."""
    _check_config(config, words)
    device = find_device(config.device)
    everything = config.reward == "all" and not config.rewards
    rewards, notes = _all() if everything else (build(config), [])
    for name, reward in rewards.items():
        if reward.granularity != "clip":
            raise ConfigError(f"reward {name!r} gives a value for each {reward.granularity}; an audit wants one a clip")
        claims_of(reward, CHANGES)
    found = audit_clips.from_files(config, words) if words else audit_clips.made(config)
    kept = {}
    for name, reward in rewards.items():
        try:
            _check_reward(name, reward, found)
            kept[name] = reward
        except (OSError, ValueError) as error:
            if not everything:
                raise
            notes.append(f"not audited: {error}")
    if not kept:
        raise ConfigError(f"no reward can score these clips; {notes[-1]}")
    changes = {k: c for k, c in (CHANGES | {"mirrored": MIRROR}).items() if not config.changes or k in config.changes}
    return Job(config, kept, found, changes, device, [*notes, *(f"left out: {m}" for m in found.missing)])


def _check_config(config: AuditConfig, words: list[str]) -> None:
    """Refuse values that will not do."""
    whole = dict.fromkeys(("clips", "size", "batch"), "[1, inf)") | {"shown": "[0, inf)", "frames": "[2, inf)"}
    check_ranges(config, whole | {"noticed": "(0.5, 1]", "stays": "[0, inf)", "seed": SEEDS})
    check_ranges(config, {"fps": "(0, inf)", "short_side": "[1, inf)"})
    for name in config.changes:
        check_choice("changes", name, CHANGES)
    if config.changes and all(CHANGES[name].harmless for name in config.changes):
        raise ConfigError(f"changes={','.join(config.changes)}: moves are measured against a corruption's; add one, "
                          "e.g. frozen")  # fmt: skip
    spoken_actions(config.actions)
    if words and config.videos != AuditConfig.videos:
        raise ConfigError(f"videos={config.videos}: files were given too; leave one of the two out")
    out = Path(config.out)
    for path in (out, out.with_suffix(".csv"), out.with_suffix(".json")):
        check_file(path, suffixes=(path.suffix,) if path != out else (".html", ".htm"))


def _all() -> tuple[dict[str, Reward], list[str]]:
    """Every shipped reward with its defaults, and what is said of those that cannot be built so."""
    rewards, notes = {}, []
    for name in registry.available():
        required = [k for k, v in registry.arguments(registry.resolve(name)).items() if v is registry.REQUIRED]
        if required:
            notes.append(f"not audited: {name} requires {', '.join(required)}")
        else:
            rewards[name] = registry.build(name)
    return rewards, notes


def _check_reward(name: str, reward: Reward, found: audit_clips.Found) -> None:
    """Refuse a reward that cannot score the clips, and load it."""
    first = 0
    for clips in found.batches:
        for need in sorted(set(reward.needs) & set(WAYS)):
            if getattr(clips, NEEDS[need]) is None:
                raise ConfigError(f"reward {name!r} needs {need}, which {found.names[first]} lacks; {WAYS[need]}")
        check_needs(reward, clips)
        first += len(clips)
    registry.prepare(reward)


def run(job: Job, tell: Callable[[], None] = lambda: None) -> list[Audit]:
    """Audit every reward; ValueError names the one that could not score a batch."""
    config, out = job.config, []
    limits = Limits(config.noticed, config.stays)
    for name, reward in job.rewards.items():
        try:
            out.append(audit(reward, job.clips.batches, job.changes, name=name, seed=config.seed, limits=limits,
                             device=job.device, tell=tell))  # fmt: skip
        except ValueError as error:
            raise ValueError(f"reward {name!r}: {error}") from error
    return out
