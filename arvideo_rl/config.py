"""Configuration: dataclasses are the schema, YAML is the data, OmegaConf merges.

A file may start from another with one ``base:`` line (relative to itself). Dotted ``key=value`` overrides come last.
Unknown keys are errors that name the nearest known one. Values are taken literally: no interpolation. All other paths,
in a file as on the command line, are relative to the directory where the command runs.
"""

from __future__ import annotations

import difflib
import re
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")
SEEDS = f"[0, {2**32 - 1}]"  # what every random generator in use takes


class ConfigError(ValueError):
    """A configuration a user must change; the message is one line."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: 1e-4 is a number (YAML 1.1 wants 1.0e-4 and reads the rest as text)."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    """A mapping without repeated keys, of which YAML would keep the last and drop the others."""
    loader.flatten_mapping(node)
    seen: dict[Any, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if key.value in seen and isinstance(key, yaml.ScalarNode):
            raise yaml.YAMLError(f"key {key.value} stands in line {seen[key.value]} and again in line {line}")
        seen[str(key.value)] = line
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def presets() -> Path:
    """The folder of shipped presets: configs/ of a checkout, or the copy inside the installed package."""
    here = Path(__file__).resolve().parent
    return here / "configs" if (here / "configs").is_dir() else here.parent / "configs"


def find(source: str) -> Path:
    """The file for a path or a preset name such as ``align/tiny_nft``."""
    given = Path(source)
    named = presets() / (source.removeprefix("configs/").removesuffix(".yaml") + ".yaml")
    for path in (given, named):
        if path.is_file():
            return path
    known = sorted(str(p.relative_to(presets()).with_suffix("")) for p in presets().rglob("*.yaml"))
    raise ConfigError(f"no configuration at {source!r}; give a YAML file or a preset: {', '.join(known)}")


def read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file with its bases merged underneath, as plain data."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        data = yaml.load(text, _Loader) or {}
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not readable YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold keys and values, not a {type(data).__name__}")
    base = data.pop("base", None)
    if base is None:
        return data
    below = path.parent / str(base)
    if not below.is_file():  # of a file somewhere else: a shipped preset by its name, as in the presets' own folders
        below = next((p for p in sorted(presets().glob("*/*.yaml")) if p.name == str(base)), below)
    if not below.is_file() or below.resolve() in (*seen, path.resolve()):
        raise ConfigError(f"{path}: base {base!r} is not another file next to it, nor a shipped preset")
    return _merge(read(below, (*seen, path.resolve())), data)


def _merge(low: dict, high: dict) -> dict:
    out = dict(low)
    for k, v in high.items():
        out[k] = _merge(out[k], v) if isinstance(v, dict) and isinstance(out.get(k), dict) else v
    return out


def load(schema: type[T], source: str | None, overrides: list[str]) -> T:
    """Build ``schema`` from a file (or None: its defaults) and ``key=value`` overrides."""
    data: dict[str, Any] = {}
    if source:
        path = find(source)
        data = read(path)
        try:
            check_keys(schema, data, "")
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    for item in overrides:
        key, eq, value = item.partition("=")
        if not eq or not key:
            raise ConfigError(f"override {item!r} is not key=value")
        here = data
        *parents, last = key.split(".")
        for name in parents:
            here = here.setdefault(name, {})
            if not isinstance(here, dict):
                raise ConfigError(f"override {item!r}: {name} holds a value, not keys")
        here[last] = _value(value, _hint(schema, [*parents, last]))
    check_keys(schema, data, "")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), _literal(data))
        return typing.cast(T, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(wrong_type(schema, data, error)) from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from None


TYPES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def wrong_type(schema: type, data: dict, error: OmegaConfBaseException, where: str = "") -> str:
    """What to say of a value that is not of the schema's type; ``where`` stands before the key."""
    path = str(error.full_key or "").split(".")
    hint: Any = _hint(schema, path)
    value: Any = data
    for name in path:
        value = value[name] if isinstance(value, dict) and name in value else None
    shown = f"{where}{'.'.join(path)}={'null' if value is None else value}"
    kinds = [TYPES[a] for a in typing.get_args(hint) or (hint,) if a in TYPES]
    if _is_mapping(hint):
        return f"{shown}: must hold keys, e.g. {where}{'.'.join(path)}.KEY=VALUE"
    if typing.get_origin(hint) in (list, tuple) and kinds:
        return f"{shown}: must be a list, each item {kinds[0]}"
    return f"{shown}: must be {kinds[0]}" if kinds else f"{shown}: {str(error).splitlines()[0]}"


def _value(text: str, hint: Any) -> Any:
    """An override's value: text is taken as it is where the schema wants text, so a prompt may hold anything."""
    if hint is str or not text:
        return text
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def _hint(schema: type, path: list[str]) -> Any:
    """The type the schema gives the key at ``path``, or None where it says nothing."""
    hint: Any = schema
    for name in path:
        if _is_mapping(hint):
            hint = typing.get_args(hint)[1]
        elif _dataclass_of(hint):
            hint = typing.get_type_hints(_dataclass_of(hint)).get(name)
        else:
            return None
    return hint


def _literal(data: Any) -> Any:
    """Escape what OmegaConf would interpolate."""
    if isinstance(data, dict):
        return {k: _literal(v) for k, v in data.items()}
    if isinstance(data, list):
        return [_literal(v) for v in data]
    return data.replace("${", "\\${") if isinstance(data, str) else data


def check_keys(schema: type, data: dict, where: str) -> None:
    """Refuse unknown keys at any depth, naming the nearest known one."""
    hints = typing.get_type_hints(schema)
    for key, value in data.items():
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, 1, 0.5)
            inside = [k for k, h in hints.items() if not _is_mapping(h) and key in _keys_of(h)]
            near = [f"{inside[0]}.{key}"] if inside else near  # right, but one level too high
            hint = f"did you mean {where}{near[0]}?" if near else f"known here: {', '.join(hints)}"
            raise ConfigError(f"unknown key {where}{key}; {hint}")
        kind = _dataclass_of(hints[key])
        if typing.get_origin(hints[key]) in (list, tuple) and isinstance(value, list):
            _check_items(f"{where}{key}={value}", typing.get_args(hints[key]), value)
        if kind is not None and isinstance(value, dict):
            inner = value.values() if _is_mapping(hints[key]) else [value]
            names = value.keys() if _is_mapping(hints[key]) else [None]
            for name, item in zip(names, inner):
                path = f"{where}{key}." + (f"{name}." if name is not None else "")
                if not isinstance(item, dict):
                    raise ConfigError(_wants_keys(path, kind, item))
                check_keys(kind, item, path)
        elif kind is not None and not (value is None and type(None) in typing.get_args(hints[key])):
            raise ConfigError(_wants_keys(f"{where}{key}." + "NAME." * _is_mapping(hints[key]), kind, value))


def _check_items(shown: str, kinds: tuple, items: list) -> None:
    """Refuse items of a list or tuple that are of another type or number, which OmegaConf does without their key."""
    if Ellipsis not in kinds and len(kinds) > 1 and len(items) != len(kinds):
        raise ConfigError(f"{shown}: give {len(kinds)} items")
    numbers: tuple[type, ...] = {int: (int,), float: (int, float)}.get(kinds[0], (object,))
    if not all(isinstance(x, numbers) and not isinstance(x, bool) for x in items):
        raise ConfigError(f"{shown}: each item must be {TYPES[kinds[0]]}")


def _wants_keys(path: str, kind: type, value: Any) -> str:
    """What to say of a value where keys belong: the way to write what was probably meant."""
    names = sorted((f.name for f in fields(kind)), key=lambda n: n not in kind.__annotations__)  # own before inherited
    return f"{path[:-1]} holds keys ({', '.join(names)}), not {value!r}; did you mean {path}{names[0]}={value}?"


def check_ranges(config: Any, ranges: dict[str, str], where: str = "") -> None:
    """Refuse numbers of ``config`` outside ``ranges``: dotted key -> interval such as ``[1, inf)`` or ``(0, 1]``.
    None is left alone, NaN is in no interval. ``where`` stands before the keys in messages."""
    for key, interval in ranges.items():
        value = config
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        low, high = (float(x) for x in interval[1:-1].split(", "))
        over = value is None or (value > low if interval[0] == "(" else value >= low)
        under = value is None or (value < high if interval[-1] == ")" else value <= high)
        if not (over and under):
            raise ConfigError(f"{where}{key}={value}: use {_range(interval)}")


def _range(interval: str) -> str:
    """An interval in words."""
    low, high = interval[1:-1].split(", ")
    start = f"above {low}" if interval[0] == "(" else f"{low} or more"
    if high == "inf":
        return f"a finite number {start}" if interval[0] == "(" else start
    if interval[0] == "[" and interval[-1] == "]":
        return f"{low} to {high}"
    return f"{start} and {'below' if interval[-1] == ')' else 'at most'} {high}"


def check_choice(key: str, value: Any, known: Any) -> None:
    """Refuse a value that is not one of ``known``, naming the nearest."""
    if value not in known:
        near = difflib.get_close_matches(str(value), known, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"{key}={value}: {hint}choose one of {', '.join(known)}")


def _keys_of(hint: Any) -> list[str]:
    kind = _dataclass_of(hint)
    return [f.name for f in fields(kind)] if kind else []


def _is_mapping(hint: Any) -> bool:
    return typing.get_origin(hint) is dict


def _dataclass_of(hint: Any) -> type | None:
    """The dataclass in a hint: itself, dict[str, D], or D | None."""
    if is_dataclass(hint):
        return typing.cast(type, hint)
    if typing.get_origin(hint) in (dict, types.UnionType, typing.Union):
        return next((a for a in typing.get_args(hint) if is_dataclass(a)), None)  # type: ignore[return-value]
    return None


def defaults(schema: type) -> dict[str, Any]:
    """The schema's default values by field name (for --help)."""
    out = {}
    for f in fields(schema):
        out[f.name] = (
            f.default
            if f.default is not MISSING
            else (f.default_factory() if f.default_factory is not MISSING else None)
        )
    return out
