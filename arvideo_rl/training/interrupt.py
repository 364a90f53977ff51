"""Ctrl-C and SIGTERM: a training loop ends its iteration, saves and says how to go on; a second one stops at once.

Outside a loop there is nothing to save, so the first signal already stops.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

SAME = 1.0  # seconds in which a repeated signal counts as the same: torchrun passes on what the terminal sent already


class Interrupted(KeyboardInterrupt):
    """A run was told to stop; the message says how to continue it, ``code`` is the exit code (128 + signal)."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


class Alarmed(KeyboardInterrupt):
    """A run was stopped by its own alarm, after saving; exit code 3."""

    code = 3

    def __init__(self, folder: Path, iteration: int, best: bool) -> None:
        before = f"the best checkpoint before it is {folder}@best; " if best else ""
        super().__init__(
            f"stopped by the alarm (alarm=stop); saved after iteration {iteration}; {before}"
            f"to go on in spite of it: arvideo align {folder / 'config.yaml'} alarm=warn"
        )


class Stop:
    """The handler of both signals. Use as a context around a whole run; ``how`` is the command that
    continues it."""

    def __init__(self, how: str) -> None:
        self.how = how
        self._number, self._at, self._wait = 0, 0.0, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals nowhere else
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) != signal.SIG_IGN:  # a shell tells its background jobs to ignore Ctrl-C
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def later(self) -> Iterator[None]:
        """Scope of a loop that asks :meth:`asked` after every iteration."""
        self._wait = True
        try:
            yield
        finally:
            self._wait = False
        if self._number:  # came after the loop last asked
            raise self.interrupted("everything is saved")

    def asked(self, accelerator: Accelerator | None = None) -> bool:
        """Whether to stop now; the same on every process, so none waits for one that has left."""
        if accelerator is not None and accelerator.num_processes > 1:
            mine = torch.tensor([self._number], device=accelerator.device)
            self._number = int(accelerator.gather(mine).max())
            self._at = self._at or time.monotonic() * (self._number > 0)
        return self._number > 0

    def interrupted(self, saved: str) -> Interrupted:
        """What to raise, with one line for the user."""
        return Interrupted(f"interrupted; {saved}; continue with: {self.how}", self._number)

    def _handle(self, number: int, _: object) -> None:
        now = time.monotonic()
        if self._number and now - self._at < SAME:
            return
        if self._number or not self._wait:
            self._number = number
            raise self.interrupted("nothing new was saved")
        self._number, self._at = number, now
        # not print, which may be under way
        os.write(2, b"arvideo: stopping after this iteration or step; once more stops at once\n")
