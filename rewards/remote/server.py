"""The reward server as an ASGI application: three paths that look, one that scores.

    GET  /healthz            the process lives
    GET  /readyz             and can take work (503 while a reward hangs)
    GET  /v1/rewards         what is served, as the rewards declare it
    POST /v1/score?reward=NAME    an npz file of clips (wire.py) -> scores

Errors are ``{"error": {"type", "message", "retry"}}``. Requests are admitted before their body is read and computed one
by one, so memory is bounded by the sizes in ``Limits`` whatever is sent.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from rewards.contract import Clips, Reward, score
from rewards.describe import declared
from rewards.remote import wire


@dataclass(frozen=True)
class Limits:
    """What a server takes."""

    queue: int = 8  # requests that wait while one is computed
    timeout: float = 120.0  # seconds for an upload, and for waiting and computing
    size: int = 2**30  # bytes of a request, packed and unpacked
    clips: int = 256  # in a request


@dataclass(frozen=True)
class Served:
    """A reward and what tells it from others: ``target(args)``."""

    reward: Reward
    identity: str


class Fault(Exception):
    """An error for the client."""

    def __init__(self, status: int, kind: str, message: str, retry: bool = False):
        super().__init__(message)
        self.status, self.kind, self.retry = status, kind, retry


class Worker(threading.Thread):
    """The one thread that computes. It ends with the process, so a reward that hangs does not keep that alive."""

    def __init__(self, room: int):
        super().__init__(name="rewards", daemon=True)
        self.room = threading.Semaphore(room)  # taken before a body is read, given back when the work is out of here
        self.jobs: SimpleQueue[tuple[Callable[[], bytes], Future[bytes]]] = SimpleQueue()
        self.since: float | None = None  # when the work in hand began

    def submit(self, work: Callable[[], bytes]) -> Future[bytes]:
        """Have ``work`` done; its place in ``room`` must have been taken."""
        future: Future[bytes] = Future()
        self.jobs.put((work, future))
        return future

    def run(self) -> None:
        while True:
            work, future = self.jobs.get()
            if future.set_running_or_notify_cancel():
                self.since = time.monotonic()
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
                self.since = None
            del work, future  # with the request they hold
            self.room.release()


def application(served: Mapping[str, Served], limits: Limits, token: str = "", device: str = "cpu") -> Starlette:
    """The application. With a ``token`` everything below /v1 wants it as ``Authorization: Bearer TOKEN``."""
    worker = Worker(limits.queue + 1)
    worker.start()
    listed = reply({"rewards": [{"name": k, "identity": s.identity, **declared(s.reward)} for k, s in served.items()],
                    "limits": {"bytes": limits.size, "clips": limits.clips}})  # fmt: skip

    def check_token(request: Request) -> None:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            raise Fault(401, "unauthorized", "send the server's token as Authorization: Bearer TOKEN")

    async def healthz(request: Request) -> Response:
        return json_response(200, reply({"status": "alive"}))

    async def readyz(request: Request) -> Response:
        since = worker.since
        if since is not None and time.monotonic() - since > limits.timeout:
            raise Fault(503, "stuck", f"a reward has been computing for {time.monotonic() - since:.0f} s", retry=True)
        return json_response(200, reply({"status": "ready"}))

    async def rewards(request: Request) -> Response:
        check_token(request)
        return json_response(200, listed)

    async def score_clips(request: Request) -> Response:
        check_token(request)
        name = request.query_params.get("reward", "")
        if name not in served:
            raise Fault(404, "unknown_reward", f"{name[:80]!r} is not served here; say reward= {' or '.join(served)}")
        if not worker.room.acquire(blocking=False):
            raise Fault(503, "busy", f"{limits.queue} requests wait already", retry=True)
        try:
            body = await asyncio.wait_for(read_body(request, limits.size), limits.timeout)
        except BaseException as error:
            worker.room.release()
            if isinstance(error, (TimeoutError, asyncio.TimeoutError)):
                raise Fault(408, "slow_upload", f"the request took over {limits.timeout:.4g} s to arrive") from None
            raise
        job = worker.submit(lambda: measure(name, served[name], body, limits, device))
        return json_response(200, await outcome(request, job, limits.timeout))

    return Starlette(
        routes=[
            Route("/healthz", healthz), Route("/readyz", readyz),
            Route("/v1/rewards", rewards), Route("/v1/score", score_clips, methods=["POST"]),
        ],
        exception_handlers={Fault: _fault, HTTPException: _http, ClientDisconnect: _gone, Exception: _internal},
    )  # fmt: skip


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most ``limit`` bytes."""
    too_large = Fault(413, "too_large", f"the request is larger than {limit} bytes; send fewer clips")
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise too_large
        parts.append(part)
    return b"".join(parts)


async def outcome(request: Request, job: Future[bytes], seconds: float) -> bytes:
    """What ``job`` gives within ``seconds``. It is dropped, if it has not begun, when it is late or nobody waits."""
    result: asyncio.Future[Any] = asyncio.wrap_future(job)
    gone: asyncio.Future[Any] = asyncio.ensure_future(
        request.receive()
    )  # after the body only the end of the connection can come
    done, _ = await asyncio.wait({result, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if result in done:
        gone.cancel()
        return result.result()
    result.cancel()
    if gone in done:
        raise ClientDisconnect()
    gone.cancel()
    raise Fault(504, "timeout", f"no scores within {seconds:.4g} s", retry=True)


def measure(name: str, served: Served, body: bytes, limits: Limits, device: str) -> bytes:
    """The answer to one request, in the worker's thread; Fault when there is none."""
    began = time.perf_counter()
    try:
        clips = wire.unpack(body, limits.size)
        if len(clips) > limits.clips:
            raise Fault(413, "too_large", f"{len(clips)} clips in a request; the server takes {limits.clips}")
        clips = _on(clips, device)
    except ValueError as error:
        raise Fault(400, "invalid_clips", str(error)) from None
    except (MemoryError, RuntimeError) as error:
        raise _failed(name, error) from None
    try:
        scores = score(served.reward, clips)
        told = wire.answer(scores)
    except ValueError as error:
        raise Fault(422, "refused", str(error)) from None
    except (Exception, SystemExit) as error:  # whatever a reward of somebody else raises
        raise _failed(name, error) from None
    seconds = round(time.perf_counter() - began, 4)
    return reply({"reward": name, "identity": served.identity, **told, "seconds": seconds})


def _on(clips: Clips, device: str) -> Clips:
    if device == "cpu":
        return clips

    def moved(holder: Any) -> Any:
        fields = {k: v.to(device) for k, v in vars(holder).items() if torch.is_tensor(v)}
        return replace(holder, **fields)

    return replace(moved(clips), cameras=clips.cameras and moved(clips.cameras))


def _failed(name: str, error: BaseException) -> Fault:
    """The fault for whatever a reward raised that is not about the clips; said here, too."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
    print(f"reward {name} failed: {said}", file=sys.stderr, flush=True)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return Fault(500, "out_of_memory", f"no memory at the server to score this; send fewer clips ({said})")
    return Fault(500, "reward_failed", said)


def reply(content: Mapping[str, Any]) -> bytes:
    """Every answer says which protocol it is of."""
    return json.dumps({"protocol": wire.PROTOCOL, **content}, allow_nan=False).encode()


def json_response(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(body, status, headers, "application/json")


def _error(status: int, kind: str, message: str, retry: bool = False, headers: Any = None) -> Response:
    error = {"type": kind, "message": " ".join(message.split()), "retry": retry}
    headers = dict(headers or {}) | ({"Retry-After": "1"} if retry else {})
    return json_response(status, reply({"error": error}), headers)


async def _fault(request: Request, error: Exception) -> Response:
    assert isinstance(error, Fault)
    return _error(error.status, error.kind, str(error), error.retry)


async def _http(request: Request, error: Exception) -> Response:
    """What starlette itself refuses: paths and methods that are not there."""
    assert isinstance(error, HTTPException)
    kind = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    ways = "GET /healthz, GET /readyz, GET /v1/rewards, POST /v1/score?reward=NAME"
    return _error(error.status_code, kind, f"{error.detail}; there is {ways}", headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _internal(request: Request, error: Exception) -> Response:
    return _error(500, "internal", f"{type(error).__name__} in the server, whose log says where")
