"""Who does which part of a window: the cut, what comes next, what is taken from another. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from heapq import nlargest

import numpy as np
from numpy.typing import NDArray

from ..workers.wire import GENERATE
from .costs import placement_cost
from .evict import regret_rows
from .generating import room
from .keys import at_depth, depth_of
from .plan import Plan, Segment
from .pool_tree import bits
from .work import PoolState, Work

# Up to so many pairs of a run and a replica the regret of each is weighed; beyond, one figure a replica.
PAIRS = 4096
# A thief looks at so many of the richest runs before it gives up.
VICTIMS = 4


def assign(state: PoolState, plan: Plan) -> None:
    """Cut a window into one run a replica; each goes to the replica where the one rule makes it cheapest."""
    works = [work for _, work in sorted(state.replicas.items()) if not work.draining]
    if not works:
        state.loose.append(Segment(plan.key, 0, len(plan)))
        return
    runs = _cut(plan, min(len(works), max(1, plan.rows(0, len(plan)) // state.rules.chunk_rows)))
    costs = _costs(state, plan, runs, works)
    for run, row in zip(runs, costs, strict=True):
        chosen = int(row.argmin())
        works[chosen].run.append(run)
        costs[:, chosen] = np.inf


def next_segment(state: PoolState, work: Work, client: str) -> Segment | None:
    """What a replica works on next for a client, an element of its run; None if there is nothing for it.

    A loose segment of an older window comes first, then its own run, then any loose segment, then a theft.
    Of what is to be generated nothing, while the replica has as much of that as the client may have there.
    """
    is_for_it = _taken(state, work, client)
    own = next(filter(is_for_it, work.run), None)
    loose = list(filter(is_for_it, state.loose))
    if loose and (own is None or _age(state, own) > min(_age(state, segment) for segment in loose)):
        held = work.mirror.entries
        best = min(loose, key=lambda segment: (_age(state, segment), -_held_rows(state, segment, held)))
        state.loose.remove(best)
        work.run.appendleft(best)
        return best
    return own if own is not None else _steal(state, work, is_for_it)


def _taken(state: PoolState, work: Work, client: str) -> Callable[[Segment], bool]:
    """Whether a replica may take a segment for a client now."""
    generates = not state.places or room(state, work, client) > 0

    def is_for_it(segment: Segment) -> bool:
        head = state.plans[segment.window].head
        return head.client == client and (generates or head.kind != GENERATE)

    return is_for_it


def _cut(plan: Plan, parts: int) -> list[Segment]:
    runs, begin = [], 0
    for left in range(parts, 0, -1):
        end = plan.cut(begin, len(plan), 1.0 / left) if left > 1 else len(plan)
        if end > begin:
            runs.append(Segment(plan.key, begin, end))
        begin = end
    return runs


def _age(state: PoolState, segment: Segment) -> int:
    return state.plans[segment.window].number


def _costs(state: PoolState, plan: Plan, runs: list[Segment], works: list[Work]) -> NDArray[np.float64]:
    """float64 [runs, works]: seconds by the one rule if that replica took that run."""
    held = _held(state, plan, runs, works)
    rows = np.array([plan.rows(run.begin, run.end) for run in runs], dtype=np.float64)
    row_s = np.array([work.rates.seconds(1, plan.head.depth) for work in works])
    backlog_s = np.array([state.backlog_s(work) for work in works])
    miss_s = np.maximum(rows[:, None] - held, 0.0) * row_s
    return placement_cost(backlog_s, miss_s, _regrets(state, plan, runs, works) * row_s)


def _held(state: PoolState, plan: Plan, runs: list[Segment], works: list[Work]) -> NDArray[np.float64]:
    """Tokens of each run's prefixes that each replica holds, at this depth or, if that serves, deeper."""
    held = np.zeros((len(runs), len(works)))
    column = {work.mirror.slot: index for index, work in enumerate(works)}
    begins, ends = [run.begin for run in runs], [run.end for run in runs]
    for node, digest in enumerate(plan.digests):
        holders = _holders(state, digest)
        if holders:
            first, last = bisect_right(ends, plan.lows[node]), bisect_left(begins, plan.highs[node])
            above = plan.lengths[plan.parents[node]] if plan.parents[node] >= 0 else 0
            for slot in bits(holders):
                if slot in column:
                    held[first:last, column[slot]] += plan.lengths[node] - above
    return held


def _holders(state: PoolState, digest: bytes) -> int:
    holders = state.tree.holders(digest)
    if not state.sizes.has_coda:
        depth = depth_of(digest)
        for deeper in state.tree.depths:
            if deeper > depth:
                holders |= state.tree.holders(at_depth(digest, deeper))
    return holders


def _regrets(state: PoolState, plan: Plan, runs: list[Segment], works: list[Work]) -> NDArray[np.float64]:
    """Rows that each replica must compute again if it makes room for each run's longest prefix."""
    longest = [_longest(plan, run) for run in runs]
    if len(runs) * len(works) > PAIRS:
        longest = [max(longest)] * len(runs)
    known: dict[tuple[int, int], int] = {}
    regrets = np.zeros((len(runs), len(works)))
    for column, work in enumerate(works):
        if not work.mirror.entries:
            continue
        for row, length in enumerate(longest):
            if (column, length) not in known:
                known[column, length] = regret_rows(state, work, length, plan.head.depth)
            regrets[row, column] = known[column, length]
    return regrets


def _longest(plan: Plan, run: Segment) -> int:
    ends = {run.begin, run.end - 1}
    return max((plan.lengths[plan.node_of[p]] for p in ends if plan.node_of[p] >= 0), default=0)


def _held_rows(state: PoolState, segment: Segment, held: dict[bytes, int]) -> int:
    """Tokens of the path to a segment's first item that a replica holds."""
    plan = state.plans[segment.window]
    steps = plan.path(plan.node_of[segment.begin])
    return max((plan.lengths[step] for step in steps if plan.digests[step] in held), default=0)


def _steal(state: PoolState, work: Work, is_for_it: Callable[[Segment], bool]) -> Segment | None:
    """Take the tail half of a rich run, at a prefix border if possible, when that is worth the path."""
    if work.stuck_at == state.version:
        return None
    found = [
        (state.segment_s(other, tail), slot, tail)
        for slot, other in state.replicas.items()
        if other is not work and (tail := next(filter(is_for_it, reversed(other.run)), None)) is not None
    ]
    for _, slot, victim in nlargest(VICTIMS, found, key=lambda candidate: candidate[:2]):
        taken = _tail_half(state, state.replicas[slot], victim)
        if taken is not None:
            work.run.append(taken)
            state.counters.steals += 1
            return taken
    return None


def _tail_half(state: PoolState, owner: Work, victim: Segment) -> Segment | None:
    plan = state.plans[victim.window]
    middle = plan.cut(victim.begin, victim.end, 0.5)
    gain, price = plan.before[victim.end] - plan.before[middle], 2 * int(plan.shared[middle])
    would_idle = middle == victim.begin and len(owner.run) == 1 and not owner.mirror.flights
    if middle == victim.end or gain <= price or would_idle:
        return None
    taken = Segment(victim.window, middle, victim.end)
    victim.end = middle
    if victim.begin == victim.end:
        owner.run.remove(victim)
    return taken
