"""Train the inverse-dynamics model on somebody's own videos and actions, and say how far it can be trusted.

Shape letters: T frames, N changes between frames, A actions, or numbers of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import cv2
import numpy as np
import psutil
import torch
import torch.nn.functional as F
from rich.progress import track
from rich.table import Table
from torch import Tensor

from arvideo_rl.config import ConfigError
from arvideo_rl.decoding import Reading, decode
from arvideo_rl.progress import console, hidden
from arvideo_rl.scoring.inputs import Task, collect
from arvideo_rl.scoring.vpt import NAMES, read_recording
from arvideo_rl.training.fit import fit, seeded, write
from arvideo_rl.training.idm import AUGMENTS, HUGE, IdmConfig, disturb, measure
from arvideo_rl.training.prompts import Spoken, actions_for
from rewards.contract import Clips, score
from rewards.idm_network import InverseDynamicsNet, each_pair, pack
from rewards.inverse_dynamics import SHARP, InverseDynamics

EVERY, FEWEST = 5, 5  # every fifth video is held out, of at least so many
ENOUGH = 20  # held-out videos from which on 95 % of them say something
TRUSTED, USELESS = 0.8, 0.6  # held-out accuracy (of numbers R^2) below which a reward of it misleads, or is noise


@dataclass(frozen=True)
class Film:
    """One video as it is trained on."""

    pixels: np.ndarray  # uint8 [T, size, size, 3]
    said: list[Spoken]  # at most T-1
    name: str
    fps: float


@dataclass(frozen=True)
class Data:
    """Films with one kind of actions."""

    films: list[Film]
    kind: str  # discrete or continuous
    labels: tuple[str, ...]
    notes: tuple[str, ...] = ()  # what is odd about them

    def actions(self, film: Film) -> Tensor:
        """int64 [T-1], 0 where nothing is commanded; or float32 [T-1, A], NaN there."""
        return actions_for(self, film.said, len(film.pixels))  # type: ignore[arg-type]


def run(config: IdmConfig) -> dict[str, Any]:
    """Train, evaluate, write ``config.out`` and its .json. Returns the report; ConfigError for data that will
    not do."""
    data = read(config)
    held_out = data.films[EVERY - 1 :: EVERY]
    train = [film for i, film in enumerate(data.films) if i % EVERY != EVERY - 1]
    notes = check_split(config, data, train, held_out)
    beside, start = statistics(data, train), time.monotonic()
    nets = [fitted(data, train, beside, config, member) for member in range(config.members)]
    report: dict[str, Any] = {
        "kind": data.kind, "labels": list(data.labels), "size": nets[0].size, "resize": "stretch",
        "config": asdict(config), "seconds": round(time.monotonic() - start, 1), "videos": len(data.films),
        "command": "arvideo rewards train-idm " + " ".join(f"{k}={v}" for k, v in asdict(config).items()),
        "held_out": [film.name for film in held_out], "disagreement_95": HUGE, "notes": [*data.notes, *notes],
        "fps": sorted({round(film.fps, 3) for film in data.films}),
    }  # fmt: skip
    features = torch.cat([_outputs(nets[0].features, film) for film in held_out]).double()
    beside |= {"frechet.mean": features.mean(0), "frechet.cov": features.T.cov()}
    report |= measured(data, held_out, nets, beside)
    tensors = pack(nets, beside)
    kept = "closeness" if data.kind == "continuous" else "expected_accuracy"
    clips = [Clips(_frames(film)[None], actions=data.actions(film)[None]) for film in held_out]
    with TemporaryDirectory() as folder:  # the rest is measured from a file, as a user will
        draft = Path(folder) / "draft.safetensors"
        write(draft, tensors, report)
        reward = InverseDynamics(draft, kept)
        if config.members > 1:
            apart = torch.cat([score(reward, c).components["disagreement"] for c in clips])
            report["disagreement_95"] = float(apart.quantile(0.95))
        report["probes"] = probes(reward, clips)
    report["ceiling"] = report["probes"]["real"]
    write(Path(config.out), tensors, report)
    return report


def check_split(config: IdmConfig, data: Data, train: list[Film], held_out: list[Film]) -> list[str]:
    """ConfigError when one of the two sets says nothing that can be learned or measured; else what to warn of."""
    there = [torch.cat([data.actions(film) for film in films]) for films in (train, held_out)]
    named = ("training", "held-out")
    if data.kind == "discrete":
        counts = [torch.bincount(actions, minlength=len(data.labels) + 1)[1:] for actions in there]
        for which, count in zip(named, counts):
            if not count.any():
                raise ConfigError(
                    f"data={config.data}: no change of the {which} videos has an action; give more videos"
                )
        notes = [f"never in the {which} videos: {', '.join(n for n, c in zip(data.labels, count) if not c)}"
                 for which, count in zip(named, counts) if not count.all()]  # fmt: skip
    else:
        known = [actions[~actions.isnan().any(-1)] for actions in there]
        for which, numbers in zip(named, known):
            if not len(numbers):
                raise ConfigError(f"data={config.data}: no change of the {which} videos has numbers; all are NaN")
        varies = [(numbers != numbers[0]).any(0) for numbers in known]
        for which, some in (("training", varies[0]), ("held-out", varies[0] & varies[1])):
            if not some.any():
                raise ConfigError(f"data={config.data}: no number of the {which} videos ever changes, so there is "
                                  "nothing to read; give more videos")  # fmt: skip
        notes = []
    if config.members > 1 and len(held_out) < ENOUGH:
        notes.append(f"disagreement_95 is of {len(held_out)} held-out videos: doubtful=refuse would be a guess")
    return notes


def read(config: IdmConfig) -> Data:
    """Decode ``config.data``. A video's actions are what a manifest or FILE.json says, else VPT's NAME.jsonl."""
    room = psutil.virtual_memory().available // 2
    films: list[Film] = []
    recorded, seen, odd = 0, set(), []
    for task in track(collect([config.data]), "reading videos", console=console(), disable=hidden(), transient=True):
        if task.problem:
            raise ConfigError(f"data={config.data}: {task.name}: {task.problem[1]}")
        if (real := task.path.resolve()) in seen:
            raise ConfigError(f"data={config.data}: {task.name} stands there twice, and might be trained on and held "
                              "out; name every video once")  # fmt: skip
        seen.add(real)
        beside = task.path.with_suffix(".jsonl")
        vpt = task.actions is None and beside.is_file()
        recorded += vpt
        said: list[Spoken] = [*read_recording(beside)] if vpt else task.actions or []
        if not said:
            raise ConfigError(f"data={config.data}: {task.name} has no actions; name them in a manifest (.csv "
                              f"or .jsonl: path, actions), {task.path.name}.json, or VPT's {beside.name}")  # fmt: skip
        films.append(_film(task, said, config.size, room))
        changes = len(films[-1].pixels) - 1
        if len(said) > changes + vpt:  # the recorder has a line for the last frame, too
            raise ConfigError(f"data={config.data}: {task.name} has {len(said)} actions, and {changes} changes between "
                              "its frames; the first action drives the change into the second frame")  # fmt: skip
        odd += [task.name] if len(said) < changes else []
        if (room := room - films[-1].pixels.nbytes) < 0:
            raise ConfigError(f"data={config.data} does not fit into half of the memory at size={config.size}; lower "
                              "size, or give fewer videos")  # fmt: skip
    if recorded not in (0, len(films)):
        raise ConfigError(f"data={config.data}: {recorded} of {len(films)} videos have a VPT recording; give all one")
    if len(films) < FEWEST:
        raise ConfigError(f"data={config.data} has {len(films)} videos; give {FEWEST} or more: every fifth is held out")
    notes = [f"{len(odd)} videos have fewer actions than changes; their ends are left out: {odd[0]}"] if odd else []
    rates = sorted({round(film.fps, 2) for film in films})
    if rates[-1] > 1.01 * rates[0]:
        notes.append(f"from {rates[0]:g} to {rates[-1]:g} frames a second: an action is not the same change in all")
    if recorded and rates != [20]:
        notes.append(f"VPT's recordings have 20 frames a second, and these {rates[0]:g} to {rates[-1]:g}")
    spoken = [action for film in films for action in film.said]
    if any(isinstance(action, (float, tuple)) for action in spoken):
        wide = {len(a) if isinstance(a, tuple) else 1 for a in spoken if not isinstance(a, str)}
        if len(wide) > 1 or any(isinstance(a, str) for a in spoken):
            raise ConfigError(f"data={config.data}: actions are not all of one kind; give names, or as many numbers "
                              "each")  # fmt: skip
        labels = NAMES if recorded else tuple(f"number {i}" for i in range(max(wide)))
        return Data(films, "continuous", labels, tuple(notes))
    labels = tuple(sorted({str(action).lower() for action in spoken}))
    if len(labels) < 2:
        raise ConfigError(f"data={config.data}: every action is {labels[0]!r}; there is nothing to tell apart")
    if fractions := [name for name in labels if _is_fraction(name)]:
        raise ConfigError(f"data={config.data}: {fractions[0]!r} is a number, but as a text would be a name; "
                          "write [0.5, -2.0] in a .jsonl or a .json")  # fmt: skip
    return Data(films, "discrete", labels, tuple(notes))


def _is_fraction(name: str) -> bool:
    try:
        return not float(name).is_integer()  # NaN and infinity are none, either
    except ValueError:
        return False


def _film(task: Task, said: list[Spoken], size: int, room: int) -> Film:
    """A video, its frames stretched to a square as they were for VPT; refused above ``room`` bytes."""
    try:
        video = decode(task.path, Reading(fps=task.fps, most=room))
    except ValueError as error:
        raise ConfigError(f"{task.name}: {error}") from None
    if len(video.frames) < 2:
        raise ConfigError(f"{task.name} has one frame; an action needs two")
    small = [cv2.resize(frame, (size, size), interpolation=cv2.INTER_LINEAR) for frame in video.frames]
    return Film(np.stack(small), said[: len(video.frames) - 1], task.name, video.fps)


def _frames(film: Film) -> Tensor:
    return torch.from_numpy(film.pixels).permute(0, 3, 1, 2).float() / 255


def _outputs(function: Callable[[Tensor, Tensor], Tensor], film: Film) -> Tensor:
    return each_pair(function, _frames(film)[None])[0]


def statistics(data: Data, films: list[Film]) -> dict[str, Tensor]:
    """What the reward needs to know of the training actions."""
    actions = torch.cat([data.actions(film) for film in films])
    if data.kind == "continuous":
        known = actions[~actions.isnan().any(-1)].double()
        return {"action_mean": known.mean(0).float(), "action_std": known.std(0).float()}
    counts = torch.bincount(actions[actions > 0] - 1, minlength=len(data.labels)).clamp_min(1)
    return {"class_frequency": (counts / counts.sum()).float()}


def fitted(
    data: Data, films: list[Film], beside: dict[str, Tensor], config: IdmConfig, member: int
) -> InverseDynamicsNet:
    """Network ``member`` of an ensemble: another seed, and every second one another augmentation."""
    draw = np.random.default_rng(config.seed + member)
    noise = torch.Generator().manual_seed(config.seed + member)
    augment = AUGMENTS[("own", "own other")[(member + (config.augment == "other")) % 2]]
    wanted = [data.actions(film) for film in films]
    given = [~w.isnan().any(-1) if data.kind == "continuous" else w > 0 for w in wanted]
    places = np.array([(i, j) for i, g in enumerate(given) for j in g.nonzero().flatten().tolist()])
    net = seeded(config.seed + member, lambda: InverseDynamicsNet(len(data.labels), size=films[0].pixels.shape[1]))

    def loss_of(step: int) -> Tensor:
        chosen = places[draw.integers(len(places), size=config.batch)]
        pairs = np.stack([films[i].pixels[j : j + 2] for i, j in chosen])
        target = torch.stack([wanted[i][j] for i, j in chosen])
        shown, target = disturb(torch.from_numpy(pairs).permute(0, 1, 4, 2, 3).float() / 255, target, augment, noise)
        outputs = net(shown[:, 0], shown[:, 1])
        if data.kind == "discrete":
            return F.cross_entropy(outputs, target - 1)
        return F.smooth_l1_loss(outputs, standardised(target, beside))

    about = "the inverse dynamics" + (f", network {member + 1} of {config.members}" if config.members > 1 else "")
    return fit(net, loss_of, steps=config.steps, lr=config.lr, warm_up=0.1, about=about, progress=not hidden())


def standardised(actions: Tensor, beside: dict[str, Tensor]) -> Tensor:
    """Actions [..., A] in deviations of the training data from its mean; 0 for numbers that never changed there."""
    spread = beside["action_std"]
    return torch.where(spread > 0, (actions - beside["action_mean"]) / spread.where(spread > 0, 1), 0.0)


def measured(
    data: Data, held_out: list[Film], nets: list[InverseDynamicsNet], beside: dict[str, Tensor]
) -> dict[str, Any]:
    """Held-out numbers of the networks together, beside what knowing nothing earns. ``trust`` is the accuracy, of
    numbers the mean R^2."""
    outputs = torch.cat([torch.stack([_outputs(n, film) for n in nets], 1) for film in held_out])  # [N, M, A]
    actions = torch.cat([data.actions(film) for film in held_out])
    if data.kind == "discrete":
        given = actions > 0
        p = outputs[given].softmax(-1).mean(1)
        found = measure(p.clamp_min(1e-12).log(), actions[given] - 1)
        return found | {"trust": found["accuracy"]}
    given = ~actions.isnan().any(-1)
    wanted, read, told = standardised(actions[given], beside), outputs[given].mean(1), beside["action_std"] > 0
    told &= wanted.std(0) > 0  # where nothing changes there is no share to explain
    r2 = (1 - (read - wanted).square().mean(0) / wanted.var(0, correction=0)).where(told, torch.nan)
    base = (-SHARP * wanted.square()).exp()[:, beside["action_std"] > 0].mean()
    return {
        "r2": {n: None if v != v else round(v, 4) for n, v in zip(data.labels, r2.tolist())},
        "trust": float(r2[told].mean()), "mean_baseline": float(base),
        "transitions": int(given.sum()),
    }  # fmt: skip


def probes(reward: InverseDynamics, clips: list[Clips]) -> dict[str, float]:
    """Mean score of held-out videos as they are, and of copies that should not pass for them."""
    dice = torch.Generator().manual_seed(0)

    def other(i: int) -> Clips:
        """The actions of the next video, over the length that both have."""
        mine, theirs = clips[i], clips[(i + 1) % len(clips)]
        n = min(mine.frames.shape[1], theirs.frames.shape[1])
        assert theirs.actions is not None
        return Clips(mine.frames[:, :n], actions=theirs.actions[:, : n - 1])

    cases = {
        "real": lambda i: clips[i],
        "frozen": lambda i: Clips(clips[i].frames[:, :1].expand_as(clips[i].frames), actions=clips[i].actions),
        "shuffled": lambda i: Clips(
            clips[i].frames[:, torch.randperm(clips[i].frames.shape[1], generator=dice)], actions=clips[i].actions
        ),
    }
    if len(clips) > 1:
        cases["another video's actions"] = other
    return {
        name: round(float(torch.cat([score(reward, make(i)).value for i in range(len(clips))]).nanmean()), 4)
        for name, make in cases.items()
    }


def said(report: dict[str, Any]) -> list[str]:
    """What somebody should know of a trained model, warnings last."""
    discrete, trust = report["kind"] == "discrete", report["trust"]
    what = "accuracy" if discrete else "share of the variance explained (R^2)"
    base = f"{report['majority_baseline']:.3f} by always the most frequent action" if discrete else "0 by their mean"
    lines = [
        f"{report['videos']} videos, {len(report['held_out'])} held out ({report['transitions']} changes)",
        f"held-out {what} {trust:.3f}, {base}; a reward by it reaches {report['ceiling']:.3f} on real videos",
        "mean reward of " + ", ".join(f"{k} {v:.3f}" for k, v in report["probes"].items()),
    ]
    if not discrete:
        silent = [name for name, r2 in report["r2"].items() if r2 is None]
        lines.append("R^2 of " + ", ".join(f"{k} {v:.2f}" for k, v in report["r2"].items() if v is not None))
        lines += [f"never changed, or not in the held-out videos: {', '.join(silent)}"] if silent else []
    lines += [f"warning: {note}" for note in report["notes"]]
    if trust < TRUSTED:
        how = "noise: do not train on it" if trust < USELESS else f"below {TRUSTED}, a weak judge"
        lines.append(f"warning: held-out {what} {trust:.3f} is {how}; give more videos, more steps or a larger size")
    for name, value in report["probes"].items():
        if name != "real" and value > 0.9 * report["probes"]["real"]:
            lines.append(f"warning: videos that are {name} earn {value:.3f}, nearly as much as real ones")
    return lines


def confusion(report: dict[str, Any]) -> Table | None:
    """Rows are the truth, columns what was read; None of numbers."""
    if report["kind"] != "discrete":
        return None
    table = Table("truth", *report["labels"], title="held-out changes, by what was read")
    for name, row in zip(report["labels"], report["confusion"]):
        table.add_row(name, *map(str, row))
    return table
