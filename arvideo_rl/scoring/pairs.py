"""Best and worst clip of each prompt, for preference training elsewhere: who is left out, and why, is counted.

A clip takes part if it has a value, a group, and moves: a still clip wins by having nothing to fault, or loses by that
alone, and neither teaches anything. Of what is left the best is paired with the worst, the second best with the second
worst, and so on, so that no clip is in two pairs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arvideo_rl.config import ConfigError, check_ranges
from arvideo_rl.scoring.inputs import Task
from arvideo_rl.training.rundir import write_bytes

MOTION = "dynamic_degree"  # the reward that says whether a clip moves
Row = dict[str, Any]


@dataclass
class Pairing:
    """How pairs are made of what was scored."""

    by: str = "prompt"  # clips that agree in this are compared: prompt (and actions), or a column of the manifest
    reward: str = ""  # which of several rewards ranks them; empty: the first
    gap: float = 0.0  # least difference of a pair, in the reward's units; ties are never a pair
    motion: float = 0.1  # least dynamic_degree of both, which is scored, too; 0 = still clips may take part
    most: int = 1  # pairs a group: best and worst, second best and second worst, ...

    def check(self) -> None:
        """ConfigError for what cannot be."""
        check_ranges(self, {"gap": "[0, inf)", "motion": "[0, 1]", "most": "[1, inf)"}, "pairing.")


def group(task: Task, by: str) -> Hashable:
    """What ``task`` is compared within, None when it is not known. Clips under other actions are of another group,
    because they were asked for something else."""
    if by == "prompt":
        return None if task.prompt is None else (task.prompt, *(task.actions or ()))
    found = task.given.get(by)
    return None if found is None else json.dumps(found, sort_keys=True, default=str)


def check_groups(tasks: Sequence[Task], by: str) -> None:
    """ConfigError when no two clips can be compared."""
    counts = Counter(g for t in tasks if t.problem is None and (g := group(t, by)) is not None)
    if not counts:
        how = "give a manifest or FILE.json beside the files" if by == "prompt" else "is it a column of the manifest?"
        raise ConfigError(f"pairing.by={by}: no clip has a {by}; {how}")
    if max(counts.values()) < 2:
        also = " and actions" if by == "prompt" else ""
        raise ConfigError(f"pairing.by={by}: no two clips have the same {by}{also}, so there is nothing to pair")


def make(tasks: Sequence[Task], rows: Sequence[Sequence[Row]], reward: str, how: Pairing) -> tuple[list[Row], Row]:
    """(pairs, what became of clips and groups) from the ``rows`` of each task, one a reward. Pairs stand in the order
    in which their groups first appear."""
    clips: Counter[str] = Counter()
    groups: dict[Hashable, list[tuple[Task, float, float | None]]] = {}
    for task, some in zip(tasks, rows):
        by_reward = {row["reward"]: row for row in some}
        row, moves = by_reward[reward], by_reward.get(MOTION, {}) if how.motion else {}
        key = group(task, how.by)
        if key is not None:
            groups.setdefault(key, [])
        if row["value"] is None:
            clips[row["reason"]] += 1
        elif key is None:
            clips[f"no_{how.by}"] += 1
        elif how.motion and moves["value"] is None:
            clips[f"{MOTION} {moves['reason']}"] += 1
        elif how.motion and moves["value"] < how.motion:
            clips["still"] += 1
        else:
            groups[key].append((task, row["value"], moves.get("value")))
    left: Counter[str] = Counter()
    pairs: list[Row] = []
    for members in groups.values():
        ranked = sorted(members, key=lambda m: -m[1])
        both = list(zip(ranked[: len(ranked) // 2], ranked[::-1]))[: how.most]
        made = [_pair(best, worst, reward) for best, worst in both if best[1] - worst[1] > 0]
        made = [pair for pair in made if pair["gap"] >= how.gap]
        pairs += made
        if not made:
            left["one_clip" if not both else "gap"] += 1
    told: Row = {"pairs": len(pairs), "reward": reward, "clips": len(tasks), "groups": len(groups)}
    return pairs, told | {"clips_left_out": dict(clips.most_common()), "groups_left_out": dict(left.most_common())}


def _pair(best: tuple[Task, float, float | None], worst: tuple[Task, float, float | None], reward: str) -> Row:
    (chosen, high, fast), (rejected, low, slow) = best, worst
    out: Row = {"prompt": chosen.prompt, "chosen": chosen.name, "rejected": rejected.name}
    out |= {"chosen_score": high, "rejected_score": low, "gap": high - low, "reward": reward}
    out |= {} if fast is None else {"chosen_motion": fast, "rejected_motion": slow}
    out |= {"actions": chosen.actions} if chosen.actions == rejected.actions and chosen.actions else {}
    return out | {f"{k}_given": t.given for k, t in (("chosen", chosen), ("rejected", rejected)) if t.given}


def write(path: Path, pairs: Sequence[Row]) -> None:
    """One JSON object a line; the file appears whole or not at all."""
    text = "".join(json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
    write_bytes(path, text.encode("utf-8", "backslashreplace"))
