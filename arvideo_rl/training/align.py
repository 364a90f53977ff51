"""Alignment: prompts -> rollouts -> rewards -> advantages -> update, one straight road.

Every process draws and trains its share of the branches; rewards are gathered, so advantages see whole groups, and
gradients are summed once per update. Gradients are reduced by hand and not by a DDP wrapper, because an update runs
many small backwards (one chunk's graph each) and needs one reduction.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.attention import choose
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.policies import Policies, PolicyConfig
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.generators.umt5 import Umt5
from arvideo_rl.objectives.advantages import advantages, worst_of_group
from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.kv_routing import KVRouting
from arvideo_rl.objectives.matching import imbalance, joined_saliency, saliency_weights
from arvideo_rl.objectives.mix import combine
from arvideo_rl.objectives.record import Record, context_gap
from arvideo_rl.training.asked import asked_for
from arvideo_rl.training.axes import table
from arvideo_rl.training.checkpoints import (
    Checkpoint,
    check_base,
    fingerprint,
    load_checkpoint,
    newest,
    read_state,
    save_checkpoint,
)
from arvideo_rl.training.critic import Critic, leaving
from arvideo_rl.training.guided import guiding
from arvideo_rl.training.judges import look
from arvideo_rl.training.memory import at_once, check_memory, estimate, limit
from arvideo_rl.training.prompts import Prompts, prompt_rows
from arvideo_rl.training.pull import Pull
from arvideo_rl.training.reduce import mean_over_processes, sum_gradients
from arvideo_rl.training.replay import Replay, Scored, made_by, record_replay
from arvideo_rl.training.rollout import appearance, clips_of, from_first, reward_table, roll_out, script_of
from arvideo_rl.training.routed import roll_out_routed
from arvideo_rl.training.saliency import saliency
from arvideo_rl.training.settings import (
    AlignConfig,
    lag_keep,
    ungated,
)
from rewards.contract import Clips
from samplers.exploration import draws
from samplers.forks import pivot_of
from samplers.randomness import Key

RATIO_OFF = 1e-3  # at the first update of a rollout: above rounding in bfloat16


class Run:
    """One alignment run: what it holds between iterations and the two things it does, ``step`` and ``save``."""

    def __init__(self, config: AlignConfig, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.generator = Generator.load(config.generator).to(accelerator.device)
        streaming = self.generator.streaming
        self.kernel = choose(
            self.generator.transformer, config.attention, trains=True, masked=streaming.past_weight < 1
        )
        asked = asked_for(config, self.generator, accelerator.num_processes)
        self.rewards, self.objective, self.prompts, self.held_out = asked
        self.guide = guiding(self.objective.exploration.guide, self.rewards)
        self.critic: Critic | None = None
        if isinstance(self.objective, DMD):
            self.critic = Critic(self.objective, self.generator, config.frames, config.seed)
        self._encode_prompts()
        self.base = base_of(self.generator.transformer, config.policy)
        if self.critic is not None:
            self.base["teacher"] = self.critic.weights
        self.pull = Pull(config.pull)
        moving = config.pull.reference == "dynamic"
        self.policies = Policies(self.generator.transformer, config.policy, config.seed, moving)
        self.optimizer = torch.optim.AdamW(
            self.policies.parameters().values(), lr=config.lr, weight_decay=config.weight_decay
        )
        if config.checkpointing:
            self.generator.transformer.enable_gradient_checkpointing()
            if self.critic is not None:
                self.critic.teacher.transformer.enable_gradient_checkpointing()
        trainable = sum(p.numel() for p in self.policies.parameters().values())
        self.memory = estimate(config, self.generator, trainable, accelerator.num_processes)
        check_memory(self.memory, limit(accelerator.device), pixels=accelerator.device.type == "cpu")
        made = made_by(self.generator, self.base["weights"], config, self.objective)
        there = Path(config.replay.path) if config.replay.path else None
        self._replay = Replay(there, made) if there and there.exists() else None
        self._replayed: str | None = None  # checksum of the index of what has been trained on
        self.iteration = 0
        self.table: dict[str, Any] = {}  # of the newest iteration: what each reward said of each branch (axes.py)
        self.told = False  # of a ratio that was not 1
        self.seconds = 0.0  # spent in steps, over all resumes

    def _encode_prompts(self) -> None:
        """Encode a file's prompts once; ConfigError for one that the generator cannot read."""
        source = self.config.prompts.source
        if source == "world":
            return
        try:
            with self.accelerator.main_process_first():  # what is slow to encode is kept on disk for the others
                for text in (*self.prompts.texts, *self.held_out.texts):
                    self.generator.script([text])
                if self.critic is not None:
                    self.critic.encode(self.prompts)
        except ValueError as error:
            raise ConfigError(f"{source}: {error}") from None
        for generator in (self.generator, *([self.critic.teacher] if self.critic is not None else ())):
            if isinstance(generator.text_encoder, Umt5):
                generator.text_encoder.forget()  # all prompts are known now, and it is larger than what is trained

    def step(self) -> dict[str, float]:
        """One iteration; returns its metrics."""
        config, begun = self.config, time.time()
        clips = prompts = None
        if replay := self.replay():
            numbers = prompt_rows(config.replay.groups, config.prompts_per_step, self.iteration, config.seed)
            share = (self.accelerator.process_index, self.accelerator.num_processes)
            record, values, content = replay.share(numbers, list(self.rewards), self.generator, *share)
            rolled = time.time()
        else:
            rows = prompt_rows(len(self.prompts), config.prompts_per_step, self.iteration, config.seed)
            record, prompts = self._rollouts(rows)
            rolled = time.time()
            clips = clips_of(self.generator, record, prompts)
            values, content = reward_table(self.rewards, clips)
        if self.objective.credit == "sequence":
            values = {name: from_first(value, record) for name, value in values.items()}
        record, adv, metrics = self._advantages(values, content, record)
        scored = time.time()
        updates = config.updates
        if self.critic is not None and clips and prompts:
            record, judged = self._judge(self.critic, record, prompts, clips)
            metrics |= judged
            updates = int(self.iteration >= self.critic.objective.warmup)
        for i in range(updates):
            metrics |= self._update(record, adv)
            fresh = not self.iteration or not lag_keep(config.lag, self.iteration)  # the old policy is the trained one
            if i == 0 and fresh and "train/ratio_off" in metrics:
                metrics["train/first_ratio_off"] = metrics["train/ratio_off"]
                self._check_ratio(metrics["train/first_ratio_off"])
        metrics |= self.pull.follow(self.policies, metrics)
        self.iteration += 1
        self.policies.copy("current", "old", lag_keep(config.lag, self.iteration))
        if clips and prompts:  # a replay looks the same for ever
            metrics |= self._looks(clips, prompts)
        self.seconds += time.time() - begun
        metrics |= {"seconds/rollout": rolled - begun, "seconds/reward": scored - rolled,
                    "seconds/update": time.time() - scored}  # fmt: skip
        return metrics

    def _looks(self, clips: Clips, prompts: Prompts) -> dict[str, float]:
        """What verifiers say of the branches of all processes, and how they look."""
        seen, out = appearance(clips.frames), {}
        looks = {f"verifier/{k}": v for k, v in look(self.generator, clips.frames, prompts).items() if k not in seen}
        looks |= {f"picture/{k}": value for k, value in seen.items()}
        for name, value in looks.items():  # NaN where the prompt is not the world's
            both = torch.stack([value.nansum(), (~value.isnan()).sum().float()]).to(self.accelerator.device)
            total, count = self.accelerator.reduce(both, "sum").tolist()
            if count:
                out[name] = total / count
        return out

    def replay(self) -> Replay | None:
        """The replay that is trained on, recorded now if nobody has; None without one."""
        config = self.config
        if not config.replay.path:
            return None
        if self._replay is None:
            folder = Path(config.replay.path)
            made = made_by(self.generator, self.base["weights"], config, self.objective)
            record_replay(folder, made, self._group, self.accelerator)
            self._replay = Replay(folder, made)
        if self._replayed not in (None, self._replay.digest):
            raise ConfigError(f"replay {config.replay.path} is not the one that this run was trained on; bring it back")
        self._replayed = self._replay.digest
        return self._replay

    def _group(self, n: int) -> Scored:
        """Group ``n`` of a replay: those of the first iterations, had the policy not changed."""
        config = self.config
        iteration, place = divmod(n, config.prompts_per_step)
        row = prompt_rows(len(self.prompts), config.prompts_per_step, iteration, config.seed)[place]
        record, prompts = self._draw([(row, g) for g in range(config.group)], iteration)
        return Scored(record, prompts, *reward_table(self.rewards, clips_of(self.generator, record, prompts)))

    def _check_ratio(self, off: float) -> None:
        """Say so, once, when the policy that made the rollouts and the one that trains on them are not the same."""
        if off > RATIO_OFF and not self.told:
            self.told = True
            self.accelerator.print(
                f"warning: at the first update of iteration {self.iteration + 1} a ratio is {off:.1g} away from 1: "
                "rollout and update do not compute the same, so the trained policy is not the one that was sampled"
            )

    def _rollouts(self, rows: list[int]) -> tuple[Record, Prompts]:
        """This process's share of prompts x group branches, drawn from the old policy."""
        config, accelerator = self.config, self.accelerator
        branches = [(row, g) for row in rows for g in range(config.group)]
        share = len(branches) // accelerator.num_processes
        return self._draw(branches[accelerator.process_index * share :][:share], self.iteration)

    def _draw(self, mine: list[tuple[int, int]], iteration: int) -> tuple[Record, Prompts]:
        """Branches (row of the prompts, number in the group), drawn from the old policy."""
        config, objective, generator = self.config, self.objective, self.generator
        chunks = config.frames // generator.streaming.chunk
        if self.critic is not None:  # a self-rollout: all chunks leave at the step drawn for this iteration
            step = self.critic.objective.exit_step(config.seed, iteration, generator.streaming.levels)
            generator = leaving(generator, step)
        size = config.group if objective.exploration.forks else config.rollout_batch  # a fork is of one group
        records = []
        for i in range(0, len(mine), size):
            block = mine[i : i + size]
            some = self.prompts.take([row for row, _ in block])
            keys = [Key(config.seed, iteration, self.prompts.ids[row], g) for row, g in block]
            groups = torch.tensor([row for row, _ in block])
            asked = (some, keys, config.frames, groups)
            with torch.no_grad(), self.policies.using("old") as model:
                if isinstance(objective, KVRouting):
                    memory = objective.memory(self.generator.streaming.attention_window(), config.frames)
                    records.append(roll_out_routed(self.generator, model, *asked, memory, config.rollout_batch))
                else:
                    pivot = pivot_of(keys[0], objective.from_chunk, chunks)
                    explored = (objective.exploration, pivot, self.guide, config.rollout_batch)
                    records.append(roll_out(generator, model, *asked, *explored))
        prompts = self.prompts.take([row for row, _ in mine])
        return Record.cat(records, script_of(self.generator, prompts)), prompts

    def _judge(self, critic: Critic, record: Record, prompts: Prompts, clips: Clips) -> tuple[Record, dict[str, float]]:
        """Let the critic learn from the clips, then ask it and the teacher where they should go: the record with it."""
        objective, batch = critic.objective, self.config.update_batch
        metrics = critic.learn(record, prompts, batch, self.accelerator)
        record = replace(record, towards=critic.towards(record, prompts, batch))
        if objective.saliency:
            _, frames, _, height, width = record.latents.shape
            trained = {name: part for name, part in self.rewards.items() if part[1]}
            seen = [saliency(reward, clips, objective.saliency_patch, (frames, height, width))
                    for reward, _ in trained.values()]  # fmt: skip
            rewards = torch.stack([v.nanmean(1) for v in reward_table(trained, clips)[0].values()]).nan_to_num(0.0)
            joined = joined_saliency(torch.stack(seen), rewards)
            record = replace(record, map=saliency_weights(joined, objective.saliency).to(record.latents.device))
        return record, metrics

    def _advantages(self, values: dict, content: dict, record: Record) -> tuple[Record, Tensor, dict[str, float]]:
        """This process's branches with their gates, the weighted mean of the advantages of each trained reward [B, K],
        and statistics."""
        accelerator = self.accelerator
        groups = record.groups
        every_group = accelerator.gather(groups.to(accelerator.device)).cpu()
        if isinstance(self.objective, KVRouting):
            assert record.steps is not None
            first = accelerator.gather(record.steps.first.to(accelerator.device)).cpu()
            last = torch.tensor([k.branch == self.config.group - 1 for k in record.keys])
            anchors = accelerator.gather(last.to(accelerator.device)).cpu()
        metrics, raw, judged = {}, {}, {}
        weights = {name: weight for name, (_, weight) in self.rewards.items()}
        for name in self.rewards:
            raw[name] = value = accelerator.gather(values[name].to(accelerator.device)).cpu()
            fault = accelerator.gather(content[name].to(accelerator.device)).cpu()
            if value.isnan().all():
                needs = ", ".join(sorted(self.rewards[name][0].needs)) or "nothing"
                failed = "the measuring failed; the same command goes on from the last checkpoint"
                raise ValueError(
                    f"reward {name!r} could score none of {len(value)} branches at iteration {self.iteration}; "
                    + (f"it needs {needs}: do the prompts give that?" if fault.any() else failed)
                )
            metrics[f"reward/{name}"] = value.nanmean().item()
            metrics[f"reward/{name}/invalid_share"] = value.isnan().float().mean().item()
            judged[name] = worst_of_group(value, fault, every_group)

        def compare(value: Tensor, least_std: float) -> tuple[Tensor, dict[str, float]]:
            if isinstance(self.objective, KVRouting):
                return self.objective.advantages(value, every_group, first, anchors)
            return advantages(value, every_group, self.config.advantage, floor=least_std)

        total, stats = combine(judged, weights, every_group, compare, self.config.mix, self.config.rewards)
        metrics |= {f"reward/{k}": v for k, v in stats.items()}
        self.table, seen = table(raw, judged, weights, total, every_group)
        metrics |= seen
        if self.critic is not None:
            objective = self.critic.objective
            self.critic.history.append([metrics[f"reward/{name}"] for name, weight in weights.items() if weight])
            if objective.balance:
                off = imbalance(torch.tensor(self.critic.history))
                metrics["reward/imbalance"], total = off, total - objective.balance * off
            total = objective.weigh(total)
            metrics["train/weight_spread"] = total.mean(1).std(correction=0).item()
        voices = ungated(weights, self.config)
        gates, seen = self.pull.gates({name: judged[name] for name in voices}, voices, every_group)
        at = accelerator.process_index * len(groups)
        mine = slice(at, at + len(groups))
        record = record if gates is None else replace(record, gates=gates[mine].to(record.latents.device))
        return record, total[mine], metrics | seen

    def _update(self, record: Record, adv: Tensor) -> dict[str, float]:
        """One optimizer step on all branches, in micro-batches; equal to one large batch on one process."""
        config, accelerator = self.config, self.accelerator
        streaming = self.generator.streaming
        adv = adv.to(accelerator.device)
        whole = len(record) * accelerator.num_processes
        seen: dict[str, list[tuple[float, int]]] = {}
        parameters = list(self.policies.parameters().values())
        gap = None
        exploration = self.objective.exploration
        whole_group = config.group if exploration.forks else len(record)
        for rows in update_rows(len(record), whole_group, at_once(config, self.objective)):
            part = record.rows(rows)
            pivot = part.steps.one_first() if exploration.forks and part.steps is not None else None
            draw = draws(exploration, part.keys, self.generator.latent_shape, part.latents.device, pivot)
            denoiser = self.generator.denoiser(self.policies, part.script, draw)
            if rows.start == 0 and not self.policies.old_is_current:
                old, current = (lambda n=n: self.policies.using(n) for n in ("old", "current"))
                gap = context_gap(denoiser, part.latents, old, current)
            # levels, noise and anchors of an update are new also where a branch is replayed
            part = replace(part, keys=[replace(k, seed=config.seed, iteration=self.iteration) for k in part.keys])
            for loss, metrics in self.objective.losses(self.policies, denoiser, part, adv[rows], streaming.levels):
                self.policies.check_backward()
                (loss * len(part) / whole).backward()
                for k, v in metrics.items():
                    seen.setdefault(k, []).append((v, len(part)))
        sum_gradients(parameters, accelerator)
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
        if not torch.isfinite(norm):
            named = self.policies.parameters().items()
            bad = next((k for k, p in named if p.grad is not None and not p.grad.isfinite().all()), "their norm")
            raise FloatingPointError(
                f"gradient is {norm.item()} at iteration {self.iteration}, first in {bad}; lower lr ({config.lr})"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.policies.old_is_current = False  # until it is copied: a second update must not take current for old
        out = mean_over_processes(seen, accelerator)
        out |= {"train/grad_norm": norm.item(), "train/policy_distance": self.policies.distance()}
        if gap is not None:
            out["train/context_gap"] = gap
        return out

    def save(self, folder: Path, score: float | None = None) -> Path:
        """Write a checkpoint and drop old ones. ``score`` (higher is better) says how good the policy is on prompts the
        run was not trained on (watch.py); the best one is kept whatever its age."""
        state: dict[str, Any] = {"old_is_current": self.policies.old_is_current, "seconds": self.seconds,
                                 "pull": self.pull.state(), "replay": self._replayed}  # fmt: skip
        tensors, optimizer = self.policies.state(), self.optimizer.state_dict()
        if self.critic is not None:
            tensors |= self.critic.tensors()
            optimizer = {"policy": optimizer, "critic": self.critic.optimizer.state_dict()}
            state["reward_history"] = self.critic.history
        return save_checkpoint(
            folder, self.iteration, tensors, optimizer, state,
            base=self.base, score=score, keep_last=self.config.keep_last,
        )  # fmt: skip

    def restore(self, folder: Path) -> Path | None:
        """Continue from the newest whole checkpoint of run ``folder`` and return its path; None when it has none yet.
        ValueError when all are damaged, or when it was made on another base."""

        def read(path: Path) -> Checkpoint:
            check_base(path, read_state(path), self.base, f"generator {self.config.generator}")
            return load_checkpoint(path)

        found = newest(folder, read, self.accelerator.print)
        if found is None:
            return None
        tensors, optimizer = found.tensors, found.optimizer
        if self.critic is not None:
            self.critic.load(tensors, optimizer["critic"], found.state["reward_history"])
            optimizer = optimizer["policy"]
            tensors = {k: v for k, v in tensors.items() if not k.startswith("critic/")}
        self.policies.load_state(tensors, found.state["old_is_current"])
        self.pull.load_state(found.state["pull"])
        self._replayed = found.state["replay"]
        self.optimizer.load_state_dict(optimizer)
        self.iteration, self.seconds = found.state["step"], found.state["seconds"]
        return found.path

    def check_processes(self) -> None:
        """RuntimeError unless every process holds the same trained weights and optimizer moments, bit for bit."""
        if self.accelerator.num_processes == 1:
            return
        held = self.policies.state()
        optimizers = [self.optimizer]
        if self.critic is not None:
            held |= self.critic.tensors()
            optimizers.append(self.critic.optimizer)
        for n, optimizer in enumerate(optimizers):
            moments = optimizer.state_dict()["state"]
            held |= {f"{n}/{i}/{k}": v for i, s in moments.items() for k, v in s.items()}
        sums = gather_object([fingerprint(held)])
        if len(set(sums)) > 1:
            odd = [i for i, x in enumerate(sums) if x != sums[0]]
            raise RuntimeError(
                f"after iteration {self.iteration} process {odd[0]} holds other weights than process 0: gradients were "
                "not summed over all processes; the last checkpoint is from before"
            )


def update_rows(total: int, group: int, size: int) -> list[slice]:
    """Micro-batches of at most ``size`` of ``total`` rows, none of which crosses a border between groups."""
    starts = ((i, j) for i in range(0, total, group) for j in range(i, min(i + group, total), size))
    return [slice(j, min(j + size, i + group, total)) for i, j in starts]


def base_of(transformer: CausalWan, policy: PolicyConfig) -> dict[str, Any]:
    """What a checkpoint belongs to: the untrained weights and the shape of what is trained."""
    out: dict[str, Any] = {"weights": fingerprint(dict(transformer.named_parameters())), "kind": policy.kind}
    if policy.kind == "lora":
        out |= {"rank": policy.rank, "alpha": policy.alpha, "targets": list(policy.targets)}
    return out
