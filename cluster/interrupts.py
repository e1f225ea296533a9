"""SIGINT and SIGTERM as a flag that the job looks at between steps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import TypeVar

from .errors import ExitCode, Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# One request to stop can come twice: to the whole group from a terminal or `timeout`, and forwarded.
SAME_REQUEST_S = 0.5
POLL_S = 0.1

T = TypeVar("T")


class Interrupts:
    """Catches the signals while installed. The first asks the job to stop; the second ends the process at
    once.

    A flag and not an exception: an exception out of a signal handler can be swallowed by whatever code it
    lands in.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._received_s = 0.0
        self._previous: dict[int, object] = {}

    def install(self) -> None:
        """Take the signals over."""
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

    @contextmanager
    def entered(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Enter a context that takes long to enter, and leave it at the end. Call from the main thread.

        It is entered in a thread, so that a signal need not wait for it: Ray's start takes seconds in calls
        that no signal ends. Ray's own handlers are replaced again as it goes.
        Raises: Interrupted if a signal comes before it is entered; the process must then end.
        """
        value: Future[T] = Future()
        left = threading.Event()

        def enter() -> None:
            try:
                value.set_result(context.__enter__())
            except BaseException as error:
                value.set_exception(error)
            # Ray's processes are told to die with the thread that started them.
            left.wait()

        threading.Thread(target=enter, name="start-pool", daemon=True).start()
        while not value.done():
            self.check()
            wait([value], timeout=POLL_S)
            # Ray's library takes SIGTERM over for the whole process, also from a thread.
            self.install()
        # Once more: the last of it may have come after the last look, or before the first.
        self.install()
        try:
            entered = value.result()
            with ExitStack() as stack:
                stack.push(context)
                yield entered
        finally:
            left.set()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._received is None:
            self._received, self._received_s = number, now_s
        elif now_s - self._received_s > SAME_REQUEST_S:
            os._exit(ExitCode.INTERRUPTED)
