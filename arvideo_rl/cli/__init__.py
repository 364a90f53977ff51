"""The command line: it only parses and calls."""

from arvideo_rl.cli.main import main

__all__ = ["main"]
