"""A remote reward: the same scores as the local one, and dead, slow, hanging and lying servers."""

import contextlib
import json
import logging
import math
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from rewards.contract import Clips, Scores, score
from rewards.geometry.cameras import Cameras
from rewards.inverse_dynamics import InverseDynamics
from rewards.registry import FunctionReward, build
from rewards.remote import client, wire
from rewards.remote.client import Remote

CLIPS = Clips(torch.rand(2, 3, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
INFO = {
    "name": "bright", "identity": "bright()", "granularity": "clip", "needs": [], "range": [0, 1],
    "licence": "none", "hacked_by": "light",
}  # fmt: skip


def http_answer(status, content, kind="application/json", **headers) -> bytes:
    """The bytes of one HTTP answer."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = {"Content-Type": kind, "Content-Length": len(body), "Connection": "close", **headers}
    head = "".join(f"{k.replace('_', '-')}: {v}\r\n" for k, v in lines.items())
    return f"HTTP/1.1 {status} -\r\n{head}\r\n".encode() + body


def good(**change) -> bytes:
    """A right answer for two clips, changed."""
    reply = {"protocol": wire.PROTOCOL, "identity": "bright()", "value": [0.25, 0.5], "reasons": [None, None]}
    return http_answer(200, reply | change)


def fault(status, kind, retry=False, **headers) -> bytes:
    error = {"type": kind, "message": f"it is {kind}", "retry": retry}
    return http_answer(status, {"protocol": wire.PROTOCOL, "error": error}, **headers)


def listing(**change) -> bytes:
    """An answer to /v1/rewards whose one reward is changed."""
    return http_answer(200, {"protocol": wire.PROTOCOL, "rewards": [INFO | change]})


class Scripted:
    """A server that answers GET with ``info`` and POST with the next of ``script``, the last of which is repeated:
    bytes to send, or a function of server and socket. ``asked`` counts the POSTs."""

    def __init__(self, *script, info=None):
        self.script, self.info, self.asked = list(script), info or listing(), 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.closed = threading.Event()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self.listener.accept()
                threading.Thread(target=self.answer, args=(caller,), daemon=True).start()

    def answer(self, caller):
        with contextlib.suppress(OSError), caller:
            got = b""
            while b"\r\n\r\n" not in got:
                got += caller.recv(65536)
            head, _, body = got.partition(b"\r\n\r\n")
            length = next((int(x[15:]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length:")), 0)
            while len(body) < length:
                body += caller.recv(65536)
            reply = self.info
            if head.startswith(b"POST"):
                reply = self.script[min(self.asked, len(self.script) - 1)]
                self.asked += 1
            if isinstance(reply, bytes):
                caller.sendall(reply)
            else:
                reply(self, caller)

    def close(self):
        self.closed.set()
        with contextlib.suppress(OSError):  # wakes accept()
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def scripted():
    """``scripted(*script, info=None)`` -> :class:`Scripted`."""
    made = []

    def start(*script, **more):
        made.append(Scripted(*script, **more))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(client, "PAUSE", 0.001)


def silent(server, caller):
    """Takes the request and never answers."""
    server.closed.wait(20)


def dripping(start: bytes):
    """Sends ``start`` and then a byte now and then, so that no single wait is long."""

    def drip(server, caller):
        caller.sendall(start)
        while not server.closed.wait(0.02):
            caller.sendall(b"x")

    return drip


HTML = b"<html><body>502 Bad Gateway</body></html>"
BODY = b'{"protocol": 1, "identity": "bright()", "value": [0.25,'
FAULTS = {  # name -> (what the server does, reason, tries with one retry)
    "hangs": (silent, "timeout", 2),
    "drips headers": (dripping(b"HTTP/1.1 200 OK\r\nX-A: "), "timeout", 2),
    "drips a body": (dripping(b"HTTP/1.1 200 OK\r\n\r\n" + BODY), "timeout", 2),
    "drips a body of a stated length": (dripping(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"), "timeout", 2),
    "hangs up": (b"", "truncated", 2),
    "a cut body": (good()[:-9], "truncated", 2),
    "a cut body of no stated length": (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, "bad_answer", 1),
    "a cut chunked body": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{", "truncated", 2),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.6\r\n", "bad_answer", 1),
    "an HTML page": (http_answer(200, HTML, "text/html"), "bad_answer", 1),
    "an HTML error": (http_answer(500, HTML, "text/html"), "bad_answer", 1),
    "an HTML error of a gateway": (http_answer(502, HTML, "text/html"), "bad_answer", 2),
    "a redirect": (http_answer(302, b"", Location="http://127.0.0.1:1/"), "bad_answer", 1),
    "another protocol": (good(protocol=2), "protocol", 1),
    "no protocol": (http_answer(200, {"value": [0.25, 0.5], "reasons": [None, None]}), "protocol", 1),
    "a JSON list": (http_answer(200, [0.25, 0.5]), "bad_answer", 1),
    "deep JSON": (http_answer(200, b"[" * 100000), "bad_answer", 1),
    "too much": (http_answer(200, b" " * 5000), "bad_answer", 1),
    "another reward": (good(identity="dark()"), "server_changed", 1),
    "too few values": (good(value=[0.25], reasons=[None]), "bad_answer", 1),
    "too many values": (good(value=[0.25, 0.5, 0.5], reasons=[None] * 3), "bad_answer", 1),
    "values a chunk": (good(value=[[0.25], [0.5]]), "bad_answer", 1),
    "no values": (good(value=None), "bad_answer", 1),
    "words": (good(value=["0.25", "0.5"]), "bad_answer", 1),
    "truths": (good(value=[True, False]), "bad_answer", 1),
    "a NaN without a reason": (good(value=[0.25, None]), "bad_answer", 1),
    "a reason without a NaN": (good(reasons=[None, "content:dark"]), "bad_answer", 1),
    "a reason of no kind": (good(value=[0.25, None], reasons=[None, "dark"]), "bad_answer", 1),
    "reasons that are no texts": (good(value=[0.25, None], reasons=[None, 3]), "bad_answer", 1),
    "too few reasons": (good(reasons=[None]), "bad_answer", 1),
    "NaN, which is no JSON": (good(value=[0.25, math.nan], reasons=[None, "content:dark"]), "bad_answer", 1),
    "an infinity": (good(value=[0.25, "inf"]), "bad_answer", 1),
    "more than float32 holds": (good(value=[0.25, 1e300]), "bad_answer", 1),
    "above the range": (good(value=[0.25, 1.5]), "bad_answer", 1),
    "below the range": (good(value=[0.25, -0.1]), "bad_answer", 1),
    "a component of another shape": (good(components={"a": [1.0]}), "bad_answer", 1),
    "a component that is text": (good(components={"a": "b"}), "bad_answer", 1),
    "components that are none": (good(components=[1]), "bad_answer", 1),
    "its token changed": (fault(401, "unauthorized"), "unauthorized", 1),
    "its rewards changed": (fault(404, "unknown_reward"), "unknown_reward", 1),
    "too large": (fault(413, "too_large"), "too_large", 1),
    "the reward fails": (fault(500, "reward_failed"), "reward_failed", 1),
    "the reward is slow": (fault(504, "slow", retry=True), "slow", 2),
    "an error of a strange type": (fault(500, "a b\nc"), "bad_answer", 1),
    "an error that is none": (http_answer(500, {"protocol": 1, "error": "x"}), "bad_answer", 1),
    "busy for an hour": (fault(503, "busy", retry=True, Retry_After=3600), "busy", 2),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_server_costs_the_clips_their_scores_and_nothing_else(name, scripted, caplog, monkeypatch):
    does, reason, tries = FAULTS[name]
    monkeypatch.setattr(client, "MOST", 4096)
    server = scripted(does)
    remote = build("remote", url=server.url, reward="bright", timeout=20, retries=1)
    remote.timeout = {"timeout": 0.2, "busy": 1.0}.get(reason, 20)  # the other answers come, on a busy machine late
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        found = score(remote, CLIPS)
    assert time.monotonic() - began < 15, "a server that drips holds nobody for longer than the timeout"
    assert found.value.isnan().all() and not found.valid.any() and found.value.shape == (2,)
    assert list(found.reasons) == [f"system:{reason}"] * 2
    assert server.asked == tries
    assert len(caplog.messages) == 1 and "bright at http://" in caplog.text and f"system:{reason} for 2" in caplog.text


@pytest.mark.parametrize(("told", "asked"), [(2, 20), (0, 80)])
def test_a_busy_server_is_asked_again_until_the_time_is_up_but_not_without_a_pause(told, asked, scripted, monkeypatch):
    """By a clock that only waiting moves, so that it says the same on a busy machine."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    server = scripted(fault(503, "busy", retry=True, Retry_After=told))
    remote = build("remote", url=server.url, reward="bright", timeout=20, retries=1)
    monkeypatch.setattr(client, "PAUSE", 0.5)
    monkeypatch.setattr(client, "time", clock)
    assert list(score(remote, CLIPS).reasons) == ["system:busy"] * 2
    assert server.asked == asked, "at 0, 2, ... 18 seconds of each of two tries, or every half second"


def test_a_server_that_dies_is_unreachable(scripted):
    server = scripted(good())
    remote = build("remote", url=server.url, reward="bright", timeout=5, retries=1)
    assert score(remote, CLIPS).value.tolist() == [0.25, 0.5]
    server.close()
    assert list(score(remote, CLIPS).reasons) == ["system:unreachable"] * 2


def test_a_server_that_recovers_within_the_retries_is_not_noticed(scripted):
    busy, late = fault(503, "busy", True, Retry_After=0), fault(504, "timeout", True)
    server = scripted(busy, b"", good()[:-9], late, busy, good())
    remote = build("remote", url=server.url, reward="bright", timeout=5, retries=3)
    assert score(remote, CLIPS).value.tolist() == [0.25, 0.5] and server.asked == 6


def test_what_the_reward_itself_refuses_is_an_error_as_it_would_be_here(scripted):
    remote = build("remote", url=scripted(fault(422, "refused")).url, reward="bright", retries=0)
    with pytest.raises(ValueError, match="bright at .*: it is refused"):
        score(remote, CLIPS)


STARTS = {
    "another protocol": (http_answer(200, {"protocol": 2, "rewards": [INFO]}), {}, "speaks protocol 2; this client sp"),
    "an HTML page": (http_answer(200, HTML, "text/html"), {}, "not that of a reward server"),
    "a page that is not there": (http_answer(404, HTML, "text/html"), {}, "(status 404) is not that of a reward"),
    "no list": (http_answer(200, {"protocol": 1}), {}, "its list of rewards is not one"),
    "an unknown reward": (listing(), {"reward": "dark"}, "does not serve 'dark'; it serves bright"),
    "a wrong token": (fault(401, "unauthorized"), {}, "it is unauthorized"),
    "no token": (listing(), {"token": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE (token=) holds no token"),
    "hangs": (silent, {"timeout": 0.1}, "no answer within 0.1 s"),
    "a need nobody knows": (listing(needs=["money"]), {}, "not what a reward declares"),
    "an unknown granularity": (listing(granularity="frame"), {}, "not what a reward declares"),
    "a range of one": (listing(range=[0]), {}, "not what a reward declares"),
    "no licence": (listing(licence=None), {}, "not what a reward declares"),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_cannot_begin_is_an_error_at_the_start_in_one_line(name, scripted):
    info, args, says = STARTS[name]
    with pytest.raises(ValueError) as error:
        build("remote", **{"url": scripted(info=info).url, "reward": "bright", "timeout": 20, "retries": 0} | args)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_no_host_can_have_is_an_error_at_the_start():
    with pytest.raises(ValueError, match="remote reward bright at http://aaa.*: it cannot be reached") as error:
        build("remote", url=f"http://{'a' * 70}.example", reward="bright", retries=0)
    assert "\n" not in str(error.value)


def test_nobody_there_is_an_error_at_the_start(scripted):
    server = scripted()
    server.close()
    with pytest.raises(ValueError, match="cannot be reached .*is it running?"):
        build("remote", url=server.url, reward="bright", retries=0)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"url": "127.0.0.1:8100"}, "not the address of a server"),
        ({"url": "ftp://a"}, "not the address of a server"),
        ({"url": "http://a b"}, "not the address of a server"),
        ({"url": "http://a:port"}, "is not one"),
        ({"url": "http://a?x=1"}, "not the address of a server"),
        ({"url": 5}, "not the address of a server"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "long"}, "timeout is long"),
        ({"retries": -1}, "retries is -1"),
        ({"retries": 1.5}, "retries is 1.5"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_asked(args, says):
    with pytest.raises(ValueError, match="remote: ") as error:
        Remote(**{"url": "http://127.0.0.1:1", "reward": "bright"} | args)
    assert says in str(error.value)


def test_what_it_declares_is_what_the_server_says(scripted):
    said = {"needs": ["fps", "prompts"], "granularity": "chunk", "range": [None, 3], "licence": "MIT", "hacked_by": "x"}
    remote = build("remote", url=scripted(info=listing(**said)).url + "/", reward="bright")
    assert remote.needs == {"fps", "prompts"} and remote.granularity == "chunk"
    assert remote.value_range == (-math.inf, 3) and remote.licence == "MIT" and remote.hacked_by == "x"
    with pytest.raises(ValueError, match="needs chunks"):
        score(remote, CLIPS)


class Everything:
    """A reward that reads every field and gives every kind of result."""

    name, granularity, value_range = "everything", "chunk", (-1e6, 1e6)
    needs = frozenset({"fps", "prompts", "actions", "cameras", "groups", "chunks"})
    licence, hacked_by = "none", "nothing"

    def __call__(self, clips):
        self.seen = clips
        value = clips.frames[:, :2].mean((2, 3, 4)) / 3
        value[0, 1] = math.nan
        reasons = ["content:dark", *[None] * (len(clips) - 1)]
        raw = {"predicted": clips.actions + 1, "error": torch.tensor([1.5, math.inf]), "map": torch.zeros(70000)}
        told = {"pairs": 3, "names": ["a", "b"], "object": object(), "none": torch.zeros(2, 0)}
        return Scores(value, ~value.isnan(), reasons, {"part": value[:, 0] * 2}, raw, told)


def test_every_field_and_every_result_crosses_the_wire_exactly(serving):
    reward = Everything()
    remote = build("remote", url=serving({"all": reward}).url, reward="all")
    clips = Clips(
        CLIPS.frames, torch.tensor([8.0, 7.3], dtype=torch.float64), ['a "red" ball/ümlaut \\ 球', ""],
        torch.tensor([[1, 2], [3, 0]]), Cameras(torch.rand(2, 3, 4, 4), torch.rand(3, 3)), torch.tensor([5, 7]), (0, 2),
    )  # fmt: skip
    found, local = score(remote, clips), score(reward, clips)
    assert torch.equal(found.value.nan_to_num(9), local.value.nan_to_num(9)) and found.value.dtype == torch.float32
    assert torch.equal(found.valid, local.valid) and list(found.reasons) == list(local.reasons)
    assert torch.equal(found.components["part"], local.components["part"])
    assert torch.equal(found.raw["predicted"], local.raw["predicted"])
    assert found.raw["error"].tolist() == [1.5, math.inf]
    assert "map" not in found.raw and "object" not in found.diagnostics, "too large, and not JSON"
    assert found.diagnostics["pairs"] == 3 and found.diagnostics["names"] == ["a", "b"]
    assert found.diagnostics["none"].shape == (2, 0)
    score(remote, clips)
    seen = reward.seen
    assert seen is not clips and torch.equal(seen.frames, clips.frames) and list(seen.prompts) == list(clips.prompts)
    assert torch.equal(seen.fps, clips.fps) and torch.equal(seen.actions, clips.actions)
    assert torch.equal(seen.cameras.c2w, clips.cameras.c2w)
    assert torch.equal(seen.cameras.intrinsics, clips.cameras.intrinsics)
    assert torch.equal(seen.group_ids, clips.group_ids) and seen.chunk_starts == (0, 2)
    score(remote, Clips(clips.frames, 8, clips.prompts, clips.actions, clips.cameras, clips.group_ids, (0, 2)))
    assert reward.seen.fps == 8.0


def test_unknown_cameras_cannot_be_sent(scripted):
    remote = build("remote", url=scripted(good()).url, reward="bright")
    with pytest.raises(ValueError, match="cameras is a str, which cannot be sent"):
        score(remote, Clips(CLIPS.frames, cameras="left"))


@pytest.mark.parametrize("granularity", ["clip", "chunk"])
def test_a_shipped_reward_scores_the_same_bit_for_bit(serving, granularity):
    local = InverseDynamics(granularity=granularity)
    remote = build("remote", url=serving({"moves": local}).url, reward="moves")
    assert remote.value_range == local.value_range and remote.needs == local.needs
    frames = torch.rand(3, 7, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    actions = torch.tensor([[1, 2, 3, 4, 5, 1], [0] * 6, [5, 4, 0, 2, 1, 1]])
    clips = Clips(frames, 8.0, actions=actions, chunk_starts=(0, 3, 6))
    a, b = score(remote, clips), score(local, clips)
    assert torch.equal(a.value.nan_to_num(9), b.value.nan_to_num(9)) and list(a.reasons) == list(b.reasons)
    assert "content:no_actions" in a.reasons
    assert all(torch.equal(a.components[k].nan_to_num(9), b.components[k].nan_to_num(9)) for k in b.components)


def test_a_token_from_the_environment_is_sent(serving, monkeypatch):
    monkeypatch.setenv("REWARDS_TOKEN", "0123456789abcdef")
    bright = FunctionReward(lambda clips: clips.frames.mean((1, 2, 3, 4)), "bright", {})
    url = serving({"bright": bright}, "0123456789abcdef").url
    remote = build("remote", url=url, reward="bright", token="REWARDS_TOKEN")
    assert torch.equal(score(remote, CLIPS).value, CLIPS.frames.mean((1, 2, 3, 4)))
    monkeypatch.setenv("REWARDS_TOKEN", "0123456789abcdeF")
    assert list(score(remote, CLIPS).reasons) == ["system:unauthorized"] * 2
    with pytest.raises(ValueError, match="token"):
        build("remote", url=url, reward="bright", retries=0)
