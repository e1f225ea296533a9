"""What replicas generate: items that were sent there and that their client has not settled. Pure.

A command to generate is acknowledged when its items have joined a replica's batch; from then on they are on
that replica's list until the client says that it needs nothing more of them: it has all ids, or gave them up.
A client gets no more items sent to a replica than `generate_items`, so a client that does not fetch what came
for it makes its own items wait, and what replicas keep for it stays bounded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
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
    """Forget a window, all of whose items are settled or given up."""
    if state.places.pop(key, None) is None:
        return
    for work in state.replicas.values():
        for entry in [entry for entry in work.generating if entry[0] == key]:
            del work.generating[entry]


def room(state: PoolState, work: Work, client: str) -> int:
    """How many more items to generate of a client a replica may be sent."""
    flights = [flight for flight in work.mirror.flights if flight.kind == GENERATE]
    sent = sum(flight.end - flight.begin for flight in flights if _client(state, flight.window) == client)
    sent += sum(1 for window, _ in work.generating if _client(state, window) == client)
    return max(state.rules.generate_items - sent, 0)


def most_items(state: PoolState, work: Work, segment: Segment) -> int:
    """How many items of a segment one command may have."""
    head = state.plans[segment.window].head
    if head.kind != GENERATE:
        return segment.end - segment.begin
    return min(room(state, work, head.client), segment.end - segment.begin)


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


def settle(state: PoolState, key: str, items: Iterable[int]) -> tuple[Int32Array, int]:
    """The client needs nothing more of these items of a window.

    Returns those that were not settled before, and how many of them no replica was sent. Whoever works on one
    of the others is to be told, which `cancels` then names.
    """
    settled, waiting = [], 0
    places = state.places.get(key, {})
    for item in items:
        place = places.pop(item, None)
        if place is not None:
            settled.append(item)
            waiting += _take_back(state, key, place)
    return np.array(settled, dtype=np.int32), waiting


def abandon(state: PoolState, plan: Plan) -> list[int]:
    """Nobody needs a window any more: see `cancels` then. Returns its positions that replicas have."""
    head, found = plan.head, list[int]()
    wanted = state.places.get(plan.key, {})
    for work in state.replicas.values():
        for flight in work.mirror.flights:
            if flight.window == plan.key and head.kind != GENERATE:
                found += range(flight.begin, flight.end)
            elif flight.window == plan.key:
                on_the_way = [p for p in range(flight.begin, flight.end) if int(head.order[p]) in wanted]
                state.settled_early.update(((plan.key, p), _owner(plan, p)) for p in on_the_way)
                found += on_the_way
        for entry in [entry for entry in work.generating if entry[0] == plan.key]:
            del work.generating[entry]
            state.cancels.append((work.mirror.slot, _owner(plan, entry[1])))
            found.append(entry[1])
    return found


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


def _take_back(state: PoolState, key: str, place: int) -> bool:
    """Stop work on one item, wherever that is. Returns whether no replica had been sent it."""
    owner = _owner(state.plans[key], place)
    for work in state.replicas.values():
        if work.generating.pop((key, place), None) is not None:
            state.cancels.append((work.mirror.slot, owner))
            return False
        if any(f.window == key and f.begin <= place < f.end for f in work.mirror.flights):
            state.settled_early[key, place] = owner
            return False
    queues = (state.loose, state.lone, *(work.run for work in state.replicas.values()))
    return any(_cut_out(queue, key, place) for queue in queues)


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


def _owner(plan: Plan, place: int) -> Owner:
    return plan.head.client, plan.head.window, int(plan.head.order[place])


def _client(state: PoolState, key: str) -> str:
    plan = state.plans.get(key)
    return plan.head.client if plan is not None else ""


def _path(mirror: Mirror, leaf: bytes) -> list[bytes]:
    return list(mirror.path(leaf)) if leaf in mirror.entries else []
