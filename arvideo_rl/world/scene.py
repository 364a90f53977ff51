"""Scenes of the embedded world: what is in them, how it moves, and the sentence that says so.

A scene is drawn from its seed alone, so (seed, frames, actions) names a clip for ever. Nothing is rendered here.

Axes are OpenCV's: x right, y down, z forward; the ground is y = 0, so heights are negative y. Lengths are metres,
angles radians, time is counted in frames. Shape letters: B clips, T frames, O = 2 object slots.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

ACTIONS = ("null", "stay", "turn left", "turn right", "forward", "back")  # index 0 marks "no action" (frame 0)
COLOURS = {
    "red": (0.90, 0.13, 0.10),
    "green": (0.12, 0.72, 0.18),
    "blue": (0.13, 0.28, 0.92),
    "yellow": (0.95, 0.83, 0.08),
}
SHAPES = ("ball", "cube")
MOTIONS = ("rest", "left", "right", "bounce")
TURN = np.deg2rad(4.5)  # radians a frame
STEP = 0.16  # metres a frame
HEIGHTS = (1.15, 1.45)  # of the camera over the ground, metres
PITCHES = (9.0, 13.0)  # degrees down
SLOTS = 2

CAMERA_WORDS = {1: "stays still", 2: "turns left", 3: "turns right", 4: "moves forward", 5: "moves back"}
MOTION_WORDS = {
    ("ball", "rest"): "rests", ("cube", "rest"): "rests",
    ("ball", "left"): "rolls left", ("ball", "right"): "rolls right",
    ("cube", "left"): "slides left", ("cube", "right"): "slides right",
    ("ball", "bounce"): "bounces", ("cube", "bounce"): "bounces",
}  # fmt: skip
WORDS = tuple(sorted(
    set("a and while the camera then".split())
    | set(COLOURS) | set(SHAPES)
    | {w for s in MOTION_WORDS.values() for w in s.split()}
    | {w for s in CAMERA_WORDS.values() for w in s.split()}
))  # fmt: skip


@dataclass(frozen=True)
class Object:
    """One captioned object: a colour of COLOURS, a shape of SHAPES, a motion of MOTIONS."""

    colour: str
    shape: str
    motion: str


@dataclass(frozen=True)
class Scenes:
    """A batch of scenes as tensors (float32 unless said); row b came from ``seeds[b]``."""

    seeds: tuple[int, ...]
    captions: tuple[str, ...]
    objects: tuple[tuple[Object, ...], ...]
    actions: Tensor  # [B, T] int64, index into ACTIONS; the action drives the change INTO its frame
    camera: Tensor  # [B, T, 3] position
    yaw: Tensor  # [B, T] positive to the right
    pitch: Tensor  # [B] positive looks down
    ground: Tensor  # [B] palette index
    sky: Tensor  # [B] palette index
    checker: Tensor  # [B, 4] square size, angle, two phases
    hills: Tensor  # [B, 3, 3] amplitude, frequency, phase of three waves over azimuth
    present: Tensor  # [B, O] bool
    is_cube: Tensor  # [B, O] bool
    colour: Tensor  # [B, O, 3]
    radius: Tensor  # [B, O] ball radius, or half a cube's edge
    centre: Tensor  # [B, T, O, 3]
    spin: Tensor  # [B, T, O] a ball's roll about z (positive rolls right), a cube's constant yaw

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, rows: slice) -> Scenes:
        return Scenes(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


def sample_actions(rng: np.random.Generator, frames: int, style: str) -> np.ndarray:
    """Draw one action per frame [T]; frame 0 has none. ``smooth``: one or two segments, as the tiny generator is
    trained on. ``joystick``: a new command every two to five frames, as a player would give."""
    out = np.zeros(frames, dtype=np.int64)
    if style == "smooth":
        late = max(frames // 3 + 1, frames - frames // 3)
        cuts = [] if rng.random() < 0.5 else [max(1, int(rng.integers(frames // 3, late)))]
    elif style == "joystick":
        cuts, at = [], 1 + int(rng.integers(2, 6))
        while at < frames:
            cuts.append(at)
            at += int(rng.integers(2, 6))
    else:
        raise ValueError(f"actions style {style!r} is unknown; choose smooth or joystick")
    previous = 0
    for a, b in zip([1, *cuts], [*cuts, frames]):
        choices = [i for i in range(1, len(ACTIONS)) if i != previous]
        previous = int(rng.choice(choices))
        out[a:b] = previous
    return out


def camera_path(actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Yaw [T] and position [T, 3], at height 0, of a camera that does what is commanded."""
    yaw = np.cumsum(np.where(actions == 3, TURN, 0.0) - np.where(actions == 2, TURN, 0.0))
    advance = STEP * ((actions == 4).astype(float) - (actions == 5).astype(float))
    camera = np.zeros((len(actions), 3))
    camera[:, 0] = np.cumsum(advance * np.sin(yaw))
    camera[:, 2] = np.cumsum(advance * np.cos(yaw))
    return yaw, camera


def caption(objects: tuple[Object, ...], actions: np.ndarray, with_camera: bool) -> str:
    """Describe a scene in plain words, e.g. ``a red ball rolls left while the camera turns right``."""
    parts = [f"a {o.colour} {o.shape} {MOTION_WORDS[o.shape, o.motion]}" for o in objects]
    text = " and ".join(parts)
    order = [int(a) for i, a in enumerate(actions[1:]) if i == 0 or a != actions[i]]
    if with_camera and 1 <= len(order) <= 2:
        text += " while the camera " + " then ".join(CAMERA_WORDS[a] for a in order)
    return text


def parse_caption(text: str) -> tuple[Object, ...]:
    """Read the objects back from a caption. Raises ValueError when the sentence is not one of the world's."""
    verbs = {words: key for key, words in MOTION_WORDS.items()}
    found = []
    for part in text.split(" while ")[0].split(" and "):
        words = part.split()
        verb = " ".join(words[3:])
        if len(words) < 4 or words[0] != "a" or words[1] not in COLOURS or words[2] not in SHAPES or verb not in verbs:
            raise ValueError(f"caption {text!r} is not of the world's form 'a <colour> <shape> <motion>[ and ...]'")
        motion = verb.split()[-1] if verb.split()[-1] in MOTIONS else {"rests": "rest", "bounces": "bounce"}[verb]
        found.append(Object(words[1], words[2], motion))
    return tuple(found)


def sample_scenes(seeds, frames: int, *, style: str = "smooth") -> Scenes:
    """Draw scenes for ``seeds`` (ints), each ``frames`` long; ``style`` as in :func:`sample_actions`."""
    rows = [_sample_one(int(seed), frames, style) for seed in seeds]
    tensors = {
        k: torch.from_numpy(np.stack([r[k] for r in rows])) for k in rows[0] if isinstance(rows[0][k], np.ndarray)
    }
    tensors = {k: v.float() if v.is_floating_point() else v for k, v in tensors.items()}
    return Scenes(
        seeds=tuple(int(s) for s in seeds),
        captions=tuple(r["caption"] for r in rows),
        objects=tuple(r["objects"] for r in rows),
        **tensors,
    )


def _sample_one(seed: int, frames: int, style: str) -> dict:
    rng = np.random.default_rng(seed)
    count = 1 if rng.random() < 0.65 else 2
    colours = rng.permutation(list(COLOURS))[:count]
    objects = tuple(
        Object(str(c), str(rng.choice(SHAPES)), str(rng.choice(MOTIONS, p=(0.2, 0.3, 0.3, 0.2)))) for c in colours
    )
    actions = sample_actions(rng, frames, style)

    yaw, camera = camera_path(actions)
    camera[:, 1] = -rng.uniform(*HEIGHTS)

    centre, spin = np.zeros((frames, SLOTS, 3)), np.zeros((frames, SLOTS))
    radius, colour = np.full(SLOTS, 0.4), np.zeros((SLOTS, 3))
    time = np.arange(frames)
    side = rng.permutation([-1.0, 1.0])
    for i, o in enumerate(objects):
        radius[i] = rng.uniform(0.38, 0.58) * (0.88 if o.shape == "cube" else 1.0)
        colour[i] = COLOURS[o.colour]
        depth = rng.uniform(3.0, 5.2)
        lateral = rng.uniform(-0.22, 0.22) if count == 1 else side[i] * rng.uniform(0.20, 0.34)
        heading = {"left": -1.0, "right": 1.0}.get(o.motion, 0.0)
        if count == 1:
            lateral -= 0.12 * heading  # start opposite to where it is going, so that it stays in view for a while
        travel = heading * rng.uniform(0.07, 0.13) * time
        centre[:, i, 0] = lateral * depth + travel
        centre[:, i, 2] = depth + 0.9 * i
        height = np.zeros(frames)
        if o.motion == "bounce":
            phase, period = rng.uniform(0, 1), rng.uniform(8, 12)
            height = rng.uniform(0.6, 1.0) * np.abs(np.sin(np.pi * (time / period + phase)))
        centre[:, i, 1] = -(radius[i] + height)
        turned = rng.uniform(0, 2 * np.pi)
        spin[:, i] = turned + travel / radius[i] if o.shape == "ball" else turned
    hills = np.stack([rng.uniform(0.02, 0.07, 3), np.array([3.0, 7.0, 13.0]), rng.uniform(0, 2 * np.pi, 3)], -1)
    return {
        "objects": objects,
        "caption": caption(objects, actions, with_camera=rng.random() < 0.6),
        "actions": actions,
        "camera": camera,
        "yaw": yaw,
        "pitch": np.array(np.deg2rad(rng.uniform(*PITCHES))),
        "ground": np.array(rng.integers(0, 3)),
        "sky": np.array(rng.integers(0, 2)),
        "checker": np.array([rng.uniform(0.9, 1.3), rng.uniform(0, np.pi / 2), rng.uniform(0, 2), rng.uniform(0, 2)]),
        "hills": hills,
        "present": np.array([i < count for i in range(SLOTS)]),
        "is_cube": np.array([i < count and objects[i].shape == "cube" for i in range(SLOTS)]),
        "colour": colour,
        "radius": radius,
        "centre": centre,
        "spin": spin,
    }
