"""How the branches of a group differ: which draws they share, and from where on.

``independent``: in all their noise. ``shared_init``: the group shares the noise that every chunk starts from, so that
branches differ by re-noising alone, which is what an objective on transitions trains. ``fork``: up to a pivot chunk
there is one stream; the branches start that chunk from neighbouring noise,

    eps_g = sqrt(1 - sigma^2) eps + sigma delta_g,

and share every other draw (Neighbor GRPO, AR-CoPO), or with ``neighbours: all`` those outside of the pivot chunk.
``fork_fresh``: after the common past all their noise differs (TempAct). ``pair``: two take antithetic noise in every
draw of the pivot (samplers/forks.py). ``churn``: two start the pivot as in ``fork`` and draw its steps each for itself,
by a kernel that replaces as small a share of the noise (FDFO). ``route``: they share all draws, and differ in what
they read (routes.py).
With a ``window`` (step_window.py) the re-noising outside of it is shared as well. A ``guide`` (guidance.py) moves what
is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samplers.forks import antithetic_noise, neighbour_noise
from samplers.guidance import Guidance, Guide, Judge
from samplers.kernels import Kernel
from samplers.randomness import Key, normal, shared
from samplers.step_window import StepWindow
from samplers.stream import CONSISTENCY, Draw

KINDS = ("independent", "shared_init", "fork", "fork_fresh", "pair", "churn", "route")


@dataclass(frozen=True)
class Exploration:
    """How a group is drawn and what of it is recorded."""

    kind: str = "independent"
    sigma: float = 0.5  # of fork, pair and churn: how far branches lie from the common noise, in (0, 1]
    neighbours: str = "init"  # of fork: which of the pivot's draws differ, the initial one or all
    kernel: Kernel = CONSISTENCY
    steps: bool = False  # every step of the trained chunks is recorded
    window: StepWindow | None = None  # transitions that draw by ``kernel``, each branch its own noise; None: all
    guide: Guide | None = None  # moves the means of transitions to where a reward rises

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"exploration {self.kind!r} is unknown; choose one of {', '.join(KINDS)}")
        if self.neighbours not in ("init", "all"):
            raise ValueError(f"neighbours {self.neighbours!r} is unknown; choose init or all")
        if not 0 < self.sigma <= 1:
            raise ValueError(f"sigma={self.sigma}: neighbours lie above 0 and at most 1 from the common noise")
        if self.window is not None and self.kind in ("fork", "pair", "churn", "route"):
            raise ValueError(f"exploration {self.kind!r} has no steps of its own to choose, so a window means nothing")

    @property
    def forks(self) -> bool:
        """Whether a group has one past and one pivot chunk."""
        return self.kind in ("fork", "fork_fresh", "pair", "churn", "route")

    def trained(self, iteration: int, transitions: int) -> range:
        """The transitions of a chunk, of so many, that draw by ``kernel``."""
        return range(transitions) if self.window is None else self.window.steps(iteration, transitions)

    def kernels(self, iteration: int, transitions: int) -> tuple[Kernel, ...]:
        """The kernel of each of a chunk's transitions."""
        if self.window is None:
            return (self.kernel,) * transitions
        return self.window.kernels(self.kernel, iteration, transitions)

    def guidance(self, judge: Judge | None, iteration: int, transitions: int) -> Guidance | None:
        """The guide at work with what judges chunks: at the last transitions that draw."""
        if self.guide is None or judge is None:
            return None
        return Guidance(judge, self.guide.strength, self.trained(iteration, transitions)[-self.guide.steps :])


def draws(
    exploration: Exploration,
    keys: list[Key],
    shape: tuple[int, ...],
    device,
    pivot: int | None = None,
    transitions: int = 0,
) -> Draw:
    """The draw of branches, of chunk shape [F, C, H, W]; rows of one group share what the exploration says. With a
    window, ``transitions`` is how many a chunk has."""
    common = shared(keys)
    differing = ("init", "renoise") if exploration.neighbours == "all" else ("init",)

    def draw(chunk: int, step: int, purpose: str) -> torch.Tensor:
        if exploration.forks:
            together = exploration.kind in ("fork", "pair", "churn", "route") or (pivot is not None and chunk < pivot)
        else:
            together = exploration.kind == "shared_init" and purpose == "init"
        if exploration.window is not None and purpose == "renoise":
            together |= step - 1 not in exploration.trained(keys[0].iteration, transitions)
        if not together:
            return normal(keys, chunk, step, purpose, shape).to(device)
        if exploration.kind == "pair" and chunk == pivot:
            return antithetic_noise(keys, chunk, step, purpose, shape, exploration.sigma).to(device)
        if exploration.kind == "churn" and chunk == pivot and purpose == "renoise":
            return normal(keys, chunk, step, purpose, shape).to(device)
        if exploration.kind in ("fork", "churn") and chunk == pivot and purpose in differing:
            return neighbour_noise(keys, chunk, step, purpose, shape, exploration.sigma).to(device)
        return normal(common, chunk, step, purpose, shape).to(device)

    return draw
