"""The end of processes that Ray was told to end: seen to on this host, so that none stays behind."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

GRACE_S = 1.0
DEADLINE_S = 10.0


def end_processes(hosts: Mapping[int, str], router_pid: int) -> None:
    """Wait until these worker processes of Ray on this host are gone; after a second they are killed.

    A frozen process does not hear the polite request, and Ray waits five seconds before it insists.
    """
    pids = {pid for pid, host in hosts.items() if host == socket.gethostname()} | ({router_pid} - {0})
    start_s = time.monotonic()
    while (left := {pid for pid in pids if _is_worker(pid)}) and time.monotonic() - start_s < DEADLINE_S:
        if time.monotonic() - start_s > GRACE_S:
            for pid in left:
                _kill(pid)
        time.sleep(0.02)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _is_worker(pid: int) -> bool:
    # The command line says that it is Ray's worker: a number may have been given to another process in the
    # meantime.
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
