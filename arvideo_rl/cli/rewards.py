"""``arvideo rewards``: list what there is; train the inverse-dynamics reward."""

from __future__ import annotations

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

MEMORY_KEYS = "batch, smooth or joystick"


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.idm import IdmConfig

    return f"""arvideo rewards list
arvideo rewards train-idm [key=value ...]

list shows every reward with what it needs, its licence and what maximises it wrongly. train-idm renders the world and
trains the inverse-dynamics model (a minute or two on two CPU cores); the shipped ones say how they were made in
rewards/weights/*.json.

keys of train-idm and defaults
{keys(IdmConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Dispatch."""
    if words == ["list"] and not items:
        from rich.table import Table

        from arvideo_rl.progress import console
        from rewards import registry

        table = Table("reward", "needs", "range", "licence", "maximised wrongly by")
        for name in registry.available():
            r = registry.build(name)
            low, high = r.value_range
            table.add_row(name, ", ".join(sorted(r.needs)), f"{low:.3g} .. {high:.3g}", r.licence, r.hacked_by)
        console().print(table)
        return 0
    if words == ["train-idm"]:
        from arvideo_rl.training import idm

        config = load(idm.IdmConfig, None, items)
        config.check()
        if "--dry-run" in flags:
            print(f"would train the inverse-dynamics model for {config.steps} steps and write {config.out}")
            return 0
        report = idm.run(config)
        measured = f"accuracy {report['accuracy']:.4f}, balanced {report['balanced_accuracy']:.4f}"
        print(f"held-out {measured}; wrote {config.out}")
        return 0
    raise UsageError("use 'arvideo rewards list' or 'arvideo rewards train-idm [key=value ...]'")
