"""What an audit comes to: in sentences, and in the files beside its page."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arvideo_rl.scoring.audit import Job
from arvideo_rl.training.rundir import write_json, write_text
from rewards.audit import Audit, Finding, Score, Values
from rewards.separation import Share


def span(numbers: Share) -> str:
    """A number with its interval."""
    return "" if math.isnan(numbers[0]) else "{:.2f} ({:.2f} to {:.2f})".format(*numbers)


def number(value: float, form: str = ".4g") -> str:
    """A number, or nothing where there is none."""
    return "" if math.isnan(value) else f"{value:{form}}"


def summary(one: Audit) -> list[str]:
    """What the findings come to, a sentence each."""
    lines = [f"{n} of {len(one.values['clean'])} clean clips have no value: {reason}"
             for reason, n in _reasons(one.values["clean"])]  # fmt: skip
    unmeasured = {f.change: r for f in one.findings if not f.pairs for r, _ in _reasons(one.values[f.change])[:1]}
    if len(unmeasured) == len(one.findings):
        return [*lines, "nothing could be measured"]
    lines += [f"{change} was not measured: {reason}" for change, reason in unmeasured.items()]
    higher = [f.change for f in one.findings if f.verdict == "FOOLED"]
    lines.append(f"scored above clean: {', '.join(higher)}" if higher else "nothing scored above clean beyond chance")
    claimed = [f for f in one.findings if f.passed is not None and f.claim]
    if one.failures:
        lines.append("FAILS its own claims: " + ", ".join(f"{f.change} ({f.verdict})" for f in one.failures))
    elif claimed:
        lines.append(f"passes its own claims ({len(claimed)} tested)")
    else:
        lines.append("claims nothing that was tested")
    if one.untested:
        lines.append(f"claims not tested here: {', '.join(one.untested)}")
    return lines


def _reasons(values: Values) -> list[tuple[str, int]]:
    return Counter(v[1] for v in values if v and v[1]).most_common()


def write(job: Job, audits: list[Audit], page: str) -> list[Path]:
    """Write the page, the findings as .csv, and all values with the settings as .json; their paths."""
    html = Path(job.config.out)
    paths = [html, html.with_suffix(".csv"), html.with_suffix(".json")]
    rows = [{"reward": a.reward, **flat(f)} for a in audits for f in a.findings]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]) if rows else ["reward"])
    writer.writeheader()
    writer.writerows(rows)
    told = [{"reward": a.reward, "untested": a.untested, "failures": [f.change for f in a.failures],
             "findings": [flat(f) for f in a.findings],
             "values": {k: [_plain(v) for v in found] for k, found in a.values.items() if any(found)}}
            for a in audits]  # fmt: skip
    write_text(html, page)
    write_text(paths[1], text.getvalue())
    settings = {"settings": asdict(job.config), "clips": job.clips.names, "notes": job.notes}
    write_json(paths[2], settings | {"rewards": told})
    return paths


def flat(finding: Finding) -> dict[str, Any]:
    """A finding with an interval in three columns, None where a number is not finite."""
    out: dict[str, Any] = {}
    for key, value in asdict(finding).items():
        if isinstance(value, tuple):
            out |= {key: _finite(value[0]), f"{key}_low": _finite(value[1]), f"{key}_high": _finite(value[2])}
        else:
            out[key] = _finite(value) if isinstance(value, float) else value
    return out


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plain(found: Score | None) -> dict[str, Any] | None:
    return None if found is None else {"value": _finite(found[0]), "reason": found[1]}
