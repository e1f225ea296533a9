"""What replicas generate: items that were sent there and that their client has not settled. Pure.

A command to generate is acknowledged when its items have joined a replica's batch; from then on they are on
that replica's list until the client says that it needs nothing more of them: it has all ids, or gave them up.
A client gets no more items sent to a replica than `generate_items`, so a client that does not fetch what came
for it makes its own items wait, and what replicas keep for it stays bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from ..workers.outbox import Owner
from ..workers.wire import GENERATE, Int32Array
from .mirror import Flight, Mirror
from .plan import Plan, Segment
from .work import PoolState, Work


def open_window(state: PoolState, plan: Plan) -> None:
    """Begin to keep account of a window that is to be generated."""
    if plan.head.kind == GENERATE:
        state.places[plan.key] = {item: place for place, item in enumerate(plan.head.order.tolist())}


def close_window(state: PoolState, key: str) -> None:
    """Forget a window; what replicas still do for it is of no use."""
    state.places.pop(key, None)
    for work in state.replicas.values():
        for entry in [entry for entry in work.generating if entry[0] == key]:
            del work.generating[entry]


def room(state: PoolState, work: Work, key: str) -> int:
    """How many more items of a window's client a replica may be sent."""
    client = state.plans[key].head.client
    flights = [flight for flight in work.mirror.flights if flight.kind == GENERATE]
    sent = sum(flight.end - flight.begin for flight in flights if _client(state, flight.window) == client)
    sent += sum(1 for window, _ in work.generating if _client(state, window) == client)
    return max(state.rules.generate_items - sent, 0)


def with_room(state: PoolState, work: Work, segment: Segment | None) -> Segment | None:
    """The segment, or where its client must wait another one of the run, now its head; None if all must."""
    for _ in range(len(work.run)):
        if segment is None or most_items(state, work, segment) > 0:
            return segment
        work.run.rotate(-1)
        segment = work.run[0]
    return None


def most_items(state: PoolState, work: Work, segment: Segment) -> int:
    """How many items of a segment one command may have."""
    if state.plans[segment.window].head.kind != GENERATE:
        return segment.end - segment.begin
    return min(room(state, work, segment.window), segment.end - segment.begin)


def in_use(work: Work) -> set[bytes]:
    """Prefixes that completions on their way stand on, with their ancestors: a drop would free nothing."""
    leaves = {flight.leaves[place - flight.begin] for (_, place), flight in work.generating.items()}
    for flight in work.mirror.flights:
        leaves.update(flight.leaves)
    return {digest for leaf in leaves for digest in _path(work.mirror, leaf)}


def begin(state: PoolState, work: Work, flight: Flight) -> None:
    """A command to generate was acknowledged: its items are on the replica's list, but for those settled."""
    for place in range(flight.begin, flight.end):
        owner = state.settled_early.pop((flight.window, place), None)
        if owner is None:
            work.generating[flight.window, place] = flight
        else:
            state.cancels.append((work.mirror.slot, owner))


def settle(state: PoolState, key: str, items: Int32Array) -> Int32Array:
    """The client needs nothing more of these items of a window. Returns those that were not settled before.

    Whoever works on one of them is to be told, which `cancels` then names.
    """
    settled = []
    places = state.places.get(key, {})
    for item in items.tolist():
        place = places.pop(item, None)
        if place is not None:
            settled.append(item)
            _withdraw(state, key, place, item)
    return np.array(settled, dtype=np.int32)


def parts(state: PoolState, flight: Flight) -> list[Flight]:
    """What a command that is lost leaves to do: all of it, less the items settled on the way."""
    if flight.kind != GENERATE:
        return [flight]
    kept = [
        place
        for place in range(flight.begin, flight.end)
        if state.settled_early.pop((flight.window, place), None) is None
    ]
    return _neighbours([flight] * len(kept), kept)


def suspects(work: Work) -> list[Flight]:
    """What was generated on a replica that is gone, as flights of neighbours that were sent together."""
    entries = sorted(work.generating)
    return _neighbours([work.generating[entry] for entry in entries], [place for _, place in entries])


def is_alone(work: Work) -> bool:
    """Whether a replica generates for an item that must have it for itself."""
    return any(flight.alone for flight in work.generating.values())


def _neighbours(flights: list[Flight], places: list[int]) -> list[Flight]:
    """One flight for each run of neighbouring places that belong to the same one."""
    runs: list[Flight] = []
    before: Flight | None = None
    for flight, place in zip(flights, places, strict=True):
        leaf = flight.leaves[place - flight.begin : place - flight.begin + 1]
        if flight is before and runs[-1].end == place:
            runs[-1] = replace(runs[-1], end=place + 1, leaves=runs[-1].leaves + leaf)
        else:
            runs.append(replace(flight, begin=place, end=place + 1, leaves=leaf))
        before = flight
    return runs


def _withdraw(state: PoolState, key: str, place: int, item: int) -> None:
    head = state.plans[key].head
    owner: Owner = (head.client, head.window, item)
    for work in state.replicas.values():
        if work.generating.pop((key, place), None) is not None:
            state.cancels.append((work.mirror.slot, owner))
            return
        if any(f.window == key and f.begin <= place < f.end for f in work.mirror.flights):
            state.settled_early[key, place] = owner
            return
    for queue in (state.loose, state.lone, *(work.run for work in state.replicas.values())):
        if _cut_out(queue, key, place):
            return


def _cut_out(queue: deque[Segment], key: str, place: int) -> bool:
    """Take one place out of the segment that has it."""
    for index, segment in enumerate(queue):
        if segment.window == key and segment.begin <= place < segment.end:
            rest = [Segment(key, segment.begin, place), Segment(key, place + 1, segment.end)]
            del queue[index]
            for offset, part in enumerate(part for part in rest if part.begin < part.end):
                queue.insert(index + offset, part)
            return True
    return False


def _client(state: PoolState, key: str) -> str:
    plan = state.plans.get(key)
    return plan.head.client if plan is not None else ""


def _path(mirror: Mirror, leaf: bytes) -> list[bytes]:
    return list(mirror.path(leaf)) if leaf in mirror.entries else []
