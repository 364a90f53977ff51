"""What several test folders share: golden numbers, small random generators, a reward server. Nothing here reads outside
tests/."""

import contextlib
import http.client
import json
import socket
import threading
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.transformer import CausalWan

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def golden():
    """``golden("rollouts")`` -> tensors of tests/golden/rollouts.safetensors, read once."""
    return lru_cache(lambda name: load_file(GOLDEN / f"{name}.safetensors"))


@pytest.fixture(scope="session")
def golden_wan(golden):
    """The tiny Wan all golden numbers were made with; never change it."""
    model = CausalWan(num_attention_heads=4, attention_head_dim=32, text_dim=32, ffn_dim=256, num_layers=2)
    model.load_state_dict(golden("wan_weights"))
    return model.eval()


def make_tiny(**config) -> CausalWan:
    """A random causal Wan on 3 x 4 x 4 latents (4 tokens a frame), x0 prediction and 6 actions unless told."""
    settings = dict(
        num_attention_heads=2, attention_head_dim=24, in_channels=3, out_channels=3, text_dim=8, freq_dim=32,
        ffn_dim=64, num_layers=2, prediction="x0", num_actions=6,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return CausalWan(**(settings | config)).eval()


@pytest.fixture
def tiny():
    """The factory :func:`make_tiny`; every call gives a fresh model with the same weights."""
    return make_tiny


@pytest.fixture
def randn():
    """``randn(2, 3)``: normal numbers from one generator per test."""
    source = torch.Generator().manual_seed(11)
    return lambda *shape: torch.randn(*shape, generator=source)


def make_moved(context: Context, by: int) -> Context:
    """The same context with every frame and position ``by`` frames later."""
    spans = tuple(replace(s, start=s.start + by, stop=s.stop + by) for s in context.spans)
    return replace(context, spans=spans, position=context.position + by, _rotated={})


@pytest.fixture
def moved():
    """:func:`make_moved`."""
    return make_moved


class Running:
    """The reward server in a thread of this process."""

    def __init__(self, rewards, token="", **limits):
        import uvicorn

        from rewards.remote.server import Limits, Served, application

        app = application({k: Served(r, f"{k}()") for k, r in rewards.items()}, Limits(**limits), token)
        options = dict(http="h11", ws="none", lifespan="off", log_level="critical", access_log=False)
        self.server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **options))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],), daemon=True)
        self.thread.start()

    def ask(self, method, path, body=None, **headers):
        """(status, JSON, headers) of one request."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()), answer.headers

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)
        self.listener.close()
        assert not self.thread.is_alive()


@pytest.fixture
def serving():
    """``serving({name: reward}, token="", **limits)`` -> :class:`Running`, until the test ends."""
    running = []

    def start(*args, **more):
        running.append(Running(*args, **more))
        return running[-1]

    yield start
    for one in running:
        one.stop()
