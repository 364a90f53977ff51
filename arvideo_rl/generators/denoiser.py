"""Bind a transformer to what a stream needs: prompts in force per chunk, actions per frame, and the window.

This is the denoiser that ``samplers.stream`` drives, and the same object walks recorded chunks in training, so the
context of an update is by construction the context of the stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arvideo_rl.generators.context import Context, Window
from arvideo_rl.generators.transformer import Prediction


@dataclass(frozen=True)
class Script:
    """What is asked of a batch of streams: prompt embeddings with the frame each comes into force at, and actions."""

    texts: tuple[tuple[int, Tensor], ...]  # (from frame, [B, tokens, dim]), the first from frame 0, ascending
    actions: Tensor | None = None  # [B, F] int64, or None for a generator without actions

    def text_at(self, frame: int) -> Tensor:
        """The embedding in force for the chunk that starts at ``frame``."""
        return [text for start, text in self.texts if start <= frame][-1]

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
    """``model(x, t, context, write=)`` plus a window and a script."""

    model: Callable[..., Prediction]
    window: Window
    script: Script

    def start(self) -> Context:
        """An empty context."""
        return self.window.start()

    def enter(self, context: Context) -> Context:
        """Put the prompt and actions of the next chunk in force."""
        a, b = context.position, context.position + self.window.chunk
        return context.condition(self.script.text_at(a), self.script.actions_in(a, b))

    def denoise(self, x: Tensor, t: float, context: Context) -> Tensor:
        """Predict the clean chunk from x [B, F, C, H, W] at noise level t."""
        return self.model(x, torch.full(x.shape[:1], t, device=x.device), context).x0

    def refresh(self, x0: Tensor, context: Context) -> Context:
        """Run the clean chunk at t = 0 and commit its keys and values, detached."""
        out = self.model(x0, torch.zeros(x0.shape[:1], device=x0.device), context, write=True)
        assert out.span is not None
        return self.window.commit(context, out.span.detach())
