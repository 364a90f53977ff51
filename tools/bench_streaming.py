"""Seconds per chunk, pixel frames per second, memory and FLOPs of a stream, against its length and between settings.

    python tools/bench_streaming.py [generator] [--frames 48] [--vary KEY=A,B ...] [--repeats 5] [--decode] [--flops]
    python tools/bench_streaming.py --random wan-1.3b --set device=cuda dtype=bfloat16 window=12 sink=3 \\
        --vary attention=native,flash --decode
    python tools/bench_streaming.py --random reference --set window=9 sink=3 --beside 'python their_bench.py'

Every combination of the varied values is a case. Cases alternate within the run, so that a busy machine hits all alike:
trust the ratios (each to the first case of its round), not the absolute figures. Keys: threads, streams, in_place (a
ring, or contexts), compile (0, 1, or a mode of torch.compile), attention, dtype, device, and those of the generator's
`streaming:`. --random makes a network of a named size with random weights, text and latents: wan-1.3b and wan-14b at
480x832, or reference (dim 256, 6 layers, 64 tokens a frame). --beside runs a second command in turn with the cases; it
must print a JSON object with "seconds_per_chunk" as its last line. --flops counts the products of one chunk and says
how far its time lies above what they would take at the speed of one large matrix product on this machine.
Peak memory is of the device on CUDA, per case; on a CPU of the whole process. Without --decode frames are latent ones
where a decoder would make several of each. Prints a table (chunks before the window is full are left out) and one JSON
line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.attention_dispatch import AttentionBackendName
from torch.utils.flop_counter import FlopCounterMode

from arvideo_rl.generators import transformer as module
from arvideo_rl.generators.attention import BACKENDS, choose
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.codec import IdentityCodec, WanCodec
from arvideo_rl.generators.pretrained import stored_dtype
from arvideo_rl.generators.ring import Ring
from arvideo_rl.generators.streaming import Streaming
from arvideo_rl.generators.transformer import CausalWan
from samplers.randomness import Key
from samplers.stream import draw_from

SHAPES = {  # network, text tokens, pixels in height and width
    "wan-1.3b": (dict(num_attention_heads=12, ffn_dim=8960, num_layers=30), 512, (480, 832)),
    "wan-14b": (dict(num_attention_heads=40, ffn_dim=13824, num_layers=40), 512, (480, 832)),
    "reference": (dict(num_attention_heads=4, attention_head_dim=64, ffn_dim=1024, num_layers=6, text_dim=256), 64,
                  (128, 128)),
}  # fmt: skip
WAN = Streaming(window=12, sink=3, shift=5.0, fps=16, trained_frames=21)
RUN = dict(threads="1", streams="1", in_place="1", compile="0", attention="native", dtype="", device="cpu")
KINDS = {f.name: type(f.default) if f.default is not None else int for f in fields(Streaming)}


def network_of(name: str, shape: str | None, told: dict[str, str], decode: bool) -> Generator:
    """A generator on the device of a case in its dtype, as loading gives it: norms and some others stay in float32."""
    dtype = getattr(torch, told["dtype"]) if told["dtype"] else None
    if shape is None:
        generator = Generator.load(name)
    else:
        sizes, tokens, (height, width) = SHAPES[shape]
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype or before)
        with torch.device(told["device"]):
            network = CausalWan(**sizes, linear_state=_switch("linear", told.get("linear", "0"))).eval()
        torch.set_default_dtype(before)
        network.requires_grad_(False)
        text = torch.randn(1, tokens, network.config.text_dim, generator=torch.Generator().manual_seed(0))
        encoder: Any = SimpleNamespace(embed=lambda p: text.expand(len(p), -1, -1), to=lambda device: None)
        codec = WanCodec(AutoencoderKLWan().eval().to(dtype)) if decode else IdentityCodec()
        stride = 1 if decode else 8  # without a decoder the latents are taken for the pixels
        generator = Generator(network, encoder, codec, replace(WAN, size=height // stride, width=width // stride))
    for key, p in generator.transformer.named_parameters():
        p.data = p.data.to(stored_dtype(key, dtype or p.dtype) if shape or dtype else p.dtype)
    return generator.to(told["device"])


def settings_of(generator: Generator, told: dict[str, str]) -> Generator:
    """The same networks with the streaming settings of a case."""
    changes = {k: _value(k, v) for k, v in told.items() if k in KINDS}
    return replace(generator, streaming=replace(generator.streaming, **changes))


def _value(key: str, text: str) -> Any:
    kind = KINDS[key]
    if key in ("window", "width") and text in ("null", "none"):
        return None
    if kind is bool:
        return _switch(key, text)
    return tuple(map(float, text.split("-"))) if kind is tuple else kind(text)


def _switch(key: str, text: str) -> bool:
    if text.lower() not in ("0", "1", "true", "false"):
        raise ValueError(f"{key}={text}: use 0 or 1")
    return text.lower() in ("1", "true")


def stream_once(generator: Generator, told: dict[str, str], frames: int, decode: bool) -> dict[str, list[float]]:
    """Seconds, and bytes held by the process (of the device on CUDA: the most allocated), per chunk."""
    torch.set_num_threads(int(told["threads"]))
    cuda, streams = told["device"].startswith("cuda"), int(told["streams"])
    actions = generator.transformer.action_embedding is not None
    script = generator.script(["a red ball rolls left"] * streams,
                              torch.ones(streams, frames, dtype=torch.long) if actions else None)  # fmt: skip
    draw = draw_from([Key(0, branch=i) for i in range(streams)], generator.latent_shape, told["device"])
    decoder = generator.codec.decoder() if decode else None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    out: dict[str, list[float]] = {"seconds": [], "bytes": [], "past": []}
    begun = time.perf_counter()
    for chunk in generator.stream(
        generator.transformer, script, draw, frames, to_continue=True, in_place=_switch("in_place", told["in_place"])
    ):
        if decoder:
            decoder(chunk.latents)
        if cuda:
            torch.cuda.synchronize()
        out["seconds"].append(time.perf_counter() - begun)
        out["bytes"].append(torch.cuda.max_memory_allocated() if cuda else psutil.Process().memory_info().rss)
        out["past"].append(bytes_of(chunk.context))
        begun = time.perf_counter()
    return out


def bytes_of(context: Any) -> int:
    """Bytes of a past's keys and values."""
    if isinstance(context, Ring):
        return sum(x.nbytes for x in (*context.keys, *context.values))
    return sum(x.nbytes for s in context.spans for x in (*s.keys, *s.values))


def flops_at(generator: Generator, told: dict[str, str], marks: list[int]) -> dict[int, int]:
    """Floating-point operations of the chunks ``marks`` of one stream by their first frame, counted; of attention too,
    which is why it is computed by plain products there."""
    script = generator.script(["a red ball rolls left"] * int(told["streams"]))
    draw = draw_from([Key(0, branch=i) for i in range(int(told["streams"]))], generator.latent_shape, told["device"])
    frames, kernel = (max(marks) + 1) * generator.streaming.chunk, generator.transformer.attention
    chunks = generator.stream(generator.transformer, script, draw, frames, to_continue=True, in_place=True)
    out = {}
    for k in range(max(marks) + 1):
        if k not in marks:
            next(chunks)
            continue
        generator.transformer.attention = AttentionBackendName._NATIVE_MATH
        with FlopCounterMode(display=False) as counter:
            chunk = next(chunks)
        generator.transformer.attention = kernel
        out[chunk.start] = counter.get_total_flops()
    return out


def products_per_second(generator: Generator, told: dict[str, str]) -> float:
    """FLOPs a second of the feed-forward's larger product with one chunk's tokens, the best of ten."""
    torch.set_num_threads(int(told["threads"]))
    frames, _, height, width = generator.latent_shape
    _, p_h, p_w = generator.transformer.config.patch_size
    rows = int(told["streams"]) * frames * (height // p_h) * (width // p_w)
    weight = generator.transformer.blocks[0].ffn.net[2].weight
    x, best = torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype), float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(20):
            torch.nn.functional.linear(x, weight)
        if weight.is_cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - begun) / 20)
    return 2 * rows * weight.numel() / best


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", nargs="?", default="tiny")
    parser.add_argument("--random", choices=SHAPES)
    parser.add_argument("--frames", type=int, default=48)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--vary", nargs="+", default=[], metavar="KEY=A,B")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--flops", action="store_true")
    parser.add_argument("--beside", metavar="COMMAND")
    args = parser.parse_args()
    if bad := [item for item in (*args.set, *args.vary) if "=" not in item]:
        parser.error(f"{bad[0]}: write KEY=VALUE")
    varied = {k: v.split(",") for k, v in (item.split("=", 1) for item in args.vary)}
    fixed = RUN | dict(item.split("=", 1) for item in args.set)
    if unknown := [k for k in (*fixed, *varied) if k not in RUN and k not in KINDS]:
        parser.error(f"unknown {', '.join(unknown)}; known: {', '.join((*RUN, *KINDS))}")
    for key, values in {**{k: [v] for k, v in fixed.items()}, **varied}.items():
        for value in values:
            try:
                if key == "dtype":
                    assert value in ("", "float32", "bfloat16", "float16"), f"dtype={value}: use float32 or bfloat16"
                elif key in KINDS:
                    _value(key, value)
                elif key in ("in_place",):
                    _switch(key, value)
            except (ValueError, AssertionError) as error:
                parser.error(f"{key}={value}: {error}")
    torch._dynamo.config.recompile_limit = 64
    cases: dict[str, Callable[[bool], dict]] = {}
    made: dict[str, tuple[Generator, dict[str, str]]] = {}
    networks: dict[tuple, Generator] = {}  # cases share them
    for combination in itertools.product(*varied.values()):
        told = fixed | dict(zip(varied, combination))
        name = " ".join(f"{k}={v}" for k, v in zip(varied, combination)) or "ours"
        where = tuple(told[k] for k in ("dtype", "device")) + (told.get("linear", ""),)
        if where not in networks:
            networks[where] = network_of(args.generator, args.random, told, args.decode)
        generator = settings_of(networks[where], told)
        print(choose(generator.transformer, told["attention"], masked=generator.streaming.past_weight < 1), flush=True)
        made[name] = (generator, told)
        cases[name] = case_of(generator, told, args.frames, args.decode)
    if args.beside:
        cases["beside"] = lambda warm: beside(args.beside)
    found: dict[str, list[dict]] = {name: [] for name in cases}
    for repeat in range(args.repeats + 1):  # the first round warms up
        for name, case in cases.items():
            one = case(repeat == 0)
            if repeat:
                found[name].append(one)
    rows = [row(name, found, made.get(name), args) for name in cases]
    print(json.dumps(rows))


def case_of(generator: Generator, told: dict[str, str], frames: int, decode: bool) -> Callable[[bool], dict]:
    """One run of a case; its blocks are compiled once."""
    mode = None if told["compile"] in ("0", "1") else told["compile"]
    block = module._block if told["compile"] == "0" else torch.compile(module._block, mode=mode)

    def run(warm: bool) -> dict:
        eager, module._block = module._block, block  # type: ignore[assignment]
        generator.transformer.attention = AttentionBackendName(BACKENDS[told["attention"]][0])
        few = 2 * (generator.streaming.window or 0) + 2 * generator.streaming.chunk
        try:
            return stream_once(generator, told, min(frames, few) if warm else frames, decode)
        finally:
            module._block = eager

    return run


def beside(command: str) -> dict:
    """Run another command; what its last line says."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    said = json.loads(done.stdout.strip().splitlines()[-1])
    return {"seconds": [said["seconds_per_chunk"]]}


def row(name: str, found: dict[str, list[dict]], made: tuple | None, args: argparse.Namespace) -> dict[str, Any]:
    """Print what a case did, and return it."""
    filled = 0
    if made:
        s = made[0].streaming
        filled = max(0, -(-(s.window or 0) // s.chunk) - 1)

    def per_chunk(run: dict) -> float:
        return statistics.median(run["seconds"][min(filled, len(run["seconds"]) - 1) :])

    first = next(iter(found.values()))
    seconds = [per_chunk(r) for r in found[name]]
    ratios = [a / per_chunk(b) for a, b in zip(seconds, first)]
    median = statistics.median(seconds)
    out: dict[str, Any] = {"case": name, "seconds_per_chunk": median, "each": seconds,
                           "ratio": statistics.median(ratios)}  # fmt: skip
    print(f"{name:<34}{median:9.4f} s a chunk [{min(seconds):.4f}, {max(seconds):.4f}]   "
          f"{out['ratio']:6.3f} [{min(ratios):.3f}, {max(ratios):.3f}]", end="")  # fmt: skip
    if not made:
        print()
        return out
    generator, told = made
    new = generator.codec.pixel_frames(2 * s.chunk) - generator.codec.pixel_frames(s.chunk) if args.decode else s.chunk
    out["frames_per_second"] = int(told["streams"]) * new / median
    run = found[name][-1]
    marks = sorted({min(filled, len(run["seconds"]) - 1), len(run["seconds"]) // 2, len(run["seconds"]) - 1})
    out["along"] = [{"frame": m * s.chunk, "seconds": statistics.median(run["seconds"][max(0, m - 4) : m + 1]),
                     "past_bytes": run["past"][m], "peak_bytes": run["bytes"][m]} for m in marks]  # fmt: skip
    kind = "pixel" if args.decode or generator.codec.stride == 1 and not args.random else "latent"
    print(f"   {out['frames_per_second']:8.1f} {kind} frames/s   peak {run['bytes'][-1] / 2**20:.0f} MiB")
    for at in out["along"]:
        print(f"    at frame {at['frame']:>5}: {at['seconds']:.4f} s, past {at['past_bytes'] / 2**20:.1f} MiB, "
              f"peak {at['peak_bytes'] / 2**20:.0f} MiB")  # fmt: skip
    if args.flops:
        rate = products_per_second(generator, told)
        out["flops"] = flops_at(generator, told, marks)
        out["floor_seconds"] = list(out["flops"].values())[-1] / rate
        said = ", ".join(f"{v / 1e9:.4f} at {k}" for k, v in out["flops"].items())
        print(f"    GFLOP a chunk by frame: {said}; at {rate / 1e9:.0f} GFLOP/s {out['floor_seconds']:.4f} s, so "
              f"{median / out['floor_seconds']:.2f} times the floor")  # fmt: skip
    return out


if __name__ == "__main__":
    main()
