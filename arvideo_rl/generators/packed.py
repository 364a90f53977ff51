"""All chunks of a recorded video in one forward, noisy and clean interleaved: each reads what its cache would hold.

    z_1 .. z_1', xh_1, z_2 .. z_2', xh_2, .., z_K .. z_K'        t = u on z, t = 0 on xh

z_k reads itself and the clean chunks that the window keeps before chunk k, xh_k the same and itself; nobody reads a z.
A chunk's pieces share their places in time. Which frames are kept, and where they stand, is asked of the window itself,
so this is the cached form by construction: its outputs to rounding, and its gradients while what is read is detached.
With ``gradient`` a loss on z_k reaches the keys and values of earlier clean chunks too, which no cache allows.

Attention is computed piece by piece over just what it reads (no mask, so any kernel does); everything else is one pass.
The price is memory: the graph of all chunks. Source: RAVEN (mvp-ai-lab/RAVEN, 2605.15190), with a block mask.
Shape letters: B rows, n frames of a chunk, F frames of the video, S of the packed sequence, L tokens a frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.generators.rope import turn
from arvideo_rl.generators.spans import Span
from arvideo_rl.generators.window import Window


@dataclass(frozen=True)
class Place:
    """One chunk in the packed sequence; all but ``frames`` count in frames of that sequence."""

    frames: range  # of the video
    noisy: tuple[int, ...]  # where each noisy piece begins
    clean: int | None  # where the clean one does; None when nobody reads it
    held: tuple[int, ...]  # what its pieces read besides themselves, oldest first
    shifts: tuple[int, ...]  # how far from its own time each of those is read


@dataclass(frozen=True)
class Packing:
    """The layout of a packed sequence; what :meth:`CausalWan.forward` is told of it."""

    places: tuple[Place, ...]
    gradient: bool = False  # through the keys and values of clean chunks

    @property
    def times(self) -> tuple[int, ...]:
        """The frame of the video at each frame of the sequence."""
        return tuple(f for p in self.places for _ in _pieces(p) for f in p.frames)

    @property
    def reads(self) -> list[tuple[int, int]]:
        """(its own frames, frames of the past that it reads) of every piece, in order."""
        return [(len(p.frames), len(p.held)) for p in self.places for _ in _pieces(p)]

    def attending(self, attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``attend`` over queries, rotated keys and values [B, S * L, N, D], each piece over what it reads."""
        length = len(self.times)

        def packed(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
            query, key, value = (x.unflatten(1, (length, -1)) for x in (query, key, value))
            out = []
            for place in self.places:
                held = list(place.held)
                keys, values = (x[:, held] if self.gradient else x[:, held].detach() for x in (key, value))
                if any(place.shifts):
                    keys = turn(keys.flatten(1, 2), place.shifts).view_as(keys)
                for at in _pieces(place):
                    own = slice(at, at + len(place.frames))
                    parts = query[:, own], torch.cat([keys, key[:, own]], 1), torch.cat([values, value[:, own]], 1)
                    out.append(attend(*(x.flatten(1, 2) for x in parts)))
            return torch.cat(out, 1)

        return packed


def pack(window: Window, noisy: Sequence[int], gradient: bool = False) -> Packing:
    """The layout for a video whose chunk k has ``noisy[k]`` noisy pieces; ValueError for a window whose past is more
    than clean frames as they were."""
    for name, used in (("sinks that change", window.fold), ("compress", window.compress), ("linear", window.linear),
                       ("recompute", window.recompute), ("past_weight", window.past_weight < 1)):  # fmt: skip
        if used:
            raise ValueError(f"a window with {name} cannot be packed into one forward; use packed=false")
    context, at, places = window.start(), 0, []
    where: dict[int, int] = {}  # frame of the video -> of the sequence
    for k, count in enumerate(noisy):
        frames = range(context.position, window.end_of(context.position))
        held = tuple(where[f] for f in context.held())
        shifts = tuple(p - f for f, p in zip(context.held(), context.positions()))
        starts = tuple(range(at, at + count * len(frames), len(frames)))
        at += count * len(frames)
        read = any(noisy[k + 1 :])
        places.append(Place(frames, starts, at if read else None, held, shifts))
        where |= {f: at + i for i, f in enumerate(frames)}
        at += read * len(frames)
        empty = (torch.empty(1, len(frames), 1, 0),)  # one token a frame of no dimension: the window moves frames alone
        context = window.commit(context, Span(frames.start, frames.stop, empty, empty))
    return Packing(tuple(places), gradient)


def packed_forward(
    model: Callable,
    denoiser: Denoiser,
    latents: Tensor,
    states: dict[int, tuple[Tensor, Tensor]],
    gradient: bool = False,
) -> dict[int, Tensor]:
    """Predicted clean chunks [m * B, n, C, H, W] by chunk, as ``model(x, t, context)`` gives them singly. ``states``
    has, for chunks of ``latents`` [B, F, C, H, W], x of m stacked noisy copies and their levels t [m * B]."""
    rows = len(latents)
    if len(denoiser.script.texts) > 1:
        raise ValueError("a video whose prompt changes cannot be packed into one forward; use packed=false")
    noisy = [len(states[k][0]) // rows if k in states else 0 for k in range(max(states) + 1)]
    packing = pack(denoiser.window, noisy, gradient)
    x, t, actions = [], [], []
    for k, place in enumerate(packing.places):
        start, stop = place.frames.start, place.frames.stop
        if k in states:
            x += states[k][0].split(rows)
            t += states[k][1].split(rows)
        if place.clean is not None:
            clean = latents[:, start:stop]
            x.append(clean if denoiser.mix is None else denoiser.mix(clean, start))
            t.append(torch.zeros(rows, device=latents.device))
        actions += [denoiser.script.actions_in(start, stop)] * len(_pieces(place))
    levels = torch.cat([level[:, None].expand(-1, part.shape[1]) for level, part in zip(t, x)], 1)
    told = None if denoiser.script.actions is None else torch.cat(actions, 1)  # type: ignore[arg-type]
    context = denoiser.window.start().condition(denoiser.script.prompt_at(0)[1], told)
    x0 = model(torch.cat(x, 1), levels, context, packing=packing).x0
    places = packing.places
    return {k: torch.cat([x0[:, at : at + len(places[k].frames)] for at in places[k].noisy]) for k in states}


def _pieces(place: Place) -> tuple[int, ...]:
    """Where each piece of a chunk begins, in order."""
    return place.noisy if place.clean is None else (*place.noisy, place.clean)
