"""The end of processes that Ray was told to end: seen to on this host, so that none stays behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_S = 1.0
DEADLINE_S = 10.0


def end_processes(processes: Iterable[tuple[int, str]]) -> None:
    """Wait until those of these actors' processes (number, host) that are here are gone; kill after a second.

    A frozen process does not hear the polite request, and Ray waits five seconds before it insists.
    """
    pids = {pid for pid, host in processes if host == socket.gethostname()}
    start_s = time.monotonic()
    while (left := {pid for pid in pids if _is_ours(pid)}) and time.monotonic() - start_s < DEADLINE_S:
        if time.monotonic() - start_s > GRACE_S:
            for pid in left:
                _kill(pid)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_ours(pid: int) -> bool:
    # By its title, which Ray sets: the number may have been given to another process in the meantime.
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return title.startswith((b"ray::Replica", b"ray::Router"))
