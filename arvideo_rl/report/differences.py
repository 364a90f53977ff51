"""The resolved configuration as rows, with what the user set and what differs between runs marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from arvideo_rl.config import ConfigError, presets, read
from arvideo_rl.report.data import RunData

OVERRIDE = "# override: "  # how the run directory keeps the command line's key=value
NAMES = ("name", "out")  # differ between any two runs and say nothing


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys with their values as text."""
    out: dict[str, str] = {}
    for key, value in data.items():
        if isinstance(value, dict) and value:
            out |= flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = shown(value)
    return out


def shown(value: Any) -> str:
    """A value as a user would write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def preset_of(run: RunData) -> tuple[str, dict[str, str]] | None:
    """(name, flat values) of the shipped preset the run was given or is based on, or None."""
    text = _file(run)
    data = _parse(text)
    base = str(data.get("base", ""))
    for path in sorted((presets() / run.kind).glob("*.yaml")):
        if path.read_text(encoding="utf-8").split() == text.split() or (base and Path(base).name == path.name):
            try:
                return f"{run.kind}/{path.stem}", flat(read(path))
            except ConfigError:
                return None
    return None


def given_keys(run: RunData) -> set[str]:
    """Dotted keys that the user set: in a file of their own, or on the command line."""
    if run.given is None:
        return set()
    items = [line[len(OVERRIDE) :] for line in run.given.splitlines() if line.startswith(OVERRIDE)]
    keys = {item.split("=", 1)[0] for item in items}
    shipped = [p.read_text(encoding="utf-8").split() for p in (presets() / run.kind).glob("*.yaml")]
    if _file(run).split() not in shipped:
        keys |= set(flat(_parse(_file(run)))) - {"base"}
    return keys


def _file(run: RunData) -> str:
    lines = (run.given or "").splitlines()
    return "\n".join(line for line in lines if not line.startswith(OVERRIDE))


def _parse(text: str) -> dict[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, dict) else {}


def table(runs: list[RunData]) -> dict[str, Any]:
    """``rows`` (key, value per run, whether the runs differ, what the preset says where the user set something else)
    and ``reference``, the names of the presets compared with, per run."""
    values = [flat(run.config) for run in runs]
    known = [preset_of(run) for run in runs]
    given = [given_keys(run) for run in runs]
    keys = list(dict.fromkeys(k for v in values for k in v))
    rows = []
    for key in keys:
        cells = []
        for value, preset, mine in zip(values, known, given):
            text = value.get(key)
            before = preset[1].get(key) if preset else None
            # A preset names only some keys: what it leaves out can have been set by the user alone.
            changed = before != text if before is not None and text is not None else key in mine
            cells.append({"text": text, "changed": changed and not _equal(before, text), "preset": before})
        several = len({c["text"] for c in cells}) > 1 and key not in NAMES
        rows.append({"key": key, "cells": cells, "differs": several, "changed": any(c["changed"] for c in cells)})
    return {"rows": rows, "presets": [p[0] if p else None for p in known]}


def _equal(a: str | None, b: str | None) -> bool:
    """Equal as text or as numbers (1.0e-3 and 0.001)."""
    if a is None or b is None:
        return False
    try:
        return a == b or float(a) == float(b)
    except ValueError:
        return a == b
