"""Put the page together: what is read, said and drawn goes into one template, which escapes everything."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from arvideo_rl.report import catalogue, charts, comparison, differences
from arvideo_rl.report.data import RunData
from arvideo_rl.report.embed import Budget, videos_view
from arvideo_rl.report.series import series
from arvideo_rl.report.status import commands, status

LEFT_OUT = ("probe/fall/",)  # what the alarm reads; its verdict is shown instead
TWICE = "probe/change/"  # the probe's values are drawn as changes since the start


def page(runs: list[RunData], budget: Budget) -> str:
    """The report on ``runs`` as HTML that needs no other file."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    told = [{
        "label": run.label, "slot": i % charts.SLOTS, "status": status(run), "events": shown_events(run),
        "notes": run.notes, "commands": commands(run), "comparison": comparison.rows(run.summary or {}),
        "videos": videos_view(run, budget),
    } for i, run in enumerate(runs)]  # fmt: skip
    return environment.get_template("page.html.j2").render(
        title=" and ".join(run.label for run in runs), made=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        runs=told, sections=sections(runs), config=differences.table(runs), environment=facts(runs),
    )  # fmt: skip


def shown_events(run: RunData) -> list[dict[str, Any]]:
    """Alarms and notes with all that the page asks for."""
    return [{"kind": str(e.get("kind", "event")), "iteration": e.get("iteration", "?"),
             "text": str(e.get("text", "")).rstrip(".")} for e in run.events]  # fmt: skip


def sections(runs: list[RunData]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """(title, what to look for, charts) in the order of the page; one chart a metric, one line a run."""
    keys = dict.fromkeys(k for run in runs for row in run.rows for k in row if k != run.clock)
    drawn: dict[str, list[dict[str, Any]]] = {name: [] for name in catalogue.SECTIONS}
    for key in sorted(keys, key=catalogue.order):
        if key.startswith(LEFT_OUT) or (key.startswith("probe/") and key.replace("probe/", TWICE, 1) in keys):
            continue
        having = [(i, run) for i, run in enumerate(runs) if any(key in row for row in run.rows)]
        found = [series(run.rows, key, run.clock, run.label, i) for i, run in having]
        meaning = catalogue.meaning(key, having[0][1].config)
        marks = [(e["iteration"], i, f"{run.label}: {e.get('text', '')}") for i, run in having for e in run.events
                 if e.get("kind") == "alarm" and isinstance(e.get("iteration"), int)]  # fmt: skip
        chart = charts.Chart(key, meaning.title, meaning.axis, having[0][1].clock, [s for s in found if s], marks,
                             meaning.about)  # fmt: skip
        drawn[meaning.section].append(charts.view(chart))
    return [(name, about, drawn[name]) for name, about in catalogue.SECTIONS.items() if drawn[name]]


def facts(runs: list[RunData]) -> list[tuple[str, list[str]]]:
    """Rows of the environment table: key and a value per run."""
    values = [differences.flat(run.environment) for run in runs]
    return [(key, [v.get(key, "-") for v in values]) for key in dict.fromkeys(k for v in values for k in v)]
