"""``arvideo rewards``: what there is, what one of them is, what they lack; train those of the embedded world;
measure the constants of the 4D reward."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

MEMORY_KEYS = "batch, smooth, joystick or scenes"
WAYS = (
    "list, info NAME [args.KEY=VALUE], doctor [NAME], train-idm, train-text-video or train-geometry [key=value ...], "
    "or calibrate NAME VIDEOS|world|generator=NAME [key=value ...]"
)


@dataclass
class InfoConfig:
    """What ``arvideo rewards info`` reads."""

    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.scoring.calibrate import CalibrateConfig
    from arvideo_rl.training.geometry import GeometryConfig
    from arvideo_rl.training.idm import IdmConfig
    from arvideo_rl.training.text_video import TextVideoConfig

    return f"""arvideo rewards list
arvideo rewards info NAME [args.KEY=VALUE ...]
arvideo rewards doctor [NAME]
arvideo rewards train-idm [key=value ...]
arvideo rewards train-text-video [key=value ...]
arvideo rewards train-geometry [key=value ...]
arvideo rewards calibrate NAME FILE|FOLDER|GLOB|MANIFEST ...|world|generator=NAME [key=value ...]

list shows every reward: what it gives, what it needs, what it would download, its licence and formula. info shows all
of one, also of your own (module:attribute): arguments, range, cost, what maximises it wrongly, its page, its weights
and how to get those that are missing. doctor says which modules or weights are missing or damaged, with the command
that mends each, and exits 1 if a reward cannot run that should: weights of published preference models are fetched by
those who want them. doctor NAME looks at one, and reads its weights whatever their size. train-idm, train-text-video
and train-geometry render the world and train the inverse-dynamics model (a minute or two on two CPU cores), the
text-video model (about ten), or the network of the geometric rewards (about seven, on one core); the shipped ones say
how they were made in rewards/weights/*.json. train-idm data=VIDEOS trains on
your own videos with their actions instead, names, numbers or VPT's recordings, and says how far the result can be
trusted (docs/rewards/inverse_dynamics.md).

calibrate measures, on videos that are known to be good, the constants by which a reward judges (four_d: how fast, how
evenly and how rigidly things move, and what pictures look like), and writes them with the files they came from, the
command and the date. Give it 64 clips or more that the generator made before it is aligned, of the length, size and
rate at which it will be judged; real= sets real videos beside them. world, instead of files, stands for clips of the
embedded world, generator=NAME for clips that a generator makes now, as an alignment run sees
them. The reward takes the file as args.calibration, its other args unchanged; clips of another size or rate are
refused:

  arvideo rewards calibrate four_d base/ out=calibration.json
  arvideo rewards calibrate four_d base/ real=camera/ short_side=448 out=calibration.json
  arvideo rewards calibrate four_d world clips=64 size=96 out=world.json
  arvideo rewards calibrate four_d generator=tiny frames=12 args.backend=network out=tiny.json
  arvideo score new/ reward=four_d args.calibration=calibration.json

keys of train-idm and defaults
{keys(IdmConfig)}

keys of train-text-video and defaults
{keys(TextVideoConfig)}

keys of train-geometry and defaults
{keys(GeometryConfig)}

keys of calibrate and defaults
{keys(CalibrateConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Dispatch."""
    if words == ["list"] and not items:
        show_list()
    elif words[:1] == ["info"] and len(words) == 2:
        show_info(words[1], load(InfoConfig, None, items).args)
    elif words[:1] == ["doctor"] and len(words) <= 2 and not items:
        return doctor(*words[1:])
    elif len(words) == 1 and words[0] in ("train-idm", "train-text-video", "train-geometry"):
        train(words[0].removeprefix("train-"), items, "--dry-run" in flags)
    elif words[:1] == ["calibrate"] and len(words) + any(i.startswith("generator=") for i in items) > 2:
        from arvideo_rl.cli.calibrate import calibrate

        calibrate(words[1], words[2:], items, "--dry-run" in flags)
    else:
        raise UsageError(f"rewards takes {WAYS}; 'arvideo rewards list' shows the names")
    return 0


def show_list() -> None:
    """One row a shipped reward."""
    from rich.table import Table

    from arvideo_rl.progress import console
    from rewards import registry
    from rewards.describe import describe
    from rewards.geometry.backends import BACKENDS

    table = Table("reward", "one a", "range", "needs", "download", "licence", "formula")
    for column in table.columns[:5]:
        column.no_wrap = True
    for name in registry.available():
        about = describe(name)
        table.add_row(name, _text(about["granularity"]), _range(about["range"]), _needs(about),
                      _gigabytes(about["download"]), _text(about["licence"]), about["formula"])  # fmt: skip
    console().print(table)
    print(f"geometry backends: {', '.join(BACKENDS)} (args.backend of the rewards that take one)")


def show_info(name: str, args: dict[str, Any]) -> None:
    """All that is known of one reward."""
    from rewards import registry
    from rewards.describe import describe, lacking

    about = describe(name, **args)
    settings = {k: "(required)" if v is registry.REQUIRED else v for k, v in about["arguments"].items()} | args
    rows = {
        "formula": about["formula"], "range": f"{_range(about['range'])}, higher is better",
        "gives": f"one number a {_text(about['granularity'])}", "needs": _needs(about),
        "arguments": ", ".join(f"{k}={_short(v)}" for k, v in settings.items()) or "none",
        "licence": _text(about["licence"]), "cost": about["cost"], "fooled by": _text(about["hacked_by"]),
        "weights": "; ".join(f"{p}, {_size(n)}" for p, n in about["files"].items()) or "none",
        "download": _gigabytes(about["download"]),
    }  # fmt: skip
    if name in registry.available() and not args and (missing := lacking(name, read=False)):
        rows["to get it"] = "; ".join(how for _, how in missing)
    print(name)
    for key, value in {**rows, **({"page": about["page"]} if about["page"] else {})}.items():
        print(f"  {key:<13} {value}")


def _text(value: str | None) -> str:
    return "varies" if value is None else value


def _short(value: Any) -> str:
    line = " ".join(str(value).split())
    return line if len(line) <= 80 else f"{line[:77]}..."


def _needs(about: dict[str, Any]) -> str:
    return _text(None if about["needs"] is None else ", ".join(about["needs"]) or "nothing")


def _range(limits: list[float | None] | None) -> str:
    if limits is None:
        return _text(None)
    low, high = ("unbounded" if x is None else f"{x:.3g}" for x in limits)
    return "unbounded" if low == high == "unbounded" else f"{low} to {high}"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count else "none"


def _size(count: int | None) -> str:
    return "MISSING" if count is None else f"{count / 2**20:.2f} MiB"


def doctor(name: str = "") -> int:
    """What each shipped reward lacks, or the reward ``name``; 1 when one that is asked for or should run cannot."""
    from rewards import registry
    from rewards.describe import backend_lacks, declared, lacking, optional, required
    from rewards.geometry.backends import BACKENDS, backend

    if name and name not in registry.available():
        raise UsageError(f"there is no shipped reward {name!r}: {', '.join(registry.available())}")
    bad = 0
    for one in [name] if name else registry.available():
        spare = optional(one) and not name
        found, asked = lacking(one, read=not spare), required(one)
        bad += bool(found) and not spare
        state = f"ready, given {', '.join(asked)}" if asked else "ready"
        if found:
            state = "not here (optional)" if spare else "CANNOT RUN"
            size = declared(registry.resolve(one))["download"]
            state += f", {_gigabytes(size)} to fetch" if size else ""
        print(f"{one:<18} {state}")
        for what, command in found:
            print(f"  {what}: {command}")
    for one in BACKENDS if not name else ():
        found, spare = backend_lacks(one), getattr(backend(one), "optional", False)
        bad += bool(found) and not spare
        print(f"{f'geometry {one}':<18} " + (("not here (optional)" if spare else "CANNOT RUN") if found else "ready"))
        for what, command in found:
            print(f"  {what}: {command}")
    if not name:
        missing = [m for m in ("starlette", "uvicorn") if importlib.util.find_spec(m) is None]
        state = f"without {', '.join(missing)} (optional): pip install 'arvideo-rl[serve]'" if missing else "ready"
        print(f"{'(serving them)':<18} {state}")
    return 1 if bad else 0


def train(model: str, items: list[str], dry: bool) -> None:
    """Train one of the networks of the embedded world and say how good it is on held-out clips."""
    from arvideo_rl.training import geometry, idm, text_video

    jobs: dict[str, tuple[str, Any, Any, Any]] = {
        "idm": ("the inverse-dynamics model", idm.IdmConfig, idm.run, _said_of_idm),
        "text-video": ("the text-video model", text_video.TextVideoConfig, text_video.run, _said_of_text_video),
        "geometry": ("depth and camera motion", geometry.GeometryConfig, geometry.run, _said_of_geometry),
    }
    what, form, run, said = jobs[model]
    config: Any = load(form, None, items)
    config.check()
    if getattr(config, "data", ""):
        train_own(config, dry)
    elif dry:
        print(f"would train {what} for {config.steps} steps and write {config.out}")
    else:
        print(f"{said(run(config))}; wrote {config.out}")


def train_own(config: Any, dry: bool) -> None:
    """Train the inverse-dynamics model on somebody's own videos; say how far it can be trusted."""
    from arvideo_rl.progress import console
    from arvideo_rl.scoring import own_idm

    if dry:
        data = own_idm.read(config)
        changes = sum(len(f.said) for f in data.films)
        print(f"would train on {len(data.films)} videos of {changes} changes, {data.kind} actions: "
              f"{', '.join(data.labels)}")  # fmt: skip
        print(f"{config.steps} steps for each of {config.members} networks, then write {config.out}")
        for note in data.notes:
            print(f"warning: {note}")
        return
    report = own_idm.run(config)
    for line in own_idm.said(report):
        print(line)
    if table := own_idm.confusion(report):
        console().print(table)
    print(f"wrote {config.out}")


def _said_of_idm(report: dict[str, Any]) -> str:
    return f"held-out accuracy {report['accuracy']:.4f}, balanced {report['balanced_accuracy']:.4f}"


def _said_of_text_video(report: dict[str, Any]) -> str:
    from arvideo_rl.training.text_video import ANOTHER

    measured = ", ".join(f"{style} {parts[ANOTHER]['auroc']:.4f}" for style, parts in report["auroc"].items())
    return f"held-out AUROC against another scene's caption: {measured}"


def _said_of_geometry(report: dict[str, Any]) -> str:
    lines = []
    for style, found in report["held_out"].items():
        parts = ", ".join(f"{k.replace('_', ' ')} {v} ({found[k + '_baseline']} by a trivial answer)"
                          for k, v in found.items() if k + "_baseline" in found)  # fmt: skip
        lines.append(f"held-out {style}: {parts}")
    return "\n".join(lines)
