"""``arvideo rewards``: what there is, what one of them is, what they lack; train those of the embedded world."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

MEMORY_KEYS = "batch, smooth or joystick"
WAYS = "list, info NAME [args.KEY=VALUE], doctor, train-idm or train-text-video [key=value ...]"


@dataclass
class InfoConfig:
    """What ``arvideo rewards info`` reads."""

    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reward


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.idm import IdmConfig
    from arvideo_rl.training.text_video import TextVideoConfig

    return f"""arvideo rewards list
arvideo rewards info NAME [args.KEY=VALUE ...]
arvideo rewards doctor
arvideo rewards train-idm [key=value ...]
arvideo rewards train-text-video [key=value ...]

list shows every reward: what it gives, what it needs, its licence and formula. info shows all of one, also of your own
(module:attribute): arguments, range, cost, what maximises it wrongly, its page and weights. doctor says which modules
or weights are missing or damaged, with the command that mends each, and exits 1 if a reward cannot run. train-idm and
train-text-video render the world and train the inverse-dynamics model (a minute or two on two CPU cores) or the
text-video model (about ten); the shipped ones say how they were made in rewards/weights/*.json.

keys of train-idm and defaults
{keys(IdmConfig)}

keys of train-text-video and defaults
{keys(TextVideoConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Dispatch."""
    if words == ["list"] and not items:
        show_list()
    elif words[:1] == ["info"] and len(words) == 2:
        show_info(words[1], load(InfoConfig, None, items).args)
    elif words == ["doctor"] and not items:
        return doctor()
    elif words == ["train-idm"]:
        train_idm(items, "--dry-run" in flags)
    elif words == ["train-text-video"]:
        train_text_video(items, "--dry-run" in flags)
    else:
        raise UsageError(f"rewards takes {WAYS}; 'arvideo rewards list' shows the names")
    return 0


def show_list() -> None:
    """One row a shipped reward."""
    from rich.table import Table

    from arvideo_rl.progress import console
    from rewards import registry
    from rewards.describe import describe

    table = Table("reward", "one a", "range", "needs", "licence", "formula")
    for column in table.columns[:4]:
        column.no_wrap = True
    for name in registry.available():
        about = describe(name)
        table.add_row(name, _text(about["granularity"]), _range(about["range"]), _needs(about), _text(about["licence"]),
                      about["formula"])  # fmt: skip
    console().print(table)


def show_info(name: str, args: dict[str, Any]) -> None:
    """All that is known of one reward."""
    from rewards import registry
    from rewards.describe import describe

    about = describe(name, **args)
    settings = {k: "(required)" if v is registry.REQUIRED else v for k, v in about["arguments"].items()} | args
    rows = {
        "formula": about["formula"], "range": f"{_range(about['range'])}, higher is better",
        "gives": f"one number a {_text(about['granularity'])}", "needs": _needs(about),
        "arguments": ", ".join(f"{k}={v}" for k, v in settings.items()) or "none",
        "licence": _text(about["licence"]), "cost": about["cost"], "fooled by": _text(about["hacked_by"]),
        "weights": "; ".join(f"{p}, {_size(n)}" for p, n in about["files"].items()) or "none",
    }  # fmt: skip
    print(name)
    for key, value in {**rows, **({"page": about["page"]} if about["page"] else {})}.items():
        print(f"  {key:<13} {value}")


def _text(value: str | None) -> str:
    return "varies" if value is None else value


def _needs(about: dict[str, Any]) -> str:
    return _text(None if about["needs"] is None else ", ".join(about["needs"]) or "nothing")


def _range(limits: list[float | None] | None) -> str:
    if limits is None:
        return _text(None)
    low, high = ("unbounded" if x is None else f"{x:.3g}" for x in limits)
    return "unbounded" if low == high == "unbounded" else f"{low} to {high}"


def _size(count: int | None) -> str:
    return "MISSING" if count is None else f"{count / 2**20:.2f} MiB"


def doctor() -> int:
    """What each shipped reward lacks; 1 when one cannot run."""
    from rewards import registry
    from rewards.describe import lacking

    bad = 0
    for name in registry.available():
        found = lacking(name)
        bad += bool(found)
        print(f"{name:<18} " + ("ready" if not found else "CANNOT RUN"))
        for what, command in found:
            print(f"  {what}: {command}")
    missing = [m for m in ("starlette", "uvicorn") if importlib.util.find_spec(m) is None]
    state = f"without {', '.join(missing)} (optional): pip install 'arvideo-rl[serve]'" if missing else "ready"
    print(f"{'(serving them)':<18} {state}")
    return 1 if bad else 0


def train_idm(items: list[str], dry: bool) -> None:
    """Train the inverse-dynamics model."""
    from arvideo_rl.training import idm

    config = load(idm.IdmConfig, None, items)
    config.check()
    if dry:
        print(f"would train the inverse-dynamics model for {config.steps} steps and write {config.out}")
        return
    report = idm.run(config)
    measured = f"accuracy {report['accuracy']:.4f}, balanced {report['balanced_accuracy']:.4f}"
    print(f"held-out {measured}; wrote {config.out}")


def train_text_video(items: list[str], dry: bool) -> None:
    """Train the text-video model."""
    from arvideo_rl.training import text_video

    config = load(text_video.TextVideoConfig, None, items)
    config.check()
    if dry:
        print(f"would train the text-video model for {config.steps} steps and write {config.out}")
        return
    found = text_video.run(config)["auroc"]
    measured = ", ".join(f"{style} {parts[text_video.ANOTHER]['auroc']:.4f}" for style, parts in found.items())
    print(f"held-out AUROC against another scene's caption: {measured}; wrote {config.out}")
