"""Who does which part of a window: the cut, what comes next, what is taken from another. Pure."""

from __future__ import annotations

from .chunks import regret_rows
from .costs import placement_cost
from .plan import Plan, Segment
from .work import PoolState, Work


def assign(state: PoolState, plan: Plan) -> None:
    """Cut a window into one run a replica; each goes to the replica where the one rule makes it cheapest."""
    free = set(state.replicas)
    if not free:
        state.loose.append(Segment(plan.key, 0, len(plan)))
        return
    for run in _cut(plan, min(len(free), max(1, plan.rows(0, len(plan)) // state.rules.chunk_rows))):
        slot = min(free, key=lambda candidate: (_cost(state, run, state.replicas[candidate]), candidate))
        free.remove(slot)
        state.replicas[slot].run.append(run)


def next_segment(state: PoolState, work: Work) -> Segment | None:
    """What a replica works on next, now the head of its run; None if there is nothing for it.

    A loose segment of an older window comes first, then its own run, then any loose segment, then a theft.
    """
    if state.loose and not (work.run and _age(state, work.run[0]) <= _age(state, state.loose[0])):
        loose = state.loose
        best = min(range(len(loose)), key=lambda i: (_age(state, loose[i]), _cost(state, loose[i], work)))
        work.run.appendleft(loose[best])
        del loose[best]
    if not work.run and not _steal(state, work):
        return None
    return work.run[0]


def _cut(plan: Plan, parts: int) -> list[Segment]:
    runs, begin = [], 0
    for left in range(parts, 0, -1):
        end = plan.cut(begin, len(plan), 1.0 / left) if left > 1 else len(plan)
        if end > begin:
            runs.append(Segment(plan.key, begin, end))
        begin = end
    return runs


def _age(state: PoolState, segment: Segment) -> int:
    return state.plans[segment.window].head.window


def _cost(state: PoolState, segment: Segment, work: Work) -> float:
    plan, mirror = state.plans[segment.window], work.mirror
    held = 0
    for digest in mirror.entries:
        low, high = state.tree[digest].uses.get(segment.window, (0, 0))
        if low < segment.end and high > segment.begin:
            held += mirror.own_length(digest)
    miss_rows = max(plan.rows(segment.begin, segment.end) - held, 0)
    miss_s = work.rates.seconds(miss_rows, plan.head.depth)
    regret_s = work.rates.seconds(regret_rows(state, work, segment), plan.head.depth)
    return placement_cost(state.backlog_s(work), miss_s, regret_s)


def _steal(state: PoolState, work: Work) -> bool:
    """Take the tail half of the richest run, at a prefix border if possible, when that is worth the path."""
    others = [other for other in state.replicas.values() if other is not work and other.run]
    if not others:
        return False
    richest = max(others, key=lambda other: state.segment_s(other, other.run[-1]))
    victim = richest.run[-1]
    plan = state.plans[victim.window]
    middle = plan.cut(victim.begin, victim.end, 0.5)
    gain, price = plan.before[victim.end] - plan.before[middle], 2 * int(plan.shared[middle])
    would_idle = middle == victim.begin and len(richest.run) == 1 and not richest.mirror.flights
    if middle == victim.end or gain <= price or would_idle:
        return False
    work.run.append(Segment(victim.window, middle, victim.end))
    victim.end = middle
    if victim.begin == victim.end:
        richest.run.pop()
    state.counters.steals += 1
    return True
