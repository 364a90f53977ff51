"""What each reward said of each branch, trained on or not: rewards.jsonl of a run, and whose way the update went."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity

from arvideo_rl.objectives.advantages import advantages
from arvideo_rl.training.rundir import rows

DIGITS = 5  # significant ones that are kept


def table(
    raw: dict[str, Tensor], judged: dict[str, Tensor], weights: dict[str, float], adv: Tensor, groups: Tensor
) -> tuple[dict[str, Any], dict[str, float]]:
    """A row of rewards.jsonl: group ids, advantages [B, K], and for each reward its weight, values ``raw`` [B, K] and
    z-scores of ``judged`` [B, K] in the group. And metrics: how far each agrees with the advantages, held-out ones
    included (the correlation of z-scores and advantages, in [-1, 1]; left out where either says nothing)."""
    axes, metrics = {}, {}
    for name, value in judged.items():
        z, _ = advantages(value, groups)
        axes[name] = {"weight": weights[name], "raw": _numbers(raw[name]), "z": _numbers(z)}
        if z.any() and adv.any():
            metrics[f"reward/{name}/agreement"] = cosine_similarity(z.flatten(), adv.flatten(), dim=0).item()
    return {"groups": groups.tolist(), "advantages": _numbers(adv), "rewards": axes}, metrics


def _numbers(values: Tensor) -> list[list[float | None]]:
    return [[float(f"{x:.{DIGITS}g}") if math.isfinite(x) else None for x in row] for row in values.tolist()]


class Axes:
    """Appends a row per iteration to rewards.jsonl. On resume, rows from the resumed iteration on are dropped; they
    come again."""

    def __init__(self, folder: Path, resume_at: int = 0) -> None:
        self._file = rows(folder / "rewards.jsonl", "iteration", resume_at)

    def write(self, iteration: int, row: dict[str, Any]) -> None:
        """Write the :func:`table` of one iteration."""
        self._file.write(json.dumps({"iteration": iteration, **row}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring all rows to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
