"""NFT: policy optimisation on the forward process, computed where the sampler goes.

Two published weightings: ``diffusion_nft`` (NVlabs/DiffusionNFT: errors divided by their own detached size, loss scaled
by adv_clip / beta, KL in v) and ``astrolabe`` (franklinz233/Astrolabe: plain x0 errors, no scale, KL in x0).
What differs here from both: the context is the rolling, clean, detached cache of the recorded rollout, and the levels
are the sampler's own (warped) ones; neither public trainer does that.

    r = clip(1/2 + A / (2 adv_clip), 0, 1);  x0_+- = x0_old +- beta (x0_cur - x0_old)
    loss = scale * (r |x0_+ - x0|^2 / w_+ + (1 - r) |x0_- - x0|^2 / w_-) + kl_weight * KL(cur, reference)

``mean_flow`` is MeanFlowNFT's r = 0 slice (Harahan/MeanFlowNFT, arXiv 2607.15273): a few-step student predicts where a
whole path ends, and t d/dt of its velocity makes the velocity at t of it. One difference quotient, of the old policy,
serves all policies, so only what is regressed to moves.

Needs: clean latents, advantages, the old policy, the reference when kl_weight > 0. No trajectory, no likelihood;
``coupling: visited`` alone takes the recorded steps.
Shape letters: B branches, M levels per chunk, F C H W a chunk's latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from arvideo_rl.config import check_ranges
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.contract import check_from_chunk
from arvideo_rl.objectives.record import Record, walk
from samplers.exploration import Exploration
from samplers.kernels import forward
from samplers.randomness import Key, generator, normal

MODES = {
    "all": lambda a, most: a,
    "positive": lambda a, most: a.clamp(0, most),
    "negative": lambda a, most: a.clamp(-most, 0),
    "one": lambda a, most: (a > 0).to(a.dtype),
    "binary": lambda a, most: a.sign(),
}


@dataclass
class NFT:
    """Options of the objective; see docs/objectives/nft.md."""

    weighting: str = "diffusion_nft"  # or astrolabe
    beta: float = 1.0  # how far the two implicit policies lie from the old one
    adv_clip: float = 5.0  # advantages are clipped to +- this; maps them to r
    kl_weight: float = 1e-3  # pull towards the reference
    kl_space: str = "v"  # v: mean (v - v_start)^2; x0: mean (x0 - x0_start)^2 = t^2 times that
    levels_per_chunk: int = 2  # drawn without repetition for every chunk from the sampler's levels
    train_levels: int | None = None  # train only the first, noisiest so many of the sampler's levels; None = all
    from_chunk: int = 0  # chunks before this one get no policy term, only the KL: they decide what the video shows
    context_writer: str = "old"  # which policy refreshes the recorded chunks: old or current
    mode: str = "all"  # which advantages count: all, positive, negative, one (1 where above 0) or binary (their sign)
    coupling: str = "fresh"  # x_t from the clean chunk and fresh noise, or the states that the rollout visited
    level_law: str = "sampler"  # train at the sampler's levels, or uniform ones
    mean_flow: bool = False  # see above; two more forwards of the old policy
    mean_flow_step: float = 0.005  # of the difference quotient in t

    credit = "chunk"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("weighting", self.weighting, ("diffusion_nft", "astrolabe")),
            ("kl_space", self.kl_space, ("v", "x0")),
            ("context_writer", self.context_writer, ("old", "current")),
            ("mode", self.mode, tuple(MODES)),
            ("coupling", self.coupling, ("fresh", "visited")),
            ("level_law", self.level_law, ("sampler", "uniform")),
        ):
            if value not in known:
                raise ValueError(f"objective {name} {value!r} is unknown; choose {' or '.join(known)}")
        above, count = "(0, inf)", "[1, inf)"
        ranges = {"beta": above, "adv_clip": above, "kl_weight": "[0, inf)", "from_chunk": "[0, inf)"}
        check_ranges(
            self,
            ranges | {"levels_per_chunk": count, "train_levels": count, "mean_flow_step": "(0, 0.1]"},
            "objective.args.",
        )

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many of the sampler's levels can be trained, and how many are in one forward."""
        usable = min(self.train_levels or len(levels), len(levels))
        return usable, min(self.levels_per_chunk, usable)

    def check_chunks(self, chunks: int) -> None:
        """Refuse a rollout that leaves no chunk to train."""
        check_from_chunk(self.from_chunk, chunks)

    @property
    def exploration(self) -> Exploration:
        """Branches differ in all their noise."""
        return Exploration(steps=self.coupling == "visited")

    def losses(
        self, policies, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """Yield (loss, metrics) per chunk: means over branches, levels and elements, divided by the chunk count, so
        that the sum over chunks is the mean. Call backward on each before asking for the next: one chunk's graph.

        ``adv`` [B, K]; ``levels`` are the sampler's warped levels.
        """
        usable, m = self.levels_trained(levels)
        levels = levels[:usable]
        chunks = adv.shape[1]
        for k, start, stop, context in walk(denoiser, record.latents, lambda: policies.using(self.context_writer)):
            x0 = record.latents[:, start:stop]
            x, t = self._states(record, x0, k, m, levels)
            rows = t.flatten()
            clean = x0.repeat(m, 1, 1, 1, 1)
            with torch.no_grad():  # before the current policy's forward: switching adapters after it loses gradients
                ref = None
                if self.kl_weight > 0:
                    with policies.using("reference") as model:
                        ref = model(x, rows, context)
                old, shift = None, x.new_zeros(())
                with policies.using("old") as model:
                    if not policies.old_is_current:
                        old = model(x, rows, context).x0
                    if self.mean_flow:
                        shift = mean_flow_shift(model, x, rows, clean, context, self.mean_flow_step)
            with policies.using("current") as model:
                cur = model(x, rows, context)
            old = cur.x0.detach() if old is None else old
            a = MODES[self.mode](adv[:, k], self.adv_clip).repeat(m)
            policy = policy_loss(cur.x0 + shift, old + shift, clean, a, self.beta, self.adv_clip, self.weighting)
            kl = kl_loss(cur, ref, self.kl_space) if ref is not None else torch.zeros_like(policy)
            trained = k >= self.from_chunk
            pull = record.pull(kl.unflatten(0, (m, -1))).flatten()
            loss = (self.kl_weight * pull + (policy if trained else 0 * policy)).mean() / chunks
            metrics = {"kl": kl.mean().item(), "pull": pull.mean().item()}
            yield loss, metrics | (self._metrics(policy, cur.x0, old, a, t, levels) if trained else {})

    def _states(self, record: Record, x0: Tensor, k: int, m: int, levels) -> tuple[Tensor, Tensor]:
        """Noisy inputs [M * B, ...] of chunk k and their levels [M, B]."""
        if self.coupling == "visited":
            assert record.steps is not None
            j = torch.tensor(np.stack([chosen(key, k, len(levels), m) for key in record.keys])).T.to(x0.device)
            t = torch.tensor(levels, device=x0.device)[j]
            return record.steps.x[torch.arange(len(record), device=x0.device), k, j].flatten(0, 1), t
        t = chunk_levels(record, k, m, levels).to(x0.device)
        if self.level_law == "uniform":
            draws = [generator(key, k, 0, "t").random(m, dtype=np.float32) for key in record.keys]
            t = torch.tensor(np.stack(draws)).T.to(x0.device).clamp_min(1e-3)
        eps = torch.stack([normal(record.keys, k, i, "forward", tuple(x0.shape[1:])) for i in range(m)])
        return forward(x0, eps.to(x0.device), t[:, :, None, None, None, None]).flatten(0, 1), t

    def _metrics(self, policy, cur, old, a, t, levels) -> dict[str, float]:
        drift = (cur.detach() - old).square().mean((1, 2, 3, 4))
        out = {"policy_loss": policy.mean().item(), "x0_moved": drift.mean().item()}
        out["mean_signal"] = (a.clamp(-self.adv_clip, self.adv_clip) / self.adv_clip).mean().item()
        for level in levels:
            at = (t.flatten() - level).abs() < 1e-6
            if at.any():
                out[f"loss_at/t{level:.3f}"] = policy[at].mean().item()
        return out


def chunk_levels(record: Record, chunk: int, count: int, levels: tuple[float, ...]) -> Tensor:
    """Levels [count, B] for one chunk: ``count`` different ones per branch, drawn by the branch's own key."""
    draws = [chosen(key, chunk, len(levels), count) for key in record.keys]
    return torch.tensor([[levels[i] for i in row] for row in draws], dtype=torch.float32).T


def chosen(key: Key, chunk: int, levels: int, count: int) -> np.ndarray:
    """Indices of ``count`` different levels for one chunk of one branch."""
    return generator(key, chunk, 0, "t").permutation(levels)[:count]


def mean_flow_shift(model, x: Tensor, t: Tensor, x0: Tensor, context, h: float) -> Tensor:
    """What turns a predicted clean chunk into the one that the velocity at t points to: -t^2 dv/dt along the straight
    path through x_t and x0, by differences of ``h`` (one-sided at t = 1). Same for all policies."""
    wide = (slice(None), *[None] * (x.ndim - 1))
    direction = (x - x0) / t[wide]  # noise - x0
    after, before = (t + h).clamp_max(1.0), (t - h).clamp_min(0.0)
    ends = []
    for level in (after, before):
        at = x + (level - t)[wide] * direction
        ends.append((at - model(at, level, context).x0) / level.clamp_min(1e-6)[wide])
    return -(t**2 / (after - before))[wide] * (ends[0] - ends[1])


def policy_loss(
    cur: Tensor, old: Tensor, x0: Tensor, adv: Tensor, beta: float, adv_clip: float, weighting: str
) -> Tensor:
    """The policy term [B] from predictions and clean latents [B, ...] and advantages [B]; gradient through cur only.

    Source of the formula: DiffusionNFT scripts/train_nft_sd3.py, Astrolabe scripts/train_nft_wan.py.
    """
    dims = tuple(range(1, x0.ndim))
    r = (0.5 + adv.double() / (2 * adv_clip)).clamp(0, 1)
    old, x0, cur = old.detach().double(), x0.double(), cur.double()
    step = beta * (cur - old)
    plus, minus = old + step - x0, old - step - x0
    if weighting == "astrolabe":
        return (r * plus.square().mean(dims) + (1 - r) * minus.square().mean(dims)).float()
    w_plus, w_minus = (e.detach().abs().mean(dims).clamp_min(1e-5) for e in (plus, minus))
    terms = r * plus.square().mean(dims) / w_plus + (1 - r) * minus.square().mean(dims) / w_minus
    return (terms * adv_clip / beta).float()


def kl_loss(cur, ref, space: str) -> Tensor:
    """Pull towards the reference [B]: mean squared difference of v or of x0."""
    a, b = (cur.v, ref.v) if space == "v" else (cur.x0, ref.x0)
    return (a.float() - b.detach().float()).square().mean(tuple(range(1, a.ndim)))
