"""Teacher and critic of distribution matching: two policies over one network that reads whole clips.

The critic starts as the teacher and learns, by flow matching on what the generator makes now, where its clips lie; what
the two predict of the same noised clip differs by where the clips should move. ``Policies`` holds both: "start" is the
teacher, "current" the critic. Source: DMD2 and Self-Forcing. Differences: the critic's updates before each of the
generator's are on the clips of that iteration, at fresh levels and noise (there on fresh rollouts); it learns first.
Shape letters: B clips, F frames, C H W a latent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from arvideo_rl.config import ConfigError
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Script
from arvideo_rl.generators.policies import Policies, PolicyConfig
from arvideo_rl.generators.transformer import Prediction
from arvideo_rl.generators.window import Window
from arvideo_rl.objectives.dmd import DMD
from arvideo_rl.objectives.matching import critic_loss, direction, guided, score_level
from arvideo_rl.objectives.record import Record
from arvideo_rl.training.checkpoints import fingerprint
from arvideo_rl.training.prompts import Prompts
from arvideo_rl.training.reduce import sum_gradients
from arvideo_rl.training.rollout import script_of
from rewards.contract import Reward
from samplers.kernels import forward
from samplers.randomness import Key, generator, normal


class Critic:
    """What ``objective`` needs besides the policies, on the device of ``student``. ConfigError when its teacher does
    not fit clips of ``frames`` frames of it."""

    def __init__(self, objective: DMD, student: Generator, frames: int, seed: int) -> None:
        try:
            self.teacher = Generator.load(objective.teacher).to(student.transformer.device)
        except ValueError as error:
            raise ConfigError(f"objective.args.teacher: {error}") from None
        self.objective, self.frames = objective, frames
        _check_fit(objective, self.teacher, student, frames)
        self.weights = fingerprint(dict(self.teacher.transformer.named_parameters()))  # what a checkpoint belongs to
        policy = PolicyConfig(objective.critic_kind, objective.critic_rank, float(objective.critic_rank))
        self.policies = Policies(self.teacher.transformer, policy, seed)
        self.optimizer = torch.optim.AdamW(
            self.policies.parameters().values(), lr=objective.critic_lr, betas=(0.0, 0.999), weight_decay=0.01
        )
        self.history: list[list[float]] = []  # mean reward of each kind, per iteration

    def encode(self, prompts: Prompts) -> None:
        """Ask the teacher's text encoder for all that it will be asked for, one by one."""
        for text in prompts.texts:
            self._without(self.teacher.script([text]))

    def learn(self, record: Record, prompts: Prompts, batch: int, accelerator: Accelerator) -> dict[str, float]:
        """The critic's updates on the clips of ``record``, in micro-batches of ``batch``; returns metrics."""
        script, losses = script_of(self.teacher, prompts), []
        whole = len(record) * accelerator.num_processes
        parameters = list(self.policies.parameters().values())
        for update in range(1, self.objective.critic_updates + 1):
            total = 0.0
            for part in _parts(len(record), batch):
                x0 = record.latents[part]
                x, t, noise = self._noised(x0, record.keys[part], update)
                loss = critic_loss(self._predict("current", x, t, script.rows(part)).v, x0, noise)
                self.policies.check_backward()
                (loss * len(x0) / whole).backward()
                total += loss.item() * len(x0) / len(record)
            sum_gradients(parameters, accelerator)
            norm = torch.nn.utils.clip_grad_norm_(parameters, 10.0)
            if not torch.isfinite(norm):
                raise FloatingPointError(f"the critic's gradient is {norm.item()}; lower objective.args.critic_lr")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(total)
        both = accelerator.reduce(torch.tensor(losses, device=record.latents.device), "mean").tolist()
        return {"critic/loss": sum(both) / len(both), "critic/grad_norm": norm.item()}

    @torch.no_grad()
    def towards(self, record: Record, prompts: Prompts, batch: int) -> Tensor:
        """What teacher and critic take off the clips of ``record`` [B, F, C, H, W], see matching.py."""
        script, out = script_of(self.teacher, prompts), []
        without = self._without(script)
        for part in _parts(len(record), batch):
            x0 = record.latents[part]
            x, t, _ = self._noised(x0, record.keys[part], 0)
            real = self._predict("start", x, t, script.rows(part)).x0
            if self.objective.guidance:
                uncond = self._predict("start", x, t, without.rows(part)).x0
                real = guided(real, uncond, self.objective.guidance)
            out.append(direction(x0, real, self._predict("current", x, t, script.rows(part)).x0))
        return torch.cat(out)

    def _noised(self, x0: Tensor, keys: list[Key], update: int) -> tuple[Tensor, Tensor, Tensor]:
        """(x_t, t [B], noise): one level a clip, the same for all its frames."""
        o = self.objective
        u = [generator(key, 0, update, "t").integers(1000) / 1000 for key in keys]
        t = torch.tensor([score_level(x, o.score_shift, o.lowest, o.highest) for x in u], device=x0.device)
        noise = normal(keys, 0, update, "forward", tuple(x0.shape[1:])).to(x0.device)
        return forward(x0, noise, t[:, None, None, None, None]), t, noise

    def _predict(self, policy: str, x: Tensor, t: Tensor, script: Script) -> Prediction:
        window = Window(self.frames, self.frames, 0)
        context = window.start().condition(script.texts[0][1], script.actions_in(0, self.frames))
        with self.policies.using(policy) as model:
            return model(x, t, context)

    def _without(self, script: Script) -> Script:
        """The script without what guidance leads towards: no prompt, or the negative one, and no actions."""
        encoder, ((_, text),) = self.teacher.text_encoder, script.texts
        rows = encoder.embed([self.objective.negative]) if self.objective.negative else encoder.nothing(1)
        actions = None if script.actions is None else torch.zeros_like(script.actions)
        return Script(((0, rows.detach().to(text).expand_as(text)),), actions)

    def tensors(self) -> dict[str, Tensor]:
        """What of it changes, for a checkpoint, under critic/."""
        return {f"critic/{k}": p.detach() for k, p in self.policies.parameters().items()}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor], optimizer: Any, history: list[list[float]]) -> None:
        """Restore what a checkpoint holds."""
        for k, p in self.policies.parameters().items():
            p.copy_(tensors[f"critic/{k}"])
        self.optimizer.load_state_dict(optimizer)
        self.history = history


def check_matching(objective: DMD, rewards: dict[str, tuple[Reward, float]], window: Window) -> None:
    """ConfigError for options that the rewards or the window cannot serve."""
    trained = {name: reward for name, (reward, weight) in rewards.items() if weight}
    for name, reward in trained.items() if objective.saliency else ():
        if not getattr(reward, "differentiable", False) or reward.granularity == "group":
            raise ConfigError(f"objective.args.saliency: rewards.{name} ({reward.name!r}) as configured has no "
                              "gradient; set saliency=0, or use one that declares differentiable")  # fmt: skip
    if objective.balance and len(trained) < 2:
        raise ConfigError("objective.args.balance weighs several rewards against each other, and one is trained; set "
                          "it to 0 or add rewards")  # fmt: skip
    kept = next((k for k in ("recompute", "compress", "linear") if getattr(window, k)), None)
    if objective.through_context and kept:
        raise ConfigError(f"objective.args.through_context=true needs a past of clean frames as they were, not "
                          f"streaming.{kept}; set it to false")  # fmt: skip


def outlined(source: str) -> Generator:
    """The generator ``source`` as far as its sizes go: of a published Wan without its weights."""
    try:
        return Generator.outline(source)
    except ValueError:
        return Generator.load(source)


def leaving(student: Generator, step: int) -> Generator:
    """The generator whose sampler stops after ``step``, from 0, so that its prediction there is the chunk."""
    return replace(student, streaming=replace(student.streaming, steps=student.streaming.steps[: step + 1]))


def _parts(count: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, count)) for i in range(0, count, size)]


def _check_fit(objective: DMD, teacher: Generator, student: Generator, frames: int) -> None:
    name, chunk = objective.teacher, teacher.streaming.chunk
    low = next((p.dtype for p in teacher.transformer.parameters() if p.dtype != torch.float32), None)
    if objective.critic_kind == "full" and low:  # policies.py would say it of the generator
        raise ConfigError(f"objective.args.critic_kind=full would train {str(low)[6:]} weights, which barely move; use "
                          "critic_kind=lora, or a teacher with wan.dtype=float32")  # fmt: skip
    if chunk < frames:
        raise ConfigError(
            f"objective.args.teacher={name} reads {chunk} frames at once, but clips have frames={frames}; use "
            f"frames of {chunk} or fewer, or a teacher made for whole clips (configs/distill/teacher_tiny.yaml)"
        )
    mine, theirs = student.latent_shape[1:], teacher.latent_shape[1:]
    if mine != theirs:
        raise ConfigError(f"objective.args.teacher={name} works on latents {theirs}, the generator on {mine}")
