"""Recordings of VPT's contractors: a NAME.jsonl beside NAME.mp4, what the hands did at each frame.

Source: the recorder's keys, the 360/2400 degrees a count of the mouse and the order of the numbers from
openai/Video-Pre-Training (MIT), run_inverse_dynamics_model.py; camera bins from the paper (arXiv 2206.11795): the angle
clipped to +-10 degrees a frame, mu-law with mu = 10, in bins of 2. Frames are 20 a second, read at 128 x 128 by
OpenCV's INTER_LINEAR: train with size=128.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

KEYS = {"w": "forward", "s": "back", "a": "left", "d": "right", "space": "jump", "left.shift": "sneak",
        "left.control": "sprint", "q": "drop", "e": "inventory", "f": "swapHands", "escape": "ESC",
        **{str(i): f"hotbar.{i}" for i in range(1, 10)}}  # fmt: skip
BUTTONS = {0: "attack", 1: "use", 2: "pickItem"}  # of the mouse
NAMES = (*KEYS.values(), *BUTTONS.values(), "camera.pitch", "camera.yaw")
DEGREES_A_COUNT, MOST, MU, BIN = 360 / 2400, 10.0, 10.0, 2.0


def camera_bin(degrees: float) -> int:
    """The bin of an angle a frame, -5 to 5: small turns have finer ones."""
    share = max(-MOST, min(MOST, degrees)) / MOST
    bent = math.copysign(math.log1p(MU * abs(share)) / math.log1p(MU), share) * MOST
    return round(bent / BIN)


def numbers_of(row: dict[str, Any]) -> tuple[float, ...]:
    """The numbers called NAMES of one line of a recording; KeyError, TypeError or ValueError for another kind."""
    held, mouse = row["keyboard"]["keys"], row["mouse"]
    if not isinstance(held, list) or not isinstance(mouse["buttons"], list):
        raise TypeError("keys and buttons are lists")
    if not all(math.isfinite(mouse[axis]) for axis in ("dy", "dx")):
        raise ValueError("dx and dy are finite")
    keys = {key.removeprefix("key.keyboard.") for key in held}
    pressed = [float(key in keys) for key in KEYS] + [float(button in mouse["buttons"]) for button in BUTTONS]
    camera = [float(camera_bin(mouse[axis] * DEGREES_A_COUNT)) for axis in ("dy", "dx")]
    return (*pressed, *camera)


def read_recording(path: Path) -> list[tuple[float, ...]]:
    """The actions of every frame, each driving the change to the next one. ValueError names the line that is wrong."""
    out = []
    for i, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                out.append(numbers_of(json.loads(line)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} line {i} is no line of a VPT recording ({error!r})") from None
    return out
