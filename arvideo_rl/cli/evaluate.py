"""``arvideo evaluate``: the held-out measures of one generator, or of two compared."""

from __future__ import annotations

from pathlib import Path

from arvideo_rl.cli.help import keys
from arvideo_rl.cli.main import UsageError
from arvideo_rl.config import load

MEMORY_KEYS = "held_out.batch"


def help_text() -> str:
    """Text of --help."""
    from arvideo_rl.training.evaluation import EvaluateConfig

    return f"""arvideo evaluate [key=value ...]

Generates the held-out prompts under fixed noises and measures the reward and every verifier. Examples:

  arvideo evaluate
  arvideo evaluate generator=runs/quickstart against=tiny
  arvideo evaluate generator=runs/quickstart@best against=runs/quickstart
  arvideo evaluate generator=runs/mix against=tiny reward=run held_out.skip=64
  arvideo evaluate benchmark=streaming generator=runs/quickstart against=tiny out=bench.json

keys and defaults
{keys(EvaluateConfig)}"""


def run(words: list[str], items: list[str], flags: set[str]) -> int:
    """Measure and print."""
    if words:
        raise UsageError(f"evaluate takes only key=value, not {words[0]!r}; e.g. generator={words[0]}")
    from arvideo_rl.progress import console
    from arvideo_rl.training import evaluation
    from arvideo_rl.training.benchmark import markdown
    from arvideo_rl.training.launch import quiet
    from arvideo_rl.training.outcome import sentence, table
    from arvideo_rl.training.rundir import write_json
    from rewards.remote.wire import plain

    quiet()
    config = load(evaluation.EvaluateConfig, None, items)
    job = evaluation.prepare(config)
    for _, (_, _, text) in job.loaded:
        print(text)
    print(job.kernel)
    size = config.held_out
    if "--dry-run" in flags:
        print(f"would generate {size.prompts} prompts x {size.noises} noises x {size.frames} frames for each")
        if config.benchmark:
            s = config.streaming
            print(f"and stream {s.streams} prompts x {s.frames} frames, with a switch at frame {s.switch_at}")
        return 0
    result = evaluation.run(job)
    if config.benchmark:
        print(markdown(result))
    elif config.against:
        console().print(table(result, f"{config.generator} against {config.against}"))
        print(sentence(result))
    else:
        for key, r in result.items():
            name = f"{key} (lower is better)" if key == "frechet" else key
            print(f"{name:<26} {r['value']:8.4f}" + (f" +- {r['se']:.4f}" if "se" in r else ""))
    if config.out:
        write_json(Path(config.out), plain(result))
        print(f"wrote {config.out}")
    return 0
