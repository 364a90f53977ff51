"""``arvideo generate``: stream prompts to files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load


@dataclass
class GenerateConfig:
    """What ``arvideo generate`` reads."""

    generator: str = "tiny"  # a shipped name, a generator folder, a run, RUN@best or RUN@STEP
    prompt: str = ""  # one prompt; or give prompts=FILE
    prompts: str = ""  # .txt with a prompt a line, or .jsonl with {"prompt", "actions"} a line
    actions: str = ""  # for prompt=, e.g. 'turn left*6, forward*9'; frame 0 has none
    switch: str = ""  # 'FRAME: new prompt'; several separated by ';'
    frames: int | None = None  # default: what the actions need, at least 18; or give seconds=
    seconds: float | None = None  # how long, at the generator's frame rate
    seed: int = 0
    out: str = "video.mp4"  # .mp4, .gif or .png (contact sheet); with several prompts a folder
    format: str = "mp4"  # of the files in a folder
    scale: int = 8  # every pixel becomes scale x scale


def help_text() -> str:
    """Text of --help."""
    return f"""arvideo generate [config.yaml] [key=value ...] [--dry-run]

Streams one video per prompt, chunk by chunk, and writes it with a .json beside it that says how it was made. Examples:

  arvideo generate prompt='a red ball rolls left' actions='turn left*6, forward*11' out=ball.mp4
  arvideo generate prompt='a red ball bounces' seconds=6 switch='24: a blue cube rests' out=switch.gif
  arvideo generate prompts=prompts.jsonl generator=runs/quickstart out=videos/

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
    config = load(GenerateConfig, words[0] if words else None, items)
    if bool(config.prompt) == bool(config.prompts):
        raise UsageError("give exactly one of prompt='...' and prompts=FILE")
    import torch
    from rich.progress import Progress

    from arvideo_rl import media
    from arvideo_rl.progress import hidden
    from arvideo_rl.training.aligned import load_any
    from arvideo_rl.training.launch import quiet
    from arvideo_rl.training.prompts import Prompts, list_actions, parse_actions, read_prompts
    from arvideo_rl.training.rundir import write_json
    from samplers.randomness import Key
    from samplers.stream import draw_from

    quiet()
    generator, model, loaded = load_any(config.generator)
    streaming = generator.streaming
    commands = len(list_actions(config.actions))
    frames = length(config, streaming.fps, max(streaming.trained_frames, commands + 1))
    if commands >= frames:
        raise UsageError(f"{commands} actions drive {commands} changes, but {frames} frames have {frames - 1}")
    if config.prompt:
        prompts = Prompts((config.prompt,), torch.tensor([parse_actions(config.actions, frames)]), (0,))
    else:
        if config.actions:
            raise UsageError("actions= goes with prompt=; in a prompts file each line has its own (.jsonl)")
        prompts = read_prompts(Path(config.prompts), frames)
    switches = parse_switches(config.switch, streaming.chunk)
    for at, _ in switches:
        if at >= frames:
            raise UsageError(f"switch at frame {at}: the video has {frames} frames; raise frames= or seconds=")
    if config.scale < 1:
        raise UsageError(f"scale={config.scale}: use 1 or more")
    targets = outputs(config, len(prompts))
    for text in prompts.texts:
        generator.script([text])  # refuse unknown words before anything is generated
    for _, text in switches:
        generator.script([text])
    levels = ", ".join(f"{t:.3g}" for t in streaming.levels)
    print(f"{loaded}; window {streaming.window}, sink {streaming.sink}, levels {levels}")
    if frames > streaming.trained_frames:
        print(f"{frames} frames go past the {streaming.trained_frames} it was trained on; quality may drift")
    if "--dry-run" in flags:
        for text, path in zip(prompts.texts, targets):
            print(f"would write {path}: {frames} frames of {text!r}")
        return 0
    chunks = streaming.attention_window().chunks(frames)
    takes_actions = generator.transformer.action_embedding is not None
    with Progress(disable=hidden()) as bar:
        task = bar.add_task("streaming", total=len(chunks) * len(prompts))
        for i, path in enumerate(targets):
            one = prompts.take([i])
            script = generator.script(
                list(one.texts), one.actions if takes_actions else None, tuple((f, [p]) for f, p in switches)
            )
            draw = draw_from([Key(config.seed, 0, i, 0)], generator.latent_shape, generator.transformer.device)
            decode = generator.codec.decoder()
            with media.writing(path, streaming.fps, config.scale) as add:
                for chunk in generator.stream(model, script, draw, frames, trim=True):
                    add(decode(chunk.latents)[0])
                    bar.advance(task)
            made = {"prompt": one.texts[0], "actions": one.actions[0, 1:frames].tolist(), "switch": switches,
                    "fps": streaming.fps, "seed": config.seed, "index": i, "generator": config.generator}  # fmt: skip
            write_json(path.with_name(path.name + ".json"), made)
    print("\n".join(f"wrote {path}" for path in targets))
    return 0


def length(config: GenerateConfig, fps: float, default: int) -> int:
    """How many frames were asked for."""
    if config.frames is not None and config.seconds is not None:
        raise UsageError("give frames= or seconds=, not both")
    frames = config.frames if config.frames is not None else default
    if config.seconds is not None:
        if not 0 < config.seconds < 1e6:
            raise UsageError(f"seconds={config.seconds}: use a number above 0")
        frames = math.ceil(config.seconds * fps)
    if frames < 1:
        raise UsageError(f"{frames} frames is nothing to generate; use 1 or more")
    return frames


def parse_switches(text: str, chunk: int) -> list[tuple[int, str]]:
    """Prompt switches [(frame, prompt), ...]; frames must be positive and begin a chunk."""
    out: list[tuple[int, str]] = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        frame, colon, prompt = part.partition(":")
        if not colon or not frame.strip().isdigit() or not prompt.strip():
            raise UsageError(f"switch {part!r} is not 'FRAME: new prompt'")
        at = int(frame)
        if at == 0 or at % chunk:
            low = max(chunk, at // chunk * chunk)
            raise UsageError(
                f"switch at frame {at}: a prompt comes into force with a chunk; use {low} or {low + chunk}"
            )
        out.append((at, prompt.strip()))
    if out != sorted(out) or len({f for f, _ in out}) < len(out):
        raise UsageError("switches must be in rising order of frames")
    return out


def outputs(config: GenerateConfig, count: int) -> list[Path]:
    """Where each video goes."""
    out = Path(config.out)
    if config.format not in ("mp4", "gif", "png"):
        raise UsageError(f"format={config.format}: use mp4, gif or png")
    if out.suffix:
        if out.suffix not in (".mp4", ".gif", ".png"):
            raise UsageError(f"out={config.out}: the suffix must be .mp4, .gif or .png, or none for a folder")
        if count > 1:
            raise UsageError(
                f"out={config.out} is one file, but there are {count} prompts; give a folder, e.g. out=videos"
            )
        return [out]
    return [out / f"{i:04d}.{config.format}" for i in range(count)]
