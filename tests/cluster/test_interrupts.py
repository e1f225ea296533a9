"""A signal ends a start that takes long, and what came twice for one request is one request."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import pytest
from tinyloop.cluster.errors import ExitCode, Interrupted
from tinyloop.cluster.interrupts import SIGNALS, Interrupts


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    caught = Interrupts()
    caught.install()
    yield caught
    caught.restore()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_start_that_hangs(interrupts: Interrupts, number: signal.Signals) -> None:
    started, released = threading.Event(), threading.Event()

    @contextmanager
    def hangs() -> Iterator[None]:
        started.set()
        os.kill(os.getpid(), number)
        released.wait(60)
        yield

    with pytest.raises(Interrupted, match=number.name), interrupts.entered(hangs()):
        pytest.fail("it was entered")
    assert started.is_set()
    released.set()


def test_a_context_is_left_once_and_told_of_a_failure(interrupts: Interrupts) -> None:
    seen: list[str] = []

    @contextmanager
    def told() -> Iterator[threading.Thread]:
        try:
            yield threading.current_thread()
        except KeyError:
            seen.append("failed")
            raise
        finally:
            seen.append("left")

    with interrupts.entered(told()) as starter:
        # Children that are to die with their parent die with the thread that made them.
        assert starter.is_alive()
    assert seen == ["left"]
    with pytest.raises(KeyError), interrupts.entered(told()):
        raise KeyError
    assert seen == ["left", "failed", "left"]


@pytest.mark.parametrize("before_the_first_look", [False, True])
def test_what_a_start_does_to_the_signals_below_python_is_undone(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch, before_the_first_look: bool
) -> None:
    class EndsFirst(threading.Thread):
        """A start so quick that it has entered the context when `start` returns."""

        def start(self) -> None:
            super().start()
            assert entered.wait(60)

    entered = threading.Event()
    if before_the_first_look:
        monkeypatch.setattr(threading, "Thread", EndsFirst)

    class EndsAfterItsValue(Future[None]):
        def set_result(self, result: None) -> None:
            super().set_result(result)
            entered.set()

    monkeypatch.setattr("tinyloop.cluster.interrupts.Future", EndsAfterItsValue)

    @contextmanager
    def takes_signals_over() -> Iterator[None]:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
        for number in SIGNALS:
            libc.signal(number, int(signal.SIG_IGN))
        yield

    with interrupts.entered(takes_signals_over()):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            interrupts.check()


def test_a_start_that_fails_says_why(interrupts: Interrupts) -> None:
    @contextmanager
    def fails() -> Iterator[None]:
        raise ValueError("no room")
        yield

    with pytest.raises(ValueError, match="no room"), interrupts.entered(fails()):
        pytest.fail("it was entered")


@pytest.mark.parametrize(("later_s", "code"), [(0.1, 7), (0.9, ExitCode.INTERRUPTED)])
def test_a_second_signal_ends_at_once_unless_it_is_the_same_request(later_s: float, code: int) -> None:
    program = f"""
import os, signal, sys, time
from tinyloop.cluster.interrupts import Interrupts
Interrupts().install()
os.kill(os.getpid(), signal.SIGTERM)
now, time.monotonic = time.monotonic(), lambda: now + {later_s}
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(7)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == code
