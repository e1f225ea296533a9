"""What an idle replica takes from the waiting requests of a stream: the rules in their order. Pure."""

from __future__ import annotations

from .plan import Segment
from .stream import Branch, Stream
from .work import PoolState, Work


def choose(state: PoolState, work: Work, stream: Stream, now_s: float) -> Segment | None:
    """The waiting segment that a replica should take next; None if idling is better, or nothing waits.

    While all that waits fits into memory, first what this replica alone saves most on, then more of the
    group it has open; else the other way round, since a group that is left will not be held later. Then the
    oldest group that nobody holds or that everybody does, and last a share of another's group.
    """
    slot = work.mirror.slot
    rules = (
        (_open_group, _largest_advantage) if _is_pressed(state, stream) else (_largest_advantage, _open_group)
    )
    branch = rules[0](work, stream) or rules[1](work, stream)
    if branch is None and _leaves_it_to_others(state, work):
        return None
    branch = branch or _oldest(state, work, stream)
    if branch is None and stream.singles:
        return stream.singles[0]
    branch = branch or _anothers(state, work, stream, now_s)
    return stream.waiting_below(branch, slot).waiting[0] if branch is not None else None


def _leaves_it_to_others(state: PoolState, work: Work) -> bool:
    """Whether this replica has something to do and another has not: what anybody may take is that one's."""
    return bool(work.mirror.flights) and any(
        not other.mirror.flights and not other.draining and not other.resyncing
        for other in state.replicas.values()
    )


def _is_pressed(state: PoolState, stream: Stream) -> bool:
    """Whether the prefixes of what waits are more than all replicas together may hold."""
    budgets = sum(work.mirror.budget_bytes for work in state.replicas.values())
    if state.rules.pool_budget_bytes:
        budgets = min(budgets, state.rules.pool_budget_bytes)
    return state.sizes.estimate(stream.tokens, state.deepest) > budgets


def _open_group(work: Work, stream: Stream) -> Branch | None:
    """The nearest group on the way up from what the replica did last, as far as it alone holds that."""
    mirror = work.mirror
    if work.open not in mirror.entries:
        return None
    for digest in mirror.path(work.open):
        branch = stream.branches.get(digest)
        if branch is not None and (digest == work.open or stream.advantage(branch, mirror.slot) > 0):
            return branch
    return None


def _largest_advantage(work: Work, stream: Stream) -> Branch | None:
    """The group with the largest own hit less the best hit of any other."""
    slot = work.mirror.slot
    best, most = None, 0
    for digest in stream.warm.get(slot, ()):
        branch = stream.branches[digest]
        if branch.length > most and (gain := stream.advantage(branch, slot)) > most:
            best, most = branch, gain
    return best


def _oldest(state: PoolState, work: Work, stream: Stream) -> Branch | None:
    """The group that has waited longest among those that cost no copy: all that is held of them is held here.

    By age and not by size: a group that has waited for a whole window has all its members there, and small
    groups that always lost would fill the window up.
    """
    best = stream.oldest_cold(b"")
    since = best.since if best is not None else 1 << 62
    for digest in stream.warm.get(work.mirror.slot, ()):
        branch = stream.branches[digest]
        if branch.waiting and (arrived := state.plans[branch.waiting[0].window].number) < since:
            best, since = branch, arrived
        below = stream.oldest_cold(digest)
        if below is not None and below.since < since:
            best, since = below, below.since
    return best


def _anothers(state: PoolState, work: Work, stream: Stream, now_s: float) -> Branch | None:
    """A group that only others hold, if its holders will not be done with it sooner than a copy would take.

    Or if this replica has idled for as long as the copy takes, since its last copy: what will still come is
    not known, but idling for longer than a copy costs would be the dearer mistake. Asked only when nothing
    else is left.
    """
    if work.mirror.flights:
        return None
    idle_rows = (work.idled_s + now_s - work.idle_since_s) / work.rates.seconds(1, state.deepest)
    leaving = sum(1 << slot for slot, other in state.replicas.items() if other.draining)
    best, most = None, -1.0
    for branch in stream.branches.values():
        if branch.waiting:
            holders = _nearest_holders(state, stream, branch) & ~leaving
            rest = branch.rows / holders.bit_count() if holders else float(branch.rows)
            missing = branch.length - _own_hit(work, stream, branch)
            if rest > most and (not holders or max(rest, idle_rows) > missing):
                best, most = branch, rest
    if best is not None:
        work.idled_s, work.idle_since_s = 0.0, now_s
    return best


def _nearest_holders(state: PoolState, stream: Stream, branch: Branch) -> int:
    """Bits of those that hold the deepest step on the way to a group that anybody holds."""
    at: Branch | None = branch
    while at is not None:
        if holders := state.tree.holders(at.digest):
            return holders
        at = stream.branches.get(at.parent)
    return 0


def _own_hit(work: Work, stream: Stream, branch: Branch) -> int:
    at: Branch | None = branch
    while at is not None:
        if at.digest in work.mirror.entries:
            return at.length
        at = stream.branches.get(at.parent)
    return 0
