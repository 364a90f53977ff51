"""Find weights by name: a path, or ``owner/name`` and ``owner/name/file`` on the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError


def locate(source: str, near: Path | None = None, patterns: list[str] | None = None) -> Path:
    """The local path of ``source``: a path as it is, a path relative to ``near``, or the Hub's file or folder (only
    ``patterns`` of it), from its cache or downloaded. ValueError in one line with the command that would get it."""
    for path in ([near / source] if near else []) + [Path(source)]:
        if path.exists():
            return path
    parts = source.split("/")
    if len(parts) < 2 or source.startswith((".", "/", "~")):
        raise ValueError(f"no file or folder {source!r}")
    repo, file = "/".join(parts[:2]), "/".join(parts[2:])
    chosen = "".join(f" --include '{p}'" for p in patterns or [])
    command = f"hf download {repo}" + (f" {file}" if file else chosen)
    try:
        if file:
            return Path(hf_hub_download(repo, file))
        return Path(snapshot_download(repo, allow_patterns=patterns))
    except GatedRepoError:
        way = f"accept it on its page, then run: hf auth login && {command}"
        raise ValueError(f"{repo} asks for consent to its licence: {way}") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        offline = constants.HF_HUB_OFFLINE or isinstance(error, (LocalEntryNotFoundError, ConnectionError))
        why = "and the Hub cannot be reached" if offline else f"and the Hub says: {str(error).splitlines()[0]}"
        raise ValueError(f"{source} is not on this machine, {why}; where it can be, run: {command}") from None
