"""A job on a named pool under seeded fire of every kind writes the bytes of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinyloop.cluster import registry
from tinyloop.cluster.named_pool import ask_status, raise_pool

from ..cluster.conftest import session  # noqa: F401
from .under_fire import Fire, fire_config, wait_until

NAME = "under-fire"
SEED = 31
PLAN = ["replica", "oom", "driver", "exception", "router", "stop_replica", "replica", "router", "replica"]


@pytest.mark.chaos
@pytest.mark.usefixtures("session")
def test_a_job_under_fire_writes_the_bytes_of_an_undisturbed_run(tmp_path: Path) -> None:
    config = fire_config(tmp_path, replicas=2, row_seconds=1.5e-3)
    raise_pool(config, NAME)
    try:
        fire = Fire(NAME, config, tmp_path / "job", SEED, list(PLAN), num_rows=300, pause_s=0.5)
        fire.run()
        assert sum(fire.done.values()) >= len(PLAN) - 2, fire.story("the job ended before the plan did")
        wait_until(lambda: not ask_status(NAME)["queued"], "work is left in the router")
        assert ask_status(NAME)["counters"]["mirror_differences"] == 0
    finally:
        registry.reap(NAME)
