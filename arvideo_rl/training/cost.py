"""What an iteration computes, and how long that takes at a stated speed.

Forwards and backwards are not derived but counted: the objective's own rollout and update run on a stand-in, a network
of one layer and one token a frame that is streamed with the same settings. Each is then worth the products of the real
network (checked against torch's counter in tests/training/test_cost.py). Decoding, rewards and everything that is no
matrix product are left out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.codec import IdentityCodec
from arvideo_rl.generators.packed import Packing
from arvideo_rl.generators.policies import PolicyConfig
from arvideo_rl.generators.transformer import CausalWan, Prediction
from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.training.critic import leaving, outlined
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import roll_out
from arvideo_rl.training.routed import roll_out_routed
from arvideo_rl.training.settings import AlignConfig, build_objective
from samplers.exploration import draws
from samplers.forks import pivot_of
from samplers.randomness import Key

GROUPS = 4  # at most so many are counted: they differ in where they fork
PEAK = {"H100 or H200": 989e12, "A100": 312e12}  # dense bfloat16 FLOP/s, SXM, from NVIDIA's data sheets
ASSUMED = 0.4  # of that peak: usual for transformers of this size, not measured here
REACHED = 0.6  # of one large product's speed, by whole chunks on a CPU (docs/speed.md)


@dataclass(frozen=True)
class Pass:
    """One forward: ``rows`` chunks of ``frames`` that read ``past`` frames; ``trained`` ones have a backward, and the
    keys and values of ``texts`` prompts are made in it."""

    rows: int
    frames: int
    past: int
    trained: bool
    texts: int


class Tally:
    """All policies in one: a small network that notes what is asked of it."""

    def __init__(self, model: CausalWan, old_is_current: bool) -> None:
        self.model, self.old_is_current = model, old_is_current
        self.passes: Counter[Pass] = Counter()

    def __call__(
        self, x: torch.Tensor, t: torch.Tensor, context: Any, *, write: bool = False, packing: Packing | None = None
    ) -> Prediction:
        grad = torch.is_grad_enabled()
        made = grad or not context.read  # None: never remembered; empty: made now
        texts = len(context.text) if made else 0  # one a stream, whatever is stacked over it
        for frames, past in packing.reads if packing else [(x.shape[1], len(context.held()))]:
            self.passes[Pass(x.shape[0], frames, past, grad, texts)] += 1
            texts = 0  # a packed forward makes them once
        return self.model(x, t, context, write=write, packing=packing)

    @contextmanager
    def using(self, name: str) -> Iterator[Tally]:
        """The same for every name."""
        yield self


def count(config: AlignConfig, generator: Generator) -> tuple[Counter[Pass], Counter[Pass], float]:
    """(of rollouts, of one update, groups an iteration has for each one counted)."""
    with torch.random.fork_rng(devices=[]):
        model = CausalWan(num_attention_heads=1, attention_head_dim=6, in_channels=1, out_channels=1, text_dim=1,
                          freq_dim=2, ffn_dim=1, num_layers=1, linear_state=generator.streaming.linear)  # fmt: skip
    text: Any = SimpleNamespace(embed=lambda prompts: torch.zeros(len(prompts), 1, 1))
    small = Generator(model.eval(), text, IdentityCodec(), replace(generator.streaming, size=2, width=2))
    objective = build_objective(config.objective, config.frames // small.streaming.chunk)
    tally, update = Tally(model, config.lag == "none"), Counter[Pass]()
    groups, exploration = min(GROUPS, config.prompts_per_step), objective.exploration
    for g in range(groups):
        keys = [Key(config.seed, 0, g, b) for b in range(config.group)]
        prompts = Prompts(("",) * len(keys), torch.zeros(len(keys), config.frames, dtype=torch.long), (g,) * len(keys))
        asked = (prompts, keys, config.frames, torch.zeros(len(keys), dtype=torch.long))
        pivot = pivot_of(keys[0], objective.from_chunk, config.frames // small.streaming.chunk)
        with torch.no_grad():
            if isinstance(objective, KVRouting):
                memory = objective.memory(small.streaming.attention_window(), config.frames)
                record = roll_out_routed(small, tally, *asked, memory)
            elif isinstance(objective, DMD):  # every group counted is an iteration's, which leave at different steps
                step = objective.exit_step(config.seed, g, small.streaming.levels)
                record = roll_out(leaving(small, step), tally, *asked, exploration)
                record = replace(record, towards=torch.zeros_like(record.latents))
            else:
                record = roll_out(small, tally, *asked, exploration, pivot)
        rolled, tally.passes = tally.passes, update
        first = record.steps.one_first() if exploration.forks and record.steps is not None else None
        draw = draws(exploration, keys, small.latent_shape, record.latents.device, first)
        adv = torch.linspace(-1, 1, len(keys))[:, None].expand(-1, config.frames // small.streaming.chunk)
        denoiser = small.denoiser(tally, record.script, draw)
        for _ in objective.losses(tally, denoiser, record, adv, small.streaming.levels):
            pass
        tally.passes = rolled
    return tally.passes, update, config.prompts_per_step / groups


def flops(config: AlignConfig, generator: Generator) -> dict[str, float]:
    """Floating-point operations of an iteration's rollouts and of all its updates; of teacher and critic where they
    judge."""
    rollout, update, groups = count(config, generator)
    objective = build_objective(config.objective, config.frames // generator.streaming.chunk)
    judge = {"teacher and critic": judging(config, objective)} if isinstance(objective, DMD) else {}

    def worth(passes: Counter[Pass]) -> float:
        return groups * sum(n * price(p, config, generator) for p, n in passes.items())

    return {"rollout": worth(rollout), **judge, "update": config.updates * worth(update)}


def judging(config: AlignConfig, objective: DMD) -> float:
    """Operations of the critic's updates and of asking it and the teacher, over whole clips at once."""
    teacher, clips = outlined(objective.teacher), config.prompts_per_step * config.group
    policy = PolicyConfig(objective.critic_kind, objective.critic_rank, float(objective.critic_rank))
    asked, trained = (price(Pass(1, config.frames, 0, grad, texts=1), replace(config, policy=policy), teacher)
                      for grad in (False, True))  # fmt: skip
    return clips * (objective.critic_updates * trained + (3 if objective.guidance else 2) * asked)


def price(p: Pass, config: AlignConfig, generator: Generator) -> float:
    """Operations of one pass: products forward, and for a trained one backward, and forward again with checkpointing.
    A frozen weight has no gradient of its own, so that with LoRA a linear's backward is one product and not two."""
    net, lora = generator.transformer.config, config.policy.kind == "lora"
    dim, words = net.num_attention_heads * net.attention_head_dim, generator.text_tokens
    _, p_h, p_w = net.patch_size
    _, channels, height, width = generator.latent_shape
    tokens = (height // p_h) * (width // p_w)
    here, keys = p.frames * tokens, (p.past + p.frames) * tokens
    linear = 2 * here * (6 * dim**2 + 2 * dim * net.ffn_dim)
    attention = 4 * here * (keys + words) * dim
    made = p.texts / p.rows * words  # of the prompt's tokens, what is made for a row
    of_text = 4 * made * dim**2
    rank = config.policy.rank if lora else 0
    low = 2 * here * rank * (12 * dim + 2 * (dim + net.ffn_dim)) + 2 * made * rank * 4 * dim
    patches = 2 * here * dim * p_h * p_w * (channels + net.out_channels)
    of_time = 2 * p.frames * (net.freq_dim * dim + 7 * dim**2)
    outside = patches + of_time + 2 * made * (net.text_dim * dim + dim**2)
    forward = net.num_layers * (linear + attention + of_text + low) + outside
    if not p.trained:
        return p.rows * forward
    back = net.num_layers * ((1 if lora else 2) * linear + 2 * attention + 2 * low + (0 if lora else 2 * of_text))
    back += (1 if lora else 2) * 2 * here * dim * p_h * p_w * net.out_channels  # of the projection to patches
    last = 2 * here * (dim * net.ffn_dim + rank * (dim + net.ffn_dim))  # nothing needs a block's last product again
    again = net.num_layers * (linear + attention + of_text + low - last) if config.checkpointing else 0
    return p.rows * (forward + back + again)


def product_speed(generator: Generator) -> float:
    """FLOP/s of one product of the feed-forward's size on this machine: the best of a few, some milliseconds."""
    net = generator.transformer.config
    dim = net.num_attention_heads * net.attention_head_dim
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, weight = (
        torch.randn(512, dim, device=device, dtype=dtype),
        torch.randn(net.ffn_dim, dim, device=device, dtype=dtype),
    )
    best = float("inf")
    for _ in range(8):
        begun = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return 2 * len(x) * weight.numel() / best


def told(config: AlignConfig, generator: Generator) -> dict[str, str]:
    """What an iteration computes and takes, as text by name."""
    found = flops(config, generator)
    total = sum(found.values())
    parts = " + ".join(f"{name} {number(value)}" for name, value in found.items())
    out = {"computed an iteration": f"{parts}FLOP, counted; without decoding and rewards"}
    if torch.cuda.is_available() or total < 1e14:  # else a CPU is no place for it
        speed, share = product_speed(generator), ASSUMED if torch.cuda.is_available() else REACHED
        out["time an iteration, here"] = (
            f"about {seconds(total / speed / share)} at {number(speed * share)}FLOP/s, {share:.0%} of one product "
            "measured now"
        )
    if total > 1e14:
        each = ", ".join(f"{seconds(total / peak / ASSUMED)} on one {name}" for name, peak in PEAK.items())
        out["time an iteration, on GPUs"] = f"{each}, at an assumed {ASSUMED:.0%} of their peak; not measured"
    return out


def number(value: float) -> str:
    """With the prefix for its size."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} P"


def seconds(value: float) -> str:
    """As people say them."""
    if value > 180:
        return f"{value / 3600:.1f} h" if value > 5400 else f"{value / 60:.0f} min"
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"
