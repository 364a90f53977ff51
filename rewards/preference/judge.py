"""A vision-language model behind an OpenAI-compatible server as a judge: vLLM, SGLang, llama.cpp, or a service.

It is sent the frames as pictures and a question, and must answer with a JSON object that holds a score. What fails is
NaN with a ``system:*`` reason, never a number: no answer in time, an error of the server, an answer that is no score.
"""

from __future__ import annotations

import base64
import io
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from rewards.claims import Claims
from rewards.contract import Clips, Scores, check_needs
from rewards.preference.pictures import spread
from rewards.remote.http import Failed, bearer, exchange, server, variable

MOST = 2**22  # bytes of an answer
UNSEEN = ("frozen", "half_frozen", "shuffled", "reversed", "looped", "saturated")  # by models that see pictures apart
PAUSE = 1.0  # seconds before the first new try, doubled each time
AGAIN = (408, 409, 429, 500, 502, 503, 504)  # statuses that may pass
QUESTION = (
    "These are {frames} frames of one generated video, in order. It was asked for with this text:\n{prompt}\n"
    "Rate from {low:g} to {high:g} how good a video it is: does it show what the text asks for, is each frame clean "
    "and plausible, and does it move as such a scene would? A video in which nothing moves deserves {low:g}. "
    'Answer with nothing but a JSON object: {{"score": NUMBER}}'
)

log = logging.getLogger(__name__)


class Judge:
    """The score that model ``model`` of the server at ``url`` gives a clip, from ``low``..``high`` to [0, 1].

    ``url`` is the base, e.g. http://127.0.0.1:8000/v1. ``token``: name of the environment variable that holds the key.
    ``question`` may hold {prompt}, {frames}, {low}, {high}; other braces are doubled. ``frames`` of at most ``side``
    pixels are sent as PNG, ``at_once`` clips at a time. ``timeout``: seconds for one try; ``retries``: further tries
    for what may pass. Greedy decoding with a fixed seed is asked for; whether the server is deterministic is up to it.
    ``options``: further fields of the request, e.g. max_tokens=4096 for a model that thinks first; null drops a field.
    """

    name = "judge"
    granularity = "clip"
    value_range = (0.0, 1.0)
    licence = "that of the model behind the server"
    formula = "(score that the model answers - low) / (high - low)"
    hacked_by = "whatever the model falls for: gaudy stills, written words, pleas in the picture; frozen clips"
    cost = "one request a clip, with the frames as pictures; the server's time or price"
    optional = True

    def __init__(self, url: str, model: str, question: str = QUESTION, frames: int = 8, side: int = 512,
                 low: float = 1.0, high: float = 5.0, timeout: float = 120.0, retries: int = 2, at_once: int = 4,
                 token: str = "", options: Mapping[str, Any] | None = None):  # fmt: skip
        self.server = server("judge", url, "http://127.0.0.1:8000/v1")
        whole = (("frames", frames, 1), ("side", side, 16), ("retries", retries, 0), ("at_once", at_once, 1))
        for key, value, least in whole:
            if not isinstance(value, int) or value < least:
                raise ValueError(f"judge: {key} is {value}; it is a whole number, {least} or more")
        if not -math.inf < low < high < math.inf:
            raise ValueError(f"judge: low is {low} and high {high}; low must be the smaller")
        if not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"judge: timeout is {timeout}; it is a positive number of seconds")
        try:
            question.format(prompt="", frames=1, low=low, high=high)
        except (KeyError, IndexError, ValueError) as error:
            said = f"judge: question cannot be filled in ({error}); double the braces that are meant"
            raise ValueError(said) from None
        self.needs = frozenset({"prompts"} if "{prompt}" in question else ())
        self.claims = Claims(notices=("wrong_prompt",) if self.needs else (), blind_to=UNSEEN)
        self.model, self.question, self.token = str(model), question, variable("judge", str(token))
        self.at_once, self.options = at_once, dict(options or {})
        self.frames, self.side, self.low, self.high = frames, side, float(low), float(high)
        self.timeout, self.retries = float(timeout), retries

    def prepare(self) -> None:
        """Ask the server for its models now; ValueError when it cannot be reached or lacks the model."""
        try:
            listed = self._ask("GET", "/models", None).get("data")
        except Failed as error:
            raise ValueError(f"judge at {self.server.host}: {error}") from None
        names = [m.get("id") for m in listed if isinstance(m, dict)] if isinstance(listed, list) else []
        if self.model not in names:
            known = ", ".join(str(n) for n in names[:8]) or "none"
            raise ValueError(f"judge: the server has no model {self.model!r}; it has {known}")

    def __call__(self, clips: Clips) -> Scores:
        check_needs(self, clips)  # type: ignore[arg-type]
        prompts = clips.prompts if clips.prompts is not None else [""] * len(clips)
        with ThreadPoolExecutor(self.at_once) as threads:
            found = list(threads.map(self._scored, range(len(clips)), clips.frames.detach(), prompts))
        raw = torch.tensor([score for score, _ in found], dtype=torch.float32, device=clips.frames.device)
        value = (raw - self.low) / (self.high - self.low)
        return Scores(value, value.isfinite(), [reason for _, reason in found], raw={"score": raw})

    def _scored(self, i: int, frames: Tensor, prompt: str) -> tuple[float, str | None]:
        """The score of clip ``i``, or NaN and why."""
        try:
            return self._judge(spread(frames, self.frames), prompt), None
        except Failed as error:
            log.warning("judge %s, clip %d: %s (%s)", self.model, i, error, error.reason)
            return math.nan, error.reason

    def _judge(self, frames: Tensor, prompt: str) -> float:
        """The score of one clip; Failed without one."""
        text = self.question.format(prompt=prompt, frames=len(frames), low=self.low, high=self.high)
        pictures = [{"type": "image_url", "image_url": {"url": picture(f, self.side)}} for f in frames]
        content = [*pictures, {"type": "text", "text": text}]
        asked = {"model": self.model, "messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 0,
                 "max_tokens": 256, **self.options}  # fmt: skip
        asked = {k: v for k, v in asked.items() if v is not None}
        answer = self._ask("POST", "/chat/completions", json.dumps(asked).encode())
        try:
            said = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise Failed("bad_answer", "the answer is not a chat completion") from None
        score = read_score(said)
        if score is None or not self.low <= score <= self.high:
            what = "no score" if score is None else f"the score {score:g}, outside {self.low:g} to {self.high:g}"
            raise Failed("no_score", f"the model gave {what}: {' '.join(str(said).split())[:120]!r}")
        return score

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        """The JSON object that the server answers; Failed after all tries."""
        attempt = 0
        while True:
            wait = PAUSE * 2**attempt
            try:
                headers = {"Content-Type": "application/json", "Accept": "application/json"} | bearer(self.token)
                status, asked, text = exchange(self.server, method, path, body, headers, self.timeout, MOST)
                wait = min(max(wait, asked), self.timeout) if status in AGAIN else wait
                return _read(status, text, os.environ.get(self.token, ""))
            except Failed as error:
                if not error.again or attempt == self.retries:
                    raise
            time.sleep(wait)
            attempt += 1


def _read(status: int, text: bytes, secret: str) -> dict[str, Any]:
    """The JSON of an answer; Failed for an error of the server, with ``secret`` struck out of what it says."""
    if status in (401, 403):
        raise Failed("unauthorized", f"the server refuses (status {status}): is token= the name of a variable?")
    if status != 200:
        said = " ".join(text.decode("utf-8", "replace").split())
        said = (said.replace(secret, "***") if secret else said)[:160]
        raise Failed("server_error", f"the server answers with status {status}: {said}", again=status in AGAIN)
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Failed("bad_answer", "the answer is not a JSON object")
    return found


def read_score(said: Any) -> float | None:
    """The finite number under "score" of the last JSON object with one in what a model said; None without any. An
    object inside another does not count."""
    value: Any = None
    at = said.find("{") if isinstance(said, str) else -1
    while at >= 0:
        try:
            found, at = json.JSONDecoder().raw_decode(said, at)
            value = found.get("score", value)
        except ValueError:
            at += 1
        at = said.find("{", at)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def picture(frame: Tensor, side: int) -> str:
    """A data URL of the PNG of ``frame`` [3, H, W] in [0, 1], its long side at most ``side``."""
    from PIL import Image
    from torchvision.transforms.v2.functional import resize

    height, width = frame.shape[1:]
    if max(height, width) > side:
        new = [max(1, round(x * side / max(height, width))) for x in (height, width)]
        frame = resize(frame, new, antialias=True)
    pixels = (frame.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
