"""A driver killed with SIGKILL at any moment and resumed writes the bytes of an undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ..cluster.test_job import make_rows, outputs
from ..cluster.test_sources import ROWS as TABLE_ROWS
from ..cluster.test_sources import write_parquet

REPOSITORY = Path(__file__).parents[2]
NUM_ROWS = 400
SEED = 20_260


def drive(rows: Path, output: Path, **arguments: Any) -> subprocess.CompletedProcess[str]:
    """One driver process over the fake pool."""
    settings = {
        "inputs": [str(rows)],
        "output": str(output),
        "resume": True,
        "max_window_rows": 64,
    } | arguments
    command = [sys.executable, "-m", "tests.cluster.score_driver", json.dumps(settings)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"".join(make_rows(NUM_ROWS)))
    return path


@pytest.fixture(scope="module")
def undisturbed(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes]:
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    finished = drive(rows, output)
    assert finished.returncode == 3, finished.stderr
    return outputs(output)


@pytest.mark.chaos
def test_output_is_byte_identical_after_a_kill_at_any_write(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(make_rows(60)))
    assert drive(path, tmp_path / "undisturbed").returncode == 3
    finished = drive(path, tmp_path / "out", max_window_rows=16, everywhere=True)
    assert finished.returncode == 0, finished.stderr
    folders = json.loads(finished.stdout)
    # A part, a journal and their removal for each of 4 windows, then the files that are published.
    assert len(folders) > 20
    for folder in folders:
        assert outputs(Path(folder)) == outputs(tmp_path / "undisturbed"), folder
        assert not (Path(folder) / "parts").exists()


@pytest.mark.chaos
def test_a_job_that_replaces_another_never_mixes_with_it_after_a_kill_at_any_write(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(make_rows(60)))
    assert drive(path, tmp_path / "undisturbed").returncode == 3
    finished = drive(path, tmp_path / "out", max_window_rows=16, replaced_everywhere=True)
    assert finished.returncode == 0, finished.stderr
    folders = json.loads(finished.stdout)
    assert len(folders) > 25
    for folder in folders:
        assert outputs(Path(folder)) == outputs(tmp_path / "undisturbed"), folder
        assert not (Path(folder) / "parts").exists()


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(SEED, SEED + 4))
def test_output_is_byte_identical_after_kills_at_random_writes_and_collects(
    rows: Path, undisturbed: tuple[bytes, bytes], tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    kills = 0
    for attempt in range(4):
        where = rng.choice([{"kill_at_write": rng.randint(1, 60)}, {"kill_at_collect": rng.randint(1, 20)}])
        finished = drive(rows, tmp_path / "out", seed=seed + attempt, **where)
        if finished.returncode != -signal.SIGKILL:
            assert finished.returncode == 3, (seed, finished.stderr)
            break
        kills += 1
    finished = drive(rows, tmp_path / "out", seed=seed)
    assert finished.returncode == 3, (seed, finished.stderr)
    assert kills > 0
    assert outputs(tmp_path / "out") == undisturbed
    ids = [json.loads(line)["id"] for line in undisturbed[0].splitlines()]
    assert len(ids) == len(set(ids))


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_resumable_folder_and_130(
    rows: Path, undisturbed: tuple[bytes, bytes], tmp_path: Path, number: signal.Signals
) -> None:
    stopped = drive(rows, tmp_path / "out", signal_at_collect=[5, int(number)])
    assert stopped.returncode == 130, stopped.stderr
    assert json.loads((tmp_path / "out" / "summary.json").read_bytes())["state"] == "interrupted"
    assert drive(rows, tmp_path / "out").returncode == 3
    assert outputs(tmp_path / "out") == undisturbed


@pytest.mark.chaos
def test_a_full_disk_stops_cleanly_and_resumes(
    rows: Path, undisturbed: tuple[bytes, bytes], tmp_path: Path
) -> None:
    # A limit on the size of a file fails a write in its middle, as a full disk does.
    stopped = drive(rows, tmp_path / "out", file_size_limit=9_000)
    assert stopped.returncode == 5, stopped.stderr
    assert "make room" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert drive(rows, tmp_path / "out").returncode == 3
    assert outputs(tmp_path / "out") == undisturbed


@pytest.mark.chaos
def test_a_retry_that_is_killed_at_any_write_and_resumed_changes_no_other_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(make_rows(60)))
    assert drive(path, tmp_path / "undisturbed").returncode == 3
    finished = drive(path, tmp_path / "out", max_window_rows=16, retried_everywhere=True)
    assert finished.returncode == 0, finished.stderr
    folders = json.loads(finished.stdout)
    # retry.json and the folder of earlier parts, then what any job writes.
    assert len(folders) > 20
    for folder in folders:
        assert outputs(Path(folder)) == outputs(tmp_path / "undisturbed"), folder
        assert not {path.name for path in Path(folder).iterdir()} & {"parts", "earlier", "retry.json"}


@pytest.mark.chaos
@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_a_job_over_parquet_goes_on_after_kills_to_the_bytes_of_an_undisturbed_one(
    tmp_path: Path, output_format: str
) -> None:
    path = tmp_path / "rows.parquet"
    rows = [row | {"id": f"row-{i}"} for i, row in enumerate(TABLE_ROWS * 6)]
    write_parquet(path, rows, row_group_size=7)
    options = {"max_window_rows": 16, "output_format": output_format}
    assert drive(path, tmp_path / "undisturbed", **options).returncode == 3
    for write in (4, 11, 18, 25):
        assert drive(path, tmp_path / "out", kill_at_write=write, **options).returncode == -signal.SIGKILL
    assert drive(path, tmp_path / "out", **options).returncode == 3
    for stem in ("results", "errors"):
        name = f"{stem}.{output_format}"
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
