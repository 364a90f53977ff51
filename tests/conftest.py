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
from diffusers import AutoencoderKLWan
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.names import to_official
from arvideo_rl.generators.pretrained import build
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


STREAMING = dict(chunk=3, window=9, sink=3, steps=[1000, 500], shift=5.0, fps=16, size=16, width=32, trained_frames=21)
WAN = dict(num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=4)
WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "ball", "rolls", "&"]


def write_text_encoder(folder, seed=0):
    """Wan's text_encoder/ and tokenizer/ in ``folder``, small and random; returns ``folder``."""
    torch.manual_seed(seed)
    config = UMT5Config(vocab_size=16, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    UMT5EncoderModel(config).save_pretrained(folder / "text_encoder")
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="session")
def make_text_encoder():
    """The function :func:`write_text_encoder`."""
    return write_text_encoder


@pytest.fixture(scope="session")
def published(tmp_path_factory):
    """A folder with the parts as they are published: an official .pt, a LoRA, a base with VAE and text encoder."""
    folder = tmp_path_factory.mktemp("published")
    write_text_encoder(folder / "base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        AutoencoderKLWan(base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1).save_pretrained(
            folder / "base" / "vae"
        )
        model = build(WAN).to_empty(device="cpu")
        state = {k: torch.randn(v.shape) * 0.2 for k, v in model.state_dict().items()}
        lora = {f"base_model.model.blocks.0.self_attn.q.lora_{k}.weight": torch.randn(s) for k, s in
                {"A": (2, 24), "B": (24, 2)}.items()}  # fmt: skip
    torch.save({"generator_ema": {f"model.{to_official(k)}": v for k, v in state.items()}}, folder / "student.pt")
    save_file(lora, folder / "lora.safetensors")
    parts = {"transformer": "student.pt", "base": "base", "dtype": "float32", "head_dim": 12, "licence": "none"}
    (folder / "student.yaml").write_text(json.dumps({"wan": parts, "streaming": STREAMING}))
    return folder
