"""Draw branches from a policy and score them: prompts -> record -> clips -> rewards per chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.denoiser import Script
from arvideo_rl.objectives.record import Record, Steps
from arvideo_rl.training.guided import judge_of
from arvideo_rl.training.prompts import Prompts
from rewards.contract import Clips, Reward, score
from samplers.exploration import Exploration, draws
from samplers.randomness import Key

LUMA = (0.299, 0.587, 0.114)


INDEPENDENT = Exploration()


@torch.no_grad()
def roll_out(
    generator: Generator,
    model,
    prompts: Prompts,
    keys: list[Key],
    frames: int,
    groups: Tensor,
    exploration: Exploration = INDEPENDENT,
    pivot: int = 0,
    guide: Reward | None = None,
    batch: int | None = None,
) -> Record:
    """Generate one branch per row of ``prompts``, each under its own key, at most ``batch`` of them at once. ``frames``
    must be whole chunks. With an exploration that forks, all rows are one group, which has one past up to chunk
    ``pivot``. ``guide`` is the reward that an exploration with a guide follows (guided.py)."""
    if generator.streaming.joint:
        raise ValueError("streaming.joint=true: what was denoised jointly cannot be trained on; set it to false")
    first = pivot if exploration.forks else 0
    start = generator.streaming.attention_window().chunks(frames)[first][0]
    device, past = generator.transformer.device, []
    transitions = len(generator.streaming.levels) - 1
    kernels = exploration.kernels(keys[0].iteration, transitions)
    if start:
        draw = draws(exploration, keys[:1], generator.latent_shape, device, pivot, transitions)
        script = script_of(generator, prompts.take([0]))
        past = list(generator.stream(model, script, draw, start, to_continue=True))
        before = torch.cat([c.latents for c in past], 1)
    found = []
    for rows in (range(len(keys))[i : i + (batch or len(keys))] for i in range(0, len(keys), batch or len(keys))):
        seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

        def keep(chunk: int, step: int, x: Tensor, x0: Tensor, seen=seen) -> None:
            if chunk == first or not exploration.forks:
                seen.setdefault(chunk, []).append((x, x0))

        mine = [keys[i] for i in rows]
        draw = draws(exploration, mine, generator.latent_shape, device, pivot, transitions)
        context = past[-1].context.fork(len(rows)) if past else None
        some = prompts.take(list(rows))
        judge = None if guide is None else judge_of(guide, generator, some)
        tail = generator.stream(
            model, script_of(generator, some), draw, frames, context=context, start=start, kernel=kernels,
            guidance=exploration.guidance(judge, keys[0].iteration, transitions),
            seen=keep if exploration.steps else None,
        )  # fmt: skip
        parts = [before.expand(len(rows), -1, -1, -1, -1)] if past else []
        latents = torch.cat([*parts, *(c.latents for c in tail)], 1)
        found.append((latents, *steps_of(seen)))
    latents, *kept = (torch.cat(x) for x in zip(*found))
    steps = Steps(kept[0], kept[1], torch.full((len(keys),), first)) if kept else None
    return Record(latents, script_of(generator, prompts), keys, groups, steps)


def steps_of(seen: dict[int, list[tuple[Tensor, Tensor]]]) -> tuple[Tensor, ...]:
    """Inputs and predictions [B, P, S, ...] of what was seen by chunk; nothing of nothing."""
    return tuple(torch.stack([torch.stack([s[i] for s in one], 1) for one in seen.values()], 1) for i in (0, 1) if seen)


def script_of(generator: Generator, prompts: Prompts) -> Script:
    """What is asked of one stream per prompt."""
    takes_actions = generator.transformer.action_embedding is not None
    return generator.script(list(prompts.texts), prompts.actions if takes_actions else None)


def clips_of(generator: Generator, record: Record, prompts: Prompts) -> Clips:
    """Decode a record into what rewards read, one video at a time: a decoder holds far more than it gives. Commands go
    with pixel frames, so a codec that makes several of a frame leaves them out."""
    codec, frames = generator.codec, record.latents.shape[1]
    pixels = torch.cat([codec.decode(one).float().cpu() for one in record.latents.split(1)])
    return Clips(
        frames=pixels,
        fps=generator.streaming.fps,
        prompts=list(prompts.texts),
        actions=prompts.actions[:, 1:frames].contiguous() if pixels.shape[1] == frames else None,
        group_ids=record.groups,
        chunk_starts=tuple(codec.pixel_frames(a) for a, _ in generator.streaming.attention_window().chunks(frames)),
    )


def appearance(pixels: Tensor) -> dict[str, Tensor]:
    """How videos [B, T, 3, H, W] look as a whole, [B] each: brightness (mean luma, 0 to 1), contrast (its deviation
    over a frame) and saturation (largest minus smallest channel). What a judge that likes bleached or gaudy pictures
    does to them shows here."""
    luma = (pixels * torch.tensor(LUMA)[:, None, None]).sum(2)
    chroma = pixels.amax(2) - pixels.amin(2)
    return {
        "brightness": luma.mean((1, 2, 3)), "contrast": luma.std((2, 3), correction=0).mean(1),
        "saturation": chroma.mean((1, 2, 3)),
    }  # fmt: skip


def reward_table(rewards: dict[str, tuple[Reward, float]], clips: Clips) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Score clips with every reward. Returns per reward its values [B, K] (a clip reward is repeated over chunks; NaN
    where invalid) and whether the clip itself was at fault [B, K]."""
    assert clips.chunk_starts is not None
    chunks = len(clips.chunk_starts)
    values, content = {}, {}
    for name, (reward, _) in rewards.items():
        scores = score(reward, clips)
        value = scores.value if scores.value.ndim == 2 else scores.value[:, None].expand(-1, chunks)
        fault = torch.tensor([bool(r and r.startswith("content:")) for r in scores.reasons])
        values[name], content[name] = value.clone(), value.isnan() & fault[:, None]
    return values, content


def from_first(values: Tensor, record: Record) -> Tensor:
    """Rewards [B, K] of chunks -> the mean over the chunks from the first trained one on, at every chunk [B, K]."""
    first = torch.zeros(len(record), dtype=torch.long) if record.steps is None else record.steps.first.cpu()
    later = torch.arange(values.shape[1]) >= first[:, None]
    return torch.where(later, values, torch.nan).nanmean(1, keepdim=True).expand_as(values).clone()
