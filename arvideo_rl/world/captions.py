"""What a clip of the world shows, captions that are wrong about it, and which of their words are right.

Shape letters: L words of a caption.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arvideo_rl.world.scene import CAMERA_WORDS, COLOURS, MOTION_WORDS, MOTIONS, SHAPES, Object, caption

SIDES = {"left": "right", "right": "left"}
MIRRORED = {2: 3, 3: 2}  # actions as seen in a mirror
UNDONE = {2: 3, 3: 2, 4: 5, 5: 4}  # and played backwards
MOST_CAMERA = 2  # camera segments that a caption names
NAN = math.nan


@dataclass(frozen=True)
class Shown:
    """What is to be seen, or said to be: the objects, and the camera's actions in their order, repeats merged."""

    objects: tuple[Object, ...]
    camera: tuple[int, ...]

    @classmethod
    def of(cls, objects: tuple[Object, ...], actions: Sequence[int]) -> Shown:
        """What frames with ``actions`` [T] show; the first action led into the first frame and does not count."""
        a = [int(x) for x in actions[1:]]
        return cls(objects, tuple(x for i, x in enumerate(a) if i == 0 or x != a[i - 1]))

    def mirrored(self) -> Shown:
        """The same with left and right exchanged in the frame."""
        return Shown(_turned(self.objects), tuple(MIRRORED.get(a, a) for a in self.camera))

    def reversed(self) -> Shown:
        """The same played backwards."""
        return Shown(_turned(self.objects), tuple(UNDONE.get(a, a) for a in reversed(self.camera)))

    def frozen(self) -> Shown:
        """One frame of it, repeated."""
        return Shown(tuple(replace(o, motion="rest") for o in self.objects), (1,))

    def retold(self, draw: np.random.Generator, with_camera: float = 0.6) -> Shown:
        """The same in another order of objects, and without the camera (always where it moves in too many ways)."""
        tells = draw.random() < with_camera and len(self.camera) <= MOST_CAMERA
        order = draw.permutation(len(self.objects))
        return Shown(tuple(self.objects[i] for i in order), self.camera if tells else ())


def _turned(objects: tuple[Object, ...]) -> tuple[Object, ...]:
    return tuple(replace(o, motion=SIDES.get(o.motion, o.motion)) for o in objects)


def caption_of(said: Shown) -> str:
    """The world's sentence for ``said``, which must have an object; the camera is named when there is any."""
    return caption(said.objects, np.array([0, *said.camera]), with_camera=bool(said.camera))


def judge_words(said: Shown, shown: Shown) -> list[float]:
    """Whether each word of :func:`caption_of` ``said`` is right of what is ``shown``: 1, 0, or NaN for a word that
    could be no other; [1 + L], the first for the number of objects.

    Objects are told apart by colour: what is said of a red ball is held against the red object, and where there is
    none, every word about it is wrong.
    """
    by_colour = {o.colour: o for o in shown.objects}
    out = [float(len(said.objects) == len(shown.objects))]
    for i, o in enumerate(said.objects):
        real = by_colour.get(o.colour)
        right = [real is not None, real and o.shape == real.shape, real and _kind(o.motion) == _kind(real.motion)]
        right += [real and o.motion == real.motion] if o.motion in SIDES else []
        out += [NAN] * (1 + (i > 0)) + [float(bool(x)) for x in right]  # "a", after an "and"
    for i, action in enumerate(said.camera):
        same = float(i < len(shown.camera) and shown.camera[i] == action)
        out += [NAN] * (1 if i else 3) + [same] * len(CAMERA_WORDS[action].split())  # "while the camera", "then"
    return out


def _kind(motion: str) -> str:
    return "travel" if motion in SIDES else motion


def alter(shown: Shown, other: Shown, draw: np.random.Generator) -> Shown:
    """A caption that is wrong of ``shown``, at least most often: one attribute exchanged, several, an object too many
    or too few, or all that is true of ``other``."""
    objects, camera = list(shown.objects), [a for a in shown.camera[:MOST_CAMERA]]
    how = draw.choice(["one", "several", "number", "other"], p=(0.4, 0.25, 0.1, 0.25))
    if how == "other" or not objects:
        objects, camera = list(other.objects) or [_any_object(draw, ())], list(other.camera[:MOST_CAMERA])
    elif how == "number":
        if len(objects) > 1:
            objects.pop(int(draw.integers(len(objects))))
        else:
            objects.append(_any_object(draw, [o.colour for o in objects]))
    else:
        parts = [(i, name) for i in range(len(objects)) for name in ATTRIBUTES] + [(i, "") for i in range(len(camera))]
        chosen = [parts[int(draw.integers(len(parts)))]] if how == "one" else [p for p in parts if draw.random() < 0.4]
        for i, name in chosen:
            if name:
                objects[i] = exchange(objects[i], name, draw, [o.colour for o in objects])
            else:
                camera[i] = int(draw.choice([a for a in CAMERA_WORDS if a != camera[i] and a not in camera]))
    return Shown(tuple(objects), tuple(camera))


ATTRIBUTES = {"colour": tuple(COLOURS), "shape": SHAPES, "motion": MOTIONS}


def exchange(o: Object, attribute: str, draw: np.random.Generator, taken: Sequence[str] = ()) -> Object:
    """``o`` with another value of ``attribute``; never one of the colours ``taken``."""
    avoid = {getattr(o, attribute), *(taken if attribute == "colour" else ())}
    return replace(o, **{attribute: str(draw.choice([v for v in ATTRIBUTES[attribute] if v not in avoid]))})


def _any_object(draw: np.random.Generator, taken: Sequence[str]) -> Object:
    colour = str(draw.choice([c for c in COLOURS if c not in taken]))
    return Object(colour, str(draw.choice(SHAPES)), str(draw.choice(MOTIONS)))


assert all((s, m) in MOTION_WORDS for s in SHAPES for m in MOTIONS)
