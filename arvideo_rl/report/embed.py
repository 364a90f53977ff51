"""Videos and pictures as data: URIs within a budget; what does not fit is named, not linked."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from arvideo_rl.report.data import Clip, RunData

KINDS = {".mp4": "video/mp4", ".png": "image/png"}
MOMENTS = 6  # iterations whose samples are shown, spread over the run
SAMPLES = 4  # videos of each
ARROWS = {"<": "←", ">": "→", "^": "↑", "v": "↓", "o": "·", " ": ""}


class Budget:
    """How much may be embedded: MiB a file and MiB in all."""

    def __init__(self, file_mib: float, total_mib: float) -> None:
        self.file, self.left, self.used = file_mib * 2**20, total_mib * 2**20, 0
        self.words = f"{file_mib:g} MiB a file and {total_mib:g} MiB in all (file_mib=, total_mib=)"

    def uri(self, path: Path) -> tuple[str | None, str]:
        """(data: URI, "") or (None, why not)."""
        try:
            size = path.stat().st_size
            if size > min(self.file, self.left):
                return None, f"{path} is {size / 2**20:.1f} MiB and was left out: the limit is {self.words}."
            data = path.read_bytes()
        except OSError:
            return None, f"{path} is missing or cannot be read."
        self.left -= size
        self.used += size
        return f"data:{KINDS[path.suffix]};base64,{base64.b64encode(data).decode()}", ""


def clip_view(clip: Clip, budget: Budget) -> dict[str, Any]:
    """A video with its prompt, its actions as arrows, and its scores as a table."""
    uri, why = budget.uri(clip.file) if clip.file.suffix in KINDS else (None, f"{clip.file} is not an .mp4.")
    columns = list(clip.scores)
    names = list(dict.fromkeys(name for column in clip.scores.values() for name in column))
    rows = [(name.removeprefix("reward/"), name.startswith("reward/"), [clip.scores[c].get(name) for c in columns])
            for name in names]  # fmt: skip
    return {
        "name": clip.file.stem, "uri": uri, "why": why, "prompt": clip.prompt, "both": "before" in columns,
        "actions": [ARROWS.get(sign, sign) for sign in clip.actions.strip()],
        "columns": columns, "rows": rows,
    }  # fmt: skip


def videos_view(run: RunData, budget: Budget) -> dict[str, Any]:
    """Before/after videos, the sheet of their frames, and samples of some moments of the run."""
    clips = [clip_view(clip, budget) for clip in run.clips]
    sheet, why = budget.uri(run.sheet) if run.sheet else (None, "")
    moments = spread([m for m in run.samples if m[1]], MOMENTS)
    samples = [(i, [clip_view(clip, budget) for clip in found[:SAMPLES]]) for i, found in moments]
    cut = ""
    if run.samples and (len(moments) < len(run.samples) or any(len(found) > SAMPLES for _, found in moments)):
        cut = f"Shown are up to {SAMPLES} videos of {len(moments)} of {len(run.samples)} moments."
    return {"clips": clips, "sheet": sheet, "sheet_why": why, "samples": samples, "samples_cut": cut}


def spread(items: list, count: int) -> list:
    """At most ``count`` of the items, evenly spaced, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]
