"""--retry-errors: rows of the named classes are done again, all others stay to the byte."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyloop.cluster.errors import (
    OUR_FAULTS,
    ROW_FAULTS,
    ErrorBudgetExceeded,
    ExitCode,
    Interrupted,
    UsageError,
)
from tinyloop.cluster.outputs.final import read_final
from tinyloop.cluster.settings import ErrorBudget, ScoreSettings, parse_retry

from .fake_pool import FakePool
from .score_driver import score, sometimes_failing
from .test_job import make_rows, outputs

INTERNAL = frozenset({"internal"})


def rows_of(tmp_path: Path, n: int = 200) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(make_rows(n)))
    return path


def run(tmp_path: Path, output: str, pool: FakePool | None = None, **changes: Any) -> dict[str, Any]:
    changes = {"max_window_rows": 32, "resume": True} | changes
    rows = str(tmp_path / "rows.jsonl")
    return score(ScoreSettings(inputs=(rows,), output=tmp_path / output, **changes), pool)


def failing() -> FakePool:
    return FakePool(override=sometimes_failing)


def test_rows_of_a_finished_job_are_tried_again_and_the_rest_stays(tmp_path: Path) -> None:
    rows_of(tmp_path)
    run(tmp_path, "whole")
    before = run(tmp_path, "out", failing())
    num_failed = before["errors_by_class"]["internal"]
    old_results, old_errors = (set(content.splitlines()) for content in outputs(tmp_path / "out"))
    # What is scored again comes out differently, so that a row that was scored twice would show.
    pool = FakePool(override=lambda ids, scores: [np.float32(-1.0)] * len(scores))
    after = run(tmp_path, "out", pool, retry=INTERNAL)
    results, errors = outputs(tmp_path / "out")
    assert num_failed > 10
    assert "internal" not in after["errors_by_class"]
    assert after["rows"] == before["rows"] == after["results"] + after["errors"]
    assert after["rows_resumed"] == before["rows"] - num_failed
    assert old_results < set(results.splitlines())
    assert set(errors.splitlines()) == {line for line in old_errors if b'"class": "internal"' not in line}
    whole = [json.loads(line)["id"] for line in outputs(tmp_path / "whole")[0].splitlines()]
    assert [json.loads(line)["id"] for line in results.splitlines()] == whole
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "errors.jsonl", "progress.json", "report.html", "results.jsonl", "run.json", "summary.json",
        "timeline.json",
    ]  # fmt: skip


def test_a_retry_in_which_all_goes_well_gives_the_bytes_of_an_undisturbed_job(tmp_path: Path) -> None:
    rows_of(tmp_path)
    run(tmp_path, "whole")
    for output, class_names in (("ours", parse_retry("ours")), ("all", parse_retry("all"))):
        run(tmp_path, output, failing())
        summary = run(tmp_path, output, retry=class_names)
        assert outputs(tmp_path / output) == outputs(tmp_path / "whole")
        # Faults of the rows themselves are the same on every run.
        assert summary["exit_code"] == ExitCode.ROW_ERRORS


def test_rows_of_a_job_under_way_are_tried_again(tmp_path: Path) -> None:
    rows_of(tmp_path)
    run(tmp_path, "whole")
    with pytest.raises(ErrorBudgetExceeded, match="60 are allowed"):
        run(tmp_path, "out", failing(), budget=ErrorBudget(max_count=60))
    assert any((tmp_path / "out" / "parts").iterdir())
    run(tmp_path, "out", retry=INTERNAL)
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def test_nothing_is_done_where_nothing_failed_so(tmp_path: Path) -> None:
    rows_of(tmp_path)
    first = run(tmp_path, "out")
    pool = FakePool()
    assert run(tmp_path, "out", pool, retry=INTERNAL) == first
    assert pool.num_scored == 0


@pytest.mark.parametrize("output_format", ["csv", "parquet"])
def test_rows_of_tables_are_tried_again(tmp_path: Path, output_format: str) -> None:
    rows_of(tmp_path)
    options = {"output_format": output_format}
    run(tmp_path, "whole", **options)
    run(tmp_path, "out", failing(), **options)
    assert (tmp_path / "out" / "parts").is_dir()
    run(tmp_path, "out", retry=INTERNAL, **options)
    for stem in ("results", "errors"):
        found = list(read_final(tmp_path / "out", stem, output_format))  # type: ignore[arg-type]
        assert found == list(read_final(tmp_path / "whole", stem, output_format))  # type: ignore[arg-type]
    # Rows with faults of their own are left; a second retry is still possible.
    run(tmp_path, "out", retry=parse_retry("all"), **options)
    run(tmp_path, "out", overwrite=True, resume=False, output_format="jsonl")
    assert not (tmp_path / "out" / "parts").exists()


def test_a_retry_that_was_stopped_goes_on_with_its_own_classes(tmp_path: Path) -> None:
    rows_of(tmp_path)
    run(tmp_path, "whole")
    run(tmp_path, "out", failing())

    def interrupt(n: int) -> None:
        if n == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted):
        run(tmp_path, "out", FakePool(items_per_collect=5, on_collect=interrupt), retry=INTERNAL)
    with pytest.raises(UsageError, match="being tried again"):
        run(tmp_path, "out", retry=frozenset({"timeout"}))
    run(tmp_path, "out")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "whole")


def test_a_retry_needs_a_job_and_no_overwrite(tmp_path: Path) -> None:
    rows_of(tmp_path)
    with pytest.raises(UsageError, match="no job in"):
        run(tmp_path, "out", retry=INTERNAL)
    with pytest.raises(UsageError, match="exclude each other"):
        run(tmp_path, "out", retry=INTERNAL, overwrite=True, resume=False)


def test_classes_are_named_or_ours_or_all() -> None:
    assert parse_retry(None) == frozenset()
    assert parse_retry("ours") == OUR_FAULTS
    assert parse_retry("all") == OUR_FAULTS | ROW_FAULTS
    assert parse_retry("timeout,invalid_json") == {"timeout", "invalid_json"}
    assert parse_retry("ours,invalid_json") == OUR_FAULTS | {"invalid_json"}
    for wrong in ("", "timeouts", "timeout,", "timeout, internal"):
        with pytest.raises(UsageError, match="--retry-errors has"):
            parse_retry(wrong)
