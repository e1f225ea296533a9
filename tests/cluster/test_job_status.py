"""How far a job is, from its folder: running, stalled, killed, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tinyloop.cluster import cli
from tinyloop.cluster.errors import UsageError
from tinyloop.cluster.inputs import InputFile
from tinyloop.cluster.job_status import job_status, names_a_job, status_lines, verdict_of
from tinyloop.cluster.lanes import ReplicaMoment
from tinyloop.cluster.progress import Awaited, LineDisplay, PoolFigures, Snapshot, stall_lines
from tinyloop.cluster.progress_file import own_process, progress_content, start_ticks
from tinyloop.cluster.stalls import awaited, place_of

from .score_driver import score
from .test_job import make_rows, settings

RUNNING = {"state": "running", "idle_s": 1.0}


@pytest.mark.parametrize(
    ("summary", "progress", "heard_of_s", "is_alive", "verdict"),
    [
        ({"state": "complete"}, {"state": "complete"}, 9e9, False, "complete"),
        ({"state": "failed"}, RUNNING, 1.0, True, "failed"),
        ({}, RUNNING, 1.0, True, "running"),
        ({}, RUNNING, 1.0, None, "running"),
        ({}, {"state": "running", "idle_s": 61.0}, 1.0, True, "stalled"),
        ({}, RUNNING, 100.0, True, "silent"),
        ({}, RUNNING, 1.0, False, "killed"),
        ({}, {"state": "complete"}, 1.0, True, "finishing"),
        ({}, {"state": "complete"}, 1.0, False, "killed"),
        ({}, {}, None, None, "unknown"),
    ],
)
def test_one_word_says_how_it_is(
    summary: dict[str, Any],
    progress: dict[str, Any],
    heard_of_s: float | None,
    is_alive: bool | None,
    verdict: str,
) -> None:
    assert verdict_of(summary, progress, heard_of_s, is_alive) == verdict


def snapshot(**changes: Any) -> Snapshot:
    moments = (ReplicaMoment(0, 1, "busy", "node-a", in_flight=2), ReplicaMoment(1, 3, "dead", "node-b"))
    pool = PoolFigures(2, 1, 0.5, 0.6, {"tokens_total": 10}, moments)
    known: dict[str, Any] = {"state": "running", "rows_done": 7, "rows_total": 20, "errors": 1}
    known |= {"rate_per_s": 2.0, "eta_s": 6.5, "elapsed_s": 3.5, "idle_s": 0.5, "pool": pool}
    return Snapshot(**{**known, **changes})


def write(folder: Path, process: dict[str, Any], **changes: Any) -> None:
    content = progress_content(snapshot(**changes), 1_000.0, process)
    (folder / "progress.json").write_text(json.dumps(content))


def test_a_job_whose_process_is_there_runs(tmp_path: Path) -> None:
    write(tmp_path, own_process())
    status = job_status(tmp_path, now_unix_s=1_003.0)
    assert (status.verdict, status.heard_of_s, status.is_alive) == ("running", 3.0, True)
    lines = list(status_lines(status))
    assert "7/20 rows, 2.0 rows/s, ETA 0:06, hit rate 50.0 %, errors 1" in lines[0]
    assert any("replica 1@node-b: dead" in line for line in lines)


def test_a_job_whose_process_was_killed_is_told_from_one_that_took_its_number(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    process = {"pid": child, "host": socket.gethostname(), "start_ticks": start_ticks(child)}
    write(tmp_path, process)
    assert job_status(tmp_path, 1_001.0).verdict == "running"
    write(tmp_path, process | {"start_ticks": 1})
    assert job_status(tmp_path, 1_001.0).verdict == "killed"
    os.kill(child, signal.SIGKILL)
    # Not waited for yet: a zombie is no running job.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    write(tmp_path, process)
    status = job_status(tmp_path, 1_001.0)
    os.waitpid(child, 0)
    assert status.verdict == "killed"
    assert "--resume" in "\n".join(status_lines(status))


def test_the_process_of_another_host_is_judged_by_its_silence(tmp_path: Path) -> None:
    write(tmp_path, own_process() | {"host": "elsewhere"})
    assert job_status(tmp_path, 1_001.0).verdict == "running"
    assert job_status(tmp_path, 1_100.0).verdict == "silent"


def test_a_finished_job_says_so_and_prints_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = score(settings(tmp_path, make_rows(60)))
    monkeypatch.setattr(sys, "argv", ["tinyloop", "status", str(tmp_path / "out"), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["verdict"], printed["summary"]) == ("complete", summary)
    assert printed["progress"]["rows_done"] == summary["rows"]


def test_an_argument_is_a_folder_if_a_job_is_in_it_or_it_has_a_slash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "progress.json").write_text("{}")
    assert [names_a_job(name) for name in ("plain", "job", "absent", "./absent")] == [
        False, True, False, True
    ]  # fmt: skip
    with pytest.raises(UsageError, match="is no folder"):
        job_status(Path("./absent"))
    with pytest.raises(UsageError, match="holds no job"):
        job_status(Path("plain"))


def test_awaited_rows_are_named_by_their_place() -> None:
    files = [InputFile(Path(name), name, 1, "0", rows, 0) for name, rows in (("a", 3), ("b", 0), ("c", 9))]
    assert [place_of(number, files) for number in (0, 2, 3, 11)] == [
        "row 1 of a", "row 3 of a", "row 1 of c", "row 9 of c"
    ]  # fmt: skip
    found = awaited(2, [None, b"x", None], files, 5.0)
    assert found == Awaited(2, 2, 5.0, ("row 3 of a", "row 2 of c"))


def test_a_stall_prints_what_is_awaited_and_what_each_replica_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times = iter([0.0, 100.0, 100.0, 100.0])
    stalled = snapshot(idle_s=90.0, awaited=(Awaited(0, 13, 95.0, ("row 8 of a",)),))
    LineDisplay(sys.stdout, lambda: next(times)).show(stalled)
    printed = capsys.readouterr().out
    assert "nothing came back for 1:30" in printed
    assert "13 rows awaited for 1:35, first row 8 of a" in printed
    assert "replica 0 on node-a is busy, 2 commands sent to it" in printed
    assert stall_lines(snapshot()) == []
