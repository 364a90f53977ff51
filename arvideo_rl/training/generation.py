"""Stream prompts to video files: everything that can be refused is refused first, then one video after the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from arvideo_rl import media
from arvideo_rl.config import SEEDS, ConfigError, check_choice, check_ranges
from arvideo_rl.generators.attention import choose
from arvideo_rl.generators.bundle import Generator
from arvideo_rl.generators.transformer import CausalWan
from arvideo_rl.outputs import check_file, check_folder
from arvideo_rl.progress import hidden
from arvideo_rl.training import searching
from arvideo_rl.training.aligned import load_any
from arvideo_rl.training.continuation import read_start
from arvideo_rl.training.prompts import Prompts, list_actions, parse_actions, read_prompts
from arvideo_rl.training.rundir import write_json
from arvideo_rl.training.searching import SearchConfig
from samplers.randomness import Key
from samplers.stream import draw_from


@dataclass
class GenerateConfig:
    """What ``arvideo generate`` reads."""

    generator: str = "tiny"  # a shipped name, a generator folder, a run, RUN@best or RUN@STEP
    prompt: str = ""  # one prompt; or give prompts=FILE
    prompts: str = ""  # .txt with a prompt a line, or .jsonl with {"prompt", "actions"} a line
    actions: str = ""  # for prompt=, e.g. 'turn left*6, forward*9'; frame 0 has none
    start: str = ""  # an image, a video or a folder of images to continue; frames= counts them in
    switch: str = ""  # 'FRAME: new prompt'; several separated by ';'
    frames: int | None = None  # default: what the actions need, at least 18; or give seconds=
    seconds: float | None = None  # how long, at the generator's frame rate
    seed: int = 0
    out: str = "video.mp4"  # .mp4, .gif or .png (contact sheet); with several prompts a folder
    format: str | None = None  # of the files in a folder: mp4 (default), gif or png; a single file's name says it
    scale: int = 8  # every pixel becomes scale x scale
    attention: str = "native"  # kernel: native, math, cudnn, flex, flash, flash3, sage, xformers (arvideo doctor)
    search: SearchConfig = field(default_factory=SearchConfig)


@dataclass(frozen=True)
class Job:
    """A request that can be carried out: loaded, checked, nothing written yet."""

    config: GenerateConfig
    generator: Generator
    model: CausalWan
    prompts: Prompts
    frames: int
    switches: list[tuple[int, str]]
    targets: list[Path]
    given: Tensor | None  # clean latents [1, F, C, h, w] to continue
    notes: list[str]  # what was loaded, and what to know before watching
    search: searching.Search | None = None

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """Bounds of the chunks that are generated."""
        past = self.given.shape[1] if self.given is not None else 0
        return [c for c in self.generator.streaming.attention_window().chunks(self.frames) if c[0] >= past]


def prepare(config: GenerateConfig) -> Job:
    """Load and check; ConfigError or ValueError for what cannot be generated or written. Writes nothing."""
    check_ranges(config, {"seed": SEEDS, "frames": "[1, inf)", "seconds": "(0, 1e6]", "scale": "[1, 64]"})
    if bool(config.prompt) == bool(config.prompts):
        raise ConfigError("give exactly one of prompt='...' and prompts=FILE")
    if config.frames is not None and config.seconds is not None:
        raise ConfigError("give frames= or seconds=, not both")
    if config.prompts and config.actions:
        raise ConfigError("actions= goes with prompt=; in a prompts file each line has its own (.jsonl)")
    count = 1 if config.prompt else len(read_prompts(Path(config.prompts), 1))
    targets = outputs(config, count)
    commands = len(list_actions(config.actions))
    generator, model, loaded = load_any(config.generator)
    kernel = choose(model, config.attention, masked=generator.streaming.past_weight < 1)
    streaming = generator.streaming
    given, told = read_start(Path(config.start), generator) if config.start else (None, "")
    past = given.shape[1] if given is not None else 0
    frames = config.frames or max(streaming.trained_frames, max(past, 1) + commands, past + streaming.chunk)
    if config.seconds is not None:
        frames = frames_for(math.ceil(config.seconds * streaming.fps), generator)
    if frames <= past:
        raise ConfigError(f"{frames} frames are no more than the {past} that start= gives; raise frames= or seconds=")
    room = frames - max(past, 1)  # changes that commands can drive: into every frame but the first or the given ones
    if commands > room:
        raise ConfigError(f"{commands} actions drive {commands} changes, but {frames} frames have {room}")
    if config.prompt:
        acts = [0] * max(past - 1, 0) + parse_actions(config.actions, frames - max(past - 1, 0))
        prompts = Prompts((config.prompt,), torch.tensor([acts]), (0,))
    else:
        prompts = read_prompts(Path(config.prompts), frames)
    switches = parse_switches(config.switch, streaming.chunk, int(streaming.first_alone))
    for at, _ in switches:
        if not max(past, 1) <= at < frames:
            seen = f"frames {past} to {frames - 1} are generated" if past else f"the video has {frames} frames"
            raise ConfigError(f"switch at frame {at}: {seen}; raise frames= or seconds=")
    for text in (*prompts.texts, *(text for _, text in switches)):
        generator.script([text])  # refuses unknown words
    levels = ", ".join(f"{t:.3g}" for t in streaming.levels)
    notes = [f"{loaded}; window {streaming.window}, sink {streaming.sink}, levels {levels}", kernel] + [told] * bool(
        told
    )
    if frames > streaming.trained_frames:
        notes.append(f"{frames} frames go past the {streaming.trained_frames} it was trained on; quality may drift")
    job = Job(config, generator, model, prompts, frames, switches, targets, given, notes)
    search = searching.prepare(config.search, generator, prompts.actions[:, :frames], job.chunks, frames)
    return replace(job, search=search, notes=[*notes, search.note]) if search else job


def run(job: Job) -> Iterator[Path]:
    """Generate and write each video, with a .json beside it that says how it was made, and one with the tree of its
    search if there was any; yields each path when whole."""
    config, generator = job.config, job.generator
    streaming = generator.streaming
    past = job.given.shape[1] if job.given is not None else 0
    takes_actions = generator.transformer.action_embedding is not None
    each = job.search.forwards if job.search else len(job.chunks)
    with Progress(disable=hidden()) as bar:
        task = bar.add_task("searching" if job.search else "streaming", total=each * len(job.prompts))
        for i, path in enumerate(job.targets):
            one, key, tree = job.prompts.take([i]), Key(config.seed, 0, i, 0), None
            script = generator.script(
                list(one.texts), one.actions if takes_actions else None, tuple((f, [p]) for f, p in job.switches)
            )
            draw = draw_from([key], generator.latent_shape, generator.transformer.device)
            context = None if job.given is None else generator.given(job.model, script, job.given, draw)
            parts: Iterable[Tensor]
            if job.search is not None:
                texts = [(0, one.texts[0]), *job.switches]
                latents, tree = searching.run(
                    job.search, generator, job.model, script, texts, one.actions, key, job.frames, context=context,
                    past=job.given, tick=lambda rows: bar.advance(task, rows),
                )  # fmt: skip
                parts = latents.split(streaming.chunk, 1)
            else:
                parts = (
                    chunk.latents
                    for chunk in generator.stream(
                        job.model, script, draw, job.frames, context=context, start=past, trim=True, in_place=True
                    )
                )
            decode = generator.codec.decoder()
            with media.writing(path, streaming.fps, config.scale) as add:
                if job.given is not None:
                    add(decode(job.given)[0])
                for part in parts:
                    add(decode(part)[0])
                    bar.advance(task, 0 if job.search else 1)
            if tree is not None:
                searching.write(path, tree)
            made = {
                "prompt": one.texts[0], "actions": one.actions[0, 1 : job.frames].tolist(), "switch": job.switches,
                "start": config.start, "fps": streaming.fps, "seed": config.seed, "index": i,
                "generator": config.generator,
            }  # fmt: skip
            write_json(path.with_name(path.name + ".json"), made)
            yield path


def frames_for(pixel_frames: int, generator: Generator) -> int:
    """The fewest frames of the generator that make ``pixel_frames``."""
    frames = 1
    while generator.codec.pixel_frames(frames) < pixel_frames:
        frames += 1
    return frames


def parse_switches(text: str, chunk: int, first: int = 0) -> list[tuple[int, str]]:
    """Prompt switches [(frame, prompt), ...]; frames must be positive and begin a chunk. Chunks begin at ``first``, 1
    where the first frame is one of its own, and every ``chunk`` frames from there."""
    out: list[tuple[int, str]] = []
    for part in filter(None, (p.strip() for p in text.split(";"))):
        frame, colon, prompt = (x.strip() for x in part.partition(":"))
        if not colon or not (frame.isascii() and frame.isdigit()) or not prompt:
            raise ConfigError(f"switch {part!r} is not 'FRAME: new prompt'")
        at = int(frame)
        if at == 0 or (at - first) % chunk or at < first:
            low = max(first or chunk, (at - first) // chunk * chunk + first)
            raise ConfigError(
                f"switch at frame {at}: a prompt comes into force with a chunk; use {low} or {low + chunk}"
            )
        out.append((at, prompt))
    if out != sorted(out) or len({f for f, _ in out}) < len(out):
        raise ConfigError("switches must be in rising order of frames")
    return out


def outputs(config: GenerateConfig, count: int) -> list[Path]:
    """Where each video goes; ConfigError when it cannot be written there."""
    out = Path(config.out)
    kinds = tuple(suffix[1:] for suffix in media.WRITES)
    if config.format is not None:
        check_choice("format", config.format, kinds)
    if not out.suffix or out.is_dir():
        check_folder(out)
        return [out / f"{i:04d}.{config.format or 'mp4'}" for i in range(count)]
    check_file(out, suffixes=media.WRITES)
    if config.format is not None and out.suffix.lower() != f".{config.format}":
        raise ConfigError(f"format={config.format} is for a folder, but out={out} is one file; leave one of them out")
    if count > 1:
        raise ConfigError(f"out={out} is one file, but there are {count} prompts; give a folder, e.g. out=videos")
    return [out]
