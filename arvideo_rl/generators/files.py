"""Reading the files of a generator: whatever is wrong with them becomes one line with the file and the way out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

WAY_OUT = "make or copy the generator again"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong while ``path`` is read and understood into a ValueError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise ValueError(f"{path} is missing: the generator is incomplete; {WAY_OUT}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged ({_line(error)}); {WAY_OUT}") from None
    except (KeyError, TypeError, AttributeError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else _line(error)
        raise ValueError(f"{path} is not such a file, or of another version ({said}); {WAY_OUT}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
