"""One chunk of a run: its items, the prefixes to build for them and those to drop. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..workers.wire import Build, Int32Array
from .evict import ahead_of, budget_of, evictions
from .generating import in_use, most_items
from .mirror import Growth, Mirror
from .plan import Plan, Segment
from .work import PoolState, Work


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [begin, end) of a window with what a replica needs for them.

    prefix_of: int32 index into prefixes, -1 for none. lacking_bytes: what one more build would have taken
    beyond the pool's budget.
    """

    window: str
    begin: int
    end: int
    rows: int
    drops: tuple[bytes, ...]
    growths: tuple[Growth, ...]
    builds: tuple[Build, ...]
    prefix_of: Int32Array
    prefixes: tuple[bytes, ...]
    alone: bool = False
    lacking_bytes: int = 0


class _Step(NamedTuple):
    """One prefix on the way to an item: held already (perhaps deeper than asked), or to be built."""

    digest: bytes
    length: int
    node: int


@dataclass(slots=True)
class _Draft:
    """A chunk in the making. kept: what it reads, which cannot be dropped for it."""

    budget: int
    rows: int = 0
    kept: set[bytes] = field(default_factory=set)
    kept_bytes: int = 0
    growths: dict[bytes, Growth] = field(default_factory=dict)
    builds: list[Build] = field(default_factory=list)
    prefixes: dict[bytes, int] = field(default_factory=dict)
    prefix_of: list[int] = field(default_factory=list)
    lacking_bytes: int = 0

    def keep(self, digests: set[bytes], mirror: Mirror) -> None:
        """These held prefixes stay."""
        for digest in digests - self.kept:
            self.kept.add(digest)
            self.kept_bytes += mirror.entries[digest]


def assemble(state: PoolState, work: Work, segment: Segment) -> Chunk:
    """The next chunk of a segment for one replica, at least one item long. Changes nothing."""
    plan, mirror = state.plans[segment.window], work.mirror
    draft = _Draft(budget_of(state, mirror))
    used = in_use(work)
    if mirror.pins or used:
        draft.keep(mirror.protected(used), mirror)
    most_rows, most = _most_rows(state, work, plan, segment), most_items(state, work, segment)
    own, node_of, prefix_of = plan.own, plan.node_of, draft.prefix_of
    position, last_node, prefix_index, missing = segment.begin, -2, -1, 0
    while position < segment.end:
        node = node_of[position]
        if node != last_node:
            path = _path_to_use(state, mirror, draft, plan, node, position, segment.end)
            fitting = _fitting(state, mirror, draft, plan, path)
            if len(fitting) < len(path) and position > segment.begin:
                break
            prefix_index, known = _add_path(state, mirror, draft, plan, fitting)
            missing = (plan.lengths[node] if node >= 0 else 0) - known
            last_node = node
        prefix_of.append(prefix_index)
        draft.rows += own[position] + missing * plan.num_uses(position, position + 1)
        position += 1
        if len(prefix_of) >= most:
            break
        if draft.rows >= state.rules.chunk_rows and (
            draft.rows >= most_rows or len(prefix_of) >= state.rules.chunk_items
        ):
            break
    return Chunk(
        window=plan.key,
        begin=segment.begin,
        end=position,
        rows=draft.rows,
        drops=_drops(state, work, draft, Segment(plan.key, position, segment.end)),
        growths=tuple(draft.growths.values()),
        builds=tuple(draft.builds),
        prefix_of=np.array(prefix_of, dtype=np.int32),
        prefixes=tuple(draft.prefixes),
        lacking_bytes=draft.lacking_bytes,
    )


def _most_rows(state: PoolState, work: Work, plan: Plan, segment: Segment) -> float:
    """Rows of chunk_seconds at the measured rate; fewer near a run's end, so that all finish together."""
    if not work.rates.measured:
        return state.rules.chunk_rows
    by_time = state.rules.chunk_seconds / work.rates.seconds(1, plan.head.depth)
    return min(by_time, plan.rows(segment.begin, segment.end) / 3)


def _path_to_use(
    state: PoolState, mirror: Mirror, draft: _Draft, plan: Plan, node: int, position: int, end: int
) -> list[_Step]:
    """The deepest held prefix on the way to `node`, then those below it worth building for this segment."""
    nodes = plan.path(node)
    path: list[_Step] = []
    first = 0
    for index in range(len(nodes) - 1, -1, -1):
        digest = plan.digests[nodes[index]]
        served = digest if digest in draft.growths else mirror.serving(digest, exactly=state.sizes.has_coda)
        if served:
            path.append(_Step(served, plan.lengths[nodes[index]], nodes[index]))
            first = index + 1
            break
    base = path[0].length if path else 0
    for step in nodes[first:]:
        digest = plan.digests[step]
        saved = _later_uses(state, plan, step, position, end) * (plan.lengths[step] - base)
        if saved > state.rules.build_overhead_rows and digest not in state.unbuildable:
            path.append(_Step(digest, plan.lengths[step], step))
            base = plan.lengths[step]
    return path


def _later_uses(state: PoolState, plan: Plan, node: int, position: int, end: int) -> int:
    """How often a prefix will be read after the first item that needs it, as far as anybody knows.

    A stream's client names prefixes that it expects to send again, so one more use is always expected there.
    """
    if plan.is_stream:
        branch = state.streams[plan.head.client].branches.get(plan.digests[node])
        return branch.items if branch is not None else 1
    return plan.num_uses(position, min(plan.highs[node], end)) - 1


def _fitting(state: PoolState, mirror: Mirror, draft: _Draft, plan: Plan, path: list[_Step]) -> list[_Step]:
    """The longest start of the path that fits into the budget beside what the chunk already reads."""
    room = draft.budget - draft.kept_bytes
    base = 0
    for count, step in enumerate(path):
        digest = step.digest
        held = digest in mirror.entries
        if held:
            room -= sum(mirror.entries[d] for d in mirror.path(digest) if d not in draft.kept)
        elif digest not in draft.growths:
            room -= state.sizes.estimate(step.length - base, plan.head.depth)
        # What is held may stay, whatever the budget has become; but nothing may be built beside it then.
        if room < 0 and (draft.growths or not held):
            if draft.budget < mirror.budget_bytes * 9 // 10:
                draft.lacking_bytes = -room
            return path[:count]
        base = step.length
    return path


def _add_path(
    state: PoolState, mirror: Mirror, draft: _Draft, plan: Plan, path: list[_Step]
) -> tuple[int, int]:
    """Put a path into the draft. Returns its deepest prefix as index (-1: none) and length."""
    above, base = b"", 0
    for digest, length, node in path:
        if digest in mirror.entries:
            draft.keep(set(mirror.path(digest)), mirror)
        elif digest not in draft.growths:
            size_bytes = state.sizes.estimate(length - base, plan.head.depth)
            draft.growths[digest] = Growth(digest, above, length, length - base, size_bytes)
            draft.builds.append(Build(digest, above, int(plan.head.node_sources[node]), base, length))
            draft.kept.add(digest)
            draft.kept_bytes += size_bytes
            draft.rows += length - base
        above, base = digest, length
    if not path:
        return -1, 0
    return draft.prefixes.setdefault(above, len(draft.prefixes)), base


def _drops(state: PoolState, work: Work, draft: _Draft, rest: Segment) -> tuple[bytes, ...]:
    """Leaves to drop until the builds fit, and until the pool as a whole is within its budget."""
    mirror = work.mirror
    growth = sum(g.size_bytes for g in draft.growths.values())
    excess = mirror.total_bytes + growth - draft.budget
    if excess <= 0:
        return ()
    return tuple(evictions(state, mirror, draft.kept, ahead_of(state, work, rest), excess))
