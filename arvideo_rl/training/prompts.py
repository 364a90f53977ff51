"""Prompts with their actions, from the world or from a user's file, and the order in which a run takes them."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from arvideo_rl.world.dataset import HELD_OUT
from arvideo_rl.world.scene import ACTIONS, sample_scenes
from rewards.contract import Reward

TRAIN_SEED = 2_000_000  # beyond every scene that the shipped weights were trained on
HELD_OUT_SEED = HELD_OUT + 500_000_000
HELD_OUT_FRAMES = 21
HOLD_OUT_EVERY, FEWEST_TO_SPLIT = 5, 10  # different texts of a user's file
STYLES = ("joystick", "smooth")  # of the world's actions


@dataclass
class PromptConfig:
    """Where prompts come from. ``world`` draws captions and actions from scenes; anything else is a file: one prompt a
    line (.txt), or one JSON object a line (.jsonl) with ``prompt`` and optionally ``actions``. See own_prompts for what
    of a file is held out."""

    source: str = "world"  # world, or a file: .txt, a prompt a line; .jsonl, {"prompt", "actions"} a line
    count: int = 256  # training prompts to draw from the world (a file is taken whole)
    style: str = "joystick"  # world actions: joystick (a new command every 2 to 5 frames) or smooth


@dataclass(frozen=True)
class Prompts:
    """Prompts [n] with actions [n, F]; ``ids`` name them in random keys, whatever their place in a batch."""

    texts: tuple[str, ...]
    actions: Tensor  # int64
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: list[int]) -> Prompts:
        """The prompts at ``rows``, repeats allowed."""
        return Prompts(tuple(self.texts[i] for i in rows), self.actions[rows], tuple(self.ids[i] for i in rows))


def world_prompts(first_seed: int, count: int, frames: int, style: str) -> Prompts:
    """Captions and actions of ``count`` scenes."""
    scenes = sample_scenes(range(first_seed, first_seed + count), frames, style=style)
    return Prompts(scenes.captions, scenes.actions, tuple(range(first_seed, first_seed + count)))


def held_out_prompts(count: int, frames: int, style: str, skip: int = 0) -> Prompts:
    """Held-out prompts ``skip`` .. ``skip + count - 1``, the same for every run and command: scenes are drawn for at
    least HELD_OUT_FRAMES frames whatever a run's own length is."""
    return world_prompts(HELD_OUT_SEED + skip, count, max(HELD_OUT_FRAMES, frames + 3), style)


def training_prompts(config: PromptConfig, frames: int) -> Prompts:
    """What a run is trained on."""
    if config.source == "world":
        return world_prompts(TRAIN_SEED, config.count, frames, config.style)
    return own_prompts(Path(config.source), frames)[0]


def own_prompts(path: Path, frames: int) -> tuple[Prompts, Prompts, str]:
    """(training prompts, held-out prompts, one line on what was done) of a user's file.

    The rule: a line that repeats the text and actions of an earlier one is left out. Different texts are numbered in
    the order in which they first stand; every fifth (5, 10, 15 ...) is held out, with all its actions. So no text is on
    both sides, and lines added at the end move none. A file of fewer than 10 texts is trained on whole.
    """
    prompts, numbers = read_prompts(path, frames), []
    places: dict[str, int] = {}
    kept: dict[tuple, int] = {}
    repeats = []
    for row, (text, actions) in enumerate(zip(prompts.texts, prompts.actions.tolist())):
        numbers.append(places.setdefault(text, len(places) + 1))
        first = kept.setdefault((text, *actions), row)
        if first != row:
            repeats.append(f"{row + 1} repeats {first + 1}")
    split = len(places) >= FEWEST_TO_SPLIT
    out = [row for row in kept.values() if split and numbers[row] % HOLD_OUT_EVERY == 0]
    train = [row for row in kept.values() if row not in set(out)]
    said = f"{path}: {len(train)} prompts to train on, " + (
        f"{len(out)} held out (every {HOLD_OUT_EVERY}th different text)" if split
        else f"none held out (of fewer than {FEWEST_TO_SPLIT} different texts)"
    )  # fmt: skip
    if repeats:
        shown = ", ".join(repeats[:3]) + (" ..." if len(repeats) > 3 else "")
        said += f", {len(repeats)} repeated left out (prompt {shown})"
    return prompts.take(train), prompts.take(out), said


Spoken = str | int | float | tuple[float, ...]  # an action as somebody says it: a name, its number, or its numbers


def spoken_actions(value: Any) -> list[Spoken]:
    """Actions from a list of names, numbers or lists of numbers, or a text like ``turn left*4, forward*3``, one a
    change between frames; whose names they are is not asked. ValueError names what cannot be an action."""
    if not isinstance(value, (str, list)):
        raise ValueError(f"actions {value!r} must be a list or a text like 'turn left*4, forward*3'")
    out: list[Spoken] = []
    for item in value if isinstance(value, list) else [x for x in value.split(",") if x.strip()]:
        if isinstance(item, str):
            name, star, times = (x.strip() for x in item.partition("*"))
            if star and not (times.isascii() and times.isdigit() and len(times) < 7):
                raise ValueError(f"action {item.strip()!r}: what follows * must be a whole number of frames")
            out += [name] * (int(times) if star else 1)
        else:
            numbers = item if isinstance(item, (list, tuple)) else [item]
            if not numbers or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in numbers):
                raise ValueError(f"action {item!r} is no name, no number and no list of numbers")
            if any(abs(x) == float("inf") for x in numbers):  # NaN says that nothing is commanded
                raise ValueError(f"action {item!r} is infinite")
            out.append(tuple(float(x) for x in item) if isinstance(item, (list, tuple)) else item)
    return out


def list_actions(value: str | list, known: tuple[str, ...] = ACTIONS) -> list[int]:
    """Actions as places in ``known``; the first drives the change into frame 1. ValueError names what is not one."""
    places = {name.lower(): i for i, name in enumerate(known)}
    numbered = any(name.lstrip("-").isdigit() for name in places)  # then 3 is a name, or nothing
    out = []
    for item in spoken_actions(value):
        name = str(item).lower()
        if name in places:  # first, since somebody may call an action 3
            out.append(places[name])
        elif not numbered and name.isascii() and name.isdigit() and int(name) < len(known):
            out.append(int(name))
        else:
            raise ValueError(f"action {name!r} is unknown; choose from: {', '.join(known)}")
    return out


def actions_for(reward: Reward, said: list[Spoken], frames: int) -> Tensor:
    """What ``reward`` takes as the actions of a clip of ``frames`` frames: int64 [frames-1], 0 where nothing was said,
    or float32 [frames-1, A], NaN there. ValueError names what is not one of the reward's actions."""
    labels = tuple(getattr(reward, "labels", ACTIONS[1:]))
    if getattr(reward, "kind", "discrete") == "discrete":
        told = list_actions(list(said), (ACTIONS[0], *labels))
        return torch.tensor((told + [0] * frames)[: frames - 1], dtype=torch.int64)
    out = torch.full((frames - 1, len(labels)), torch.nan)
    for i, action in enumerate(said[: frames - 1]):
        numbers = action if isinstance(action, tuple) else (action,)
        if len(numbers) != len(labels) or isinstance(action, str):
            raise ValueError(f"action {action!r} is not {len(labels)} numbers: {', '.join(labels)}")
        out[i] = torch.tensor(numbers)
    return out


def parse_actions(value: str | list, frames: int) -> list[int]:
    """:func:`list_actions` laid over ``frames`` frames: frame 0 has none, short lists are padded, long ones cut."""
    return ([0] + list_actions(value) + [0] * frames)[:frames]


def read_prompts(path: Path, frames: int) -> Prompts:
    """Read a prompt file (.txt or .jsonl; UTF-8 with or without byte-order mark, any line ends; blank lines skip)."""
    if not path.is_file():
        raise ValueError(f"prompt file {str(path)!r} does not exist; give one with a prompt a line")
    if path.suffix.lower() not in ("", ".txt", ".jsonl"):
        raise ValueError(f"prompt file {path}: use .txt, a prompt a line, or .jsonl, a JSON object a line")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    split = re.split(r"\r\n|\n|\r", text)  # str.splitlines would also cut at marks that a JSON text may hold
    lines = [(i, x.strip()) for i, x in enumerate(split, 1) if x.strip()]
    if not lines:
        raise ValueError(f"prompt file {path} holds no prompt")
    texts, actions = [], []
    for number, line in lines:
        prompt, acts = line, []
        if path.suffix.lower() == ".jsonl":
            try:
                data = json.loads(line)
                prompt, acts = data["prompt"], data.get("actions", [])
            except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
                raise ValueError(f'{path} line {number} is not a JSON object with a "prompt"') from None
            if (near := difflib.get_close_matches("actions", data.keys() - {"actions"}, 1, 0.8)) and not acts:
                raise ValueError(f'{path} line {number}: {near[0]!r} is not read; did you mean "actions"?')
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f"{path} line {number}: prompt {prompt!r} is not a text")
        try:
            actions.append(parse_actions(acts, frames))
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        texts.append(prompt)
    return Prompts(tuple(texts), torch.tensor(actions), tuple(range(len(texts))))


def prompt_rows(total: int, per_step: int, iteration: int, seed: int) -> list[int]:
    """Rows for one iteration: epochs are permutations drawn by (seed, epoch), cut into steps, so that the prompts of a
    step are all different and every prompt comes once an epoch (a remainder shorter than a step is left out)."""
    if per_step > total:
        raise ValueError(
            f"prompts_per_step={per_step}: there are {total} prompts to train on; use {total} or fewer, or add prompts"
        )
    steps = total // per_step
    epoch, place = divmod(iteration, steps)
    order = np.random.default_rng((seed, epoch)).permutation(total)
    rows = [int(i) for i in order[place * per_step : (place + 1) * per_step]]
    assert len(set(rows)) == per_step
    return rows
