"""What a job's folder says of the job right now, also of one that was killed. Nothing in the folder is
changed.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .progress import STALL_LIMIT_S, clock, counted
from .progress_file import start_ticks
from .report.reading import is_job_folder, read_folder
from .report.row_fields import number

# progress.json is renewed every 2 s; reading a slow file or a slow disk may take a few of those.
SILENCE_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """verdict: running, stalled, silent, killed, finishing, unknown, or the state of the summary.

    heard_of_s: age of progress.json; is_alive: whether its process is there, None where that cannot be known.
    """

    folder: Path
    verdict: str
    heard_of_s: float | None
    is_alive: bool | None
    progress: Mapping[str, Any]
    summary: Mapping[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "job": str(self.folder),
            "verdict": self.verdict,
            "heard_of_s": None if self.heard_of_s is None else round(self.heard_of_s, 1),
            "is_alive": self.is_alive,
            "progress": dict(self.progress),
            "summary": dict(self.summary) or None,
        }


def names_a_job(argument: str) -> bool:
    """Whether the argument of status is a folder and not the name of a pool: it has a slash, or a job is in
    it.
    """
    return os.sep in argument or is_job_folder(Path(argument))


def job_status(folder: Path, now_unix_s: float | None = None) -> JobStatus:
    """Read a folder. Raises: UsageError if no job began there."""
    files = read_folder(folder)
    written = number(files.progress.get("written_unix_s"))
    now = time.time() if now_unix_s is None else now_unix_s
    heard_of_s = None if written is None else max(0.0, now - written)
    is_alive = _is_alive(files.progress.get("process"))
    verdict = verdict_of(files.summary, files.progress, heard_of_s, is_alive)
    return JobStatus(folder, verdict, heard_of_s, is_alive, files.progress, files.summary)


def verdict_of(
    summary: Mapping[str, Any],
    progress: Mapping[str, Any],
    heard_of_s: float | None,
    is_alive: bool | None,
) -> str:
    """One word. A summary is the last thing that a job writes and a resume first removes: it is the truth."""
    if summary:
        return str(summary.get("state", "unknown"))
    if is_alive is False:
        return "killed"
    if heard_of_s is None:
        return "unknown"
    if heard_of_s > SILENCE_LIMIT_S:
        return "silent"
    if progress.get("state") != "running":
        return "finishing"
    return "stalled" if (number(progress.get("idle_s")) or 0.0) > STALL_LIMIT_S else "running"


def status_lines(status: JobStatus) -> Iterator[str]:
    """The same for people."""
    yield f"job in {status.folder}: {status.verdict}, {_rows(status)}"
    yield from _process_lines(status)
    if status.verdict in ("running", "stalled", "silent"):
        yield from _replica_lines(status.progress)
    reason = status.summary.get("reason")
    if reason:
        yield f"  reason: {reason}"
    if advice := _advice(status):
        yield f"  {advice}"


def _rows(status: JobStatus) -> str:
    progress, summary = status.progress, status.summary
    done = summary.get("rows", summary.get("rows_done", progress.get("rows_done", 0)))
    total = summary.get("rows", progress.get("rows_total"))
    parts = [f"{_count(done)}/{_count(total)} rows"]
    if status.verdict in ("running", "stalled"):
        parts.append(f"{number(progress.get('rate_per_s')) or 0.0:,.1f} rows/s")
        parts.append(f"ETA {clock(number(progress.get('eta_s')))}")
    pool = summary.get("pool") or progress.get("pool")
    if isinstance(pool, Mapping) and (hit_rate := number(pool.get("hit_rate"))) is not None:
        parts.append(f"hit rate {100 * hit_rate:.1f} %")
    parts.append(f"errors {_count(summary.get('errors', progress.get('errors', 0)))}")
    return ", ".join(parts)


def _process_lines(status: JobStatus) -> Iterator[str]:
    process = status.progress.get("process")
    if status.summary or not isinstance(process, Mapping):
        return
    there = {True: "is there", False: "is gone", None: "is on another host"}[status.is_alive]
    heard = "" if status.heard_of_s is None else f", last heard of {status.heard_of_s:.1f} s ago"
    idle_s = number(status.progress.get("idle_s"))
    idle = "" if idle_s is None else f", a row last came back {clock(idle_s)} before that"
    yield f"  process {process.get('pid')}@{process.get('host')} {there}{heard}{idle}"


def _replica_lines(progress: Mapping[str, Any]) -> Iterator[str]:
    for replica in _mappings(progress.get("replicas")):
        sent = counted(int(number(replica.get("in_flight")) or 0), "command")
        yield f"  replica {replica.get('slot')}@{replica.get('host')}: {replica.get('state')}, {sent} sent"
    for window in _mappings(progress.get("awaited")):
        first = ", ".join(map(str, window.get("first", ())))
        yield (
            f"  awaited for {clock(number(window.get('waited_s')))}: {_count(window.get('rows'))} rows of "
            f"the "
            f"window of row {window.get('begin')}, first {first}"
        )


def _advice(status: JobStatus) -> str:
    if status.verdict in ("killed", "interrupted", "failed", "budget_exceeded"):
        return "run the same command with --resume to go on"
    if status.verdict == "silent":
        return "nothing was written for long: look at the process and its machine"
    return ""


def _is_alive(process: Any) -> bool | None:
    """Whether the process that wrote progress.json is there; only its own host can say."""
    if not isinstance(process, Mapping) or process.get("host") != socket.gethostname():
        return None
    pid = process.get("pid")
    if type(pid) is not int:
        return None
    began = start_ticks(pid)
    return began is not None and began == process.get("start_ticks")


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _count(value: Any) -> str:
    return f"{value:,}" if type(value) is int else "?"
