"""Help texts made from the configuration dataclasses: key, default, and the comment beside the field."""

from __future__ import annotations

import inspect
import re
import typing
from dataclasses import fields, is_dataclass
from typing import Any

from arvideo_rl.config import defaults


def keys(schema: type, prefix: str = "", given: Any = None) -> str:
    """One line per key of a configuration dataclass, with its default (or its value in ``given``) and its comment;
    NAME stands for what the user calls a part."""
    comments = _comments(schema)
    lines = []
    values = defaults(schema) if given is None else vars(given)
    hints = typing.get_type_hints(schema)
    for f in fields(schema):
        value = values[f.name]
        if is_dataclass(value) and not isinstance(value, type):
            lines.append(keys(type(value), f"{prefix}{f.name}.", value))
            continue
        parts = typing.get_args(hints[f.name]) if typing.get_origin(hints[f.name]) is dict else ()
        if parts and is_dataclass(parts[1]):
            lines.append(keys(typing.cast(type, parts[1]), f"{prefix}{f.name}.NAME."))
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
        match = re.match(r"    (\w+): [^#]*#\s*(.+)", line)
        if match:
            found[match[1]] = match[2]
    return found
