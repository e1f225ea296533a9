"""What the router asks of placement beside its own methods: to leave a replica, to stop a window. Pure.

Each is one call that placement itself may offer; until then they keep its invariant from outside: an item
that is not finished is in exactly one of a run, the loose, the lone and a flight. release_run stands for
drain(slot), leave for detach(slot) of a replica that is_drained(slot), stop_window for cancel(window).
"""

from __future__ import annotations

import numpy as np

from ..workers.wire import Int32Array
from .placement import Placement


def release_run(placement: Placement, slot: int) -> None:
    """A replica is leaving: what it has not begun goes to the others."""
    work = placement.replicas[slot]
    placement.loose.extendleft(reversed(work.run))
    work.run.clear()


def leave(placement: Placement, slot: int) -> None:
    """Forget a replica that has finished everything. It did not die and is not counted so."""
    placement.detach(slot)
    placement.counters.deaths -= 1


def stop_window(placement: Placement, window: str) -> Int32Array:
    """Forget a window. Returns int32 items of it that were not finished, those that run included."""
    plan = placement.plans.get(window)
    if plan is None:
        return np.empty(0, dtype=np.int32)
    queues = [placement.loose, placement.lone, *(work.run for work in placement.replicas.values())]
    flights = [flight for work in placement.replicas.values() for flight in work.mirror.flights]
    spans = [(s.begin, s.end) for queue in queues for s in queue if s.window == window]
    spans += [(f.begin, f.end) for f in flights if f.window == window]
    remaining = [plan.head.order[begin:end] for begin, end in spans]
    placement.drop_window(window)
    return np.concatenate(remaining) if remaining else np.empty(0, dtype=np.int32)
