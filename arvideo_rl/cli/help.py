"""Help texts made from the configuration dataclasses: key, default, and the comment beside the field."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields, is_dataclass

from arvideo_rl.config import defaults


def keys(schema: type, prefix: str = "") -> str:
    """One line per key of a configuration dataclass, with its default and its comment."""
    comments = _comments(schema)
    lines = []
    values = defaults(schema)
    for f in fields(schema):
        value = values[f.name]
        if is_dataclass(value) and not isinstance(value, type):
            lines.append(keys(type(value), f"{prefix}{f.name}."))
            continue
        shown = f"{prefix}{f.name}={_plain(value)}"
        lines.append(f"  {shown:<44} {comments.get(f.name, '')}".rstrip())
    return "\n".join(lines)


def _plain(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(str, value)) + "]"
    return "null" if value is None else str(value)


def _comments(schema: type) -> dict[str, str]:
    found = {}
    for line in inspect.getsource(schema).splitlines():
        match = re.match(r"\s+(\w+): [^#]*#\s*(.+)", line)
        if match:
            found[match[1]] = match[2]
    return found
