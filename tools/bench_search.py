"""What does search at test time buy, and what does it cost? Searches tiny's videos and measures them with other eyes.

    python tools/bench_search.py [--prompts 32] [--verifiers actions geometry both guarded network] [--out search.json]

Verifiers: the inverse-dynamics reward, re-rendering by the commanded camera, their sum, re-rendering guarded by motion
and by what the prompt says, and re-projection by the shipped network, which knows neither the commands nor the
true camera. Measured on whole videos against plain streaming of the same prompts: both of the first two, the held-out
inverse-dynamics model, the distance between where the commands put points and where the flow finds them, and the
world's own measures. Standard errors are over prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from arvideo_rl.generators.bundle import Generator
from arvideo_rl.training.prompts import Prompts, held_out_prompts
from arvideo_rl.training.rollout import appearance, script_of
from arvideo_rl.training.searching import Verifier
from arvideo_rl.world.geometry import Commanded
from arvideo_rl.world.verify import VERIFIERS
from rewards.contract import Clips, Reward, Scores, score
from rewards.geometry.scores import Reprojection, Rerender
from rewards.inverse_dynamics import InverseDynamics
from rewards.registry import FunctionReward
from rewards.text_video import TextVideo
from samplers.plan import KINDS, Plan, cost
from samplers.randomness import Key
from samplers.search import branch_noise, search
from samplers.stream import draw_from

FRAMES, SEED = 18, 77_000_005
GEOMETRY = Rerender(Commanded(), motion_floor=0.0)
REPROJECTION = Reprojection(Commanded(), motion_floor=0.0)
MOVING = Rerender(Commanded(), motion_floor=0.03)  # diagonals a frame: clips of tiny move by .015 to .025, so all count
SHOWN = TextVideo()
NETWORK = Reprojection("network", reach=3, patch=2, references=6)  # as in configs/align/geometric_tiny.yaml
ACTIONS, ACTIONS_HELD_OUT = (InverseDynamics(w, score="expected_accuracy") for w in ("idm", "idm_heldout"))


def actions_and_geometry(clips: Clips) -> Scores:
    """Both verifiers: geometry counts twice, because it differs half as much between candidates."""
    one, two = score(ACTIONS, clips), score(GEOMETRY, clips)
    value = one.value + 2 * two.value
    return Scores(value, value.isfinite(), [a or b for a, b in zip(one.reasons, two.reasons)])


def guarded(clips: Clips) -> Scores:
    """Geometry that must not be bought with motion or objects: re-rendering times motion, plus a twentieth of what a
    text-video model reads of the prompt, which differs five times as much."""
    one, two = score(MOVING, clips), score(SHOWN, clips)
    value = one.value + 0.05 * two.value
    return Scores(value, value.isfinite(), [a or b for a, b in zip(one.reasons, two.reasons)])


REWARDS: dict[str, Reward] = {
    "actions": ACTIONS, "geometry": GEOMETRY, "both": FunctionReward(actions_and_geometry, "both", {}),
    "guarded": FunctionReward(guarded, "guarded", {}), "network": NETWORK,
}  # fmt: skip
PLANS = [
    *(("actions", Plan(kind, n)) for kind in KINDS for n in (2, 8)),
    *(("geometry", Plan(kind, 8)) for kind in ("best", "greedy", "beam")),
    *((name, Plan(kind, 8)) for name in ("both", "guarded", "network") for kind in ("best", "beam")),
]


def measures(clips: Clips) -> dict[str, float]:
    """Everything that is measured of one whole video."""
    assert clips.actions is not None and clips.prompts is not None
    actions = torch.cat([torch.zeros(1, 1, dtype=torch.int64), clips.actions], 1)
    found = {
        "actions": score(ACTIONS, clips).value,
        "actions_held_out": score(ACTIONS_HELD_OUT, clips).value,
        "network": score(NETWORK, clips).value,
        "rerender_error": score(GEOMETRY, clips).raw["error"],
        "reprojection_error": 100 * score(REPROJECTION, clips).raw["error_diag"],
        **{k: f(clips.frames, list(clips.prompts), actions) for k, f in VERIFIERS.items()},
        "contrast": 100 * appearance(clips.frames)["contrast"],
    }
    return {k: float(v) for k, v in found.items()}


def one_prompt(
    generator: Generator, prompt: Prompts, plans: list[tuple[str, Plan]], done: Callable[[], None]
) -> dict[str, dict]:
    """Measures of the plain video and of every search of one prompt."""
    key, model, chunks = Key(SEED, 0, prompt.ids[0]), generator.transformer, generator.streaming.attention_window()
    bounds, levels = chunks.chunks(FRAMES), generator.streaming.levels
    script, draw = script_of(generator, prompt), draw_from([key], generator.latent_shape)

    def measured(latents: Tensor) -> dict[str, float]:
        pixels = generator.codec.decode(latents).float()
        return measures(Clips(pixels, prompts=list(prompt.texts), actions=prompt.actions[:, 1:FRAMES].contiguous()))

    out = {"plain": measured(torch.cat([c.latents for c in generator.stream(model, script, draw, FRAMES)], 1))}
    for name, plan in plans:
        judge = Verifier(generator, REWARDS[name], [(0, prompt.texts[0])], prompt.actions)
        found = search(generator.denoiser(model, script, draw, fixed=True), bounds, levels,
                       branch_noise(key, generator.latent_shape), judge, plan)  # fmt: skip
        assert found.cost == cost(plan, len(bounds), len(levels)), (found.cost, plan)
        out[label(name, plan)] = measured(found.latents)
        done()
    return out


def label(name: str, plan: Plan) -> str:
    """A search by name: verifier, kind and candidates."""
    return f"{name} {plan.kind} {f'{plan.beams}x' * (plan.kind == 'beam')}{plan.candidates}"


def paired(rows: list[dict[str, dict]], name: str, measure: str) -> tuple[float, float, float]:
    """Mean, mean change against plain, and the standard error of that change."""
    values = torch.tensor([[r[name][measure], r["plain"][measure]] for r in rows], dtype=torch.float64)
    values = values[values.isfinite().all(1)]
    change = values[:, 0] - values[:, 1]
    return values[:, 0].mean().item(), change.mean().item(), (change.std() / math.sqrt(len(change))).item()


def main() -> None:
    """Search, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--verifiers", nargs="+", choices=list(REWARDS), default=list(REWARDS))
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many held-out prompts")
    parser.add_argument("--motion-floor", type=float, default=MOVING.motion_floor, help="of the verifier guarded")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    plans = [(name, plan) for name, plan in PLANS if name in args.verifiers]
    torch.set_num_threads(1)
    MOVING.motion_floor = args.motion_floor
    generator, began = Generator.load("tiny"), time.perf_counter()
    prompts = held_out_prompts(args.prompts, FRAMES, "joystick", args.skip)
    rows = []
    with Progress() as bar:
        task = bar.add_task("searching", total=len(prompts) * len(plans))
        for i in range(len(prompts)):
            rows.append(one_prompt(generator, prompts.take([i]), plans, lambda: bar.advance(task)))
    chunks, levels = len(generator.streaming.attention_window().chunks(FRAMES)), len(generator.streaming.levels)
    names = list(rows[0]["plain"])
    print(f"{len(rows)} prompts, {FRAMES} frames, {time.perf_counter() - began:.0f} s; change against plain (error)")
    print("plain: " + ", ".join(f"{m} {paired(rows, 'plain', m)[0]:.4f}" for m in names))
    table = {}
    for name, plan in plans:
        price = cost(plan, chunks, levels)
        found = {m: paired(rows, label(name, plan), m) for m in names}
        table[label(name, plan)] = {"forwards": price.forwards, "scores": price.scores, **found}
        said = "  ".join(f"{m} {d:+.4f} ({e:.4f}){'*' if abs(d) > 3 * e else ''}" for m, (_, d, e) in found.items())
        print(f"{label(name, plan):22}{price.forwards:5} {price.scores:4}  {said}")
    if args.out:
        data = {"prompts": len(rows), "plain": {m: paired(rows, "plain", m)[0] for m in names}, "searches": table}
        args.out.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
