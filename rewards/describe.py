"""What a reward says of itself, and what it lacks to run: for lists, servers and ``arvideo rewards``.

Everything comes from the reward. Besides what the contract asks for it may declare ``formula`` and ``cost`` (one line
each), ``modules`` (import name -> the command that installs it), ``files`` (path of weights -> the command that makes
it), ``hub`` (repository on the Hugging Face hub -> the files that are read), ``download`` (bytes of what is not
shipped), ``optional`` (what it needs is for those who want it) and ``page`` (of the documentation).
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rewards import registry
from rewards.geometry import backends
from rewards.preference.weights import cached, command


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
        "download": of("download", 0),
    }


def _first_sentence(thing: Any) -> str:
    text = " ".join((inspect.getdoc(thing) or "unstated").split())
    return text.partition(". ")[0].rstrip(".")


def describe(target: str, /, **args: Any) -> dict[str, Any]:
    """``declared`` of the reward ``target``, with its arguments, page and the bytes of its weights by path. ValueError
    as :func:`registry.build`, except that without any ``args`` those it requires may be missing."""
    found = registry.resolve(target)
    open_ended = not args and required(target)
    reward = found if open_ended else registry.build(target, **args)
    page = getattr(found, "page", f"docs/rewards/{target}.md") if target in registry.REWARDS else ""
    files = {} if open_ended else {str(p): _size(p) for p in getattr(reward, "files", {})}
    if not open_ended:
        files |= {f"{repo}/{f}": cached(repo, f) for repo, names in getattr(reward, "hub", {}).items() for f in names}
    return {**declared(reward), "arguments": registry.arguments(found), "files": files, "page": page}


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def optional(target: str) -> bool:
    """Whether the shipped reward ``target`` needs what only those who want it fetch."""
    return bool(getattr(registry.resolve(target), "optional", False))


def required(target: str) -> list[str]:
    """Arguments of the reward ``target`` that have no default."""
    return [n for n, default in registry.arguments(registry.resolve(target)).items() if default is registry.REQUIRED]


def lacking(target: str, read: bool = True) -> list[tuple[str, str]]:
    """What the shipped reward ``target`` lacks to run with its defaults: (what, the command that mends it). With
    ``read``, damaged weights and whatever else it says when it is prepared count, too."""
    try:
        found = registry.resolve(target)
    except ValueError as error:
        return [(str(error), "pip install --force-reinstall arvideo-rl")]
    home = found if isinstance(found, type) or inspect.isroutine(found) else type(found)
    out = _absent(home)
    if out or not read or required(target):
        return out
    files, hub = getattr(home, "files", {}), getattr(home, "hub", {})
    choices = [{}] if hub else [{"weights": str(path)} for path in files] or [{}]  # beside a hub, files are parts
    for args in choices:
        try:
            registry.prepare(registry.build(target, **args))
        except Exception as error:  # whatever a broken library raises is the finding
            how = files.get(Path(args.get("weights", "")), _again(hub))
            out.append((" ".join(str(error).split()), how))
    return out


def _absent(home: Any) -> list[tuple[str, str]]:
    """Which modules and weights that a reward or a backend declares are not here; nothing is read."""
    modules, files, hub = (getattr(home, kind, {}) for kind in ("modules", "files", "hub"))
    out = [(f"Python module {m}", how) for m, how in modules.items() if importlib.util.find_spec(m) is None]
    out += [(f"weights {path}", how) for path, how in files.items() if not path.is_file()]
    missing = [repo for repo, names in hub.items() if not all(cached(repo, name) for name in names)]
    return out + [(f"weights {repo}", command(repo, hub[repo])) for repo in missing]


def _again(hub: Mapping[str, Sequence[str]]) -> str:
    """The command that replaces what is broken."""
    fetched = " && ".join(f"{command(repo, names)} --force-download" for repo, names in hub.items())
    return fetched or "pip install --force-reinstall arvideo-rl"


def backend_lacks(name: str) -> list[tuple[str, str]]:
    """What the geometry backend ``name`` lacks to run, as :func:`lacking`; weights of an optional one are not read."""
    made = backends.backend(name)
    if getattr(made, "optional", False):
        return _absent(made)
    try:
        registry.prepare(made)
    except ValueError as error:
        how = ", ".join(getattr(made, "files", {}).values()) or "pip install opencv-python-headless"
        return [(str(error), how)]
    return []
