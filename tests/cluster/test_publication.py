"""Final files at a URL: put there once, the summary last, and never over what is not the job's."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tinyloop.cluster import publication as publication_module
from tinyloop.cluster.errors import InfrastructureError, Interrupted, UsageError
from tinyloop.cluster.job_cli import output_of
from tinyloop.cluster.settings import ScoreSettings

from .fake_pool import FakePool
from .score_driver import score, sometimes_failing
from .test_job import make_rows, outputs

NUMBERS = itertools.count()

# What is put at a URL beside results and errors.
BESIDE = ("report.html", "run.json", "summary.json", "timeline.json")


@pytest.fixture
def url() -> str:
    """A folder of its own in fsspec's memory."""
    return f"memory://publication/{next(NUMBERS)}"


def there(url: str) -> dict[str, bytes]:
    memory = fsspec.filesystem("memory")
    folder = url.removeprefix("memory:/")
    return (
        {Path(path).name: memory.cat(path) for path in memory.find(folder)} if memory.exists(folder) else {}
    )


def run(
    tmp_path: Path, url: str, pool: FakePool | None = None, work: str = "work", **changes: Any
) -> dict[str, Any]:
    rows = tmp_path / "rows.jsonl"
    if not rows.exists():
        rows.write_bytes(b"".join(make_rows(100)))
    where = output_of(url, tmp_path / work)
    return score(ScoreSettings(inputs=(str(rows),), max_window_rows=16, **where, **changes), pool)


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_job_puts_its_final_files_at_a_url(tmp_path: Path, url: str, output_format: str) -> None:
    summary = run(tmp_path, url, output_format=output_format)
    found = there(url)
    assert set(found) == {f"results.{output_format}", f"errors.{output_format}", *BESIDE}
    assert json.loads(found["summary.json"]) == summary
    local = score(
        ScoreSettings(
            inputs=(str(tmp_path / "rows.jsonl"),), output=tmp_path / "local", output_format=output_format
        )  # type: ignore[arg-type]
    )
    assert (summary["rows"], summary["errors"]) == (local["rows"], local["errors"])
    for stem in ("results", "errors"):
        name = f"{stem}.{output_format}"
        assert found[name] == (tmp_path / "local" / name).read_bytes()


def test_a_folder_that_has_something_is_refused_unless_it_is_this_jobs(tmp_path: Path, url: str) -> None:
    fsspec.filesystem("memory").pipe(f"{url.removeprefix('memory:/')}/somebody.txt", b"x")
    with pytest.raises(UsageError, match=r"is not empty, it has somebody\.txt"):
        run(tmp_path, url)
    with pytest.raises(UsageError, match="is not empty"):
        run(tmp_path, url, resume=True)
    assert set(there(url)) == {"somebody.txt"}
    run(tmp_path, url, overwrite=True, output_format="csv")
    run(tmp_path, url, overwrite=True)
    assert set(there(url)) == {"somebody.txt", "results.jsonl", "errors.jsonl", *BESIDE}
    pool = FakePool()
    run(tmp_path, url, pool, resume=True)
    assert pool.num_scored == 0
    with pytest.raises(UsageError, match="is not empty"):
        run(tmp_path, url, work="other", resume=True)


def test_a_job_that_is_stopped_before_it_publishes_goes_on(tmp_path: Path, url: str) -> None:
    def interrupt(n: int) -> None:
        if n == 2:
            raise Interrupted("stopped")

    with pytest.raises(Interrupted):
        run(tmp_path, url, FakePool(items_per_collect=5, on_collect=interrupt))
    assert there(url) == {}
    run(tmp_path, url, resume=True)
    assert "summary.json" in there(url)


def test_a_store_that_fails_while_files_are_put_leaves_no_summary_and_the_job_goes_on(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = publication_module._put
    for fails_at in range(4):
        target = f"{url}-{fails_at}"
        count = itertools.count()

        def failing(filesystem: Any, source: Path, path: str, n: int = fails_at, count: Any = count) -> None:
            if next(count) == n:
                raise OSError("the store is away")
            put(filesystem, source, path)

        with monkeypatch.context() as patch:
            patch.setattr(publication_module, "_put", failing)
            with pytest.raises(InfrastructureError, match="the store is away"):
                run(tmp_path, target, work=f"work-{fails_at}")
        assert "summary.json" not in there(target)
        pool = FakePool()
        run(tmp_path, target, pool, work=f"work-{fails_at}", resume=True)
        assert pool.num_scored == 0
        assert set(there(target)) == {"results.jsonl", "errors.jsonl", *BESIDE}


def test_a_finished_job_whose_files_are_gone_from_the_store_puts_them_again(tmp_path: Path, url: str) -> None:
    run(tmp_path, url)
    before = there(url)
    fsspec.filesystem("memory").rm(url.removeprefix("memory:/"), recursive=True)
    run(tmp_path, url, resume=True)
    assert there(url) == before


def test_rows_are_tried_again_and_published_again(tmp_path: Path, url: str) -> None:
    run(tmp_path, url, FakePool(override=sometimes_failing))
    run(tmp_path, url, resume=True, retry=frozenset({"internal"}))
    score(ScoreSettings(inputs=(str(tmp_path / "rows.jsonl"),), output=tmp_path / "local"))
    found = there(url)
    assert (found["results.jsonl"], found["errors.jsonl"]) == outputs(tmp_path / "local")


def test_an_input_in_the_output_folder_is_refused(tmp_path: Path, url: str) -> None:
    fsspec.filesystem("memory").pipe(f"{url.removeprefix('memory:/')}/rows.jsonl", b'{"text": "a"}\n')
    settings = ScoreSettings(
        inputs=(f"{url}/rows.jsonl",), **output_of(url, tmp_path / "work"), overwrite=True
    )
    with pytest.raises(UsageError, match="lies in the output folder"):
        score(settings)


def test_a_url_needs_a_work_folder_and_a_file_url_is_local(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --work-dir"):
        output_of("s3://bucket/out", None)
    assert output_of(tmp_path.as_uri(), None) == {"output": tmp_path, "work_dir": None}


def test_a_store_that_cannot_be_written_is_refused_before_the_start(tmp_path: Path) -> None:
    pool = FakePool()
    with pytest.raises(UsageError, match="nosuch"):
        run(tmp_path, "nosuch://bucket/out", pool)
    assert pool.num_scored == 0
