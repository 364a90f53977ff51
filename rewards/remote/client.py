"""A reward that runs elsewhere: clips go there, scores come back, through the same contract as any other reward.

The server may be dead, slow, hanging or lying. What fails is NaN with a ``system:*`` reason, never a number; what fails
before a run starts is an error.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from functools import cached_property
from typing import Any
from urllib.parse import quote

import torch

from rewards.contract import GRANULARITIES, NEEDS, Clips, Scores, check_needs
from rewards.remote import wire
from rewards.remote.http import Failed, bearer, exchange, server, variable

PAUSE = 0.5  # seconds before the first new try, doubled each time
MOST = 2**26  # bytes of an answer
GATEWAY = (502, 504)  # from something between here and the server: worth another try whatever they say

log = logging.getLogger(__name__)


class Remote:
    """The reward ``reward`` of the server at ``url`` (``arvideo serve rewards``).

    ``timeout``: seconds for one try, waiting while the server is busy included. ``retries``: further tries when the
    server cannot be reached, is late or fails. ``token``: name of the environment variable that holds its token.
    What it needs, gives and is licensed under is what the server says, asked once. Not differentiable.
    """

    formula = "that of the server's reward"
    cost = "the clips (float32) over the network, and the server's time"

    def __init__(self, url: str, reward: str, timeout: float = 60.0, retries: int = 3, token: str = ""):
        self.server = server("remote", url, "http://127.0.0.1:8100")
        if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"remote: timeout is {timeout}; it is a positive number of seconds")
        if not isinstance(retries, int) or retries < 0:
            raise ValueError(f"remote: retries is {retries}; it is a whole number, 0 or more")
        self.url, self.reward = str(url).rstrip("/"), str(reward)
        self.token = variable("remote", str(token))
        self.timeout, self.retries = float(timeout), retries
        self.name = f"{self.reward} at {self.url}"

    def prepare(self) -> None:
        """Ask the server now; ValueError when it cannot be reached, is of another version or lacks the reward."""
        self._info  # noqa: B018

    @cached_property
    def _info(self) -> dict[str, Any]:
        try:
            listed = self._ask("GET", "/v1/rewards").get("rewards")
            return _info_of(self.reward, listed)
        except Failed as error:
            raise ValueError(f"remote reward {self.name}: {error}") from None

    needs = property(lambda self: frozenset(self._info["needs"]))
    granularity = property(lambda self: self._info["granularity"])
    value_range = property(lambda self: self._info["range"])
    licence = property(lambda self: self._info["licence"])
    hacked_by = property(lambda self: self._info["hacked_by"])

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)  # type: ignore[arg-type]
        shape = (len(clips), len(clips.chunk_starts or ())) if self.granularity == "chunk" else (len(clips),)
        body = wire.pack(clips)
        try:
            data = self._ask("POST", f"/v1/score?reward={quote(self.reward, safe='')}", body)
            now, before = data.get("identity"), self._info["identity"]
            if now != before:
                raise Failed("server_changed", f"it now serves {now!r}, not {before!r}")
            try:
                found = wire.scores_of(data, shape, self.value_range)
            except ValueError as error:
                raise Failed("bad_answer", f"its scores are wrong: {error}") from None
        except Failed as error:
            log.warning("remote reward %s: %s (%s for %d clips)", self.name, error, error.reason, len(clips))
            value = torch.full(shape, math.nan)
            found = Scores(value, value == 0, [error.reason] * len(clips))
        return _on(found, clips.frames.device)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        """What the server answers; Failed when it does not after all tries."""
        attempt = 0
        while True:
            try:
                return self._try(method, path, body)
            except Failed as error:
                if not error.again or attempt == self.retries:
                    raise
            time.sleep(PAUSE * 2**attempt)
            attempt += 1

    def _try(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """One try: while the server is busy it is asked again, until the time is up."""
        headers = {"Accept": "application/json", "Content-Type": "application/octet-stream"}
        headers |= bearer(self.token)
        end = time.monotonic() + self.timeout
        while True:
            status, wait, text = exchange(
                self.server, method, path, body, headers, end - time.monotonic(), MOST, self.timeout
            )
            if status not in (429, 503):
                return self._read(status, text)
            wait = max(wait, PAUSE)  # told 0, it would send all clips again and again
            if time.monotonic() + wait >= end:
                raise Failed("busy", f"the server is still busy after {self.timeout:.4g} s", again=True)
            time.sleep(wait)

    def _read(self, status: int, text: bytes) -> dict[str, Any]:
        """The JSON of an answer; Failed for an error of the server, ValueError for one of the reward."""
        try:
            data = wire.parse(text)
        except ValueError as error:
            message = f"the answer (status {status}) is not that of a reward server: {error}"
            raise Failed("bad_answer", message, again=status in GATEWAY) from None
        if data.get("protocol") != wire.PROTOCOL:
            theirs = f"protocol {data.get('protocol')!r}; this client speaks {wire.PROTOCOL}"
            raise Failed("protocol", f"the server speaks {theirs}; install the same arvideo-rl at both ends")
        if status == 200:
            return data
        told = data.get("error")
        if not isinstance(told, dict):
            raise Failed("bad_answer", f"the answer has status {status} and no error", again=status in GATEWAY)
        kind, message = str(told.get("type"))[:40], " ".join(str(told.get("message")).split())[:400]
        if kind == "refused":  # the reward itself raised ValueError, which is what a local one would do
            raise ValueError(f"remote reward {self.name}: {message}")
        raise Failed(kind if kind.isidentifier() else "bad_answer", message, again=bool(told.get("retry")))


def _info_of(name: str, listed: Any) -> dict[str, Any]:
    """What the server declares of reward ``name``, checked; Failed otherwise."""
    if not isinstance(listed, list) or not all(isinstance(x, dict) for x in listed):
        raise Failed("bad_answer", "its list of rewards is not one")
    found = next((x for x in listed if x.get("name") == name), None)
    if found is None:
        names = ", ".join(str(x.get("name")) for x in listed)
        raise Failed("unknown_reward", f"the server does not serve {name!r}; it serves {names}")
    needs, limits = found.get("needs"), found.get("range")
    known = isinstance(needs, list) and set(map(str, needs)) <= set(NEEDS)
    texts = all(isinstance(found.get(k), str) for k in ("identity", "licence", "hacked_by"))
    ends = limits if isinstance(limits, list) else [""]
    ranged = len(ends) == 2 and all(isinstance(x, (int, float, type(None))) for x in ends)
    if not (known and texts and ranged and found.get("granularity") in GRANULARITIES):
        raise Failed("bad_answer", f"what it declares of {name!r} is not what a reward declares")
    low, high = (s * math.inf if x is None else float(x) for x, s in zip(limits, (-1, 1)))
    return {**found, "range": (low, high)}


def _on(scores: Scores, device: torch.device) -> Scores:
    """The same scores with values and components on ``device``."""
    if device.type == "cpu":
        return scores
    parts = {k: v.to(device) for k, v in scores.components.items()}
    return replace(scores, value=scores.value.to(device), valid=scores.valid.to(device), components=parts)
