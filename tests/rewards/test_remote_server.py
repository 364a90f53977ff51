"""The reward server: typed errors, limits, back-pressure, health; whatever is sent to it."""

import contextlib
import io
import json
import pickle
import random
import socket
import struct
import threading
import time
import zipfile

import numpy as np
import psutil
import pytest
import torch

from rewards.contract import Clips
from rewards.registry import FunctionReward, build
from rewards.remote import wire

FRAMES = np.random.default_rng(0).random((2, 3, 3, 8, 8), dtype=np.float32)
GOOD = wire.pack(Clips(torch.from_numpy(FRAMES)))
SCORE = "/v1/score?reward=bright"
TOKEN = "0123456789abcdef"


def bright(clips):
    return clips.frames.mean((1, 2, 3, 4))


def function(call, **declared):
    reward = FunctionReward(call, "bright", {})
    for name, value in declared.items():
        setattr(reward, name, value)
    return reward


BRIGHT = {"bright": function(bright)}


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def zipped(entries: dict[str, bytes], method=zipfile.ZIP_DEFLATED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file.getvalue()


def npy(array, **header) -> bytes:
    """An npy file whose header says something else."""
    file = io.BytesIO()
    told = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(file, told)
    return file.getvalue() + array.tobytes()


def zip64() -> bytes:
    """A good file whose end says that the real directory, with a million entries, is somewhere else."""
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, 10**6, 10**6, 46 * 10**6, 0)
    return GOOD[:-22] + end + struct.pack("<4sLQL", b"PK\6\7", 0, 0, 1) + GOOD[-22:]


ZEROS = np.zeros((1, 1), np.float32)
MALFORMED = {  # name -> (body, what the message says)
    "nothing": (b"", "not an npz file"),
    "text": (b"hello " * 20, "not an npz file"),
    "JSON": (json.dumps({"frames": FRAMES.tolist()}).encode(), "not an npz file"),
    "a pickle": (pickle.dumps({"frames": FRAMES}), "not an npz file"),
    "half": (GOOD[: len(GOOD) // 2], "not an npz file"),
    "another directory": (zip64(), "not an npz file"),
    "many entries": (zipped({f"{i}.npy": b"" for i in range(1000)}), "1000 entries"),
    "an unknown field": (npz(frames=FRAMES, reward=ZEROS), "holds 'reward'"),
    "a path": (zipped({"../../frames.npy": npy(FRAMES)}), "holds '../../frames'"),
    "no frames": (npz(fps=np.float64(8)), "holds no frames"),
    "objects": (zipped({"frames.npy": npy(ZEROS, descr="|O")}), "frames: it is object; send float32"),
    "bytes": (npz(frames=np.zeros((1, 1, 3, 8, 8), np.uint8)), "frames: it is uint8; send float32"),
    "records": (npz(frames=np.zeros(2, [("a", "f4")])), "send float32"),
    "text as frames": (npz(frames=np.array(["a"])), "prompts are text"),
    "numbers as prompts": (npz(frames=FRAMES, prompts=np.float32([1, 2])), "prompts are text"),
    "a grid of prompts": (npz(frames=FRAMES, prompts=np.array([["a"], ["b"]])), "prompts must be a list of texts"),
    "one prompt for two": (npz(frames=FRAMES, prompts=np.array(["a"])), "prompts is 1 entries"),
    "no such character": (
        zipped({"frames.npy": npy(FRAMES), "prompts.npy": npy(np.full(2, 2**31, np.uint32), descr="<U1")}),
        "no character",
    ),
    "doubles": (npz(frames=FRAMES.astype(np.float64)), "expected float32"),
    "255": (npz(frames=FRAMES * 255), "frames / 255"),
    "NaN": (npz(frames=FRAMES * np.nan), "non-finite"),
    "four axes": (npz(frames=FRAMES[0]), "4 axes"),
    "no clip": (npz(frames=FRAMES[:0]), "holds no pixel"),
    "no rate": (npz(frames=FRAMES, fps=np.float64(0)), "fps is 0"),
    "actions of another shape": (npz(frames=FRAMES, actions=np.zeros((2, 3), np.int64)), "actions"),
    "starts that fall": (npz(frames=FRAMES, chunk_starts=np.int64([0, 2, 1])), "chunk_starts"),
    "starts that are a number": (npz(frames=FRAMES, chunk_starts=np.int64(0)), "chunk_starts is"),
    "cameras of another shape": (npz(frames=FRAMES, c2w=ZEROS), "c2w"),
    "a header that claims a terabyte": (zipped({"frames.npy": npy(ZEROS, shape=(10**6, 10**6))}), "but 4 were sent"),
    "a header of negative size": (zipped({"frames.npy": npy(ZEROS, shape=(-1, -1))}), "takes 4 bytes"),
    "a header of no size": (zipped({"frames.npy": npy(ZEROS[:0], shape=(0, 10**30))}), "dimension"),
    "a header that is code": (zipped({"frames.npy": b"\x93NUMPY\1\0\x0a\0exit()   \n"}), "frames: "),
    "npy of a later version": (zipped({"frames.npy": b"\x93NUMPY\3\0" + bytes(64)}), "npy version"),
    "no npy": (zipped({"frames.npy": b"hello"}), "magic"),
    "another packing": (zipped({"frames.npy": npy(FRAMES)}, zipfile.ZIP_LZMA), "numpy does not write"),
    "a checksum that is wrong": (GOOD.replace(FRAMES.tobytes()[:8], bytes(8), 1), "damaged (BadZipFile)"),
}  # fmt: skip


def no_constant(word):
    raise AssertionError(f"{word} is no JSON")


def test_malformed_clips_are_a_typed_error_and_the_server_goes_on(serving):
    server = serving(BRIGHT)
    for name, (body, says) in MALFORMED.items():
        status, data, _ = server.ask("POST", SCORE, body)
        assert (status, data["error"]["type"]) == (400, "invalid_clips"), (name, data)
        message = data["error"]["message"]
        assert says in message and "\n" not in message and not data["error"]["retry"], (name, message)
    status, data, _ = server.ask("POST", SCORE, GOOD)
    assert status == 200 and data["value"] == bright(Clips(torch.from_numpy(FRAMES))).tolist()


def test_whoever_speaks_json_and_numpy_can_use_it(serving):
    server = serving(BRIGHT)
    assert server.ask("GET", "/healthz")[:2] == (200, {"protocol": 1, "status": "alive"})
    assert server.ask("GET", "/readyz")[:2] == (200, {"protocol": 1, "status": "ready"})
    status, data, _ = server.ask("GET", "/v1/rewards")
    assert status == 200 and data["limits"] == {"bytes": 2**30, "clips": 256}
    (about,) = data["rewards"]
    assert about["name"] == "bright" and about["range"] == [None, None] and about["granularity"] == "clip"
    big_endian, compressed = io.BytesIO(), io.BytesIO()
    np.savez(big_endian, frames=np.asfortranarray(FRAMES.astype(">f4")), fps=8.0)
    np.savez_compressed(compressed, frames=FRAMES)
    for body in (GOOD, big_endian.getvalue(), compressed.getvalue()):
        status, data, _ = server.ask("POST", SCORE, body)
        expected = bright(Clips(torch.from_numpy(FRAMES))).tolist()
        assert status == 200 and data["value"] == pytest.approx(expected, abs=1e-7)
        assert data["reward"] == "bright" and data["reasons"] == [None, None]


def test_paths_methods_rewards_and_needs_that_are_not_there(serving):
    needy = function(bright, needs=frozenset({"actions"}))
    server = serving({**BRIGHT, "needy": needy})
    for method, path, status, kind, says in (
        ("GET", "/", 404, "not_found", "POST /v1/score?reward=NAME"),
        ("GET", "/v2/rewards", 404, "not_found", "/v1/rewards"),
        ("GET", SCORE, 405, "method_not_allowed", "POST /v1/score"),
        ("DELETE", "/v1/rewards", 405, "method_not_allowed", "GET /v1/rewards"),
        ("POST", "/v1/score", 404, "unknown_reward", "bright or needy"),
        ("POST", "/v1/score?reward=dark", 404, "unknown_reward", "'dark' is not served"),
        ("POST", "/v1/score?reward=needy", 422, "refused", "needs actions"),
    ):
        found, data, _ = server.ask(method, path, GOOD if method == "POST" else None)
        assert (found, data["error"]["type"]) == (status, kind) and says in data["error"]["message"], path


def test_a_token_is_wanted_and_health_is_not_secret(serving):
    server = serving(BRIGHT, TOKEN)
    for given in ({}, {"Authorization": TOKEN}, {"Authorization": f"Bearer {TOKEN}x"}, {"Authorization": "Bearer ü"}):
        for method, path in (("GET", "/v1/rewards"), ("POST", SCORE)):
            status, data, _ = server.ask(method, path, GOOD if method == "POST" else None, **given)
            assert (status, data["error"]["type"]) == (401, "unauthorized")
            assert TOKEN not in json.dumps(data)
    right = {"Authorization": f"Bearer {TOKEN}"}
    assert server.ask("GET", "/v1/rewards", **right)[0] == server.ask("POST", SCORE, GOOD, **right)[0] == 200
    assert server.ask("GET", "/healthz")[0] == server.ask("GET", "/readyz")[0] == 200


def test_sizes_are_limited_before_and_after_unpacking(serving):
    server = serving(BRIGHT, size=100_000, clips=3)
    bomb = zipped({"frames.npy": npy(np.zeros((2, 100, 3, 200, 200), np.float32))})
    assert len(bomb) < 100_000
    status, data, _ = server.ask("POST", SCORE, bomb)
    assert (status, data["error"]["type"]) == (400, "invalid_clips")
    assert "larger than the server takes" in data["error"]["message"]
    many = npz(frames=np.zeros((4, 1, 3, 8, 8), np.float32))
    status, data, _ = server.ask("POST", SCORE, many)
    assert (status, data["error"]["type"]) == (413, "too_large") and "4 clips" in data["error"]["message"]
    for body in (bytes(200_000), iter([bytes(50_000)] * 4)):  # announced, and in pieces
        status, data, _ = server.ask("POST", SCORE, body)
        assert (status, data["error"]["type"]) == (413, "too_large") and "100000 bytes" in data["error"]["message"]
    assert server.ask("POST", SCORE, GOOD)[0] == 200


def wait_until(true):
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


class Held:
    """A reward that computes until it is let go, and counts."""

    def __init__(self):
        self.let_go, self.begun = threading.Event(), 0

    def __call__(self, clips):
        self.begun += 1
        assert self.let_go.wait(20)
        return bright(clips)


@pytest.fixture
def held():
    one = Held()
    yield one
    one.let_go.set()


def in_background(server, times=1):
    """Ask for scores from as many threads; (threads, where statuses will be)."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(server.ask("POST", SCORE, GOOD)[:2])) for _ in range(times)]
    for thread in threads:
        thread.start()
    return threads, found


def test_beyond_the_queue_callers_are_told_to_come_back_and_all_others_are_served(serving, held):
    server = serving({"bright": function(held)}, queue=2)
    threads, found = in_background(server, 6)
    wait_until(lambda: len(found) == 3)
    assert {(s, d["error"]["type"], d["error"]["retry"]) for s, d in found} == {(503, "busy", True)}
    assert server.ask("POST", SCORE, GOOD)[2]["Retry-After"] == "1"
    assert server.ask("GET", "/readyz")[0] == 200, "busy is not broken"
    held.let_go.set()
    for thread in threads:
        thread.join()
    assert sorted(s for s, _ in found) == [200] * 3 + [503] * 3 and held.begun == 3
    assert server.ask("POST", SCORE, GOOD)[0] == 200, "the places are free again"


def test_a_reward_that_hangs_is_late_for_everybody_and_not_ready(serving, held):
    server = serving({"bright": function(held)}, queue=1, timeout=0.2)
    for _ in range(2):  # the one that hangs and the one behind it
        status, data, _ = server.ask("POST", SCORE, GOOD)
        assert (status, data["error"]["type"], data["error"]["retry"]) == (504, "timeout", True)
    assert server.ask("POST", SCORE, GOOD)[1]["error"]["type"] == "busy", "what is given up still takes its place"
    wait_until(lambda: server.ask("GET", "/readyz")[0] == 503)
    assert server.ask("GET", "/readyz")[1]["error"]["type"] == "stuck" and server.ask("GET", "/healthz")[0] == 200
    held.let_go.set()
    wait_until(lambda: server.ask("GET", "/readyz")[0] == 200)
    wait_until(lambda: server.ask("POST", SCORE, GOOD)[0] == 200)
    assert held.begun == 2, "what nobody waits for any more was not begun"


def raw(server, text: bytes) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    caller.sendall(text)
    return caller


def head(length) -> bytes:
    return f"POST {SCORE} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n".encode()


def test_what_a_caller_who_left_asked_for_is_not_computed(serving, held):
    server = serving({"bright": function(held)})
    threads, found = in_background(server)
    wait_until(lambda: held.begun == 1)
    for _ in range(3):
        raw(server, head(len(GOOD)) + GOOD).close()
    raw(server, head(len(GOOD)) + GOOD[:99]).close()  # and one in the middle of it
    time.sleep(0.2)  # for the server to notice
    held.let_go.set()
    assert server.ask("POST", SCORE, GOOD)[0] == 200
    threads[0].join()
    assert found[0][0] == 200 and held.begun == 2


def test_an_upload_that_does_not_come_gives_its_place_back(serving):
    server = serving(BRIGHT, queue=1, timeout=0.2)
    with contextlib.closing(raw(server, head(len(GOOD)) + GOOD[:99])) as slow:
        said = b""
        while b"}" not in said:
            said += slow.recv(65536)
    assert said.startswith(b"HTTP/1.1 408") and b"slow_upload" in said
    assert server.ask("POST", SCORE, GOOD)[0] == 200


def failing(error):
    def judge(clips):
        raise error

    return function(judge)


@pytest.mark.parametrize(
    ("reward", "status", "kind", "says"),
    [
        (failing(ValueError("frames are 8x8; use 32")), 422, "refused", "frames are 8x8; use 32"),
        (failing(KeyError("fames")), 422, "refused", "mend the function"),
        (failing(OSError("no weights")), 500, "reward_failed", "OSError: no weights"),
        (failing(MemoryError()), 500, "out_of_memory", "send fewer clips"),
        (failing(torch.OutOfMemoryError("CUDA out of memory")), 500, "out_of_memory", "send fewer clips"),
        (failing(SystemExit(3)), 500, "reward_failed", "SystemExit: 3"),
        (function(lambda c: c.frames.mean((2, 3, 4))), 422, "refused", "returned shape (2, 3)"),
        (function(lambda c: c.frames.mean((1, 2, 3, 4)) * float("nan")), 422, "refused", "NaN and valid=False"),
    ],
)
def test_a_reward_that_fails_is_a_typed_error_and_the_server_goes_on(serving, capfd, reward, status, kind, says):
    server = serving({"bright": reward, "fine": function(bright)})
    found, data, _ = server.ask("POST", SCORE, GOOD)
    assert (found, data["error"]["type"]) == (status, kind) and says in data["error"]["message"], data
    assert server.ask("POST", "/v1/score?reward=fine", GOOD)[0] == 200


def test_what_needs_groups_gets_them(serving):
    def best(clips):
        return (clips.group_ids == clips.group_ids[0]).float()

    server = serving({"best": function(best, granularity="group", value_range=(0.0, 1.0))})
    remote = build("remote", url=server.url, reward="best")
    clips = Clips(torch.from_numpy(FRAMES), group_ids=torch.tensor([4, 5]))
    assert remote.granularity == "group" and remote(clips).value.tolist() == [1.0, 0.0]


def mutation(rng: random.Random) -> bytes:
    """An HTTP request that is wrong somewhere: in its bytes, its npz file, its headers or its path."""
    body = bytearray(rng.choice([GOOD, *(b for b, _ in MALFORMED.values())]))
    for _ in range(rng.choice([0, 1, 8])):
        if body:
            body[rng.randrange(len(body))] = rng.randrange(256)
    if rng.random() < 0.2:
        body = body[: rng.randrange(len(body) + 1)]
    strange = ["/v1/score?reward=%00%ff", "/v1/%2e%2e/score", "/" + "a" * 5000, "/v1/score?" + "&" * 900]
    path = rng.choice([SCORE] * 12 + strange)
    method = rng.choice(["POST"] * 12 + ["GET", "PUT", "BREW"])
    length = rng.choice([len(body)] * 16 + ["-1", "1e9", "9" * 30, len(body) + 9])
    lines = [f"{method} {path} HTTP/1.1", "Host: a", "Connection: close", f"Content-Length: {length}"]
    odd = ["Authorization: \x7f", "Accept: *", "Content-Type: a/b;q", "Content-Encoding: gzip", "X: " + "y" * 70000,
           "Transfer-Encoding: chunked", "Expect: 100-continue"]  # fmt: skip
    lines += rng.sample(odd, rng.randrange(2))
    text = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + bytes(body)
    return rng.randbytes(300) if rng.random() < 0.05 else text


def bombard(server, count, seed) -> dict[str, int]:
    """Send ``count`` malformed requests; statuses seen, "" where the server hung up or still waits for the rest."""
    rng, seen = random.Random(seed), {}
    for _ in range(count):
        with contextlib.closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as caller:
            got = b""
            with contextlib.suppress(ConnectionError):
                text = mutation(rng)
                caller.sendall(text)
                if b"Length: %d\r\n" % len(text.partition(b"\r\n\r\n")[2]) not in text or b": chunked" in text:
                    caller.shutdown(socket.SHUT_WR)  # or the server would wait for what does not come
                while piece := caller.recv(65536):
                    got += piece
        status = got[9:12].decode()
        assert status in ("", "100") or b"HTTP/1.1 " == got[:9], got
        if status and b"application/json" in got and status != "200":
            data = json.loads(got.rpartition(b"\r\n\r\n")[2], parse_constant=no_constant)
            assert data["error"]["type"] != "internal" and data["error"]["message"], data
        seen[status] = seen.get(status, 0) + 1
    return seen


def test_a_thousand_malformed_requests_end_in_typed_errors_without_a_crash_and_memory_stays(serving):
    server = serving(BRIGHT)
    bombard(server, 100, seed=1)  # what is loaded on first use is loaded
    before = psutil.Process().memory_info().rss
    seen = bombard(server, 1000, seed=2)
    grown = psutil.Process().memory_info().rss - before
    assert grown < 24 * 2**20, f"{grown / 2**20:.0f} MiB more"
    assert {"400", "404", "405"} <= seen.keys() and not {"500", "501"} & seen.keys(), seen
    assert seen["400"] > 500, seen
    status, data, _ = server.ask("POST", SCORE, GOOD)
    assert status == 200 and data["value"] == bright(Clips(torch.from_numpy(FRAMES))).tolist()
