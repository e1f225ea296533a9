"""A job killed at half and resumed on another number of replicas: same bytes, hardly any work twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from tinyloop.cluster import registry
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.named_pool import raise_pool

from ..cluster.conftest import session  # noqa: F401
from ..cluster.test_job import outputs
from .chaos_job import undisturbed

REPOSITORY = Path(__file__).parents[2]
NUM_ROWS, WINDOW_ROWS = 2_400, 16
# What is in flight at the kill is done again: two windows of 16 rows, which are 1.3 % of these.
PASSES = 1.02
DEADLINE_S = 150.0


@contextmanager
def pool(folder: Path, name: str, replicas: int) -> Iterator[None]:
    """A named pool whose replicas note their work in folder/work, from nothing."""
    model = folder / "model.json"
    model.write_text(json.dumps({"work": str(folder / "work")}))
    config = PoolConfig(model=model, factory="fake_model:load_model", replicas=replicas, threads=1)
    raise_pool(config, name)
    # What its replicas did to test themselves is no work of the job.
    (folder / "work").unlink()
    try:
        yield
    finally:
        registry.reap(name)


def begin(pool: str, rows: Path, output: Path) -> subprocess.Popen[bytes]:
    """The job as a process of its own; it resumes what is in the folder."""
    address = ray.get_runtime_context().gcs_address
    arguments: dict[str, object] = {
        "pool": pool,
        "address": address,
        "rows": str(rows),
        "output": str(output),
    }
    arguments |= {"window": WINDOW_ROWS}
    with output.with_suffix(".log").open("ab") as log:
        command = [sys.executable, "-m", "tests.chaos.chaos_job", json.dumps(arguments)]
        return subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)


def rows_computed(folder: Path) -> int:
    return sum(int(line) for line in (folder / "work").read_text().split())


def committed(output: Path) -> int:
    """Rows in parts, by their names."""
    return max((int(path.name.split("-")[1]) for path in (output / "parts").glob("*.jsonl")), default=0)


@pytest.mark.chaos
@pytest.mark.usefixtures("session")
def test_a_job_killed_at_half_and_resumed_on_more_replicas_computes_hardly_a_row_twice(
    tmp_path: Path,
) -> None:
    rows, output = tmp_path / "rows.jsonl", tmp_path / "out"
    with rows.open("w") as file:
        for i in range(NUM_ROWS):
            row = {"id": str(i), "context": f"one of {i // 40} ships", "continuation": f" is {i % 40} {i}"}
            file.write(json.dumps(row) + "\n")
    undisturbed(rows, tmp_path / "expected")
    with pool(tmp_path, "half-whole", 1):
        whole = begin("half-whole", rows, tmp_path / "whole")
        assert whole.wait(DEADLINE_S) == 0, (tmp_path / "whole.log").read_text()
        one_pass = rows_computed(tmp_path)
    with pool(tmp_path, "half-first", 1):
        first = begin("half-first", rows, output)
        deadline_s = time.monotonic() + DEADLINE_S
        while committed(output) < NUM_ROWS // 2:
            assert first.poll() is None, output.with_suffix(".log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        first.kill()
        assert first.wait() == -signal.SIGKILL
        before = rows_computed(tmp_path)
    with pool(tmp_path, "half-second", 3):
        second = begin("half-second", rows, output)
        assert second.wait(DEADLINE_S) == 0, output.with_suffix(".log").read_text()
        after = rows_computed(tmp_path)
    assert outputs(output) == outputs(tmp_path / "expected") == outputs(tmp_path / "whole")
    print(f"{(before + after) / one_pass:.4f} passes, killed at {before / one_pass:.3f}")
    assert 0.4 * one_pass < before < 0.65 * one_pass
    assert before + after <= PASSES * one_pass
