"""The page of an audit: a table a reward, what each change looks like, and what fooled which reward."""

from __future__ import annotations

import datetime
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from arvideo_rl.media import side_by_side, write_video
from arvideo_rl.report.embed import ARROWS, Budget
from arvideo_rl.scoring.audit_tables import number, span, summary
from arvideo_rl.training.outcome import commands
from rewards.audit import Audit, Finding, Score
from rewards.contract import Clips
from rewards.describe import declared
from rewards.separation import Share

if TYPE_CHECKING:
    from arvideo_rl.scoring.audit import Job

WIDTH = 160  # pixels a clip is at least shown in
FOOLED = 3  # clips shown for each reward
TELLING = ("clean", "wrong_prompt", "wrong_actions", "mirrored")  # shown with what is said of them
TONES = {"FOOLED": "bad", "moves": "open", "noticed": "good", "falls": "open"}


def page(job: Job, audits: list[Audit]) -> str:
    """The audit as HTML that needs no other file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    with tempfile.TemporaryDirectory() as folder:
        films = Films(Path(folder))
        told = [{
            "name": a.reward, "lines": summary(a), "tone": _tone(a),
            "hacked_by": declared(job.rewards[a.reward])["hacked_by"], "rows": [_row(job, f) for f in a.findings],
            "fooled": [_fooled(job, a, f.change, films) for f in a.findings if f.verdict == "FOOLED"][:FOOLED],
        } for a in audits]  # fmt: skip
        shown = [_shown(job, audits, i, films) for i in range(min(job.config.shown, len(job.clips.names)))]
        return environment.get_template("audit.html.j2").render(
            title=f"Audit of {', '.join(job.rewards)}", rewards=told, shown=shown, notes=job.notes,
            count=len(job.clips.names), config=job.config,
            changes=job.changes, made=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        )  # fmt: skip


class Films:
    """Videos as data: URIs, within a budget."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.budget, self.count = folder, Budget(4, 60), 0

    def add(self, frames: Tensor, fps: float) -> dict[str, Any]:
        """Frames [T, 3, H, W] as what the template shows, None where the page is full."""
        self.count += 1
        path = self.folder / f"{self.count}.mp4"
        write_video(path, frames, fps, max(1, math.ceil(WIDTH / frames.shape[-1])))
        return {"uri": self.budget.uri(path)[0]}


def _tone(one: Audit) -> str:
    claimed = any(f.claim and f.passed is not None for f in one.findings)
    return "bad" if one.failures else "good" if claimed and not one.untested else "open"


def _row(job: Job, f: Finding) -> dict[str, Any]:
    """A finding as the table shows it."""
    tone = TONES.get(f.verdict, "")
    if f.claim and f.passed is not None:
        tone = "good" if f.passed else "bad"
    return {
        "finding": f, "about": job.changes[f.change].about, "tone": tone, "wins": span(f.win_rate),
        "auroc": span(f.auroc), "moved": number(f.moved, ".2f"), "clean": number(f.clean), "changed": number(f.changed),
        "bar": _bar(f.auroc) if f.pairs else None, "limit": _percent(job.config.noticed),
    }  # fmt: skip


def _bar(area: Share) -> dict[str, float]:
    """Where a bar from 0 to 1 is drawn, in percent of its width."""
    middle, low, high = map(_percent, area)
    return {"low": low, "width": round(high - low, 1), "middle": min(middle, 98.7)}  # the mark is 2 pixels wide


def _percent(share: float) -> float:
    return round(100 * share, 1)


def _batch(job: Job, index: int) -> tuple[Clips, int, int]:
    """The batch that holds clip ``index``, its row in it, and the batch's seed."""
    start = 0
    for clips in job.clips.batches:
        if index < start + len(clips):
            return clips, index - start, job.config.seed + start
        start += len(clips)
    raise IndexError(index)


def _copy(job: Job, index: int, change: str) -> tuple[Clips, int]:
    """The batch of clip ``index`` after ``change``, and the clip's row in it."""
    clips, row, seed = _batch(job, index)
    changed = clips if change == "clean" else job.changes[change].make(clips, seed)
    assert changed is not None  # it has been scored
    return changed, row


def _rate(clips: Clips, row: int) -> float:
    """Frames a second of a clip."""
    return float(torch.as_tensor(clips.fps, dtype=torch.float64).expand(len(clips))[row])


def _value(found: Score) -> str:
    return found[1] or f"{found[0]:.4g}"


def _shown(job: Job, audits: list[Audit], index: int, films: Films) -> dict[str, Any]:
    """One clip in every change that it allows, with what each reward gave."""
    out = []
    for change in ("clean", *job.changes):
        found = {a.reward: a.values[change][index] for a in audits if change in a.values}
        values = [(k, _value(v)) for k, v in found.items() if v is not None]
        if values:
            clips, row = _copy(job, index, change)
            about, prompt, actions = "" if change == "clean" else job.changes[change].about, "", ""
            if change in TELLING and clips.prompts is not None:
                prompt = clips.prompts[row]
            if change in TELLING and clips.actions is not None:
                actions = commands(clips.actions[row])
            out.append({"change": change, "about": about, "scores": values, "prompt": prompt,
                        "actions": [ARROWS.get(sign, sign) for sign in actions],
                        **films.add(clips.frames[row], _rate(clips, row))})  # fmt: skip
    return {"name": job.clips.names[index], "films": out}


def _fooled(job: Job, one: Audit, change: str, films: Films) -> dict[str, Any]:
    """The clip that gains most by ``change``: clean and changed, side by side."""
    both = [(a, b, i) for i, (a, b) in enumerate(zip(one.values["clean"], one.values[change])) if a and b]
    before, after, index = max((p for p in both if math.isfinite(p[1][0] - p[0][0])), key=lambda p: p[1][0] - p[0][0])
    (clean, row), (changed, _) = _copy(job, index, "clean"), _copy(job, index, change)
    left, right = clean.frames[row], changed.frames[row]
    if len(right) < len(left):  # at half the rate
        right = right.repeat_interleave(2, 0)[: len(left)]
    return {"change": change, "name": job.clips.names[index], "scores": f"{_value(before)} to {_value(after)}",
            **films.add(side_by_side(left, right), _rate(clean, row))}  # fmt: skip
