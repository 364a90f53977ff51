"""What a reward says of itself, and what it lacks to run: for lists, servers and ``arvideo rewards``.

Everything comes from the reward. Besides what the contract asks for it may declare ``formula`` and ``cost`` (one line
each), ``modules`` (import name -> the command that installs it), ``files`` (path of weights -> the command that makes
it) and ``page`` (of the documentation).
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from pathlib import Path
from typing import Any

from rewards import registry


def declared(reward: Any) -> dict[str, Any]:
    """What ``reward`` (or, where it cannot be built without arguments, its class) declares, ready for JSON: an
    unbounded end of ``range`` is None, and so is everything that only its arguments decide."""
    home = getattr(reward, "function", reward)

    def of(name: str, otherwise: Any = None) -> Any:
        found = getattr(reward, name, getattr(home, name, otherwise))
        return None if isinstance(found, property) else found

    needs, limits = of("needs"), of("value_range", (-math.inf, math.inf))
    return {
        "formula": of("formula") or _first_sentence(home),
        "granularity": of("granularity"),
        "needs": None if needs is None else sorted(needs),
        "range": None if limits is None else [x if math.isfinite(x) else None for x in limits],
        "licence": of("licence", "unstated"),
        "hacked_by": of("hacked_by", "unstated"),
        "cost": of("cost", "unstated"),
    }


def _first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "unstated").split())
    return text.partition(". ")[0].rstrip(".")


def describe(target: str, /, **args: Any) -> dict[str, Any]:
    """``declared`` of the reward ``target``, with its arguments, page and the bytes of its weights by path. ValueError
    as :func:`registry.build`, except that without any ``args`` those it requires may be missing."""
    found = registry.resolve(target)
    lacking = [] if args else [n for n, default in registry.arguments(found).items() if default is registry.REQUIRED]
    reward = found if lacking else registry.build(target, **args)
    page = getattr(found, "page", f"docs/rewards/{target}.md") if target in registry.REWARDS else ""
    files = {} if lacking else {str(p): _size(p) for p in getattr(reward, "files", {})}
    return {**declared(reward), "arguments": registry.arguments(found), "files": files, "page": page}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def lacking(target: str) -> list[tuple[str, str]]:
    """What the shipped reward ``target`` lacks to run with its defaults: (what, the command that mends it). Damaged
    weights and whatever else it says when it is prepared count, too."""
    try:
        found = registry.resolve(target)
    except ValueError as error:
        return [(str(error), "pip install --force-reinstall arvideo-rl")]
    home = found if isinstance(found, type) or inspect.isroutine(found) else type(found)
    modules, files = getattr(home, "modules", {}), getattr(home, "files", {})
    out = [(f"Python module {m}", how) for m, how in modules.items() if importlib.util.find_spec(m) is None]
    out += [(f"weights {path}", how) for path, how in files.items() if not path.is_file()]
    if out or registry.REQUIRED in registry.arguments(found).values():
        return out
    for args in [{"weights": str(path)} for path in files] or [{}]:
        try:
            registry.prepare(registry.build(target, **args))
        except Exception as error:  # whatever a broken library raises is the finding
            how = files.get(Path(args.get("weights", "")), "pip install --force-reinstall arvideo-rl")
            out.append((" ".join(str(error).split()), how))
    return out
