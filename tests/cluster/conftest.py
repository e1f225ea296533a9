"""Simulated replicas, fake models and one Ray session for the tests of many."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS / room) for room in ("cluster", "workers", "native")]

from collecting import MakePool  # noqa: E402
from ray_session import session  # noqa: E402, F401
from tinyloop.cluster.config import PoolConfig  # noqa: E402
from tinyloop.cluster.pool import ReplicaPool  # noqa: E402


@pytest.fixture
def make_pool(session: None, tmp_path: Path) -> Iterator[MakePool]:  # noqa: F811
    pools: list[ReplicaPool] = []

    def make(
        replicas: int = 1,
        model: dict[str, Any] | None = None,
        *,
        model_path: Path | None = None,
        factory: str = "fake_model:load_model",
        **settings: Any,
    ) -> ReplicaPool:
        path = model_path or tmp_path / f"model-{len(pools)}.json"
        if model_path is None:
            path.write_text(json.dumps(model or {}))
        config = PoolConfig(model=path, factory=factory, replicas=replicas, **settings)
        pools.append(ReplicaPool.start(config))
        return pools[-1]

    yield make
    for pool in pools:
        pids = [replica.pid for replica in pool.status().replicas] if not pool._closed else []
        pool.close()
        assert not [pid for pid in pids if "ray::Replica" in _command(pid)]


def _command(pid: int) -> str:
    """Empty once the process has gone, which it may do at any moment."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
