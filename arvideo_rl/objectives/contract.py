"""What the trainer asks of an objective, and what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.denoiser import Denoiser
from arvideo_rl.objectives.record import Record
from samplers.exploration import Exploration


class Objective(Protocol):
    """A dataclass of options, checked as they are set."""

    from_chunk: int  # chunks before this one get no policy term
    credit: str  # what a chunk is credited with: the reward of the "chunk", or of the "sequence" from the first trained

    @property
    def exploration(self) -> Exploration:
        """How the branches of a group differ, and whether their steps are recorded."""

    def check_chunks(self, chunks: int) -> None:
        """ConfigError when rollouts of so many chunks leave nothing to train."""

    def levels_trained(self, levels: tuple[float, ...]) -> tuple[int, int]:
        """How many of the sampler's levels can be trained, and how many stand in one forward."""

    def losses(
        self, policies: Any, denoiser: Denoiser, record: Record, adv: Tensor, levels: tuple[float, ...]
    ) -> Iterator[tuple[Tensor, dict[str, float]]]:
        """(loss, metrics) per trained chunk, to be summed; call backward on each before asking for the next."""


def check_from_chunk(first: int, chunks: int) -> None:
    """ConfigError when rollouts of so many chunks end before the ``first`` that may be trained, or be the pivot."""
    if first >= chunks:
        raise ConfigError(f"objective.args.from_chunk={first} leaves no chunk to train: a rollout has {chunks}")
