"""arvideo rewards calibrate: measure a reward's constants on good clips."""

from __future__ import annotations

import shlex

from rich.table import Table

from arvideo_rl.config import load
from arvideo_rl.progress import console


def calibrate(name: str, words: list[str], items: list[str], dry: bool) -> None:
    """Measure constants on good clips, write them, and say what they are."""
    from arvideo_rl.scoring import calibrate as measuring
    from rewards.four_d.calibration import BY_HAND

    config = load(measuring.CalibrateConfig, None, items)
    if dry:
        _, tasks = measuring.prepare(config, name, words)
        if config.generator:
            measuring.opened(config)
        made = f"{config.clips} clips of {config.generator or 'the world'}"
        what = made if tasks is None else f"{len(tasks)} files"
        print(f"would measure {what} and write {config.out}")
        return
    command = shlex.join(["arvideo", "rewards", "calibrate", name, *words, *items])
    found, seen = measuring.run(config, name, words, command)
    table = Table("measured", "5 %", "median", "95 %", "mean")
    for key, numbers in found.measured.items():
        if isinstance(numbers, dict):
            table.add_row(key, *(f"{numbers[k]:.4g}" for k in ("q05", "median", "q95", "mean")))
    console().print(table)
    low, high = found.measured["m_nat_95"]
    others = ", ".join(f"{k} {getattr(found, k):.4g}" for k in BY_HAND if k != "m_nat")
    print(f"m_nat {found.m_nat:.4g} (95 % {low:.4g} to {high:.4g}), {others}")
    for reason, count in seen.bad.items():
        print(f"not measured: {count} {reason}")
    if said := measuring.shaky(seen):
        print(said)
    if config.real:
        for part, (ours, real) in measuring.beside(config, name, seen).items():
            print(f"{part:<8} yours {ours:.3f}, real {real:.3f}" + ("" if ours < real else "; no room to improve"))
    print(f"wrote {config.out}")
