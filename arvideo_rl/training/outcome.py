"""What a run ends with: a table for the terminal, summary.json, and before/after videos side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import interpolate

from arvideo_rl import media
from arvideo_rl.progress import console
from arvideo_rl.training import rundir
from arvideo_rl.training.compare import Measured
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.world.scene import ACTIONS

WIDTH = 192  # pixels to which small videos are enlarged
CELLS = 12  # frames of a large video on a contact sheet
SAMPLES = 4  # videos kept of every moment of a run that is sampled
ARROWS = {0: " ", 1: "o", 2: "<", 3: ">", 4: "^", 5: "v"}


def table(result: dict[str, Any], title: str) -> Table:
    """The comparison as a table."""
    out = Table(title=title, title_justify="left")
    for column in ("", "before", "after", "change", "+- se", "n", "verdict"):
        out.add_column(column, justify="left" if column in ("", "verdict") else "right")
    rows = [
        (f"trained: {result['trained']['name']}", result["trained"], "up > 3 se" if result["learned"] else "not shown")
    ]
    for v in result["verifiers"]:
        kept = f"kept (margin {v['margin']:.0%})" if v["ok"] else f"LOST (margin {v['margin']:.0%})"
        rows.append((v["name"] + (" (lower is better)" if v["better"] == "lower" else ""), v, kept))
    for name, r, verdict in rows:
        out.add_row(
            name,
            f"{r['before']:.4f}",
            f"{r['after']:.4f}",
            f"{r['delta']:+.4f}",
            f"{r['se']:.4f}",
            str(r["n"]),
            verdict,
        )
    return out


def sentence(result: dict[str, Any]) -> str:
    """One plain sentence: did it learn, was anything sacrificed."""
    gain = result["trained"]
    learned = "It learned" if result["learned"] else "No gain was shown"
    lost = [v["name"] for v in result["verifiers"] if not v["ok"]]
    kept = "nothing was sacrificed" if not lost else f"these left their margin: {', '.join(lost)}"
    return (
        f"{learned}: {gain['name']} went from {gain['before']:.3f} to {gain['after']:.3f} "
        f"({gain['delta']:+.3f} +- {gain['se']:.3f}, {gain['n']} held-out prompts, smallest gain they can show "
        f"{gain['margin']:.3f}); {kept}."
    )


def commands(actions: torch.Tensor) -> str:
    """Actions [T] as text, one sign a frame: < > turn, ^ v move, o stay; empty where nothing is commanded."""
    return "".join(ARROWS[int(a)] for a in actions) if actions.any() else ""


def videos(folder: Path, before: Measured, after: Measured, prompts: Prompts, fps: float) -> list[Path]:
    """Write the kept held-out videos side by side (left before, right after), a contact sheet, and videos.json: a list
    of objects with file, prompt, actions, and the scores of both halves by name (null where not measured)."""
    folder.mkdir(parents=True, exist_ok=True)
    written, rows, labels, facts = [], [], [], []
    told = next(k for k in ("actions_other_judge", *after.values) if k in after.values)  # else the first reward
    for p, (left, right) in enumerate(zip(before.pixels, after.pixels)):
        path = folder / f"{p:02d}.mp4"
        media.write_video(path, media.side_by_side(left, right, gap=2), fps, scale=enlarged(left))
        written.append(path)
        acts = commands(prompts.actions[p, : len(left)])
        facts.append({
            "file": path.name, "prompt": prompts.texts[p], "actions": acts,
            "before": scores_of(before, p), "after": scores_of(after, p),
        })  # fmt: skip
        scores = [f"{m.values[told][p, 0]:.2f}" for m in (before, after)]
        name = told.removeprefix("reward/").replace("actions_other_judge", "actions")
        for when, clip, s in zip(("before", "after "), (left, right), scores):
            rows.append(small(clip))
            labels.append(" | ".join(x for x in (f"{when} {name} {s}", acts, prompts.texts[p]) if x))
    sheet = media.contact_sheet(rows, labels=labels, scale=max(1, enlarged(rows[0]) // 2))
    path = folder / "before_after.png"
    media.write_sheet(path, sheet)
    rundir.write_json(folder / "videos.json", facts)
    return [path, *written]


def enlarged(clip: torch.Tensor) -> int:
    """How many times a small video [T, 3, H, W] is enlarged."""
    return max(1, WIDTH // clip.shape[-1])


def small(clip: torch.Tensor) -> torch.Tensor:
    """A video [T, 3, H, W] uint8 as it goes on a contact sheet: one wider than WIDTH as wide, at most CELLS frames."""
    if clip.shape[-1] <= WIDTH:
        return clip
    clip = clip[:: -(-len(clip) // CELLS)]
    size = (round(clip.shape[-2] * WIDTH / clip.shape[-1]), WIDTH)
    return interpolate(clip.float(), size, mode="area").round().to(torch.uint8)


def samples(folder: Path, measured: Measured, prompts: Prompts, fps: float) -> None:
    """Write the first videos of a measurement made during a run, and samples.json: a list of objects with file, prompt,
    actions and scores by name."""
    facts = []
    for p, clip in enumerate(measured.pixels[:SAMPLES]):
        media.write_video(folder / f"{p:02d}.mp4", clip, fps, scale=enlarged(clip))
        facts.append({
            "file": f"{p:02d}.mp4", "prompt": prompts.texts[p],
            "actions": commands(prompts.actions[p, : len(clip)]), "scores": scores_of(measured, p),
        })  # fmt: skip
    rundir.write_json(folder / "samples.json", facts)


def scores_of(measured: Measured, prompt: int) -> dict[str, float | None]:
    """What was measured on a prompt's first video, by name; None where it could not be."""
    values = {name: value[prompt, 0].item() for name, value in measured.values.items()}
    return {name: round(v, 4) if math.isfinite(v) else None for name, v in values.items()}


def finish(
    folder: Path,
    result: dict[str, Any],
    facts: dict[str, Any],
    before: Measured,
    after: Measured,
    prompts: Prompts,
    fps: float,
) -> None:
    """Write summary.json and the videos, print the table and the sentence."""
    shown = videos(folder / "videos", before, after, prompts, fps)
    rundir.write_json(folder / "summary.json", {**facts, **result, "sentence": sentence(result)})  # last: marks the end
    out = console()
    out.print(table(result, f"held-out comparison of {folder}"))
    out.print(sentence(result), soft_wrap=True)
    out.print(f"summary: {folder / 'summary.json'}   videos: {shown[0]}", soft_wrap=True)


assert set(ARROWS) == set(range(len(ACTIONS)))
