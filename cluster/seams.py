"""What the router asks of placement beside its own methods: to let a replica leave. Pure.

Either is one call that placement itself may offer: drain(slot), and detach(slot) once is_drained(slot). Until
then they keep its invariant from outside: an item that is not finished is in exactly one of a run, the loose,
the lone and a flight.
"""

from __future__ import annotations

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
