"""A window of steps: branches of a group differ by the noise of a few consecutive steps, and only those are trained.

MixGRPO draws noise (an SDE) inside the window and takes plain ODE steps outside of it, and moves the window on as
training goes; flow_grpo-fast and Flow-DPPO train on such windows too, TempFlow-GRPO on one of a single step. What is
credited is then what differed. Outside, a chunk takes steps of another kernel:

    ode   no noise at all: as published, for samplers of many steps that are ODE solvers anyway
    cm    the consistency step with noise that a group shares: a few-step student was trained on re-noised states, and
          streams so; its videos stay those of the plain sampler

Source: MixGRPO (Tencent-Hunyuan): 4 of 25 steps, moved by 1 every 25 iterations. A student of four steps has three that
can draw: use one, moving on.
"""

from __future__ import annotations

from dataclasses import dataclass

from samplers.kernels import Kernel

OUTSIDE = ("cm", "ode")


@dataclass(frozen=True)
class StepWindow:
    """``size`` consecutive transitions from number ``start`` on, counted from the noisiest, 0. ``moves``: every so many
    iterations it moves on by one and, past the last place, begins again at the first; None stays."""

    size: int = 1
    start: int = 0
    moves: int | None = None
    outside: str = "cm"

    def __post_init__(self) -> None:
        if self.size < 1 or self.start < 0 or (self.moves is not None and self.moves < 1):
            raise ValueError(
                f"window size={self.size} start={self.start} moves={self.moves}: use a size of 1 or more, a start of 0 "
                "or more, and moves of 1 or more or none"
            )
        if self.outside not in OUTSIDE:
            raise ValueError(f"window outside={self.outside!r} is unknown; choose {' or '.join(OUTSIDE)}")

    def steps(self, iteration: int, transitions: int) -> range:
        """The transitions inside, of a chunk that has so many; ValueError when the window does not fit."""
        places = transitions - self.size + 1
        if self.start >= places:
            raise ValueError(
                f"a window of {self.size} steps from step {self.start} on does not fit {transitions} transitions (the "
                f"last step of a chunk draws nothing): use a size + start of at most {transitions}"
            )
        first = (self.start + (iteration // self.moves if self.moves else 0)) % places
        return range(first, first + self.size)

    def kernels(self, inside: Kernel, iteration: int, transitions: int) -> tuple[Kernel, ...]:
        """The kernel of each transition."""
        steps, outside = self.steps(iteration, transitions), Kernel(self.outside)
        return tuple(inside if j in steps else outside for j in range(transitions))
