"""What a replica drops to make room: never what is pinned or in use, first what nobody waits for. Pure."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from .mirror import Mirror
from .plan import Segment
from .work import PoolState, Work

NEVER = (1 << 30, 1 << 30)
# A choice looks at so many entries from the least recently used on: the order among more is not worth a
# router's time, and what is older is also what is more likely to be wanted by nobody.
LOOKED_AT = 512
# So many segments ahead are told apart; what is needed later than that is simply far away.
AHEAD = 32


def ahead_of(state: PoolState, work: Work, rest: Segment | None = None) -> list[Segment]:
    """The segments that a replica may work on, nearest first. rest: what is left of the one it is at."""
    ahead = [rest] if rest is not None else []
    for queue in (work.run, state.loose, state.lone):
        for segment in queue:
            if len(ahead) >= AHEAD:
                return ahead
            if rest is None or (segment.window, segment.end) != (rest.window, rest.end):
                ahead.append(segment)
    return ahead


def evictions(
    state: PoolState, mirror: Mirror, kept: set[bytes], ahead: list[Segment], excess: int
) -> list[bytes]:
    """What to drop to free `excess` bytes: least wanted first, children before parents, never what is safe.

    Least wanted: what no window needs, copies of what others hold first; then what is needed furthest from
    now.
    """
    if excess <= 0:
        return []
    looked_at = _oldest(state, mirror, kept, ahead, excess)
    children: dict[bytes, int] = {}
    for digest in looked_at:
        parent = mirror.parent_of(digest)
        if parent in looked_at:
            children[parent] = children.get(parent, 0) + 1
    heap = [(*wish, digest) for digest, wish in looked_at.items() if not children.get(digest)]
    heapify(heap)
    chosen: list[bytes] = []
    while excess > 0 and heap:
        digest = heappop(heap)[-1]
        chosen.append(digest)
        excess -= mirror.entries[digest]
        parent = mirror.parent_of(digest)
        if parent in looked_at:
            children[parent] -= 1
            if not children[parent]:
                heappush(heap, (*looked_at[parent], parent))
    return chosen


def _oldest(
    state: PoolState, mirror: Mirror, kept: set[bytes], ahead: list[Segment], excess: int
) -> dict[bytes, tuple[int, int, int, int]]:
    """Droppable entries from the least recently used on, each with how much it is wanted.

    Enough of them that what nobody needs frees the room, or LOOKED_AT. Children come before their parents.
    """
    safe = mirror.protected(kept)
    found: dict[bytes, tuple[int, int, int, int]] = {}
    unneeded = freed = 0
    for age, (digest, size_bytes) in enumerate(mirror.entries.items()):
        if digest in safe:
            continue
        when = next_use(state, digest, ahead)
        if when == NEVER:
            unneeded += size_bytes
            found[digest] = (0 if state.tree.held_elsewhere(digest, mirror.slot) else 1, 0, 0, age)
        else:
            found[digest] = (2, -when[0], -when[1], age)
        freed += size_bytes
        if unneeded >= excess or (freed >= excess and len(found) >= LOOKED_AT):
            break
    return found


def regret_rows(state: PoolState, work: Work, length: int, depth: int) -> int:
    """Rows that a replica must compute again later if it makes room for a prefix of that length."""
    mirror = work.mirror
    excess = mirror.total_bytes + state.sizes.estimate(length, depth) - budget_of(state, mirror)
    if excess <= 0 or not mirror.entries:
        return 0
    ahead = ahead_of(state, work)
    return sum(
        mirror.own_length(digest)
        for digest in evictions(state, mirror, set(), ahead, excess)
        if next_use(state, digest, ahead) != NEVER
    )


def next_use(state: PoolState, digest: bytes, ahead: list[Segment]) -> tuple[int, int]:
    """When a prefix is next needed by the segments ahead: (segments from now, position), or NEVER.

    What waiting requests of a stream need is needed soon, all of it equally.
    """
    for stream in state.streams.values():
        if digest in stream.branches:
            return 0, 0
    uses = state.tree.uses(digest)
    if uses:
        for distance, segment in enumerate(ahead):
            run = uses.get(segment.window)
            if run is not None and run[0] < segment.end and run[1] > segment.begin:
                return distance, max(run[0], segment.begin)
    return NEVER


def budget_of(state: PoolState, mirror: Mirror) -> int:
    """Bytes this replica may hold: its budget and what the others leave of the pool's, less a reserve."""
    budget = mirror.budget_bytes
    if state.rules.pool_budget_bytes:
        others = sum(work.mirror.peak_bytes for work in state.replicas.values() if work.mirror is not mirror)
        budget = max(min(budget, state.rules.pool_budget_bytes - others), 0)
    return budget * 95 // 100
