"""``arvideo audit``: try to fool rewards, and say which of it worked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

if TYPE_CHECKING:
    from arvideo_rl.scoring.audit import Job
    from rewards.audit import Audit

MEMORY_KEYS = "batch, clips, frames or size"


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.scoring.audit import AuditConfig

    return f"""arvideo audit [FILE|FOLDER|GLOB|MANIFEST ...] [config.yaml] [key=value ...]

Scores clips clean and spoiled (frozen, shuffled, melted, with another clip's prompt ...) or changed without harm
(resized, mirrored ...), and says for each change whether the reward falls, stays, or rises, which is what a policy
would find. A reward may declare what it notices and withstands, and then passes or fails. Without files the clips are
the world's. Writes a page with the clips, and the numbers as .csv and .json. Examples:

  arvideo audit
  arvideo audit videos/ reward=inverse_dynamics,naive_colour prompt='a red ball rests' actions='forward*17'
  arvideo audit videos=rooms size=96 frames=12 reward=epipolar fail=true
  arvideo audit videos=tiny reward=all

keys and defaults
{keys(AuditConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Audit, show, write; 1 when nothing could be measured, or with fail=true a reward fails its own claims."""
    from rich.progress import Progress

    from arvideo_rl.progress import hidden
    from arvideo_rl.report.audit import page
    from arvideo_rl.scoring import audit
    from arvideo_rl.scoring.audit_tables import write

    recipes = [w for w in words if w.lower().endswith((".yaml", ".yml"))]
    if len(recipes) > 1:
        raise UsageError(f"audit takes one YAML file, not {' and '.join(recipes)}")
    config = load(audit.AuditConfig, recipes[0] if recipes else None, items)
    job = audit.prepare(config, [w for w in words if w not in recipes])
    if "--dry-run" in flags:
        print(f"would audit {', '.join(job.rewards)} on {len(job.clips.names)} clips in {len(job.changes)} changes")
        return 0
    with Progress(disable=hidden(), transient=True) as bar:
        task = bar.add_task("auditing", total=job.steps)
        audits = audit.run(job, lambda: bar.advance(task))
    for one in audits:
        show(job, one)
    for note in job.notes:
        print(note)
    print("wrote " + ", ".join(map(str, write(job, audits, page(job, audits)))))
    measured = any(f.pairs for one in audits for f in one.findings)
    return 1 if not measured or (config.fail and any(one.failures or one.untested for one in audits)) else 0


def show(job: Job, one: Audit) -> None:
    """One reward's table and what it comes to."""
    from rich.table import Table

    from arvideo_rl.progress import console
    from arvideo_rl.scoring.audit_tables import number, span, summary

    table = Table("change", "claim", "pairs", "clean", "changed", "clean wins", "AUROC", "moved", "verdict",
                  title=f"{one.reward} on {len(job.clips.names)} clips")  # fmt: skip
    for f in one.findings:
        lost = f" ({f.unmeasurable} no value)" if f.unmeasurable else ""
        numbers = (number(f.clean), f"{number(f.changed)}{lost}", number(f.win_rate[0], ".2f"), span(f.auroc))
        verdict = f.verdict + (" FAILS" if f.passed is False else "")
        table.add_row(f.change, f.claim, str(f.pairs), *numbers, number(f.moved, ".2f"), verdict)
    console().print(table)
    for line in summary(one):
        print(f"{one.reward}: {line}")
