"""An example of a reward that is gamed: "the colour of the prompt should be seen", taken as an average over the frame.

It looks reasonable and rises nicely. It is maximal when the whole frame is painted in that colour, so a policy trained
on it loses sky, ground, objects and obedience. docs/hack_alarm.md shows that, and the alarm that says so.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips, Scores

CHANNELS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1), "yellow": (1, 1, 0)}


def naive_colour(clips: Clips) -> Scores:
    """How much the channels of the prompt's first colour exceed the others, averaged over all pixels and frames: 0
    (none, or grey) to 1 (nothing but that colour). NaN where the prompt names no colour."""
    assert clips.prompts is not None
    values: list[Tensor] = []
    for frames, prompt in zip(clips.frames, clips.prompts):
        named = next((w for w in prompt.lower().replace(",", " ").split() if w in CHANNELS), None)
        if named is None:
            values.append(torch.tensor(torch.nan))
            continue
        own = torch.tensor(CHANNELS[named], dtype=torch.bool)
        excess = frames[:, own].mean(1) - frames[:, ~own].mean(1)  # [T, H, W]
        values.append(excess.clamp_min(0).mean())
    value = torch.stack(values)
    reasons = ["content: the prompt names no colour" if v else None for v in value.isnan()]
    return Scores(value, ~value.isnan(), reasons)


naive_colour.formula = "mean over pixels of max(0, named channels - the others)"  # type: ignore[attr-defined]
naive_colour.cost = "none to speak of"  # type: ignore[attr-defined]
naive_colour.page = "docs/hack_alarm.md"  # type: ignore[attr-defined]
naive_colour.needs = {"prompts"}  # type: ignore[attr-defined]
naive_colour.value_range = (0.0, 1.0)  # type: ignore[attr-defined]
naive_colour.licence = "Apache-2.0, no weights"  # type: ignore[attr-defined]
naive_colour.hacked_by = "painting the frame: kept as an example of that"  # type: ignore[attr-defined]
naive_colour.claims = Claims(notices=("wrong_prompt",), withstands=("grainy", "mirrored"))  # type: ignore[attr-defined]
