"""The score job over the fake pool: order, errors, exit codes, resume, reconciliation, memory."""

from __future__ import annotations

import gc
import json
import random
import signal
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyloop.cluster import inputs, planning, running
from tinyloop.cluster import job as job_module
from tinyloop.cluster.errors import (
    ErrorBudgetExceeded,
    ExitCode,
    InfrastructureError,
    Interrupted,
    UsageError,
)
from tinyloop.cluster.kinds import ModelChoice
from tinyloop.cluster.results import Parts
from tinyloop.cluster.score import run_score
from tinyloop.cluster.settings import ErrorBudget, ScoreSettings
from tinyloop.cluster.sources.places import Place

from .fake_pool import FakePool
from .score_driver import NoDisplay, make_encoder, score

WORDS = ["hello", "world", "Answer", "caf\u00e9", "x", "yz", "  ", "\n"]


def make_rows(n: int, seed: int = 1, *, bad: bool = True) -> list[bytes]:
    """n lines of every kind, a tenth of them bad if bad."""
    rng = random.Random(seed)

    def text(low: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(low, 6))) + rng.choice(["", " "])

    lines: list[bytes] = []
    for i in range(n):
        kind = rng.randrange(4)
        row: dict[str, Any] = {"id": f"row-{i}", "note": i}
        if kind == 0:
            row |= {"context": text(0), "continuation": text(1)}
        elif kind == 1:
            row |= {
                "context": text(0),
                "choices": [text(1) + str(k) for k in range(3)],
                "gold": rng.randrange(3),
            }
        elif kind == 2:
            row |= {"text": text(0) * rng.choice([1, 9])}
        else:
            row |= {"context_ids": [3, 4, 5], "continuation_ids": [6, rng.randrange(9)]}
        line = json.dumps(row).encode()
        if bad and rng.random() < 0.1:
            line = rng.choice(
                [b"{oops", b'{"context": "a"}', b'{"id": "row-0", "text": "again"}', b'{"text": 5}']
            )
        lines.append(line + b"\n")
    return lines


def write(path: Path, lines: list[bytes]) -> str:
    path.write_bytes(b"".join(lines))
    return str(path)


def settings(tmp_path: Path, lines: list[bytes], output: str = "out", **changes: Any) -> ScoreSettings:
    path = write(tmp_path / "rows.jsonl", lines)
    return ScoreSettings(inputs=(path,), output=tmp_path / output, **changes)


def outputs(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "results.jsonl").read_bytes(), (folder / "errors.jsonl").read_bytes()


BAD_ROWS = [
    (b'{"id": "1", "context": "a"', "invalid_json"),
    (b'{"id": "2", "context": "a"}', "missing_field"),
    (b'{"id": "3", "context": "a", "continuation": ""}', "empty_continuation"),
    (b'{"id": "4", "context": "a", "continuation": "' + b"z" * 60 + b'"}', "continuation_too_long"),
    (b'{"id": "5", "context": "a", "continuation": "\\ud800"}', "invalid_unicode"),
    (b'{"id": "6", "context_ids": [1], "continuation_ids": [100000]}', "token_out_of_range"),
    (b'{"id": "good-0", "text": "a"}', "duplicate_id"),
    (b'{"id": "8", "context": "a", "continuation": 8}', "wrong_type"),
]


def test_each_bad_row_is_one_line_of_errors_and_the_job_goes_on(tmp_path: Path) -> None:
    lines: list[bytes] = []
    for i, (bad, _) in enumerate(BAD_ROWS):
        lines += [b'{"id": "good-%d", "text": "hello"}\n' % i, bad + b"\n"]
    summary = score(settings(tmp_path, lines))
    results, errors = (content.splitlines() for content in outputs(tmp_path / "out"))
    assert summary["exit_code"] == ExitCode.ROW_ERRORS
    assert [json.loads(line)["id"] for line in results] == [f"good-{i}" for i in range(len(BAD_ROWS))]
    assert [json.loads(line)["class"] for line in errors] == [name for _, name in BAD_ROWS]
    assert [json.loads(line)["line"] for line in errors] == list(range(2, 2 * len(BAD_ROWS) + 1, 2))
    assert summary["errors_by_class"] == {name: 1 for _, name in sorted(BAD_ROWS, key=lambda row: row[1])}


def test_results_are_ascii_json_without_clock_and_in_input_order(tmp_path: Path) -> None:
    lines = make_rows(300)
    summary = score(settings(tmp_path, lines))
    results, errors = outputs(tmp_path / "out")
    places = []
    for line in results.splitlines() + errors.splitlines():
        assert line.isascii()
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    for content in (results, errors):
        numbers = [json.loads(line)["line"] for line in content.splitlines()]
        assert numbers == sorted(numbers)
        places += numbers
    assert sorted(places) == list(range(1, 301))
    assert summary["rows"] == 300 == summary["results"] + summary["errors"]
    assert b"elapsed" not in results
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "results.jsonl", "errors.jsonl", "summary.json", "run.json", "progress.json", "timeline.json",
        "report.html"
    }  # fmt: skip


def test_output_does_not_depend_on_windows_batches_or_order_of_arrival(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = make_rows(200)
    score(settings(tmp_path, lines, "whole"))
    for i, rows in enumerate((1, 7, 64, None)):
        pool = FakePool(seed=i, items_per_collect=1 + 50 * i)
        score(settings(tmp_path, lines, f"out-{i}", max_window_rows=rows), pool)
        assert outputs(tmp_path / f"out-{i}") == outputs(tmp_path / "whole")
        assert pool.max_windows_waiting <= 2
    monkeypatch.setattr(planning, "WINDOW_TOKENS", 50)
    monkeypatch.setattr(planning, "BATCH_CHARACTERS", 100)
    score(settings(tmp_path, lines, "tokens"))
    assert outputs(tmp_path / "tokens") == outputs(tmp_path / "whole")


def test_windows_double_and_the_next_is_sent_while_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "FIRST_WINDOW_ROWS", 8)
    monkeypatch.setattr(planning, "BATCH_ROWS", 4)
    pool = FakePool()
    sizes: list[int] = []
    commit = Parts.commit

    def spy(self: Parts, part: list[bytes]) -> None:
        sizes.append(len(part))
        commit(self, part)

    monkeypatch.setattr(Parts, "commit", spy)
    lines = [b'{"context": "%d", "continuation": "x"}\n' % i for i in range(100)]
    score(settings(tmp_path, lines, max_window_rows=32), pool)
    assert sizes == [8, 16, 32, 32, 12]
    assert pool.max_windows_waiting == 2


def test_other_fields_come_back_as_they_were(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(198):
        deep = [deep]
    extra = {"deep": deep, "big": 10**30, "null": None, "lone": "\ud800", "text ": "caf\u00e9", "f": 1e-300}
    score(settings(tmp_path, [json.dumps({"continuation": "x", "context": "y", **extra}).encode() + b"\n"]))
    (line,) = outputs(tmp_path / "out")[0].splitlines()
    assert json.loads(line)["extra"] == extra


def test_zero_rows_is_a_finished_job(tmp_path: Path) -> None:
    for i, content in enumerate((b"", b"\n \n", b"\xef\xbb\xbf")):
        summary = score(settings(tmp_path, [content], f"out-{i}"))
        assert (summary["exit_code"], summary["rows"]) == (ExitCode.SCORED, 0)
        assert outputs(tmp_path / f"out-{i}") == (b"", b"")


def test_all_rows_bad_is_a_finished_job(tmp_path: Path) -> None:
    summary = score(settings(tmp_path, [b"{\n"] * 20))
    assert (summary["exit_code"], summary["errors"], summary["results"]) == (ExitCode.ROW_ERRORS, 20, 0)


def test_limit_reads_the_first_rows(tmp_path: Path) -> None:
    summary = score(settings(tmp_path, make_rows(50, bad=False), limit=10))
    assert (summary["exit_code"], summary["rows"]) == (ExitCode.SCORED, 10)


def test_accuracy_is_reported_by_file_and_task(tmp_path: Path) -> None:
    for name, gold in (("a", 0), ("b", 1)):
        row = {"context": "q", "choices": ["x", "xyz and more"], "gold": gold}
        write(tmp_path / f"{name}.jsonl", [json.dumps(row).encode() + b"\n"] * 4)
    patterns = (str(tmp_path / "*.jsonl"),)
    summary = score(ScoreSettings(inputs=patterns, output=tmp_path / "out"))
    assert [(g["file"], g["task"], g["with_gold"], g["acc"]) for g in summary["groups"]] == [
        ("a.jsonl", "choices", 4, 1.0),
        ("b.jsonl", "choices", 4, 0.0),
    ]


@pytest.mark.parametrize(
    ("budget", "stops"),
    [
        (ErrorBudget(), False),
        (ErrorBudget(max_count=5), False),
        (ErrorBudget(max_count=4), True),
        (ErrorBudget(max_fraction=0.25), False),
        (ErrorBudget(max_fraction=0.2), True),
        (ErrorBudget.parse(None, fail_fast=True), True),
    ],
)
def test_the_error_budget_decides_between_3_and_4(tmp_path: Path, budget: ErrorBudget, stops: bool) -> None:
    lines = ([b'{"text": "a"}\n'] * 3 + [b"{\n"]) * 5
    job = settings(tmp_path, lines, budget=budget)
    if not stops:
        assert score(job)["exit_code"] == ExitCode.ROW_ERRORS
        return
    with pytest.raises(ErrorBudgetExceeded):
        score(job)
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["state"] == "budget_exceeded"
    assert not (tmp_path / "out" / "results.jsonl").exists()
    assert score(settings(tmp_path, lines, resume=True))["exit_code"] == ExitCode.ROW_ERRORS


def test_failures_of_the_pool_are_errors_of_their_rows(tmp_path: Path) -> None:
    pool = FakePool(override=lambda ids, scores: "replica_lost" if ids[0] == 3 else scores)
    lines = [
        b'{"context_ids": [3], "continuation_ids": [4]}\n',
        b'{"context_ids": [5], "continuation_ids": [4]}\n',
    ]
    summary = score(settings(tmp_path, lines), pool)
    assert summary["errors_by_class"] == {"replica_lost": 1}
    (error,) = outputs(tmp_path / "out")[1].splitlines()
    assert json.loads(error)["attempts"] == 3


def interrupt_at(n: int) -> FakePool:
    def on_collect(count: int) -> None:
        if count == n:
            signal.raise_signal(signal.SIGTERM)

    return FakePool(items_per_collect=11, on_collect=on_collect)


def test_an_interrupted_job_goes_on_where_it_stopped(tmp_path: Path) -> None:
    lines = make_rows(200)
    undisturbed = FakePool()
    score(settings(tmp_path, lines, "whole", max_window_rows=50), undisturbed)
    num_scored = 0
    for n in (1, 4, 9, 3):
        pool = interrupt_at(n)
        with pytest.raises(Interrupted, match="SIGTERM"):
            score(settings(tmp_path, lines, max_window_rows=50, resume=True), pool)
        assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["state"] == "interrupted"
        num_scored += pool.num_scored
    last = FakePool()
    summary = score(settings(tmp_path, lines, max_window_rows=33, resume=True), last)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
    assert summary["rows_resumed"] > 0
    # What was finished is not scored again: only items of rows that were under way can repeat.
    assert num_scored + last.num_scored < 1.5 * undisturbed.num_scored


def test_signals_are_given_back_after_a_job(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    score(settings(tmp_path, make_rows(5)))
    assert signal.getsignal(signal.SIGTERM) is before


def test_failures_of_our_own_in_the_journal_are_tried_again(tmp_path: Path) -> None:
    lines = [b'{"context_ids": [%d], "continuation_ids": [4]}\n' % i for i in range(2, 40)]
    broken = FakePool(
        items_per_collect=5,
        override=lambda ids, scores: "out_of_memory",
        on_collect=lambda n: signal.raise_signal(signal.SIGINT) if n == 3 else None,
    )
    with pytest.raises(Interrupted, match="SIGINT"):
        score(settings(tmp_path, lines), broken)
    assert score(settings(tmp_path, lines, resume=True))["exit_code"] == ExitCode.SCORED


def test_resume_refuses_what_differs_and_names_it(tmp_path: Path) -> None:
    lines = make_rows(60)
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines), interrupt_at(2))
    for changes, key in (
        ({"depth": 2}, "model.depth"),
        ({"pmi": True}, "task.pmi"),
        ({"limit": 10}, "read.limit"),
        ({"target_delimiter": " "}, "encoding.target_delimiter"),
    ):
        with pytest.raises(UsageError, match=key):
            score(settings(tmp_path, lines, resume=True, **changes))
    with pytest.raises(UsageError, match=r"model\.digest"):
        score(settings(tmp_path, lines, resume=True), digest="1" * 64)
    with pytest.raises(UsageError, match=r"inputs\.0\.sha256"):
        score(settings(tmp_path, [*lines, b'{"text": "more"}\n'], resume=True))
    assert score(settings(tmp_path, lines, resume=True))["state"] == "complete"


def test_resuming_a_finished_job_does_nothing_and_succeeds(tmp_path: Path) -> None:
    lines = make_rows(40)
    first = score(settings(tmp_path, lines))
    before = outputs(tmp_path / "out")
    pool = FakePool()
    assert score(settings(tmp_path, lines, resume=True), pool) == first
    assert (pool.num_collects, outputs(tmp_path / "out")) == (0, before)


@pytest.mark.parametrize("name", ["results.jsonl", "errors.jsonl"])
@pytest.mark.parametrize("damage", ["gone", "shorter", "folder"])
def test_resuming_a_finished_job_looks_at_its_files(tmp_path: Path, name: str, damage: str) -> None:
    lines = make_rows(40)
    score(settings(tmp_path, lines))
    path = tmp_path / "out" / name
    content = path.read_bytes()
    path.unlink()
    if damage == "shorter":
        path.write_bytes(content[: content.rindex(b"\n", 0, -1) + 1])
    elif damage == "folder":
        path.mkdir()
    with pytest.raises(InfrastructureError, match=name):
        score(settings(tmp_path, lines, resume=True))


def test_resuming_a_finished_job_keeps_to_the_error_budget(tmp_path: Path) -> None:
    lines = [b'{"text": "a"}\n', b"{\n"]
    score(settings(tmp_path, lines))
    for budget in (ErrorBudget(max_count=0), ErrorBudget(max_fraction=0.4)):
        with pytest.raises(ErrorBudgetExceeded, match="1 row failed, 0 are allowed"):
            score(settings(tmp_path, lines, resume=True, budget=budget))
    assert score(settings(tmp_path, lines, resume=True, budget=ErrorBudget(max_count=1)))["exit_code"] == 3


DAMAGED_JSON = [b"", b"{}", b"[]", b"{", b"\xff", b"[" * 100_000, b'{"state": "complete"}']


@pytest.mark.parametrize("content", DAMAGED_JSON)
@pytest.mark.parametrize("name", ["summary.json", "run.json"])
def test_a_damaged_file_of_a_finished_job_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    lines = make_rows(10)
    score(settings(tmp_path, lines))
    (tmp_path / "out" / name).write_bytes(content)
    with pytest.raises(InfrastructureError, match=f"{name}.*--overwrite"):
        score(settings(tmp_path, lines, resume=True))
    assert score(settings(tmp_path, lines, overwrite=True))["rows"] == 10


@pytest.mark.parametrize("content", DAMAGED_JSON)
def test_a_damaged_summary_of_a_job_under_way_loses_nothing(tmp_path: Path, content: bytes) -> None:
    lines = make_rows(60)
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines), interrupt_at(2))
    (tmp_path / "out" / "summary.json").write_bytes(content)
    if content == DAMAGED_JSON[-1]:
        with pytest.raises(InfrastructureError, match="lacks figures"):
            score(settings(tmp_path, lines, resume=True))
        return
    assert score(settings(tmp_path, lines, resume=True))["rows_resumed"] > 0


@pytest.mark.parametrize("content", [None, *DAMAGED_JSON])
@pytest.mark.parametrize("max_window_rows", [10, 1_000])
def test_settings_never_mix_when_the_fingerprint_is_lost(
    tmp_path: Path, content: bytes | None, max_window_rows: int
) -> None:
    """In parts or in the journal: rows of other settings are not taken for this job's."""
    lines = make_rows(60)
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines, max_window_rows=max_window_rows), interrupt_at(4))
    path = tmp_path / "out" / "fingerprint.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InfrastructureError, match=r"fingerprint\.json.*start again with --overwrite"):
        score(settings(tmp_path, lines, resume=True, depth=2))
    assert score(settings(tmp_path, lines, overwrite=True, depth=2))["rows"] == 60


@pytest.mark.parametrize("name", ["results.jsonl", "notes.txt", "parts/mine.jsonl"])
def test_resume_leaves_a_folder_alone_that_never_was_a_job(tmp_path: Path, name: str) -> None:
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    with pytest.raises(UsageError, match="no job to resume"):
        score(settings(tmp_path, make_rows(5), resume=True))
    assert [p for p in (tmp_path / "out").rglob("*") if p.is_file()] == [path]
    assert path.read_text() == "mine"


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_refused_overwrite_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = make_rows(20)
    score(settings(tmp_path, lines))
    before = snapshot(tmp_path)
    for name in ("results.jsonl", "errors.jsonl", "run.json"):
        again = ScoreSettings(inputs=(str(tmp_path / "out" / name),), output=tmp_path / "out", overwrite=True)
        with pytest.raises(UsageError, match="output of this job"):
            score(again)
    usable = ScoreSettings(inputs=(str(tmp_path / "rows.jsonl"),), output=tmp_path / "out", overwrite=True)

    def unreadable(places: list[Place], input_format: None) -> None:
        raise UsageError(f"input {places[0].spelled!r} cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(running, "scan", unreadable)
        with pytest.raises(UsageError, match="cannot be read"):
            score(usable)

    @contextmanager
    def no_pool() -> Iterator[Any]:
        raise InfrastructureError("cannot start the pool")
        yield

    encoder = make_encoder()
    with pytest.raises(InfrastructureError, match="cannot start"):
        run_score(usable, ModelChoice({"digest": "other"}, encoder.policy, {}), no_pool, NoDisplay())
    assert snapshot(tmp_path) == before


def test_a_defect_leaves_a_summary_that_says_so(tmp_path: Path) -> None:
    def broken(ids: np.ndarray, scores: list[np.float32]) -> list[np.float32]:
        raise ZeroDivisionError("a defect")

    with pytest.raises(ZeroDivisionError):
        score(settings(tmp_path, make_rows(20)), FakePool(override=broken))
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert (summary["state"], summary["exit_code"], summary["reason"]) == ("failed", 5, "a defect")
    assert score(settings(tmp_path, make_rows(20), resume=True))["state"] == "complete"


def test_a_second_run_needs_a_flag_and_overwrite_starts_anew(tmp_path: Path) -> None:
    lines = make_rows(20, bad=False)
    score(settings(tmp_path, lines))
    with pytest.raises(UsageError, match="not empty"):
        score(settings(tmp_path, lines))
    assert score(settings(tmp_path, lines[:7], overwrite=True))["rows"] == 7


def test_a_pool_that_delivers_too_few_log_probabilities_ends_the_job(tmp_path: Path) -> None:
    pool = FakePool(override=lambda ids, scores: scores[1:])
    with pytest.raises(InfrastructureError, match="log-probabilities"):
        score(settings(tmp_path, make_rows(20, bad=False)), pool)


def test_a_second_delivery_of_an_item_changes_nothing(tmp_path: Path) -> None:
    class Twice(FakePool):
        def collect(self, timeout_s: float) -> list[Any]:
            arrivals = super().collect(timeout_s)
            return [*arrivals, *arrivals]

    lines = make_rows(50)
    score(settings(tmp_path, lines, "once"))
    score(settings(tmp_path, lines, "twice"), Twice())
    assert outputs(tmp_path / "once") == outputs(tmp_path / "twice")


def test_rows_that_do_not_come_out_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Parts.commit

    def lossy(self: Parts, lines: list[bytes]) -> None:
        commit(self, [*lines[:-1], lines[0]])

    monkeypatch.setattr(Parts, "commit", lossy)
    with pytest.raises(InfrastructureError, match="reconciliation"):
        score(settings(tmp_path, make_rows(10, bad=False)))


def test_work_folder_may_lie_elsewhere(tmp_path: Path) -> None:
    lines = make_rows(60)
    score(settings(tmp_path, lines, "whole"))
    work = tmp_path / "work"
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines, work_dir=work), interrupt_at(3))
    assert (work / "journal").exists()
    score(settings(tmp_path, lines, work_dir=work, resume=True))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")
    assert list(work.iterdir()) == []
    assert not (tmp_path / "out" / "work.json").exists()


@pytest.mark.parametrize(("began", "resumed"), [("work", None), ("work", "other"), (None, "other")])
def test_resume_with_another_work_folder_is_refused(
    tmp_path: Path, began: str | None, resumed: str | None
) -> None:
    def job(work: str | None, **changes: Any) -> ScoreSettings:
        return settings(tmp_path, lines, work_dir=None if work is None else tmp_path / work, **changes)

    lines = make_rows(60)
    with pytest.raises(Interrupted):
        score(job(began), interrupt_at(3))
    with pytest.raises(UsageError, match="--work-dir"):
        score(job(resumed, resume=True))
    assert score(job(began, resume=True))["rows_resumed"] > 0


def test_a_work_folder_that_was_moved_is_found(tmp_path: Path) -> None:
    lines = make_rows(60)
    with pytest.raises(Interrupted):
        score(settings(tmp_path, lines, work_dir=tmp_path / "work"), interrupt_at(3))
    (tmp_path / "work").rename(tmp_path / "moved")
    again = settings(tmp_path, lines, work_dir=tmp_path / "moved", resume=True)
    assert score(again)["rows_resumed"] > 0


def test_memory_does_not_grow_with_the_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peak of Python and NumPy memory for 4 times the rows, in windows of one size."""
    monkeypatch.setattr(inputs, "RECENT_IDS", 256)

    def peak(n: int) -> int:
        lines = [b'{"context": "%d", "continuation": "x"}\n' % i for i in range(n)]
        job = settings(tmp_path, lines, f"out-{n}", max_window_rows=256)
        del lines
        pool = FakePool(items_per_collect=512)
        submit = pool.submit

        def forgetful(window: int, items: Any) -> None:
            for done in [w for w in pool.windows if w < window - 2]:
                del pool.windows[done]
            submit(window, items)

        pool.submit = forgetful  # type: ignore[method-assign]
        gc.collect()
        tracemalloc.start()
        score(job, pool)
        _, high = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return high

    peak(500)
    small, large = peak(1_000), peak(4_000)
    # Ids take 16 bytes a row; the rest is when the collector ran. A row that is kept takes more than 1,000.
    assert large - small < 3_000 * 64


def test_collect_is_not_called_for_windows_without_items(tmp_path: Path) -> None:
    pool = FakePool()
    score(settings(tmp_path, [b'{"text": ""}\n'] * 30), pool)
    assert pool.num_collects == 0
    assert job_module.MAX_OPEN_WINDOWS == 2
    assert np.all([len(items) for items in pool.windows.values()])
