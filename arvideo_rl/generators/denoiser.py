"""Bind a transformer to what a stream needs: prompts in force per chunk, actions per frame, and the window.

This is the denoiser that ``samplers.stream`` drives, and the same object walks recorded chunks in training, so the
context of an update is by construction the context of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.ring import Ring, unfit
from arvideo_rl.generators.switching import newest, recache, switch
from arvideo_rl.generators.transformer import Prediction
from arvideo_rl.generators.window import Window


@dataclass(frozen=True)
class Script:
    """What is asked of a batch of streams: prompt embeddings with the frame each comes into force at, and actions."""

    texts: tuple[tuple[int, Tensor], ...]  # (from frame, [B, tokens, dim]), the first from frame 0, ascending
    actions: Tensor | None = None  # [B, F] int64, or None for a generator without actions

    def prompt_at(self, frame: int) -> tuple[int, Tensor]:
        """What is in force for the chunk that starts at ``frame``: since which frame, and its embedding."""
        return [(start, text) for start, text in self.texts if start <= frame][-1]

    def actions_in(self, start: int, stop: int) -> Tensor | None:
        """Actions of frames [start, stop); past the end of the script there are none (0)."""
        if self.actions is None:
            return None
        part = self.actions[:, start:stop]
        return torch.nn.functional.pad(part, (0, stop - start - part.shape[1]))

    def rows(self, rows: slice) -> Script:
        """The script of part of the batch."""
        actions = None if self.actions is None else self.actions[rows]
        return Script(tuple((f, t[rows]) for f, t in self.texts), actions)


@dataclass(frozen=True)
class Denoiser:
    """``model(x, t, context, write=)`` plus a window and a script. ``fixed`` promises that ``model`` is one policy
    whose weights do not change while this object lives: then a prompt's keys and values are computed only once.
    ``in_place`` keeps the past in a ring where the window can be kept so: faster, but the stream cannot be forked.
    ``mix`` (clean chunk, its first frame) makes what is refreshed; None refreshes the clean chunk itself."""

    model: Callable[..., Prediction]
    window: Window
    script: Script
    fixed: bool = False
    mix: Callable[[Tensor, int], Tensor] | None = None
    in_place: bool = False
    _read: dict[int, dict] = field(default_factory=dict, repr=False, compare=False)  # by the prompt's first frame

    def start(self) -> Any:
        """An empty past: a :class:`Context`, or a :class:`Ring` where it is kept in place."""
        return self._kept(self.window.start())

    def _kept(self, context: Any) -> Any:
        if not self.in_place or isinstance(context, Ring) or unfit(self.window):
            return context
        return Ring(self.window, context).load(context)

    def enter(self, context: Any, stop: int | None = None) -> Any:
        """Put the prompt and actions of the next chunk in force, or the actions up to frame ``stop``."""
        context = self._kept(context)
        a, b = context.position, stop or self.window.end_of(context.position)
        start, text = self.script.prompt_at(a)
        switched = a > 0 and self.script.prompt_at(max(0, a - self.window.chunk))[0] != start  # since the last chunk
        read = self._read.setdefault(start, {}) if self.fixed else None
        actions_in = self.script.actions_in
        if isinstance(context, Ring):
            if switched and self.window.at_switch != "keep":
                context.load(switch(self.model, self.window, context.context(), text, actions_in))
            return context.change(text=text, actions=actions_in(a, b), read=read)
        if self.window.recompute and a > 0:
            context = recache(self.model, self.window, context, text, actions_in)
        elif switched:
            context = switch(self.model, self.window, context, text, actions_in)
        return context.condition(text, actions_in(a, b), read)

    def denoise(self, x: Tensor, t: float | Tensor, context: Any) -> Tensor:
        """Predict the clean frames from x [B, F, C, H, W] at noise level t, a number or one per frame [F]."""
        levels = torch.as_tensor(t, dtype=torch.float32, device=x.device).expand(*x.shape[: 1 + isinstance(t, Tensor)])
        return self.model(x, levels, context).x0

    def refresh(self, x0: Tensor, context: Any, reading: Context | None = None) -> Any:
        """Run the clean chunk at t = 0 and commit its keys and values, detached; ``reading`` is what the forward reads
        where that is not the context itself. A window that recomputes only keeps the chunk: ``enter`` runs it."""
        ring = isinstance(context, Ring)
        recent = newest(self.window, context.state.recent if ring else context.recent, x0.detach())
        if self.window.recompute:
            return replace(context, position=context.position + x0.shape[1], recent=recent)
        x0 = x0 if self.mix is None else self.mix(x0, context.position)
        clean = torch.zeros(x0.shape[:1], device=x0.device)
        if ring:
            self.model(x0, clean, context)
            return context.commit().change(recent=recent)
        out = self.model(x0, clean, reading or context, write=True)
        assert out.span is not None
        return replace(self.window.commit(context, out.span.detach()), recent=recent)
