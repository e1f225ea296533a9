"""The pool on Ray with the fake model: the same numbers whatever the number of replicas and whatever dies."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from fake_model import expected_logprobs
from simulated import ids_of, ragged_items, shared_prefix_items

from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.items import Failed, Items, Scored
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.cluster.session import connect
from tinyloop.cluster.supervisor import PoolError

MakePool = Callable[..., ReplicaPool]


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent.parent / "workers"), *filter(None, [before])])
    started = connect(None)
    yield
    if started:
        ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def make_pool(session: None, tmp_path: Path) -> Iterator[MakePool]:
    pools: list[ReplicaPool] = []

    def make(replicas: int = 1, model: dict[str, Any] | None = None, **settings: Any) -> ReplicaPool:
        path = tmp_path / f"model-{len(pools)}.json"
        path.write_text(json.dumps(model or {}))
        config = PoolConfig(model=path, factory="fake_model:load_model", replicas=replicas, **settings)
        pools.append(ReplicaPool.start(config))
        return pools[-1]

    yield make
    for pool in pools:
        pids = [replica.pid for replica in pool.status().replicas] if not pool._closed else []
        pool.close()
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists() and "ray::Replica" in _command(pid)]


def _command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")


def gather(pool: ReplicaPool, window: int, items: Items, until: float = 60.0) -> dict[int, bytes | Failed]:
    """Every item of one window, each exactly once."""
    found: dict[int, bytes | Failed] = {}
    deadline = time.monotonic() + until
    while len(found) < len(items):
        assert time.monotonic() < deadline, f"{len(found)} of {len(items)} items came back"
        for part in pool.collect(1.0):
            assert part.window == window
            for item, value in _values(part):
                assert item not in found
                found[item] = value
    assert pool.collect(0.0) == []
    return found


def _values(part: Scored | Failed) -> list[tuple[int, bytes | Failed]]:
    if isinstance(part, Failed):
        return [(part.item, part)]
    bounds = part.offsets.tolist()
    return [(item, part.logprobs[bounds[i] : bounds[i + 1]].tobytes()) for i, item in enumerate(part.items.tolist())]


def expected(items: Items) -> dict[int, bytes]:
    return {
        item: expected_logprobs(ids_of(items, item), items.depth)[-int(items.n_scored[item]) :].tobytes()
        for item in range(len(items))
    }


@pytest.mark.parametrize("replicas", [1, 2])
def test_scores_do_not_depend_on_the_number_of_replicas(make_pool: MakePool, replicas: int) -> None:
    pool = make_pool(replicas)
    windows = [shared_prefix_items(64, 8, 64, 16, seed=seed, depth=2) for seed in range(2)]
    for number, items in enumerate(windows):
        pool.submit(number, items)
        assert gather(pool, number, items) == expected(items)
    status = pool.status()
    assert status.tokens_computed <= 1.02 * status.tokens_ideal
    assert status.alive == replicas
    assert (status.mirror_differences, status.deaths, status.queued_items) == (0, 0, 0)
