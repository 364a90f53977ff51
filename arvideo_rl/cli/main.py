"""Parse the command line, run one command, turn errors a user can mend into one line.

One style: a YAML file or preset name, then ``key=value``. Only --help, --dry-run, --debug and --version are flags.
Commands import what they need when they run, so that ``--help`` and ``doctor`` answer at once.
"""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
from typing import NoReturn

from arvideo_rl.cli.errors import explain

COMMANDS = {  # name -> (module, one line)
    "align": ("arvideo_rl.cli.align", "align a generator with rewards, from a YAML file"),
    "distill": ("arvideo_rl.cli.distill", "make the tiny generator from the embedded world"),
    "generate": ("arvideo_rl.cli.generate", "stream videos from prompts to mp4, gif or png"),
    "score": ("arvideo_rl.cli.score", "score video files with a reward"),
    "rewards": ("arvideo_rl.cli.rewards", "list, explain and check rewards; train those of the embedded world"),
    "audit": ("arvideo_rl.cli.audit", "try to fool rewards: do they fall where they should?"),
    "serve": ("arvideo_rl.cli.serve", "serve rewards over HTTP"),
    "evaluate": ("arvideo_rl.cli.evaluate", "measure a generator or a run on the held-out prompts"),
    "status": ("arvideo_rl.cli.status", "say how far runs are and how to continue them"),
    "report": ("arvideo_rl.cli.report", "write one HTML file about runs: curves, videos, comparison"),
    "convert": ("arvideo_rl.cli.convert", "export a trained policy for diffusers or peft, or merged"),
    "doctor": ("arvideo_rl.cli.doctor", "say what is installed and what is missing"),
}
FLAGS = ("--help", "-h", "--dry-run", "--debug", "--version")

USAGE = """arvideo: align, stream and score causal video generators

  arvideo <command> [config.yaml | preset] [key=value ...] [--dry-run] [--debug] [--help]

commands
{commands}

arvideo <command> --help shows a command's keys with their defaults.
--dry-run says what would be done; --debug shows tracebacks; --version prints the version."""


class UsageError(ValueError):
    """The command line itself is wrong; the message is one line."""


def usage() -> str:
    """The text of ``arvideo --help``."""
    return USAGE.format(commands="\n".join(f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()))


def split(args: list[str]) -> tuple[list[str], list[str], set[str]]:
    """(plain words, key=value items, flags); UsageError for an unknown flag."""
    words, items, flags = [], [], set()
    for arg in args:
        if arg.startswith("-"):
            if arg not in FLAGS:
                raise UsageError(_unknown_flag(arg))
            flags.add("--help" if arg == "-h" else arg)
        elif arg.startswith("="):
            raise UsageError(f"{arg!r} stands alone; write key=value without spaces around =")
        elif re.match(r"[\w.-]+=", arg):
            items.append(arg)
        else:
            words.append(arg)
    return words, items, flags


def _unknown_flag(arg: str) -> str:
    key, eq, value = arg.lstrip("-").replace("-", "_").partition("=")
    near = difflib.get_close_matches(arg, FLAGS, 1, 0.8)
    hint = f"did you mean {near[0]}?" if near and not eq else f"a setting is written {key}={value if eq else 'VALUE'}"
    return f"unknown flag {arg}; {hint} (flags are {', '.join(FLAGS)})"


def main(argv: list[str] | None = None) -> NoReturn:
    """Entry point; exits 0, 1 (a value or a file that will not do), 2 (a command line that cannot be read), 3 (a run
    stopped by its own alarm), 130 or 143 (interrupted)."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not {"", os.getcwd()} & set(sys.path):  # module:attribute may name a file beside the user; last, to hide nothing
        sys.path.append(os.getcwd())
    try:
        sys.exit(_run(args))
    except UsageError as error:
        _fail(f"{error}", 2)
    except KeyboardInterrupt as error:  # a training run says how to continue it and which signal it was
        _fail(str(error) or "interrupted; align and distill continue when started again", getattr(error, "code", 130))
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except Exception as error:
        if "--debug" in args:
            raise
        command = next((a for a in args if a in COMMANDS), None)
        lower = getattr(sys.modules.get(COMMANDS[command][0]), "MEMORY_KEYS", "") if command else ""
        _fail(explain(error, lower), 1)


def _run(args: list[str]) -> int:
    words, items, flags = split(args)
    if "--version" in flags:
        from importlib.metadata import version

        print(f"arvideo-rl {version('arvideo-rl')}")
        return 0
    if not words:
        print(usage())
        return 0 if "--help" in flags else 2
    name, *rest = words
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {name!r}; {hint}")
    command = importlib.import_module(COMMANDS[name][0])
    if "--help" in flags:
        print(command.help_text())
        return 0
    return command.run(rest, items, flags) or 0


def _fail(message: str, code: int) -> NoReturn:
    print(f"arvideo: {message}", file=sys.stderr)
    sys.exit(code)
