"""Replay: rollouts of the initial policy on disk, made once and trained on again and again (semi-on-policy training).

The policy that made them stays the old one, and the clipped ratio to it is the trust region. Source: AR-CoPO (arXiv
2603.17461), from the paper. docs/objectives/replay.md has the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from arvideo_rl.config import ConfigError, check_ranges
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.objectives.chunk_fork import ChunkFork
from arvideo_rl.objectives.contract import Objective
from arvideo_rl.objectives.fpo import FPO
from arvideo_rl.objectives.grpo import GRPO
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.objectives.pairs import Pairs
from arvideo_rl.objectives.record import Record, Steps
from arvideo_rl.outputs import check_folder
from arvideo_rl.progress import hidden
from arvideo_rl.training.checkpoints import aside, digest
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.rollout import script_of
from arvideo_rl.training.rundir import flat, write_json
from samplers.randomness import Key

FORMAT, INDEX = 1, "index.json"
HELD = (ChunkFork, GRPO, FPO, Pairs, KVRouting)  # by a ratio to the policy that made the rollouts
Table = dict[str, Tensor]  # by reward, [B, K]


@dataclass
class ReplayConfig:
    """Rollouts of the initial policy instead of fresh ones (docs/objectives/replay.md)."""

    path: str = ""  # folder: made by the first run that names it, read by every other; "" = fresh rollouts
    groups: int = 64  # in it


@dataclass(frozen=True)
class Scored:
    """Branches with what rewards say of them."""

    record: Record
    prompts: Prompts  # of the branches
    values: Table  # float, NaN where there is none
    content: Table  # bool: the clip itself was at fault


def check_replay(config: ReplayConfig, lag: str, per_step: int, target: str, objective: Objective) -> None:
    """ConfigError for a replay that the objective cannot be trained on, or that does not go into whole steps."""
    if not config.path:
        return
    check_ranges(config, {"groups": "[1, inf)"}, "replay.")
    check_folder(Path(config.path), "replay.path")
    if not isinstance(objective, HELD) or getattr(objective, "trust", "") == "score":
        name = f"{target} with trust=score" if isinstance(objective, GRPO) else target
        raise ConfigError(f"replay.path: objective {name} has no ratio that holds the policy near to the replay's; "
                          "use chunk_fork, or grpo with trust=clip or mask")  # fmt: skip
    if lag != "frozen":
        raise ConfigError(f"replay.path needs lag=frozen, not lag={lag}: the policy that made the replay stays the old")
    if (window := objective.exploration.window) is not None and window.moves:
        raise ConfigError(f"objective.args.window.moves={window.moves}: the steps that a replay drew stay where they "
                          "were, so the window cannot move on; use null")  # fmt: skip
    if config.groups % per_step:
        low = config.groups // per_step * per_step
        near = " or ".join(str(n) for n in (low, low + per_step) if n)
        raise ConfigError(f"replay.groups={config.groups} are not whole steps of {per_step} groups; use {near}")


def made_by(generator: Generator, weights: str, config: Any, objective: Objective) -> dict[str, Any]:
    """What a replay belongs to, as JSON gives it back: ``weights`` of the generator, how it is streamed, how groups are
    drawn, and what scored them. ``config`` is the run's."""
    memory = None
    if isinstance(objective, KVRouting):
        memory = asdict(objective.memory(generator.streaming.attention_window(), config.frames))
    rewards = {name: [part.target, part.args] for name, part in config.rewards.items()}
    facts = {
        "weights": weights, "streaming": asdict(generator.streaming), "frames": config.frames, "group": config.group,
        "groups": config.replay.groups, "exploration": asdict(objective.exploration),
        "from_chunk": objective.from_chunk, "memory": memory, "rewards": rewards,
    }  # fmt: skip
    return json.loads(json.dumps(facts))


def record_replay(folder: Path, made: dict[str, Any], make: Callable[[int], Scored], accelerator: Accelerator) -> None:
    """Write group ``make(n)`` for every n, each process its share; nothing stands at ``folder`` until all is there."""
    main, count = accelerator.is_main_process, made["groups"]
    accelerator.print(f"recording {count} groups of the initial policy in {folder}")
    with aside(folder) if main else nullcontext(folder.with_name(folder.name + ".tmp")) as draft:
        accelerator.wait_for_everyone()  # the folder is there
        mine = range(accelerator.process_index, count, accelerator.num_processes)
        for n in track(mine, "recording", disable=not main or hidden(), transient=True):
            group = make(n)
            save_file(_tensors(group), draft / _name(n), {"format": "pt"})
            write_json(draft / f"{_name(n)}.json", _entry(group))
        accelerator.wait_for_everyone()
        if main:
            entries = []
            for n in range(count):
                file, told = draft / _name(n), draft / f"{_name(n)}.json"
                size = {"file": file.name, "bytes": file.stat().st_size, "sha256": digest(file)}
                entries.append(size | json.loads(told.read_text(encoding="utf-8")))
                told.unlink()
            write_json(draft / INDEX, {"format": FORMAT, "made": made, "entries": entries})
    accelerator.wait_for_everyone()


class Replay:
    """A replay at hand."""

    def __init__(self, folder: Path, made: dict[str, Any]) -> None:
        """Open ``folder``; ConfigError when it is damaged or was ``made`` otherwise."""
        self.folder, self.group, way_out = folder, made["group"], "choose another replay.path or delete it"
        try:
            self.digest = digest(folder / INDEX)
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            form, theirs, self.entries = index["format"], index["made"], index["entries"]
            sizes = [(folder / e["file"]).stat().st_size == e["bytes"] for e in self.entries]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"replay {folder} cannot be read ({type(error).__name__} {error}); {way_out}") from None
        if form != FORMAT:
            raise ConfigError(f"replay {folder} has format {form!r}; this version reads {FORMAT}")
        there, here = flat(theirs), flat(made)
        odd = next((k for k in here if k not in there or there[k] != here[k]), None)  # it may hold more rewards
        if odd:
            said = f"{odd} is {here[odd]} here and {there.get(odd, 'not in it')} there"
            raise ConfigError(f"replay {folder} was made otherwise: {said}; {way_out}")
        if not all(sizes):
            raise ConfigError(f"replay {folder} is damaged: a file has another size than the index says; {way_out}")

    def share(
        self, numbers: list[int], names: list[str], generator: Generator, process: int, processes: int
    ) -> tuple[Record, Table, Table]:
        """What ``process`` of so many trains on of these groups, as many branches as every other; of groups cut in two
        the whole is read. Returns record, rewards and whose fault it was that there is none."""
        share = len(numbers) * self.group // processes
        first, last = process * share // self.group, -(-(process + 1) * share // self.group)
        found = self.read(numbers[first:last], names, generator)
        mine = slice(process * share - first * self.group, (process + 1) * share - first * self.group)
        values, content = ({k: v[mine] for k, v in table.items()} for table in (found.values, found.content))
        return found.record.rows(mine), values, content

    def read(self, numbers: list[int], names: list[str], generator: Generator) -> Scored:
        """The groups called ``numbers``, which become their group ids, with the rewards called ``names``."""
        device = generator.transformer.device
        found, keys, ids = [], [], []
        for n in numbers:
            entry, path = self.entries[n], self.folder / self.entries[n]["file"]
            if digest(path) != entry["sha256"]:
                raise ValueError(f"{path} is damaged: it does not match its checksum; delete {self.folder}")
            found.append(load_file(path))
            size = len(found[-1]["latents"])
            keys += [Key(entry["seed"], entry["iteration"], entry["id"], branch) for branch in range(size)]
            ids += [n] * size
        told = [self.entries[n] for n in ids]
        prompts = Prompts(tuple(e["prompt"] for e in told), torch.tensor([e["actions"] for e in told]),
                          tuple(e["id"] for e in told))  # fmt: skip
        together = {k: torch.cat([f[k] for f in found]) for k in found[0]}
        steps = Steps(*(together[k].to(device) for k in ("x", "x0", "first"))) if "x" in together else None
        record = Record(together["latents"].to(device), script_of(generator, prompts), keys, torch.tensor(ids), steps)
        values, content = ({n: together[f"{kind}/{n}"] for n in names} for kind in ("value", "content"))
        return Scored(record, prompts, values, content)


def _name(n: int) -> str:
    return f"group-{n:06d}.safetensors"


def _tensors(group: Scored) -> dict[str, Tensor]:
    steps = group.record.steps
    out = {"latents": group.record.latents} | ({} if steps is None else vars(steps))
    for kind, table in (("value", group.values), ("content", group.content)):
        out |= {f"{kind}/{name}": value for name, value in table.items()}
    return {k: v.detach().cpu().contiguous() for k, v in out.items()}


def _entry(group: Scored) -> dict[str, Any]:
    key, prompts = group.record.keys[0], group.prompts
    return {"prompt": prompts.texts[0], "actions": prompts.actions[0].tolist(), "id": key.prompt, "seed": key.seed,
            "iteration": key.iteration}  # fmt: skip
