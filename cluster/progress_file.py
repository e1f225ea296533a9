"""progress.json: what it holds, how it is written, and what is read of it. Fields are only ever added."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .progress import Snapshot

FORMAT_VERSION = 1


def own_process() -> dict[str, Any]:
    """This process as another one on the same host can find it again."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "start_ticks": start_ticks(os.getpid())}


def start_ticks(pid: int) -> int | None:
    """When a process of this host was started, in clock ticks after boot; None if it is gone.

    A number alone may belong to another process by now; number and start do not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; state is the first field after it, the start the twentieth.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] == b"Z" else int(fields[19])


def progress_content(snapshot: Snapshot, written_unix_s: float, process: dict[str, Any]) -> dict[str, Any]:
    """The fields of progress.json, documented in REPORTS.md."""
    pool = asdict(snapshot.pool)
    moments = pool.pop("moments")
    return {
        "format_version": FORMAT_VERSION,
        "state": snapshot.state,
        "rows_done": snapshot.rows_done,
        "rows_total": snapshot.rows_total,
        "errors": snapshot.errors,
        "rate_per_s": snapshot.rate_per_s,
        "eta_s": snapshot.eta_s,
        "elapsed_s": snapshot.elapsed_s,
        "idle_s": snapshot.idle_s,
        "written_unix_s": written_unix_s,
        "process": process,
        "pool": pool,
        "replicas": [
            {name: moment[name] for name in ("slot", "generation", "state", "host", "in_flight", "busy_s")}
            for moment in moments
        ],
        "awaited": [asdict(window) for window in snapshot.awaited],
    }
