"""Goals of the pool as figures: python -m tests.bench.pool_goals [death] [router] [share] [no-reuse]

death: seconds from the SIGKILL of a replica to the moment at which another one begins its work (goal: 0.1).
router: seconds from the SIGKILL of the router to a status in which it knows every replica and prefix again
(2). share: the router's CPU time over that of the whole job, with the shipped model and rows (0.01).
no-reuse: what placement costs a job in which nothing is shared: CPU time of the router and of cutting windows
in the client, over the CPU time of the engine (0.01).
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import ray

TESTS = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(TESTS / "workers"), *filter(None, [os.environ.get("PYTHONPATH")])]
)

from tinyloop.cluster.config import PoolConfig  # noqa: E402
from tinyloop.cluster.fleet import PoolError  # noqa: E402
from tinyloop.cluster.items import Items, Scored  # noqa: E402
from tinyloop.cluster.pool import ReplicaPool  # noqa: E402
from tinyloop.cluster.pool_backend import JobPool, choose_model  # noqa: E402
from tinyloop.cluster.scoring import score_rows  # noqa: E402
from tinyloop.cluster.segments import CutRules, cut_window  # noqa: E402
from tinyloop.cluster.settings import PoolRequest, ScoreSettings  # noqa: E402
from tinyloop.native.models import default_model_path  # noqa: E402

DEMO = TESTS.parent / "configs" / "demo"
DEADLINE_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


def death_to_redispatch_s(folder: Path, kills: int) -> list[float]:
    """One item runs on one of two replicas, which is killed; the other one has nothing to do."""
    log = folder / "log"
    model = {"row_seconds": 0.01, "log": str(log)}
    items = random_items(np.random.default_rng(3), 1, 50)
    measured = []
    with fake_pool(folder, 2, model) as pool:
        for window in range(kills):
            wait_until(lambda: pool.status().alive == 2)
            wait_until(lambda: all(r.backlog_s == 0.0 for r in pool.status().replicas))
            log.write_text("")
            pool.submit(window, items)
            wait_until(lambda: bool(log.read_text()))
            victim = int(log.read_text().split()[0])
            killed_s = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            drain(pool, len(items))
            began = [line.split() for line in log.read_text().splitlines()]
            # A replacement tests itself meanwhile: the first call of the replica that was there before
            # counts.
            other = next(float(at) for pid, at in began if int(pid) != victim)
            measured.append(other - killed_s)
    return measured


def router_restart_s(folder: Path, kills: int) -> list[float]:
    """A pool that holds prefixes loses its router, again and again."""
    items = shared_items(np.random.default_rng(5))
    measured = []
    with fake_pool(folder, 2, {}) as pool:
        pool.submit(0, items)
        drain(pool, len(items))
        before = pool.status().prefixes
        assert before > 0
        for _ in range(kills):
            killed_s = time.monotonic()
            os.kill(pool._router_pid, signal.SIGKILL)
            wait_until(lambda: pool.status().prefixes == before and pool.status().alive == 2)
            measured.append(time.monotonic() - killed_s)
    return measured


def router_share(rows: int | None = None) -> dict[str, float]:
    """Rows that ship with the package on the model that does, as a job scores them."""
    lines = [json.loads(line) for file in sorted(DEMO.glob("*.jsonl")) for line in file.open()][:rows]
    chosen = choose_model(ScoreSettings(inputs=(), output=Path("unused")), PoolRequest())
    with ReplicaPool.start(PoolConfig(model=chosen.path, max_seq_len=chosen.max_seq_len)) as pool:
        idle = idle_rate(pool)
        before_s, own_s = cpu_of_replicas(pool), time.process_time()
        router_before_s, began_s = pool.status().router_cpu_s, time.monotonic()
        score_rows(JobPool(pool, PoolError), chosen.encoder, lines, depth=chosen.depth)
        router_s, wall_s = pool.status().router_cpu_s - router_before_s, time.monotonic() - began_s
        job_s = cpu_of_replicas(pool) - before_s + time.process_time() - own_s + router_s
    figures = {"rows": len(lines), "router_s": router_s, "job_s": job_s, "wall_s": wall_s, "idle": idle}
    return figures | {"share": router_s / job_s, "share_without_idle": (router_s - idle * wall_s) / job_s}


def no_reuse_cost(items_a_window: int, length: int = 128) -> dict[str, float]:
    """Random ids: no two items share anything."""
    items = random_items(np.random.default_rng(7), items_a_window, length)
    path = default_model_path()
    with ReplicaPool.start(PoolConfig(model=path, max_seq_len=256)) as pool:
        idle, began_s = idle_rate(pool), time.monotonic()
        before_s, router_before_s = cpu_of_replicas(pool), pool.status().router_cpu_s
        pool.submit(0, items)
        drain(pool, len(items))
        router_s = pool.status().router_cpu_s - router_before_s
        engine_s, wall_s = cpu_of_replicas(pool) - before_s, time.monotonic() - began_s
        info = pool.info
    began_s = time.process_time()
    cut_window(items, CutRules(info.digest, int(info.descriptor["vocab_size"]), 8), client="bench", window=0)
    cut_s = time.process_time() - began_s
    figures = {"tokens": len(items.token_ids), "router_s": router_s, "cut_s": cut_s, "engine_s": engine_s}
    cost, idle_s = router_s + cut_s, idle * wall_s
    return figures | {
        "wall_s": wall_s,
        "idle": idle,
        "cost": cost / engine_s,
        "cost_without_idle": (cost - idle_s) / engine_s,
    }


def idle_rate(pool: ReplicaPool, seconds: float = 5.0) -> float:
    """CPU seconds a second of a router that has nothing to do: what Ray's own threads take in any actor."""
    before_s, began_s = pool.status().router_cpu_s, time.monotonic()
    time.sleep(seconds)
    return (pool.status().router_cpu_s - before_s) / (time.monotonic() - began_s)


def fake_pool(folder: Path, replicas: int, model: dict[str, Any]) -> ReplicaPool:
    path = folder / "model.json"
    path.write_text(json.dumps(model))
    return ReplicaPool.start(
        PoolConfig(
            model=path, factory="fake_model:load_model", replicas=replicas, threads=1, crash_limit=1000
        )
    )


def random_items(random: Any, count: int, length: int) -> Items:
    ids = random.integers(1, 999, count * length, dtype=np.int32)
    offsets = np.arange(0, count * length + 1, length, dtype=np.int64)
    return Items(ids, offsets, np.full(count, length // 2, dtype=np.int32), 1)


def shared_items(random: Any, groups: int = 40, each: int = 8) -> Items:
    shared = np.repeat(random.integers(1, 999, (groups, 64), dtype=np.int32), each, axis=0)
    rows = np.concatenate([shared, random.integers(1, 999, (groups * each, 8), dtype=np.int32)], axis=1)
    offsets = np.arange(0, rows.size + 1, rows.shape[1], dtype=np.int64)
    return Items(rows.reshape(-1), offsets, np.full(len(rows), 4, dtype=np.int32), 1)


def drain(pool: ReplicaPool, count: int) -> None:
    left = count
    deadline_s = time.monotonic() + 10 * DEADLINE_S
    while left:
        assert time.monotonic() < deadline_s, f"{left} of {count} items did not come back"
        left -= sum(len(part.items) if isinstance(part, Scored) else 1 for part in pool.collect(1.0))


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def cpu_of_replicas(pool: ReplicaPool) -> float:
    """Seconds of user and system time of every replica process."""
    total = 0
    for replica in pool.status().replicas:
        fields = Path(f"/proc/{replica.pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS


def main() -> None:
    wanted = sys.argv[1:] or ["death", "router", "share", "no-reuse"]
    with tempfile.TemporaryDirectory() as folder:
        if "death" in wanted:
            report("death to re-dispatch", death_to_redispatch_s(Path(folder), 10), 0.1)
        if "router" in wanted:
            report("router restart", router_restart_s(Path(folder), 5), 2.0)
    if "share" in wanted:
        print("router share of a job's CPU time, goal 0.01:", json.dumps(router_share()))
    if "no-reuse" in wanted:
        print("cost of placement without reuse, goal 0.01:", json.dumps(no_reuse_cost(1000)))
    ray.shutdown()


def report(name: str, seconds: list[float], goal_s: float) -> None:
    print(
        f"{name}: median {1e3 * statistics.median(seconds):.0f} ms, least {1e3 * min(seconds):.0f}, most "
        f"{1e3 * max(seconds):.0f} of {len(seconds)}; goal {1e3 * goal_s:.0f} ms"
    )


if __name__ == "__main__":
    main()
