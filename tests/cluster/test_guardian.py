"""Whatever ends the process of a score job, the shell gets an exit code of the table, and nothing is left."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tinyloop.cluster.errors import ExitCode
from tinyloop.cluster.folder import JobFolder

# The real parent, with a job's process that announces its folder and says its number and that of a process
# which it started in a session of its own, as Ray does; what comes then is the test's.
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tinyloop.cluster import cli, guardian
from tinyloop.cluster.interrupts import Interrupts

def job():
    guardian.announce(Path(sys.argv[2]), Path(sys.argv[2]))
    interrupts = Interrupts()
    if ACTION == "wait":
        interrupts.install()
    orphan = subprocess.Popen(["sleep", "100"], start_new_session=True, stdout=subprocess.DEVNULL)
    print(os.getpid(), orphan.pid, flush=True)
    while ACTION in ("wait", "wait unprepared"):
        try:
            interrupts.check()
        except Exception:
            sys.exit(130)
        signal.pause() if ACTION == "wait unprepared" else signal.sigtimedwait([], 0.05)
    exec(ACTION)

ACTION = sys.argv[3]
cli.main = job
guardian.main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which a job has begun and not ended."""
    begun = JobFolder.open(tmp_path / "out", None, resume=False, overwrite=False)
    begun.write_fingerprint({"format_version": 1, "model": "fake"})
    begun.write_output("progress.json", {"state": "running", "rows_done": 7, "errors": 2})
    begun.close()
    return tmp_path / "out"


class Started:
    """The program under test, from when its job has begun."""

    def __init__(self, folder: Path, action: str) -> None:
        command = [sys.executable, "-c", PROGRAM, "score", str(folder), action]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.job, self.orphan = map(int, self.process.stdout.readline().split())

    def end(self) -> int:
        """The exit code. Checks that what the job started is gone with it."""
        pid_fds = [_open(pid) for pid in (self.job, self.orphan)]
        self.process.communicate(timeout=20)
        for pid_fd in filter(None, pid_fds):
            assert select.select([pid_fd], [], [], 10)[0]
            os.close(pid_fd)
        return self.process.returncode


def _open(pid: int) -> int | None:
    """A descriptor that becomes readable when the process is gone; None if it is already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def summary_of(folder: Path) -> dict[str, object]:
    content = json.loads((folder / "summary.json").read_bytes())
    assert isinstance(content, dict)
    return content


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["os._exit(1)", "os._exit(15)", "os.kill(os.getpid(), 9)"])
def test_an_end_that_no_job_chose_is_a_resumable_failure_with_a_summary(folder: Path, action: str) -> None:
    assert Started(folder, action).end() == ExitCode.INFRASTRUCTURE
    summary = summary_of(folder)
    assert (summary["state"], summary["exit_code"], summary["rows_done"], summary["errors"]) == (
        "failed",
        5,
        7,
        2,
    )
    assert json.loads((folder / "progress.json").read_bytes())["state"] == "failed"
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("code", [0, 3, 130])
def test_a_code_that_the_job_chose_is_kept(folder: Path, code: int) -> None:
    (folder / "summary.json").write_text('{"state": "as the job says"}')
    assert Started(folder, f"sys.exit({code})").end() == code
    assert summary_of(folder) == {"state": "as the job says"}


@pytest.mark.chaos
@pytest.mark.parametrize("action", ["wait", "wait unprepared"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_parent_or_to_the_whole_group_is_one_interrupt(
    folder: Path, number: signal.Signals, action: str
) -> None:
    for send in (os.kill, os.killpg):
        started = Started(folder, action)
        send(started.process.pid, number)
        assert started.end() == ExitCode.INTERRUPTED
        assert summary_of(folder)["state"] == "interrupted"


@pytest.mark.chaos
def test_the_job_dies_with_its_parent(folder: Path) -> None:
    started = Started(folder, "wait")
    gone = os.pidfd_open(started.job)
    started.process.kill()
    assert select.select([gone], [], [], 10)[0]
    os.close(gone)
    os.kill(started.orphan, signal.SIGKILL)
    started.process.communicate(timeout=20)
    # It can go on: nobody holds the folder any more.
    JobFolder.open(folder, None, resume=True, overwrite=False).close()


def test_a_folder_in_which_no_job_began_gets_no_summary(tmp_path: Path) -> None:
    assert Started(tmp_path, "os._exit(1)").end() == ExitCode.INFRASTRUCTURE
    assert list(tmp_path.iterdir()) == []


def test_the_parent_is_started_without_slow_imports() -> None:
    slow = {"ray", "torch", "tokenizers", "numpy", "typer", "rich", "pydantic"}
    code = f"import sys; import tinyloop.cluster.guardian; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
