"""Watch a run from outside: the probe's looks, the alarm, and plain words about what is wrong, once each.

Everything told goes to the console and to events.jsonl at once. The run itself is never changed by it.
"""

from __future__ import annotations

from pathlib import Path

from accelerate.utils import gather_object

from arvideo_rl.config import ConfigError
from arvideo_rl.progress import console
from arvideo_rl.training.alarm import diagnose, flat, parted, sentence, suspects
from arvideo_rl.training.align import Run
from arvideo_rl.training.compare import Measured
from arvideo_rl.training.outcome import samples
from arvideo_rl.training.probe import Look, probe, probe_prompts, trained, values
from arvideo_rl.training.rundir import Events, read_rows

REMEMBERED = 12  # rows that a diagnosis may read
LONG = 20  # iterations; half of a shorter run has seldom gained what so few prompts can show


def check_alarm(folder: Path, config_alarm: str) -> None:
    """ConfigError when the run was stopped by an alarm and is only to go on."""
    rung = [e for e in read_rows(folder / "events.jsonl") if e["kind"] == "alarm"]
    if rung and config_alarm == "stop":
        raise ConfigError(
            f"the alarm of {folder} has rung after iteration {rung[-1]['iteration']} ({folder / 'events.jsonl'}); "
            f"to go on in spite of it: arvideo align {folder / 'config.yaml'} alarm=warn"
        )


class Watch:
    """What is remembered between looks. Every process holds one; the main one writes."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, config = run, run.config
        self.every = config.probe.every
        self.prompts = probe_prompts(run) if self.every else None
        self.folder, self.start = folder, {}
        if self.prompts:
            found = probe(run, self.prompts, "start")
            self.start = values(found)
            if run.iteration == 0:
                self._sample(found)
        done = [r for r in read_rows(folder / "metrics.jsonl") if r["iteration"] < run.iteration]
        self.rows = done[-REMEMBERED:]
        self.before = next((r for r in reversed(done) if any(k.startswith("probe/") for k in r)), None)
        self.events = Events(folder, run.iteration) if run.accelerator.is_main_process else None

    def due(self) -> bool:
        """Whether this iteration ends with a look: every few, and wherever a checkpoint is due."""
        config, i = self.run.config, self.run.iteration
        return bool(self.prompts) and (
            i % self.every == 0 or i % config.checkpoint_every == 0 or i == config.iterations
        )

    def see(self, metrics: dict[str, float]) -> tuple[float | None, str | None]:
        """After an iteration with its ``metrics``, to which a look adds its own. Returns the score of the policy
        (the trained reward on the probe, None where there was no look or a verifier is down) and the alarm's text if
        it rings."""
        config = self.run.config
        score: float | None = None
        rang: str | None = None
        self.rows = [*self.rows, {"iteration": self.run.iteration - 1, **metrics}][-REMEMBERED:]
        for about, words in diagnose(self.rows):
            self._note(about, words)
        if not self.due():
            return score, rang
        assert self.prompts is not None
        measured = probe(self.run, self.prompts, "current")
        if self.run.iteration % config.checkpoint_every == 0 or self.run.iteration == config.iterations:
            self._sample(measured)
        look = Look(self.start, values(measured))
        found = look.metrics()
        changes = trained(self.run, look.now) - trained(self.run, look.before)
        gain, size = changes.nanmean().item(), config.held_out
        metrics |= found
        self.rows[-1] |= found
        if not suspects(found, size.margins, size.margin):
            score = trained(self.run, look.now).nanmean().item()
        fell = parted(self.before, found, gain, size.margins, size.margin)
        known = {n for e in self.events.told if e["kind"] == "alarm" for n in e["verifiers"]} if self.events else set()
        if config.alarm != "off" and set(fell) - known and self.events:
            rang = sentence(fell, found, gain)
            self._tell("alarm", rang, verifiers=fell)
        first_half = self.run.iteration - self.every < config.iterations / 2 <= self.run.iteration
        if first_half and config.iterations >= LONG and (said := flat(changes, config.prompts_per_step, self.rows)):
            self._note("flat", said)
        self.before = found
        if self.run.accelerator.num_processes > 1:
            rang = gather_object([rang])[0]
        return score, rang

    def _sample(self, measured: Measured) -> None:
        if self.run.accelerator.is_main_process and self.prompts:
            moment = self.folder / "samples" / f"iteration-{self.run.iteration:06d}"
            samples(moment, measured, self.prompts, self.run.generator.streaming.fps)

    def _note(self, about: str, words: str) -> None:
        if self.events and not any(e.get("about") == about for e in self.events.told):
            self._tell("note", words, about=about)

    def _tell(self, kind: str, text: str, **more: object) -> None:
        assert self.events is not None
        self.events.tell(self.run.iteration, kind, text, **more)
        console().print(f"{kind.upper()} after iteration {self.run.iteration}: {text}", soft_wrap=True, highlight=False,
                        markup=False)  # fmt: skip

    def alarms(self) -> list[str]:
        """Everything the alarm has said in this run."""
        return [e["text"] for e in self.events.told if e["kind"] == "alarm"] if self.events else []

    def close(self) -> None:
        """Close the file of events."""
        if self.events:
            self.events.close()
