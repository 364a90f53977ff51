"""Collect finished alignment runs into docs/results.json, one row a run; print its tables and draw its curves.

    python tools/results.py runs/cm_seed0 runs/cm_seed1 "runs/dmd_seed*"     # adds or replaces their rows
    python tools/results.py                                                  # only prints and draws

A row says what was trained, the held-out gain of the trained reward with its standard error (64 prompts x 2 noises or
as told, clustered by prompt), which verifiers left their margin, how many videos were scored, the trained rewards of
each iteration's own videos, and the command that repeats it. Settings that were run on three seeds or more are
summarised together and have a curve in docs/images/results.svg. A run measured again on prompts that nothing was chosen
on has that too: arvideo evaluate generator=RUN against=tiny held_out.skip=128 held_out.prompts=256 out=RUN/unseen.json
"""

from __future__ import annotations

import argparse
import glob
import hashlib
import json
import math
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

from arvideo_rl.report.curves import Line, curves

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results.json"
CURVES = ROOT / "docs" / "images" / "results.svg"
ASIDE = ("name", "out", "seed", "probe", "alarm", "checkpoint_every", "keep_last")  # do not change what is learned
BLOCK = 6  # iterations whose rewards are averaged for one point: eight prompts differ more than training changes
COLUMNS = ("recipe", "reward", "seed", "before", "delta", "se", "lost", "iterations", "seconds")


def row(folder: Path) -> dict[str, Any]:
    """What ``folder``, a finished run, is in the table; ValueError when it is not one."""
    paths = folder / "summary.json", folder / "config.yaml", folder / "config_given.yaml"
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{folder} is no finished run: it has no {path.name}")
    summary = json.loads(paths[0].read_text(encoding="utf-8"))
    config = yaml.safe_load(paths[1].read_text(encoding="utf-8"))
    given = paths[2].read_text(encoding="utf-8").splitlines()
    recipe = next(x.split(":", 1)[1].strip() for x in given if x.startswith("name:"))
    told = [x.removeprefix("# override: ") for x in given if x.startswith("# override: ")]
    changed = sorted(x for x in told if x.split("=")[0] not in ("name", "out"))
    trained = summary["trained"]
    names = [n for n, p in config["rewards"].items() if p["weight"] and not p.get("held_out")]
    metrics = [json.loads(x) for x in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "recipe": recipe, "objective": config["objective"]["target"],
        "reward": " + ".join(_named(config["rewards"][n]) for n in names),
        "seed": summary["seed"], "before": trained["before"], "after": trained["after"], "delta": trained["delta"],
        "se": trained["se"], "lost": [v["name"] for v in summary["verifiers"] if not v["ok"]],
        "verifiers": {v["name"]: [v["before"], v["delta"], v["se"]] for v in summary["verifiers"]},
        "iterations": summary["iterations"], "seconds": summary["seconds"],
        "videos": summary["iterations"] * config["prompts_per_step"] * config["group"],
        "settings": fingerprint({k: v for k, v in config.items() if k not in ASIDE}),
        "curve": {n: [round(m[f"reward/{n}"], 4) for m in metrics] for n in names},
        "command": shlex.join(["arvideo", "align", f"align/{recipe}", *changed]),
    } | unseen(folder / "unseen.json")  # fmt: skip


def unseen(path: Path) -> dict[str, Any]:
    """What ``arvideo evaluate out=`` says in ``path``, where it is there."""
    if not path.is_file():
        return {}
    told = json.loads(path.read_text(encoding="utf-8"))
    lost = [v["name"] for v in told["verifiers"] if not v["ok"]]
    return {"unseen": {k: told["trained"][k] for k in ("before", "delta", "se", "n")} | {"lost": lost}}


def fingerprint(config: dict[str, Any]) -> str:
    """Twelve hex digits that tell settings apart."""
    told = json.dumps(config, sort_keys=True)
    same = re.sub(r"(?<=[ \[])(-?\d+)\.0(?=[,\]}])", r"\1", told)  # 8.0 is 8
    return hashlib.sha256(same.encode()).hexdigest()[:12]


def _named(part: dict[str, Any]) -> str:
    """A trained reward by name; of a gate that it is one."""
    return part["target"] + (" (gate)" if part.get("gate") is not None else "")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join((*COLUMNS, "learned, nothing lost")) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for r in rows:
        learned = r["delta"] > 3 * r["se"]
        verdict = f"{'yes' if learned else 'no'}, {'no' if r['lost'] else 'yes'}"
        cells = [r["recipe"], r["reward"], str(r["seed"]), f"{r['before']:.3f}", f"{r['delta']:+.3f}", f"{r['se']:.3f}",
                 ", ".join(r["lost"]) or "nothing", str(r["iterations"]), f"{r['seconds']:.0f}", verdict]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def repeated(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows of the same settings together, sorted by seed; those with three seeds or more."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in sorted(rows, key=lambda r: r["seed"]):
        found.setdefault(r["settings"], []).append(r)
    return [group for group in found.values() if len(group) >= 3]


def summary(rows: list[dict[str, Any]]) -> str:
    """Markdown: each setting that was run on three seeds or more, with the mean gain, its spread over the seeds and
    what it cost."""
    heads = ("reward", "recipe", "iterations", "gain of each seed", "mean", "spread", "error of one", "videos",
             "minutes", "lost", "on unseen prompts")  # fmt: skip
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for group in sorted(repeated(rows), key=lambda g: (g[0]["reward"], g[0]["recipe"], g[0]["iterations"])):
        gains, lost = [r["delta"] for r in group], sorted({v for r in group for v in r["lost"]})
        cells = [group[0]["reward"], group[0]["recipe"], str(group[0]["iterations"]),
                 ", ".join(f"{g:+.3f}" for g in gains), f"{statistics.mean(gains):+.3f}",
                 f"{statistics.stdev(gains):.3f}", f"{statistics.mean(r['se'] for r in group):.3f}",
                 f"{group[0]['videos']:,}", f"{statistics.mean(r['seconds'] for r in group) / 60:.1f}",
                 ", ".join(lost) or "nothing",
                 ", ".join(f"seed {r['seed']} {_again(r['unseen'])}" for r in group if "unseen" in r)]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _again(found: dict[str, Any]) -> str:
    return f"{found['delta']:+.3f} ({found['se']:.3f})" + (f" lost {', '.join(found['lost'])}" if found["lost"] else "")


def drawn(rows: list[dict[str, Any]]) -> str:
    """SVG: a panel a reward; of each setting the reward of its own rollouts against the videos scored so far, means of
    BLOCK iterations and of all seeds."""
    panels: dict[str, dict[str, Line]] = {}
    groups = [g for g in repeated(rows) if len(g[0]["curve"]) == 1]
    names = sorted({_pen(g[0]) for g in groups})
    for group in groups:
        series = [next(iter(r["curve"].values())) for r in group]
        per = group[0]["videos"] / len(series[0])
        line = []
        for at in range(0, len(series[0]), BLOCK):
            block = [v for s in series for v in s[at : at + BLOCK]]
            line.append((per * (at + len(block) / len(series) / 2), statistics.mean(block)))
        panel = panels.setdefault(f"{group[0]['reward']}, against videos scored", {n: [] for n in names})
        if line[-1][0] > max((x for x, _ in panel[_pen(group[0])]), default=-math.inf):  # the longest of a recipe
            panel[_pen(group[0])] = line
    return curves(panels)


def _pen(r: dict[str, Any]) -> str:
    """Whose curve it is: the objective's; of the policy gradients, which are one objective, the recipe's."""
    return r["recipe"].removesuffix("_tiny") if r["objective"] == "grpo" else r["objective"]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", help="run directories, or patterns of them")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the JSON file (default: docs/results.json)")
    told = parser.parse_args()
    rows = json.loads(told.results.read_text(encoding="utf-8")) if told.results.exists() else []
    for pattern in told.runs:
        found = sorted(glob.glob(pattern))
        if not found:
            print(f"error: no run at {pattern!r}", file=sys.stderr)
            return 1
        for folder in found:
            try:
                new = row(Path(folder))
            except ValueError as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
            same = [r for r in rows if (r["settings"], r["seed"]) == (new["settings"], new["seed"])]
            rows = [r for r in rows if r not in same] + [new]
    rows.sort(key=lambda r: (r["objective"], r["recipe"], r["reward"], r["command"], r["seed"]))
    if told.runs:
        draft = told.results.with_suffix(".tmp")
        draft.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        draft.replace(told.results)
        CURVES.write_text(drawn(rows), encoding="utf-8")
    print(table(rows), summary(rows), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
