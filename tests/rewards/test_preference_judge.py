"""A judge behind HTTP: what it is sent, how its answers are read, and that whatever fails is NaN with a reason."""

import base64
import io
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from PIL import Image

from rewards.adversarial import CHANGES
from rewards.audit import audit
from rewards.contract import Clips, score
from rewards.preference import judge
from rewards.registry import build

FRAMES = (torch.arange(3 * 6 * 3 * 24 * 40).reshape(3, 6, 3, 24, 40) % 256) / 255
PROMPTS = ["a red ball", "a {blue} cube", "a dog"]
NOW = {"Retry-After": "0"}
KEY = "sk-secret-0123456789"


class Model:
    """A server that answers chat completions with ``say(number of the request, its JSON)``: text of the model, or
    (status, body, headers)."""

    def __init__(self, say):
        outer, self.asked, self.lock = self, [], threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, json.dumps({"data": [{"id": "tiny-vlm"}]}).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.asked.append((self.path, dict(self.headers), body))
                    number = len(outer.asked)
                said = say(number, body)
                if isinstance(said, str):
                    said = 200, json.dumps({"choices": [{"message": {"content": said}}]}).encode(), {}
                self.reply(*said)

            def reply(self, status, body, headers=()):
                self.send_response(status)
                for key, value in {**dict(headers), "Content-Length": len(body)}.items():
                    self.send_header(key, str(value))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve(monkeypatch):
    """``serve(say)`` -> :class:`Model`, until the test ends; new tries come at once."""
    monkeypatch.setattr(judge, "PAUSE", 0.01)
    running = []

    def start(say):
        running.append(Model(say))
        return running[-1]

    yield start
    for one in running:
        one.stop()


def scored(url, **args):
    return score(build("judge", **{"url": url, "model": "tiny-vlm"} | args), Clips(FRAMES, prompts=PROMPTS))


def test_the_score_of_a_good_answer_is_scaled_and_goes_to_its_clip(serve):
    given = {"red": 2, "blue": 5, "dog": 1.5}

    def say(_, body):
        text = body["messages"][0]["content"][-1]["text"]
        time.sleep(0.05 if "red" in text else 0)  # the first to be asked answers last
        return f'Fine.\n```json\n{{"score": {next(v for k, v in given.items() if k in text)}}}\n```'

    got = scored(serve(say).url)
    assert got.raw["score"].tolist() == [2, 5, 1.5] and got.valid.all() and got.reasons == [None] * 3
    torch.testing.assert_close(got.value, torch.tensor([0.25, 1.0, 0.125]))


def test_a_judge_that_reads_the_prompt_claims_to_notice_a_wrong_one(serve):
    """The audit holds it to that: a model that sees whether grey and prompt belong together passes, one that rates all
    alike fails."""

    def sees(_, body):
        *pictures, text = body["messages"][0]["content"]
        file = io.BytesIO(base64.b64decode(pictures[0]["image_url"]["url"].partition(",")[2]))
        fits = PROMPTS[round(Image.open(file).getpixel((0, 0))[0] / 127.5)] in text["text"]
        return json.dumps({"score": 1 + 4 * fits})

    clips = Clips(torch.tensor([0, 0.5, 1])[:, None, None, None, None].expand(3, 4, 3, 24, 40).clone(), prompts=PROMPTS)
    changes = {k: CHANGES[k] for k in ("wrong_prompt", "frozen")}
    say = {"good": sees, "flat": lambda *_: '{"score": 3}'}
    found = {k: audit(build("judge", url=serve(s).url, model="tiny-vlm"), [clips], changes) for k, s in say.items()}
    assert not found["good"].failures and [f.change for f in found["flat"].failures] == ["wrong_prompt"]
    blunt = build("judge", url="http://127.0.0.1:1/v1", model="tiny-vlm", question="How good?")
    assert blunt.claims.notices == () and "frozen" in blunt.claims.blind_to


def test_it_is_sent_the_frames_the_text_and_greedy_decoding(serve):
    server = serve(lambda *_: '{"score": 3}')
    scored(server.url, frames=3, side=20, options={"max_tokens": 999, "seed": None}, at_once=1)
    path, headers, body = server.asked[1]
    assert path == "/v1/chat/completions" and "Authorization" not in headers
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny-vlm", 0, 999) and "seed" not in body
    *pictures, text = body["messages"][0]["content"]
    assert "a {blue} cube" in text["text"] and "3 frames" in text["text"] and '{"score": NUMBER}' in text["text"]
    seen = [Image.open(io.BytesIO(base64.b64decode(p["image_url"]["url"].partition(",")[2]))) for p in pictures]
    assert [s.size for s in seen] == [(20, 12)] * 3
    scored(server.url, frames=2, at_once=1)
    first, last, _ = server.asked[3][2]["messages"][0]["content"]
    for sent, frame in ((first, FRAMES[0, 0]), (last, FRAMES[0, 5])):  # smaller than side: bit for bit
        got = Image.open(io.BytesIO(base64.b64decode(sent["image_url"]["url"].partition(",")[2])))
        assert np.array_equal(np.asarray(got), (frame * 255).round().byte().permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    ("said", "score"),
    [('{"score": 4}', 4), ('{"score": 1} no: {"score": 2.5}', 2.5), ('{"why": {"score": 1}, "score": 5}', 5),
     ('{"score": 4, "parts": [{"score": 1}]}', 4), ('{ {"score": 3}', 3), ('{"score": 2} {"why": "dull"}', 2),
     ("4", None), ("", None), (None, None), ('{"score": "4"}', None), ('{"score": true}', None), ("[1, 2]", None),
     ('{"score": NaN}', None), ('{"score": 1e999}', None), ('{"rating": 4}', None), ('{"score": 4', None)],
)  # fmt: skip
def test_what_a_model_says_is_read_as_json_and_not_guessed(said, score):
    assert judge.read_score(said) == score


def chat(content):
    return 200, json.dumps({"choices": [{"message": {"content": content}}]}).encode(), {}


@pytest.mark.parametrize(
    ("answer", "reason", "tries"),
    [("I cannot rate this.", "no_score", 1), ('{"score": 9}', "no_score", 1), ('{"score": 0.99}', "no_score", 1),
     (chat(None), "no_score", 1), (chat([{"text": "4"}]), "no_score", 1), ((200, b"{}", {}), "bad_answer", 1),
     ((200, b"<html>", {}), "bad_answer", 1), ((200, b"[1]", {}), "bad_answer", 1),
     ((200, b'{"choices": []}', {}), "bad_answer", 1), ((400, b"too many pictures", {}), "server_error", 1),
     ((404, b"no such model", {}), "server_error", 1), ((401, b"", {}), "unauthorized", 1),
     ((429, b"slow down", NOW), "server_error", 3), ((500, b"", NOW), "server_error", 3),
     ((503, b"", NOW), "server_error", 3)],
)  # fmt: skip
def test_an_answer_that_is_no_score_is_nan_with_a_reason(serve, answer, reason, tries):
    """Only what may pass is tried again; the other clips of the batch keep their scores."""

    def say(_, body):
        return answer if "dog" in body["messages"][0]["content"][-1]["text"] else '{"score": 3}'

    server = serve(say)
    got = scored(server.url)
    assert got.reasons == [None, None, f"system:{reason}"]
    assert got.value[:2].tolist() == [0.5, 0.5] and got.value[2].isnan()
    assert len(server.asked) == 2 + tries


def test_what_passes_is_tried_again_after_the_time_the_server_asks_for(serve):
    def say(number, _):
        return (429, b"", {"Retry-After": "1"}) if number <= 3 else '{"score": 5}'

    server = serve(say)
    start = time.monotonic()
    assert scored(server.url, at_once=3).value.tolist() == [1, 1, 1]
    assert time.monotonic() - start >= 1 and len(server.asked) == 6


def test_a_server_that_is_late_dead_or_closed_is_a_reason(serve):
    done = threading.Event()
    late = serve(lambda *_: "late" if done.wait(5) else "")
    start = time.monotonic()
    assert scored(late.url, timeout=0.2, retries=0).reasons == ["system:timeout"] * 3
    assert time.monotonic() - start < 3
    done.set()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    assert scored(url, retries=1).reasons == ["system:unreachable"] * 3
    with pytest.raises(ValueError, match="cannot be reached .* is it running"):
        build("judge", url=url, model="tiny-vlm", retries=0).prepare()


def test_prepare_asks_whether_the_model_is_there(serve):
    url = serve(lambda *_: "").url
    build("judge", url=url, model="tiny-vlm").prepare()
    with pytest.raises(ValueError, match="no model 'other'; it has tiny-vlm"):
        build("judge", url=url, model="other").prepare()


def test_the_key_is_sent_and_shown_nowhere(serve, monkeypatch, caplog, capfd):
    """Not in scores, logs or errors, even when the server repeats it, or when it is given in place of the variable."""
    monkeypatch.setenv("JUDGE_KEY", KEY)
    server = serve(lambda *_: (400, f"bad key {KEY}".encode(), {}))
    with caplog.at_level(logging.DEBUG):
        got = scored(server.url, token="JUDGE_KEY")
        reward = build("judge", url=server.url, model="tiny-vlm", token="JUDGE_KEY")
        with pytest.raises(ValueError) as error:
            build("judge", url=server.url, model="tiny-vlm", token=KEY)
        with pytest.raises(ValueError) as other:
            build("remote", url=server.url, reward="x", token=KEY)
    assert server.asked[0][1]["Authorization"] == f"Bearer {KEY}"
    assert "bad key ***" in caplog.text and "name of the environment variable" in str(error.value)
    everything = (got, caplog.text, vars(reward), error.value, other.value, *capfd.readouterr())
    assert KEY not in "".join(map(str, everything))
    monkeypatch.delenv("JUDGE_KEY")
    assert scored(server.url, token="JUDGE_KEY").reasons == ["system:unauthorized"] * 3 and len(server.asked) == 3


@pytest.mark.parametrize(
    ("args", "says"),
    [({"url": "ftp://x"}, "is not the address of a server"), ({"frames": 0}, "frames is 0"), ({"side": 4}, "side is 4"),
     ({"retries": 1.5}, "retries is 1.5"), ({"at_once": 0}, "at_once is 0"), ({"timeout": 0}, "timeout is 0"),
     ({"low": 5, "high": 5}, "low must be the smaller"), ({"question": "{promt}"}, "cannot be filled in"),
     ({"question": '{"score": 1}'}, "double the braces")],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_one_line(args, says):
    with pytest.raises(ValueError) as error:
        build("judge", **{"url": "http://127.0.0.1:1/v1", "model": "m"} | args)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_question_without_the_prompt_needs_none(serve):
    server = serve(lambda *_: '{"score": 1}')
    plain = build("judge", url=server.url, model="m", question="Is it sharp? Rate {low:g} to {high:g}.")
    assert plain.needs == frozenset() and score(plain, Clips(FRAMES)).value.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="needs prompts"):
        score(build("judge", url=server.url, model="m"), Clips(FRAMES))
