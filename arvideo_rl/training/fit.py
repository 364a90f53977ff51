"""What training the small reward models of the world has in common: the loop, the random halves, the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from safetensors.torch import save
from torch import Tensor, nn

from arvideo_rl.config import ConfigError
from arvideo_rl.training.rundir import write_bytes, write_text

Net = TypeVar("Net", bound=nn.Module)


def seeded(seed: int, make: Callable[[], Net]) -> Net:
    """What ``make`` builds from ``seed``; the global random state is untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def fit(net: Net, loss_of: Callable[[int], Tensor], *, steps: int, lr: float, warm_up: float, about: str,
        beside: Iterable[nn.Parameter] = (), progress: bool = False) -> Net:  # fmt: skip
    """Minimise ``loss_of(step)`` in ``net`` and in the parameters ``beside`` it, which are then dropped: AdamW on one
    cycle of which ``warm_up`` in (0, 1) rises to ``lr``, gradients of ``net`` clipped to 1. Returns ``net``, frozen;
    ConfigError when it is lost."""
    optimizer = torch.optim.AdamW([*net.parameters(), *beside], lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps + 1, pct_start=warm_up)
    for step in track(range(steps), f"training {about}", console=Console(stderr=True), disable=not progress):
        loss = loss_of(step)
        if not loss.isfinite():
            raise ConfigError(f"training {about} failed at step {step}: its loss is {loss.item()}; lower lr={lr:g}")
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    if not all(p.isfinite().all() for p in net.parameters()):
        raise ConfigError(f"training {about} failed at its last step: weights are not finite; lower lr={lr:g}")
    return net.eval().requires_grad_(False)


class Some(Protocol):
    """See :func:`on_half`."""

    def __call__(self, *shape: int, low: float = -1.0) -> Tensor: ...


def on_half(n: int, noise: torch.Generator, strength: float = 1.0) -> Some:
    """A draw of how much of an effect each of ``n`` examples gets: ``some(*shape)`` is [n, *shape], ``strength`` times
    uniform in [low, 1], and zero for a random half of the examples."""

    def some(*shape: int, low: float = -1.0) -> Tensor:
        on = torch.rand(n, *[1] * len(shape), generator=noise) < 0.5
        return strength * (low + (1 - low) * torch.rand(n, *shape, generator=noise)) * on

    return some


def write(path: Path, tensors: dict[str, Tensor], report: dict[str, Any]) -> None:
    """Write weights with the report in their header, and the same report beside them as .json for people."""
    write_bytes(path, save({k: v.contiguous() for k, v in tensors.items()}, {"report": json.dumps(report)}))
    write_text(path.with_suffix(".json"), json.dumps(report, indent=1) + "\n")
