"""One million short rows through everything but the engine: python -m tests.bench.million [--rows N]

Real: reading, encoding with the shipped model's tokenizer, windows, cutting, Ray, router, the replica's
process and wire, records, journal, commit, publishing, counting. Not real: the model of the replica, which
costs a few array operations a batch (tests/workers/fast_model.py).

Then a sample of the same rows is scored by the shipped model, alone in a process, and the CPU seconds of
driver and router for a row are held against the engine's (goal: 3 %). Memory of the driver is sampled as it
works; flat means at most 16 bytes a row.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

TESTS = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS / "workers"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from tinyloop.cluster.config import PoolConfig  # noqa: E402
from tinyloop.cluster.fleet import PoolError  # noqa: E402
from tinyloop.cluster.kinds import Backend  # noqa: E402
from tinyloop.cluster.pool import ReplicaPool  # noqa: E402
from tinyloop.cluster.pool_backend import FigureSource, JobPool, choose_model  # noqa: E402
from tinyloop.cluster.progress import Snapshot  # noqa: E402
from tinyloop.cluster.rows import Row  # noqa: E402
from tinyloop.cluster.score import run_score  # noqa: E402
from tinyloop.cluster.settings import PoolRequest, ScoreSettings  # noqa: E402
from tinyloop.cluster.tasks import RowPlan, TaskOptions, encode_rows  # noqa: E402
from tinyloop.native import load_model  # noqa: E402

SHARE_GOAL = 0.03
BYTES_A_ROW = 16
# What allocators keep is not the rows'.
SLACK_BYTES = 64 << 20
SEA = "ship harbour sail storm anchor rope deck mast wave coast island crew captain cargo tide lamp"
WORDS = SEA.split(" ")


def write_rows(path: Path, count: int) -> None:
    """Short rows, a thousand to each of their contexts: about 15 tokens, of which the last few are scored."""
    with path.open("w") as file:
        for i in range(count):
            context = f"Definition {i // 1000}: one of {WORDS[i // 1000 % 16]}s that are seen at sea. Word:"
            continuation = f" {WORDS[i % 16]} {WORDS[i // 16 % 16]} {i % 1000}"
            file.write(json.dumps({"id": f"r{i}", "context": context, "continuation": continuation}) + "\n")


class MemoryDisplay:
    """Notes the driver's resident memory at every report."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []

    def show(self, snapshot: Snapshot) -> None:
        self.samples.append((snapshot.rows_done, resident_bytes()))

    def close(self) -> None:
        pass

    def growth(self, rows: int) -> int:
        """Bytes from the first report after a fifth of the rows to the most: buffers have their size then."""
        late = [size for done, size in self.samples if done >= rows // 5]
        return max(late) - late[0] if late else 0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def through_the_job(rows: Path, output: Path, profile: Path | None) -> dict[str, Any]:
    """The whole job on one replica that costs nothing. Returns CPU seconds, wall seconds, memory."""
    settings = ScoreSettings(inputs=(str(rows),), output=output)
    chosen = choose_model(settings, PoolRequest())
    model = output.parent / "fast.json"
    model.write_text(json.dumps({"vocab": chosen.encoder.policy.vocab_size}))
    config = PoolConfig(
        model=model, factory="fast_model:load_model", threads=1, max_seq_len=chosen.max_seq_len, metrics=False
    )
    display, figures = MemoryDisplay(), {}

    @contextmanager
    def opened() -> Iterator[Backend]:
        with ReplicaPool.start(config) as pool:
            identity = {**chosen.choice.identity, "numerics_id": "fast"}
            source = FigureSource(pool, PoolError)
            pids = [replica.pid for replica in pool.status().replicas]
            before, began_s = cpu_s(), time.monotonic()
            replica_before, router_before = cpu_of(pids), pool.status().router_cpu_s
            yield Backend(JobPool(pool, PoolError), chosen.encoder, chosen.depth, identity, source)
            figures["driver_cpu_s"], figures["wall_s"] = cpu_s() - before, time.monotonic() - began_s
            figures["router_cpu_s"] = pool.status().router_cpu_s - router_before
            figures["replica_cpu_s"] = cpu_of(pids) - replica_before

    profiler = cProfile.Profile() if profile else None
    if profiler:
        profiler.enable()
    summary = run_score(settings, chosen.choice, opened, display)
    if profiler and profile:
        profiler.disable()
        profiler.dump_stats(profile)
        pstats.Stats(str(profile)).sort_stats("tottime").print_stats(45)
    assert summary["exit_code"] == 0
    count = summary["rows"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return {**figures, "rows": count, "growth_bytes": display.growth(count), "peak_bytes": peak}


def engine_s_per_row(rows: Path, sample: int) -> float:
    """CPU seconds of the shipped model for a row, of rows that follow each other, prefixes computed once."""
    settings = ScoreSettings(inputs=(str(rows),), output=rows.parent)
    chosen = choose_model(settings, PoolRequest())
    from tinyloop.cluster.inputs import expand, read_rows, scan

    read = [row for row in read_rows(scan(expand([str(rows)])), limit=sample) if isinstance(row, Row)]
    plans = [p for p in encode_rows(chosen.encoder, read, TaskOptions()) if isinstance(p, RowPlan)]
    with load_model(chosen.path, chosen.max_seq_len, threads=1) as model:
        shared = plans[0].parts[0].ids[: plans[0].parts[0].n_context - 1]
        began_s = time.process_time()
        prefix = model.prefix(shared, depth=chosen.depth)
        for begin in range(0, len(plans), 64):
            parts = [plan.parts[0] for plan in plans[begin : begin + 64]]
            own = [part.ids[len(shared) :] for part in parts]
            offsets = np.cumsum([0, *map(len, own)], dtype=np.int64)
            scored = np.array([part.n_continuation for part in parts], dtype=np.int32)
            prefixes = [prefix] * len(own)
            model.score(np.concatenate(own), offsets, scored, prefixes=prefixes, depth=chosen.depth)
        return (time.process_time() - began_s) / len(plans)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_of(pids: list[int]) -> float:
    total = 0
    for pid in pids:
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sample", type=int, default=1000, help="rows of one context that the engine scores")
    parser.add_argument("--profile", type=Path, help="write a profile of the driver here and print its head")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        write_rows(rows, asked.rows)
        found = through_the_job(rows, Path(folder) / "out", asked.profile)
        print(json.dumps(found), flush=True)
        engine_s = engine_s_per_row(rows, min(asked.sample, 1000))
    count = found["rows"]
    ours_s = (found["driver_cpu_s"] + found["router_cpu_s"]) / count
    share = ours_s / (ours_s + engine_s)
    grown = found["growth_bytes"] <= SLACK_BYTES + BYTES_A_ROW * count
    print(
        f"{count:,} rows in {found['wall_s']:.0f} s, {count / found['wall_s']:,.0f} rows/s; driver "
        f"{1e6 * found['driver_cpu_s'] / count:.0f} us of CPU a row, router "
        f"{1e6 * found['router_cpu_s'] / count:.0f}, replica without an engine "
        f"{1e6 * found['replica_cpu_s'] / count:.0f}; the engine {1e6 * engine_s:.0f}: share of driver and "
        f"router {100 * share:.2f} % (goal {100 * SHARE_GOAL:.0f} %)"
    )
    print(
        f"driver memory: {found['peak_bytes'] / 2**20:,.0f} MiB at most, grew by "
        f"{found['growth_bytes'] / 2**20:,.1f} MiB after a fifth of the rows"
    )
    return 0 if share <= SHARE_GOAL and grown else 1


if __name__ == "__main__":
    sys.exit(main())
