"""A score job over a named pool of fake models, as a program that can be killed.

One argument, JSON: pool, address (of Ray), rows, output, perhaps window (in rows). It resumes what lies
in the output folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from tinyloop.cluster import client
from tinyloop.cluster.errors import JobError
from tinyloop.cluster.fleet import PoolError
from tinyloop.cluster.items import Failed, Items, Scored
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.cluster.pool_backend import JobPool
from tinyloop.cluster.settings import ScoreSettings

from ..cluster.score_driver import score
from ..workers.fake_model import expected_logprobs

WINDOW_ROWS = 64
DEPTH = 2


class Oracle:
    """The same scores from one process, one item after the other, in input order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Items]] = []

    def submit(self, window: int, items: Items) -> None:
        self._waiting.append((window, items))

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        window, items = self._waiting.pop(0)
        bounds, counts = items.offsets.tolist(), items.n_scored.tolist()
        parts = [
            expected_logprobs(items.token_ids[bounds[i] : bounds[i + 1]], items.depth)[-count:]
            for i, count in enumerate(counts)
        ]
        logprobs = np.concatenate(parts)
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        return [
            Scored(
                window,
                np.arange(len(items), dtype=np.int32),
                logprobs,
                logprobs > np.float32(-1),
                offsets,
            )
        ]


def settings_of(rows: Path, output: Path, window_rows: int = WINDOW_ROWS) -> ScoreSettings:
    return ScoreSettings(
        inputs=(str(rows),), output=output, resume=True, max_window_rows=window_rows, depth=DEPTH
    )


def undisturbed(rows: Path, output: Path) -> None:
    """The job without Ray, replicas or prefixes."""
    score(settings_of(rows, output), Oracle())  # type: ignore[arg-type]


def main() -> int:
    arguments = json.loads(sys.argv[1])
    # A frozen router is found by its silence; how long a busy machine may need is not what is tested here.
    client.LONGEST_POLL_S, client.ROUTER_ANSWER_S = 1.0, 4.0
    try:
        with ReplicaPool.connect(arguments["pool"], arguments["address"]) as pool:
            window_rows = arguments.get("window", WINDOW_ROWS)
            settings = settings_of(Path(arguments["rows"]), Path(arguments["output"]), window_rows)
            return int(score(settings, JobPool(pool, PoolError))["exit_code"])  # type: ignore[arg-type]
    except (JobError, PoolError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 5


if __name__ == "__main__":
    sys.exit(main())
