"""The probe: a few held-out prompts under fixed noise, measured while a run goes on and paired to its start point.

Training rollouts cannot show a small gain or loss, because every iteration has other prompts. The probe's are always
the same, so each prompt is compared with itself. The world's are not those of the comparison that ends a run, which
therefore stays untouched by what the probe is used for: the alarm (alarm.py) and which checkpoint is the best. A file's
held-out prompts are too few for two sets and serve both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from accelerate.utils import gather_object
from torch import Tensor

from arvideo_rl.training.alarm import fall
from arvideo_rl.training.align import Run
from arvideo_rl.training.compare import SHOWN, HeldOut, Measured, measure
from arvideo_rl.training.prompts import Prompts, held_out_prompts

SKIP = 1_000_000  # held-out prompts of the world that no comparison reaches


@dataclass(frozen=True)
class Look:
    """What the probe saw: per measure its values before and now, a number a prompt (NaN where it does not apply)."""

    before: dict[str, Tensor]
    now: dict[str, Tensor]

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl: mean now, mean paired change, and for what is not trained the chance of such a fall."""
        out: dict[str, float] = {}
        for name, value in self.now.items():
            change = value - self.before[name]
            if change.isnan().all():
                continue
            out |= {f"probe/{name}": value.nanmean().item(), f"probe/change/{name}": change.nanmean().item()}
            if not name.startswith("reward/"):
                out[f"probe/fall/{name}"] = fall(change)
        return out


def probe_prompts(run: Run) -> Prompts:
    """The world's, of the style that is trained on, or with a prompt file the first of those the run is compared on."""
    config = run.config
    if config.prompts.source != "world":
        return run.held_out.take(list(range(len(run.held_out)))[: config.probe.prompts])
    return held_out_prompts(config.probe.prompts, config.held_out.frames, config.prompts.style, SKIP)


def probe(run: Run, prompts: Prompts, which: str) -> Measured:
    """Measure policy ``which`` (start or current), one video a prompt. Touches no random state of the run."""
    return measure_shared(run, prompts, replace(run.config.held_out, noises=1), which, "probing")


def values(measured: Measured) -> dict[str, Tensor]:
    """What was measured by name, one number a prompt."""
    return {name: value[:, 0].double() for name, value in measured.values.items()}


def measure_shared(run: Run, prompts: Prompts, size: HeldOut, which: str, title: str) -> Measured:
    """Measure ``prompts`` under policy ``which``, each process its share; every process gets all numbers, the main one
    also the few videos that are kept."""
    n, i = run.accelerator.num_processes, run.accelerator.process_index
    bounds = [len(prompts) * j // n for j in range(n + 1)]
    kept = [min(b, SHOWN) - min(a, SHOWN) for a, b in zip(bounds, bounds[1:])]
    mine = prompts.take(list(range(bounds[i], bounds[i + 1])))
    with torch.no_grad(), run.policies.using(which) as model:
        found = measure(run.generator, model, mine, run.rewards, size, title, kept[i])
    if n == 1:
        return found
    shape = found.pixels.shape[1:]
    numbers = Measured.join(gather_object([replace(found, pixels=found.pixels[:0])]))
    return replace(numbers, pixels=_to_main(run, found.pixels, kept, shape))


def _to_main(run: Run, pixels: Tensor, kept: list[int], shape: torch.Size) -> Tensor:
    """The videos of all processes, on the main one; sent one by one, because gathered they would be everywhere, once
    for every process."""
    device = run.accelerator.device
    if not run.accelerator.is_main_process:
        if len(pixels):
            torch.distributed.send(pixels.to(device), 0)
        return pixels
    parts = [pixels]
    for source, count in enumerate(kept[1:], 1):
        if count:
            buffer = torch.empty(count, *shape, dtype=torch.uint8, device=device)
            torch.distributed.recv(buffer, source)
            parts.append(buffer.cpu())
    return torch.cat(parts)


def trained(run: Run, values: dict[str, Tensor]) -> Tensor:
    """The trained mixture of rewards [prompts], weighted as in training."""
    weights = {name: weight for name, (_, weight) in run.rewards.items() if weight}
    total = sum(abs(w) for w in weights.values())
    return torch.stack([w / total * values[f"reward/{name}"] for name, w in weights.items()]).sum(0)
