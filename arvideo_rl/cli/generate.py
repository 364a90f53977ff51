"""``arvideo generate``: stream prompts to files."""

from __future__ import annotations

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

MEMORY_KEYS = "frames, scale or search.batch, or write an .mp4 (a .gif or .png is held whole)"


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.generation import GenerateConfig

    return f"""arvideo generate [config.yaml] [key=value ...] [--dry-run]

Streams one video per prompt, chunk by chunk, and writes it with a .json beside it that says how it was made. Examples:

  arvideo generate prompt='a red ball rolls left' actions='turn left*6, forward*11' out=ball.mp4
  arvideo generate prompt='a red ball bounces' seconds=6 switch='24: a blue cube rests' out=switch.gif
  arvideo generate prompt='a red ball bounces' start=ball.mp4 actions='forward*6' out=longer.mp4
  arvideo generate prompts=prompts.jsonl generator=runs/quickstart out=videos/
  arvideo generate prompt='a red ball rests' actions='turn left*6, forward*11' search.kind=beam \\
      search.reward.target=inverse_dynamics out=ball.mp4

search.kind draws several candidates and keeps what search.reward likes best; what that costs is printed first.

The tiny generator knows the words of the embedded world: a, red, green, blue, yellow, ball, cube, rests, rolls, slides,
bounces, left, right, and, while, the, camera, turns, moves, forward, back, stays, still, then.
Actions: stay, turn left, turn right, forward, back; NAME*N repeats.

keys and defaults
{keys(GenerateConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Generate every prompt."""
    if len(words) > 1:
        raise UsageError(
            "generate takes at most one YAML file, then key=value; put prompts in quotes: prompt='a red ball'"
        )
    from arvideo_rl.training import generation, searching
    from arvideo_rl.training.launch import quiet

    quiet()
    job = generation.prepare(load(generation.GenerateConfig, words[0] if words else None, items))
    print("\n".join(job.notes))
    if "--dry-run" in flags:
        for text, path in zip(job.prompts.texts, job.targets):
            print(f"would write {path}: {job.frames} frames of {text!r}")
        return 0
    for path in generation.run(job):
        print(f"wrote {path}")
        if job.search is not None:
            print(searching.told(path))
    return 0
