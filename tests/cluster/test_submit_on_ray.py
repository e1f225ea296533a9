"""Jobs through the job server of a real Ray cluster that asks for a token: codes, stops, crashes, repeats."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinyloop.native.models import default_model_path

from .ray_head import RayHead, ray_head

POOL = "shared"
DEADLINE_S = 90.0


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with tempfile.TemporaryDirectory(prefix="tl-") as folder, ray_head(Path(folder), token=True) as head:
        config = Path(folder) / "pool.toml"
        config.write_text(f'model = "{default_model_path()}"\nreplicas = 1\nthreads = 1\nmax_seq_len = 128\n')
        made = head.run(["tinyloop", "up", str(config), "--name", POOL, "--address", head.address])
        assert made.returncode == 0, made.stdout
        yield head
        # A node that is told to end waits for whatever still runs on it.
        head.run(["tinyloop", "down", POOL, "--address", head.address])


def rows(count: int) -> str:
    return "".join(
        json.dumps({"id": str(i), "context": f"One of {i} ships", "continuation": f" is {i % 7}"}) + "\n"
        for i in range(count)
    )


def score(rows: Path, output: Path, *more: str) -> list[str]:
    return ["score", "-i", str(rows), "-o", str(output), "--pool", POOL, "--depth", "1", *more]


def submit(head: RayHead, *words: str) -> list[str]:
    return ["tinyloop", "submit", "--address", head.job_server, *words]


def summary(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "summary.json").read_bytes())
    return content


def test_row_errors_within_the_budget_are_code_3_and_a_repeated_submission_gets_the_same(
    head: RayHead, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(rows(40) + "not a row\n")
    job = score(tmp_path / "rows.jsonl", tmp_path / "out")
    first = head.run(submit(head, "--submission-id", "once", "--", *job))
    assert first.returncode == 3, first.stdout
    assert "1 row (invalid_json 1)" in first.stdout
    found = summary(tmp_path / "out")
    assert (found["state"], found["exit_code"], found["results"], found["errors"]) == ("complete", 3, 40, 1)
    before = (tmp_path / "out" / "summary.json").stat().st_mtime_ns
    again = head.run(submit(head, "--submission-id", "once", "--", *job))
    assert again.returncode == 3, again.stdout
    assert "was submitted before" in again.stdout
    assert (tmp_path / "out" / "summary.json").stat().st_mtime_ns == before
    other = head.run(submit(head, "--submission-id", "once", "--", *job, "--resume"))
    assert other.returncode == 2, other.stdout
    assert "is another one" in other.stdout


def test_the_command_that_ray_has_itself_runs_a_job(head: RayHead, tmp_path: Path) -> None:
    folder = tmp_path / "working"
    folder.mkdir()
    (folder / "rows.jsonl").write_text(rows(40))
    job = ["tinyloop", *score(Path("rows.jsonl"), tmp_path / "out")]
    words = ["ray", "job", "submit", "--address", head.job_server, "--working-dir", str(folder), "--", *job]
    ran = head.run(words, RAY_AUTH_MODE="token")
    assert ran.returncode == 0, ran.stdout
    assert "tinyloop: exit code 0" in ran.stdout
    assert summary(tmp_path / "out")["results"] == 40


def begun(head: RayHead, tmp_path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A submitted job of many windows that has rows in its journal."""
    (tmp_path / "rows.jsonl").write_text(rows(20_000))
    job = score(tmp_path / "rows.jsonl", tmp_path / "out", "--window", "64")
    running = head.begin(submit(head, "--", *job), tmp_path / "log")
    deadline_s = time.monotonic() + DEADLINE_S
    while not list((tmp_path / "out" / "parts").glob("*.jsonl")):
        assert running.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline_s, (tmp_path / "log").read_text()
        time.sleep(0.05)
    return running, tmp_path / "out"


def test_ctrl_c_stops_the_job_in_order_with_code_130(head: RayHead, tmp_path: Path) -> None:
    running, output = begun(head, tmp_path)
    running.send_signal(signal.SIGINT)
    assert running.wait(DEADLINE_S) == 130, (tmp_path / "log").read_text()
    found = summary(output)
    assert (found["state"], found["exit_code"]) == ("interrupted", 130)
    assert found["rows_done"] >= 64


def test_a_job_whose_process_is_killed_is_code_5(head: RayHead, tmp_path: Path) -> None:
    running, output = begun(head, tmp_path)
    os.kill(newest_process_of(output), signal.SIGKILL)
    assert running.wait(DEADLINE_S) == 5, (tmp_path / "log").read_text()
    assert (summary(output)["state"], summary(output)["exit_code"]) == ("failed", 5)


def newest_process_of(output: Path) -> int:
    """The job's own process: the youngest whose command line names the folder, but for the submitting one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                started = int((entry / "stat").read_text().rpartition(")")[2].split()[19])
            except OSError:
                continue
            if str(output).encode() in words and b"submit" not in words:
                found.append((started, int(entry.name)))
    return max(found)[1]


def test_without_the_token_every_command_says_what_to_type(head: RayHead, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(rows(1))
    job = score(tmp_path / "rows.jsonl", tmp_path / "out")
    stranger = {"HOME": str(tmp_path), "RAY_ADDRESS": head.address}
    for words in (
        submit(head, "--", *job),
        ["tinyloop", *job],
        ["tinyloop", "status", POOL],
        ["tinyloop", "submit", "--address", head.address, "--submission-id", "once"],
    ):
        began_s = time.monotonic()
        ran = head.run(words, **stranger)
        assert ran.returncode == 5, ran.stdout
        assert "`ray get-auth-token`" in ran.stdout
        assert "RAY_AUTH_MODE=token RAY_AUTH_TOKEN=" in ran.stdout
        assert "Traceback" not in ran.stdout
        assert time.monotonic() - began_s < 15
    doctor = head.run(["tinyloop", "doctor", "--address", head.address], **stranger)
    assert "ray get-auth-token" in doctor.stdout
    wrong = head.run(submit(head, "--", *job), **stranger, RAY_AUTH_TOKEN="0" * 32)
    assert "is not the cluster's" in wrong.stdout, wrong.stdout
