"""One HTTP exchange within a stated time, whatever the other end does: hangs, drips, breaks off, talks nonsense."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit


class Failed(Exception):
    """Why there is no answer: a reason for :class:`Scores`, and whether trying again may help."""

    def __init__(self, reason: str, message: str, again: bool = False):
        super().__init__(message)
        self.reason, self.again = f"system:{reason}", again


@dataclass(frozen=True)
class Server:
    """Where to ask: the parts of a URL."""

    host: str
    port: int | None
    secure: bool
    path: str  # without a slash at its end


def server(who: str, url: str, example: str) -> Server:
    """The parts of ``url``; ValueError, in the name of ``who``, when it is not the address of a server."""
    try:
        parts = urlsplit(str(url))
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{who}: url {url!r} is not one ({error}); e.g. {example}") from None
    clean = str(url).isascii() and str(url).isprintable() and " " not in str(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username or not clean:
        raise ValueError(f"{who}: url {url!r} is not the address of a server; e.g. {example}")
    return Server(parts.hostname, port, parts.scheme == "https", parts.path.rstrip("/"))


def variable(who: str, name: str) -> str:
    """``name`` if it can be that of an environment variable, or empty; ValueError otherwise, which does not repeat it,
    because it may be the token itself."""
    if name and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"{who}: token= takes the name of the environment variable that holds the token, e.g. API_KEY")
    return name


def bearer(variable: str) -> dict[str, str]:
    """The header with the token in environment variable ``variable``; none where that is empty, Failed where the
    variable holds no token."""
    if not variable:
        return {}
    secret = os.environ.get(variable, "")
    if not (secret and secret.isascii() and secret.isprintable()):
        raise Failed("unauthorized", f"the environment variable {variable} (token=) holds no token")
    return {"Authorization": f"Bearer {secret}"}


def exchange(
    at: Server, method: str, path: str, body: bytes | None, headers: Mapping[str, str], seconds: float, most: int,
    told: float | None = None,
) -> tuple[int, float, bytes]:  # fmt: skip
    """Status, seconds to wait that the server asks for, and body (at most ``most`` bytes) of one exchange of at most
    ``seconds``; Failed otherwise. ``told``: the seconds that a message names, if others."""
    kind = http.client.HTTPSConnection if at.secure else http.client.HTTPConnection
    seconds = max(seconds, 1e-3)
    connection = kind(at.host, at.port, timeout=seconds)
    late, end = threading.Event(), time.monotonic() + seconds
    timer: threading.Timer | None = None
    try:
        connection.connect()
        line = connection.sock  # which the connection forgets before the answer is read

        def cut() -> None:  # a timeout of the socket alone starts anew with every byte that drips in
            late.set()
            with contextlib.suppress(OSError):
                socket.socket.shutdown(line, socket.SHUT_RDWR)

        timer = threading.Timer(end - time.monotonic(), cut)
        timer.daemon = True
        timer.start()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may answer before it has read all
            connection.request(method, at.path + path, body, dict(headers))
        response = connection.getresponse()
        text = response.read(most + 1)
        if len(text) > most:
            raise Failed("bad_answer", f"its answer is larger than {most >> 20} MiB")
        if late.is_set():
            raise TimeoutError
        if response.length:  # read(n) does not raise for what is missing
            raise http.client.IncompleteRead(text, response.length)
        return response.status, _wait(response.headers.get("Retry-After")), text
    except (OSError, UnicodeError, http.client.HTTPException) as error:  # Unicode: a name that no host can have
        if late.is_set() or isinstance(error, TimeoutError):
            raise Failed("timeout", f"no answer within {told or seconds:.4g} s", again=True) from None
        if isinstance(error, (http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionResetError)):
            raise Failed("truncated", "the connection broke before the answer was whole", again=True) from None
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        if isinstance(error, http.client.HTTPException):
            raise Failed("bad_answer", f"what answers does not speak HTTP ({said})") from None
        raise Failed("unreachable", f"it cannot be reached ({said}); is it running?", again=True) from None
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()


def _wait(header: str | None) -> float:
    """Seconds of a Retry-After header; 1 where it says none or a date."""
    return float(header) if header and header.isascii() and header.isdigit() else 1.0
