"""How well does the text-video reward read a generator's own videos, and can clips of one prompt be told apart by it?

    python tools/measure_text_video.py [--generator tiny] [--prompts 16] [--group 8] [--frames 12]

Prompts are held out from training. Each gets `group` videos under noises of their own, judged with that prompt and with
the next one. The last number says how far the two shipped models agree inside groups.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.prompts import held_out_prompts
from arvideo_rl.training.rollout import clips_of, roll_out
from arvideo_rl.training.text_video import auroc
from arvideo_rl.world.verify import VERIFIERS
from rewards.contract import Clips, score
from rewards.text_video import SHIPPED, TextVideo
from samplers.randomness import Key

SEED = 77_000_010


def ranks(x: Tensor) -> Tensor:
    """Mid-ranks of each row of ``x`` [B, G], less their mean."""
    above = (x[:, :, None] > x[:, None]).double() + 0.5 * (x[:, :, None] == x[:, None]).double()
    return above.sum(-1) - x.shape[1] / 2


def agreement(x: Tensor, y: Tensor) -> float:
    """Mean over groups of the rank correlation of two values [B, G]; groups in which one does not vary are left out."""
    a, b = ranks(x), ranks(y)
    size = a.norm(dim=1) * b.norm(dim=1)
    return float(((a * b).sum(1) / size)[size > 0].mean())


def main() -> None:
    """Generate, judge, print."""
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--generator", default="tiny")
    for name, value in (("prompts", 16), ("group", 8), ("frames", 12)):
        ask.add_argument(f"--{name}", type=int, default=value)
    args = ask.parse_args()
    generator = Generator.load(args.generator)
    prompts = held_out_prompts(args.prompts, args.frames, "joystick", 0)
    videos, shape = [], (args.prompts, args.group)
    for p in range(args.prompts):
        some = prompts.take([p] * args.group)
        keys = [Key(SEED, 0, i, g) for g, i in enumerate(some.ids)]
        record = roll_out(generator, generator.transformer, some, keys, args.frames, torch.full((args.group,), p))
        videos.append(clips_of(generator, record, some).frames)
    frames = torch.cat(videos)
    rows = [p for p in range(args.prompts) for _ in range(args.group)]
    told = [prompts.texts[p] for p in rows]
    other = [prompts.texts[(p + 1) % args.prompts] for p in rows]
    found = {name: score(TextVideo(name), Clips(frames, prompts=told)) for name in SHIPPED}
    out = {}
    for name, own in found.items():
        wrong = score(TextVideo(name), Clips(frames, prompts=other)).value
        parts = {"value": own.value, **own.components}
        out[name] = {
            "auroc": auroc(own.value, wrong), "own": float((own.value > wrong).float().mean()),
            "mean": {k: float(v.nanmean()) for k, v in parts.items()},
            "spread_in_groups": {k: float(v.view(shape).std(1).nanmean()) for k, v in parts.items()},
            "spread_between_groups": float(own.value.view(shape).mean(1).std()),
            "agrees_in_groups": {
                k: agreement(own.value.view(shape), VERIFIERS[k](frames, told, prompts.actions[rows]).view(shape))
                for k in ("colour_present", "direction_correct")
            },
        }  # fmt: skip
    print(json.dumps(out, indent=1))
    print("two models agree in groups:", agreement(*(s.value.view(shape) for s in found.values())))


if __name__ == "__main__":
    main()
