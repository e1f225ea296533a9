"""One Ray session for all tests that want one, whichever comes first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tinyloop.cluster.session import connect

WORKERS = Path(__file__).parent.parent / "workers"


@pytest.fixture(scope="session")
def session() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(WORKERS), *filter(None, [before])])
    # A test waits for a report, and Ray would make one every 10 s.
    os.environ.setdefault("RAY_metrics_report_interval_ms", "1000")
    started = connect(None)
    yield
    if started:
        ray.shutdown()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before
