"""Everything that a pool gives back for one window, as bytes that can be compared with an oracle's."""

from __future__ import annotations

import time
from collections.abc import Callable

from fake_model import expected_logprobs
from simulated import ids_of
from tinyloop.cluster.items import Failed, Items, Scored
from tinyloop.cluster.pool import ReplicaPool

MakePool = Callable[..., ReplicaPool]


def gather(
    pool: ReplicaPool,
    window: int,
    items: Items,
    before: dict[int, bytes | Failed] | None = None,
    until: float = 60.0,
) -> dict[int, bytes | Failed]:
    """Every item of one window, each exactly once. before: what has come back already."""
    found = dict(before or {})
    deadline = time.monotonic() + until
    while len(found) < len(items):
        assert time.monotonic() < deadline, f"{len(found)} of {len(items)} items came back"
        for part in pool.collect(1.0):
            assert part.window == window
            for item, value in values_of(part):
                assert item not in found
                found[item] = value
    assert pool.collect(0.0) == []
    return found


def values_of(part: Scored | Failed) -> list[tuple[int, bytes | Failed]]:
    if isinstance(part, Failed):
        return [(part.item, part)]
    bounds = part.offsets.tolist()
    return [
        (item, part.logprobs[bounds[i] : bounds[i + 1]].tobytes())
        for i, item in enumerate(part.items.tolist())
    ]


def expected(items: Items) -> dict[int, bytes]:
    return {
        item: expected_logprobs(ids_of(items, item), items.depth)[-int(items.n_scored[item]) :].tobytes()
        for item in range(len(items))
    }
