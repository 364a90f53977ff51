"""Find weights by name: a path, or ``owner/name`` and ``owner/name/file`` on the Hugging Face Hub."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from arvideo_rl.progress import console


class NotHere(ValueError):
    """Weights that are not on this machine and could not be fetched; the message has the command that gets them."""


def locate(source: str, near: Path | None = None, patterns: tuple[str, ...] = ()) -> Path:
    """The local path of ``source``: a path relative to ``near`` or to the working directory, or the Hub's file or
    folder (only ``patterns`` of it), from its cache or else downloaded. ValueError in one line with the command that
    would get it."""
    for path in ([near / source] if near else []) + [Path(source)]:
        if path.exists():
            return path
    repo, file = "/".join(source.split("/")[:2]), "/".join(source.split("/")[2:])
    if "/" not in source or source.startswith((".", "/", "~")):
        raise ValueError(f"no file or folder {source!r}")
    command = f"hf download {repo}" + (f" {file}" if file else "".join(f" --include '{p}'" for p in patterns))
    try:
        return _fetch(repo, file, patterns, local=True)
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # the error below says it once
    if not constants.HF_HUB_OFFLINE:
        console().print(f"asking the Hub for {source}", highlight=False)
    try:
        return _fetch(repo, file, patterns, local=False)
    except GatedRepoError:
        way = f"accept it on its page, then run: hf auth login && {command}"
        raise NotHere(f"{repo} asks for consent to its licence: {way}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        offline = constants.HF_HUB_OFFLINE or isinstance(error, (LocalEntryNotFoundError, ConnectionError))
        why = "and the Hub cannot be reached" if offline else f"and the Hub says: {str(error).splitlines()[0]}"
        raise NotHere(f"{source} is not on this machine, {why}; where it can be, run: {command}") from None


def _fetch(repo: str, file: str, patterns: tuple[str, ...], local: bool) -> Path:
    if file:
        return Path(hf_hub_download(repo, file, local_files_only=local))
    folder = Path(snapshot_download(repo, allow_patterns=list(patterns) or None, local_files_only=local))
    if local and not all(any(folder.glob(p)) for p in patterns):  # the cache holds what was once asked for, not all
        raise LocalEntryNotFoundError(f"{repo} is only in part on this machine")
    return folder
