"""Room in the pool's budget moves to where it is needed: the least recently used leaf of all goes. Pure.

A replica that would build more if the others left it room says so; the one that holds what was used longest
ago, anywhere, drops that. What was dropped counts as free only when its replica has confirmed it.
"""

from __future__ import annotations

from .evict import NEVER, ahead_of, next_use
from .generating import in_use
from .work import PoolState, Work


def reclaim(state: PoolState, work: Work, now_s: float) -> tuple[bytes, ...]:
    """What an otherwise idle replica should drop for another one; nothing if it is not the one to give.

    Only what nobody needs is given, oldest first over all replicas, as far as that is here.
    """
    lacking = max((other.lacking_bytes for other in state.replicas.values() if other is not work), default=0)
    if not lacking or any(flight.drops and flight.begin == flight.end for flight in work.mirror.flights):
        return ()
    others_oldest = min(
        (_oldest(state, other) for other in state.replicas.values() if other is not work), default=state.clock
    )
    return tuple(_given(state, work, lacking, others_oldest))


def _oldest(state: PoolState, work: Work) -> int:
    """When the leaf used longest ago was used; a leaf is always the first entry."""
    first = next(iter(work.mirror.entries), None)
    stamps = work.mirror.stamps
    return state.clock if first is None or stamps is None else stamps[first]


def _given(state: PoolState, work: Work, lacking: int, others_oldest: int) -> list[bytes]:
    mirror = work.mirror
    safe, ahead = mirror.protected({work.open} | in_use(work)), ahead_of(state, work)
    given: list[bytes] = []
    for digest, size_bytes in mirror.entries.items():
        if lacking <= 0 or mirror.stamps is None or mirror.stamps[digest] > others_oldest:
            break
        if digest in safe or next_use(state, digest, ahead) != NEVER:
            safe |= mirror.protected({digest})
            continue
        given.append(digest)
        lacking -= size_bytes
    return given
