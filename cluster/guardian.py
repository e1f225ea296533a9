"""The parent of a job's process: it outlives whatever ends that, and gives every end a known exit code.

Ray ends its driver with exit code 1 when a process of Ray's own dies. The parent makes that an infrastructure
failure, completes the summary, and ends whatever the job's process started and left behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from .errors import STATES, ExitCode, JobError
from .interrupts import SIGNALS

SET_PARENT_DEATH_SIGNAL = 1
SET_CHILD_SUBREAPER = 36

# Set by Ray for the command of a job that was submitted to it.
RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"

# Where the job's process says which folders it uses; absent without a parent.
_to_parent: int | None = None


def main() -> None:
    """The command line: a job under a parent of its own, everything else in this process."""
    if sys.argv[1:2] in (["score"], ["generate"]):
        sys.exit(Guardian().run())
    from .cli import main as run_command

    run_command()


def announce(output: Path, work: Path) -> None:
    """Tell the parent, if there is one, in which folders a job now runs."""
    if _to_parent is not None:
        os.write(_to_parent, json.dumps([str(output.resolve()), str(work.resolve())]).encode() + b"\n")


class Guardian:
    """Runs the command line in a child and waits for it. Imports nothing that is slow to load."""

    def __init__(self) -> None:
        self._child = 0
        self._received: int | None = None

    def run(self) -> int:
        """Returns the exit code for the shell, always one of ExitCode."""
        # Orphans of the child, such as Ray's, become children of this process and are found at the end.
        _prctl(SET_CHILD_SUBREAPER, 1)
        not_ours = children()
        read_end, write_end = os.pipe()
        # A signal that comes before there are handlers waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        parent = os.getpid()
        self._child = os.fork()
        if not self._child:
            os.close(read_end)
            _run_child(parent, write_end)
        for number in SIGNALS:
            signal.signal(number, self._forward)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.close(write_end)
        code = self._wait()
        end_children(not_ours)
        with os.fdopen(read_end, "rb") as pipe:
            announced = pipe.readline()
        return self._said_at_last(self._account_for(code, announced))

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._received = number
        if self._child:
            # A terminal sends its signal to the child too; the child takes the two for one.
            with suppress(ProcessLookupError):
                os.kill(self._child, number)

    def _wait(self) -> int:
        """Reap orphans until the child itself has ended. Returns its exit code, below 0 for a signal."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._child:
                self._child = 0
                return os.waitstatus_to_exitcode(status)

    def _account_for(self, code: int, announced: bytes) -> int:
        """Give an end that the job did not choose an exit code and a line, and any stop a summary."""
        meaning, reason = code, f"the job stopped with exit code {code}"
        if code not in set(ExitCode):
            finished = finished_with(announced)
            if finished is not None:
                print("warning: the job was finished, and its process did not end in order", file=sys.stderr)
                return int(finished)
            meaning, reason = self._explain(code)
            print(f"error: {reason}: run again with --resume", file=sys.stderr)
        if announced and meaning in STATES:
            output, work = map(Path, json.loads(announced))
            with suppress(JobError, OSError):
                complete_summary(output, work, ExitCode(meaning), reason)
        return int(meaning)

    def _said_at_last(self, code: int) -> int:
        """Where Ray runs the job: the exit code as its last line, since Ray itself passes few of them on."""
        if RAY_JOB in os.environ:
            from .submitted import last_line

            with suppress(OSError):
                print(last_line(ExitCode(code)), flush=True)
        return code

    def _explain(self, code: int) -> tuple[ExitCode, str]:
        received = self._received if self._received is not None else -code
        if received in set(SIGNALS):
            return ExitCode.INTERRUPTED, f"{signal.Signals(received).name} received"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"was ended with {code}"
        return (
            ExitCode.INFRASTRUCTURE,
            f"the job's process {how}, as happens when Ray dies or memory runs out",
        )


def finished_with(announced: bytes) -> ExitCode | None:
    """The exit code of a job that was finished before its process fell over its own feet; None if it was not.

    A job removes the summary of earlier ones as it begins, and writes its own before it ends its pool.
    """
    if not announced:
        return None
    try:
        summary = json.loads((Path(json.loads(announced)[0]) / "summary.json").read_bytes())
        code = ExitCode(summary["exit_code"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return code if summary.get("state") == "complete" else None


def complete_summary(output: Path, work: Path, code: ExitCode, reason: str) -> None:
    """Write the summary that a job's process did not live to write. A folder without a job is left alone."""
    # Loaded at the end of a job that died, and not at every start: the folder's rules bring NumPy along.
    from .folder import JobFolder

    folder = JobFolder.open(output, work, resume=True, overwrite=False)
    try:
        if folder.read_fingerprint() is None or folder.read_summary() is not None:
            return
        state, progress = STATES[code], _read_progress(output)
        counts = {key: progress.get(key, 0) for key in ("rows_done", "errors")}
        folder.write_output(
            "summary.json", {"state": state, "exit_code": int(code), "reason": reason, **counts}
        )
        if progress:
            folder.write_output("progress.json", {**progress, "state": state})
    finally:
        folder.close()


def end_children(spared: set[int]) -> None:
    """Kill the children of this process, and theirs as they become its own, until none is left."""
    while found := children() - spared:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def children() -> set[int]:
    """Process numbers of this process's children, from the parent's number in their stat."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                # The command in brackets may itself hold brackets and spaces.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(fields[1]) == os.getpid():
                    found.add(int(entry.name))
    return found


def _run_child(parent: int, write_end: int) -> NoReturn:
    """The job's process: it dies with its parent, and ends without waiting for threads of libraries."""
    global _to_parent
    _to_parent = write_end
    _prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    code: Any = ExitCode.INFRASTRUCTURE
    try:
        if os.getppid() == parent:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            from .cli import main as run_command

            run_command()
            code = ExitCode.SCORED
    except SystemExit as end:
        code = end.code or 0
    except KeyboardInterrupt:
        code = ExitCode.INTERRUPTED
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else ExitCode.INFRASTRUCTURE)


def _read_progress(output: Path) -> dict[str, Any]:
    try:
        content = json.loads((output / "progress.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")
