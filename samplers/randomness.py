"""Noise by name: every draw is a pure function of its key, made on the CPU, so any branch can be replayed alone,
on any device, in any batch and on any number of processes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

PURPOSES = ("init", "renoise", "refresh", "routing", "forward", "t")


@dataclass(frozen=True)
class Key:
    """Names one branch of one rollout. ``prompt`` is the prompt's own number, not its place in a batch."""

    seed: int
    iteration: int = 0
    prompt: int = 0
    branch: int = 0


def generator(key: Key, chunk: int, step: int, purpose: str) -> np.random.Generator:
    """A counter-based generator (Philox) for one draw; ValueError when the purpose is not one of PURPOSES."""
    if purpose not in PURPOSES:
        raise ValueError(f"purpose {purpose!r} is unknown; choose one of {', '.join(PURPOSES)}")
    name = f"{key.seed}/{key.iteration}/{key.prompt}/{key.branch}/{chunk}/{step}/{purpose}"
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def normal(keys: list[Key], chunk: int, step: int, purpose: str, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise [len(keys), *shape], float32; row i depends on keys[i] alone."""
    rows = [generator(k, chunk, step, purpose).standard_normal(shape, dtype=np.float32) for k in keys]
    return torch.from_numpy(np.stack(rows))


def shared(keys: list[Key]) -> list[Key]:
    """The same keys with the branch replaced by a constant: what these draw is the same for all of a group."""
    return [replace(k, branch=-1) for k in keys]
