"""Runs probes side by side, each with a time limit: one that hangs or fails leaves an Unknown behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .facts import Facts, Unknown

LIMIT_S = 10.0
KILLED_S = 1.0


class ProbeFailed(RuntimeError):
    """A fact could not be found out."""


@dataclass(frozen=True, slots=True)
class Probe:
    """How one fact is found out, and how long that may take."""

    find: Callable[[], Any]
    limit_s: float = LIMIT_S


def gather(probes: Mapping[str, Probe]) -> Facts:
    """Run every probe at once, each in a thread that is left behind when its time is over."""
    found: dict[str, Any] = {}

    def run(name: str, probe: Probe) -> None:
        try:
            found[name] = probe.find()
        except Exception as error:
            # A probe that fails is itself a finding and must not cost the others.
            text = str(error) if isinstance(error, ProbeFailed) else f"{type(error).__name__}: {error}"
            found[name] = Unknown(text)

    threads, began_s = {}, time.monotonic()
    for name, probe in probes.items():
        threads[name] = threading.Thread(target=run, args=(name, probe), name=name, daemon=True)
        threads[name].start()
    for name, probe in probes.items():
        # A little longer than the commands that a probe runs: so it can say itself what hung.
        threads[name].join(max(began_s + probe.limit_s + 2 * KILLED_S - time.monotonic(), 0.0))
    late = {name: Unknown(f"not found out in {probe.limit_s:.0f} s") for name, probe in probes.items()}
    return Facts(**{entry.name: found.get(entry.name, late[entry.name]) for entry in fields(Facts)})


def run_command(command: Sequence[str], limit_s: float = LIMIT_S) -> str:
    """Standard output of a command. Raises ProbeFailed, also when it takes longer than its limit."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # With everything it has started, which may hold the pipes open; and one that the kernel does not let
        # go is not waited for.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILLED_S)
        raise ProbeFailed(f"{Path(command[0]).name} did not end in {limit_s:.0f} s") from None
    if process.returncode:
        said = (errors.strip() or output.strip() or "nothing").splitlines()[-1]
        raise ProbeFailed(f"{Path(command[0]).name} ended with {process.returncode} and said: {said}")
    return output
