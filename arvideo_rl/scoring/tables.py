"""Rows to files: .csv and .parquet as one flat table, .jsonl with an object a row; the summary beside them."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from arvideo_rl.training.rundir import write_bytes, write_json

Row = dict[str, Any]
FIRST, THEN = ("file", "value"), ("reward", "reason", "detail", "frames", "width", "height", "fps", "note", "prompt")


def write(path: Path, rows: list[Row], summary: dict[str, Any]) -> None:
    """Write the rows at ``path`` and the summary at NAME.summary.json; each appears whole or not at all."""
    columns, table = flat(rows)
    if path.suffix.lower() == ".parquet":
        data = _parquet(columns, table)
    elif path.suffix.lower() == ".jsonl":
        data = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in table).encode("utf-8", "backslashreplace")
    else:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, columns)
        writer.writeheader()
        writer.writerows(table)
        data = text.getvalue().encode("utf-8", "backslashreplace")
    write_bytes(path, data)
    write_json(summary_path(path), summary)


def summary_path(path: Path) -> Path:
    """Where the summary of ``path`` lies."""
    return path.with_name(path.stem + ".summary.json")


def flat(rows: list[Row]) -> tuple[list[str], list[Row]]:
    """(columns, rows): file and value, the components, what else is known, then what the manifest passed through,
    as given.NAME where the name is taken."""
    parts = list(dict.fromkeys(k for r in rows for k in r["components"]))
    asked = [k for k in ("set", "pair", "maps") if rows and k in rows[0]]
    taken = {*FIRST, *THEN, *asked}
    names = {k: f"component.{k}" if k in taken else k for k in parts}
    taken |= set(names.values())
    given = {k: f"given.{k}" if k in taken else k for k in dict.fromkeys(k for r in rows for k in r["given"])}
    columns = [*FIRST, *names.values(), *THEN, *asked, *given.values()]
    out = []
    for r in rows:
        row = {k: r[k] for k in (*FIRST, *THEN, *asked)}
        row |= {names[k]: v for k, v in r["components"].items()} | {given[k]: v for k, v in r["given"].items()}
        out.append({k: row[k] for k in columns if k in row})
    return columns, out


def _parquet(columns: list[str], table: list[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pa.table({k: even([r.get(k) for r in table]) for k in columns}), out)
    return out.getvalue()


def even(cells: list[Any]) -> list[Any]:
    """A column of one type, which a manifest need not have passed through: whole numbers, else numbers, else text."""
    known = [x for x in cells if x is not None]
    if all(type(x) is int and abs(x) < 2**63 for x in known):
        return cells
    if all(type(x) is float or type(x) is int and abs(x) < 2**63 for x in known):
        return [None if x is None else float(x) for x in cells]
    texts = [x if isinstance(x, str) or x is None else json.dumps(x) for x in cells]
    return [None if x is None else x.encode("utf-8", "backslashreplace").decode() for x in texts]
