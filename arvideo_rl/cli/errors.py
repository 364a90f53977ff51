"""An exception as one line for a user: what is wrong, where, and the way out."""

from __future__ import annotations

import errno
import re
import sys

MEANT = (ValueError, OSError, FloatingPointError)  # raised for users; anything else may be a fault of this program
WAYS_OUT = {
    errno.ENOSPC: "free some space or write elsewhere",
    errno.EDQUOT: "free some space or write elsewhere",
    errno.EFBIG: "free some space or write elsewhere",
    errno.EACCES: "choose another place or change its rights",
    errno.EROFS: "choose another place",
}


def explain(error: Exception, memory_keys: str = "") -> str:
    """The line for ``error``; ``memory_keys`` says which settings of the command lower its use of memory."""
    message = " ".join(str(error).split())
    if is_out_of_memory(error):
        return _out_of_memory(message, memory_keys)
    if isinstance(error, OSError) and error.strerror:
        name = f"{error.filename}: " if error.filename is not None else ""
        way_out = WAYS_OUT.get(error.errno or 0)
        return f"{name}{error.strerror}" + (f"; {way_out}" if way_out else "")
    if not isinstance(error, MEANT):
        return f"{type(error).__name__}: {message} (--debug shows where; this may be a fault of arvideo)"
    return message or type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python, a GPU (torch.OutOfMemoryError), or torch on the CPU (a plain RuntimeError)."""
    named = type(error).__name__ in ("OutOfMemoryError", "MemoryError")
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _out_of_memory(message: str, memory_keys: str) -> str:
    """How much was in use, what was asked for on top, and which keys make it less."""
    seen = []
    if sys.platform != "win32":
        import resource

        unit = 2**30 if sys.platform == "darwin" else 2**20  # bytes there, KiB on Linux
        seen.append(f"process peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit:.1f} GiB")
    if "torch" in sys.modules and (cuda := sys.modules["torch"].cuda).is_initialized():
        seen.append(f"GPU peak {cuda.max_memory_allocated() / 2**30:.1f} GiB")
    asked = re.search(r"[Tt]ried to allocate (\d[\d.]*) (\w+)", message)
    if asked:
        amount, unit_name = float(asked[1]), asked[2]
        if unit_name == "bytes":
            amount, unit_name = amount / 2**30, "GiB"
        seen.append(f"{amount:.4g} {unit_name} more were asked for")
    return f"out of memory ({', '.join(seen)})" + (f"; lower {memory_keys}" if memory_keys else "")
