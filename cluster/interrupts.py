"""SIGINT and SIGTERM as a flag that the job looks at between steps."""

from __future__ import annotations

import os
import signal
from types import FrameType

from .errors import ExitCode, Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Catches the signals while installed. The first asks the job to stop; the second ends the process at
    once.

    A flag and not an exception: an exception out of a signal handler can be swallowed by whatever code it
    lands in.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._previous: dict[int, object] = {}

    def install(self) -> None:
        """Take the signals over; again after anything that takes them too, as starting Ray does."""
        for number in SIGNALS:
            previous = signal.signal(number, self._receive)
            self._previous.setdefault(number, previous)

    def restore(self) -> None:
        """Give the signals back."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # type: ignore[arg-type]
        self._previous.clear()

    def check(self) -> None:
        """Raises: Interrupted if a signal came."""
        if self._received is not None:
            name = signal.Signals(self._received).name
            raise Interrupted(f"{name} received: what was scored is kept: run again with --resume")

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self._received is not None:
            os._exit(ExitCode.INTERRUPTED)
        self._received = number
