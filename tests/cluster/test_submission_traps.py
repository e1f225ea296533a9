"""Submitting and following: what has made others' tools report a failed job as done, or never begin one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from tinyloop.cluster.errors import ExitCode, InfrastructureError, UsageError
from tinyloop.cluster.following import PATIENCE_S, Follower, ServerUnreachable, Wishes
from tinyloop.cluster.job_server import files_to_upload
from tinyloop.cluster.submission import LARGE_BYTES, complete_runtime_env, id_of, refuse_size
from tinyloop.cluster.submitted import JobView, last_line, outcome


def view(status: str, exit_code: int | None = None) -> JobView:
    return JobView(status, exit_code, "", "tinyloop score")


class Server:
    """Answers by a script: a view and the log so far, None where nobody answers."""

    def __init__(self, script: Iterator[tuple[JobView, str | None] | None]) -> None:
        self._script = script
        self._log: str | None = None
        self.stops = 0

    def look(self, job: str) -> JobView | None:
        answer = next(self._script)
        if answer is None:
            raise ServerUnreachable("connection refused")
        found, self._log = answer
        return found

    def log(self, job: str) -> str | None:
        return self._log

    def stop(self, job: str) -> None:
        self.stops += 1


class Watcher:
    """What a person sees while following, and a clock that pauses move on."""

    def __init__(self, server: Server) -> None:
        self.shown = ""
        self.notes: list[str] = []
        self.now_s = 0.0
        self.follower = Follower(
            server,
            "job",
            echo=self._echo,
            note=self.notes.append,
            wait=self._wait,
            clock_s=lambda: self.now_s,
        )

    def _echo(self, text: str) -> None:
        self.shown += text

    def _wait(self, seconds: float) -> Wishes:
        self.now_s += seconds
        return Wishes()


RUNNING = view("RUNNING")


def test_a_connection_that_drops_is_no_end_and_the_log_is_printed_once() -> None:
    script = [(RUNNING, "a\n"), None, None, (RUNNING, None), (RUNNING, "a\nb\n"), None]
    end = (view("FAILED", 3), "a\nb\nc\n")
    watcher = Watcher(Server(iter([*script, end])))
    assert watcher.follower.run().status == "FAILED"
    assert watcher.shown == "a\nb\nc\n"
    assert [note.split(" (")[0] for note in watcher.notes] == [
        "the job server does not answer",
        "the job server answers again",
    ] * 2


def test_a_server_that_stays_away_ends_the_following_and_not_the_job() -> None:
    server = Server(chain([(RUNNING, "a\n")], repeat(None)))
    watcher = Watcher(server)
    with pytest.raises(InfrastructureError, match=r"the job may well go on.*--submission-id job"):
        watcher.follower.run()
    assert PATIENCE_S < watcher.now_s < 2 * PATIENCE_S
    assert server.stops == 0


@pytest.mark.parametrize("code", list(ExitCode))
def test_the_jobs_own_last_word_is_its_code_whatever_ray_calls_its_end(code: ExitCode) -> None:
    """Ray exits 0 for a stopped job, and 1 for one that finished with row errors."""
    log = f"some rows\n{last_line(code)}\n"
    for status, of_ray in (("SUCCEEDED", 0), ("FAILED", 1), ("FAILED", -11), ("STOPPED", None)):
        assert outcome(view(status, of_ray), log)[0] is code


def test_an_end_without_a_last_word_is_never_a_success() -> None:
    assert outcome(view("STOPPED"), "rows\n")[0] is ExitCode.INTERRUPTED
    assert outcome(view("FAILED", -11), "rows\n")[0] is ExitCode.INFRASTRUCTURE
    assert outcome(view("FAILED", None), "")[0] is ExitCode.INFRASTRUCTURE


def test_the_same_command_has_the_same_id_and_another_has_another() -> None:
    environment = complete_runtime_env({}, None)
    assert id_of("tinyloop score -i a", environment) == id_of("tinyloop score -i a", dict(environment))
    assert id_of("tinyloop score -i a", environment) != id_of("tinyloop score -i b", environment)
    assert id_of("tinyloop score -i a", environment) != id_of("tinyloop score -i a", {"env_vars": {}})


def test_git_stays_at_home_and_what_is_too_large_is_named_with_its_size(tmp_path: Path) -> None:
    for name, size in ((".git/pack", 3 << 20), ("model.tloop", 2 << 20), ("rows.jsonl", 10)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.truncate(size)
    environment = complete_runtime_env({"excludes": ["*.tmp"]}, tmp_path)
    assert environment["excludes"] == ["*.tmp", ".git"]
    files = files_to_upload(tmp_path, environment["excludes"])
    assert {path.name for _, path in files} == {"model.tloop", "rows.jsonl"}
    assert refuse_size(tmp_path, files, LARGE_BYTES) == ""
    large = [(LARGE_BYTES + 1, tmp_path / "model.tloop"), (10, tmp_path / "rows.jsonl")]
    assert "model.tloop (50.0 MiB)" in refuse_size(tmp_path, large, 2 * LARGE_BYTES)
    with pytest.raises(UsageError, match=r"at most 50 MiB: the largest are model\.tloop .*rayignore"):
        refuse_size(tmp_path, large, LARGE_BYTES)
