"""Bind a transformer to what a stream needs: prompts in force per chunk, actions per frame, and the window.

This is the denoiser that ``samplers.stream`` drives, and the same object walks recorded chunks in training, so the
context of an update is by construction the context of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context
from arvideo_rl.generators.switching import recache, remember, switch
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
    ``mix`` (clean chunk, its first frame) makes what is refreshed; None refreshes the clean chunk itself."""

    model: Callable[..., Prediction]
    window: Window
    script: Script
    fixed: bool = False
    mix: Callable[[Tensor, int], Tensor] | None = None
    _read: dict[int, dict] = field(default_factory=dict, repr=False, compare=False)  # by the prompt's first frame

    def start(self) -> Context:
        """An empty context."""
        return self.window.start()

    def enter(self, context: Context, stop: int | None = None) -> Context:
        """Put the prompt and actions of the next chunk in force, or the actions up to frame ``stop``."""
        a, b = context.position, stop or self.window.end_of(context.position)
        start, text = self.script.prompt_at(a)
        if self.window.recompute and a > 0:
            context = recache(self.model, self.window, context, text, self.script.actions_in)
        elif start == a > 0:
            context = switch(self.model, self.window, context, text, self.script.actions_in)
        read = self._read.setdefault(start, {}) if self.fixed else None
        return context.condition(text, self.script.actions_in(a, b), read)

    def denoise(self, x: Tensor, t: float | Tensor, context: Context) -> Tensor:
        """Predict the clean frames from x [B, F, C, H, W] at noise level t, a number or one per frame [F]."""
        levels = torch.as_tensor(t, dtype=torch.float32, device=x.device).expand(*x.shape[: 1 + isinstance(t, Tensor)])
        return self.model(x, levels, context).x0

    def refresh(self, x0: Tensor, context: Context) -> Context:
        """Run the clean chunk at t = 0 and commit its keys and values, detached. A window that recomputes only keeps
        the chunk: ``enter`` runs it."""
        x0 = x0 if self.mix is None else self.mix(x0, context.position)
        if self.window.recompute:
            return remember(self.window, replace(context, position=context.position + x0.shape[1]), x0.detach())
        out = self.model(x0, torch.zeros(x0.shape[:1], device=x0.device), context, write=True)
        assert out.span is not None
        context = self.window.commit(context, out.span.detach())
        return remember(self.window, context, x0.detach())
