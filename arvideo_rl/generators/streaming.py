"""The settings a generator is streamed with: part of its weights' identity, a key each in YAML."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from arvideo_rl.generators.sinks import adaptive, ema
from arvideo_rl.generators.window import Window
from samplers.kernels import forward
from samplers.schedule import warped_levels
from samplers.stream import Draw


@dataclass(frozen=True)
class Streaming:
    """How the generator is meant to be streamed; part of its weights' identity."""

    chunk: int = 3  # frames denoised together
    window: int | None = 12  # frames a chunk attends to, sinks and the chunk itself included
    sink: int = 3  # pinned oldest frames
    positions: str = "adjacent"  # where the sinks are read: adjacent or absolute
    steps: tuple[float, ...] = (1000.0, 750.0, 500.0, 250.0)  # nominal denoising steps of 1000
    shift: float = 2.0  # warps the steps into noise levels
    fps: float = 8.0  # pixel frames a second
    size: int = 32  # pixels in height, and in width where that is not given
    width: int | None = None
    trained_frames: int = 18  # longest clip seen in training
    sinks: str = "static"  # what becomes of the sinks: static, ema or adaptive
    alpha: float = 0.99  # of ema sinks: what stays of a sink when a frame is folded in
    threshold: float = 0.2  # of adaptive sinks: similarity below which one is replaced
    compress: int = 0  # frames' worth of tokens that stay of what leaves the window (compression.py)
    linear: bool = False  # what leaves the window goes into a linear state (linear.py)
    recompute: bool = False  # the past is run again before every chunk
    past_weight: float = 1.0  # factor on the attention weight of past frames but the first held
    at_switch: str = "keep"  # what happens to the past at a prompt switch (switching.py)
    keep_sinks: bool = True  # a recache leaves the first prompt's sinks in place
    refresh_level: float = 0.0  # noise mixed into a clean chunk when it is refreshed, while the network is told t = 0
    first_alone: bool = False  # the first frame is a chunk of its own
    joint: bool = False  # several chunks are denoised together, the oldest cleanest (samplers/rolling.py)

    def __post_init__(self) -> None:
        if not 0 <= self.refresh_level < 1:
            raise ValueError(f"streaming.refresh_level={self.refresh_level} must be at least 0 and below 1")
        if self.refresh_level and self.recompute:
            raise ValueError("streaming.refresh_level and streaming.recompute: what is run again is never refreshed")
        if self.joint and self.first_alone:
            raise ValueError("streaming.joint and streaming.first_alone: joint denoising needs chunks of one size")

    @property
    def levels(self) -> tuple[float, ...]:
        """Warped noise levels the sampler visits."""
        return warped_levels(self.steps, self.shift)

    def mix(self, draw: Draw) -> Callable[[Tensor, int], Tensor] | None:
        """What a denoiser mixes into chunks that it refreshes, drawn under "refresh". Public training code refreshes at
        .00498 where it means 0 (shift 5), so that released weights saw it; their inference code does not."""
        if self.refresh_level == 0:
            return None

        def mixed(x0: Tensor, start: int) -> Tensor:
            noise = draw(-(-start // self.chunk), 0, "refresh")[: x0.shape[0], : x0.shape[1]]
            return forward(x0, noise, self.refresh_level)

        return mixed

    def attention_window(self) -> Window:
        """The cache policy."""
        if self.sinks not in ("static", "ema", "adaptive"):
            raise ValueError(f"sinks {self.sinks!r} is unknown; choose static, ema or adaptive")
        fold = {"ema": ema(self.alpha), "adaptive": adaptive(self.threshold)}.get(self.sinks)
        return Window(
            self.chunk, self.window, self.sink, self.positions, fold, self.at_switch, self.keep_sinks,
            self.first_alone, self.compress, self.linear, self.recompute, self.past_weight,
            self.chunk * len(self.steps) if self.joint else 0,
        )  # fmt: skip
