"""Can it be written? Asked before any work, so that minutes of computing do not end in "no such folder"."""

from __future__ import annotations

import os
from pathlib import Path

from arvideo_rl.config import ConfigError


def check_file(path: Path, key: str = "out", suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a file that cannot be written at ``path``; missing folders are fine, they are made with it. Writes
    nothing. ``key`` is what the user called it, ``suffixes`` the endings it may have."""
    if suffixes and path.suffix.lower() not in suffixes:
        near = path.with_suffix(suffixes[0]) if path.name else f"NAME{suffixes[0]}"
        raise ConfigError(f"{key}={path}: must end with {' or '.join(suffixes)}, e.g. {key}={near}")
    if path.is_dir():
        raise ConfigError(f"{key}={path} is a folder; name a file in it")
    check_folder(path.parent, key, path)


def check_folder(path: Path, key: str = "out", shown: Path | None = None) -> None:
    """Refuse a folder in which no file can be made, whether it exists already or not. Writes nothing."""
    shown = path if shown is None else shown
    above = path
    while not os.path.lexists(above) and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise ConfigError(f"{key}={shown}: {above} is not a folder; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(f"{key}={shown}: no right to write in {above}; choose another place or change its rights")
