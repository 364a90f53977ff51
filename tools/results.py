"""Collect finished alignment runs into docs/results.json, one row a run, and print its table.

    python tools/results.py runs/cm_seed0 runs/cm_seed1 "runs/dmd_seed*"     # adds or replaces their rows
    python tools/results.py                                                  # only prints the table

A row says what was trained, the held-out gain of the trained reward with its standard error (64 prompts x 2 noises,
clustered by prompt), which verifiers left their margin, and the command that repeats it.
"""

from __future__ import annotations

import argparse
import glob
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results.json"
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
    return {
        "recipe": recipe, "objective": config["objective"]["target"],
        "reward": " + ".join(_named(p) for p in config["rewards"].values() if p["weight"] and not p.get("held_out")),
        "seed": summary["seed"], "before": trained["before"], "after": trained["after"], "delta": trained["delta"],
        "se": trained["se"], "lost": [v["name"] for v in summary["verifiers"] if not v["ok"]],
        "verifiers": {v["name"]: [v["before"], v["delta"], v["se"]] for v in summary["verifiers"]},
        "iterations": summary["iterations"], "seconds": summary["seconds"],
        "command": shlex.join(["arvideo", "align", f"align/{recipe}", *changed]),
    }  # fmt: skip


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
            rows = [r for r in rows if r["command"] != new["command"]] + [new]
    rows.sort(key=lambda r: (r["objective"], r["recipe"], r["reward"], r["command"], r["seed"]))
    if told.runs:
        draft = told.results.with_suffix(".tmp")
        draft.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        draft.replace(told.results)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
