"""One chunk of a run: its items, the prefixes to build for them and those to drop. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

import numpy as np

from ..workers.wire import Build, Int32Array
from .generating import in_use, most_items
from .mirror import Growth, Mirror
from .plan import Plan, Segment
from .work import PoolState, Work

NEVER = (1 << 30, 1 << 30)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions [begin, end) of a window with what a replica needs for them.

    prefix_of: int32 index into prefixes, -1 for none.
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


@dataclass(slots=True)
class _Draft:
    """A chunk in the making. kept: what it reads, which cannot be dropped for it."""

    rows: int = 0
    kept: set[bytes] = field(default_factory=set)
    kept_bytes: int = 0
    growths: dict[bytes, Growth] = field(default_factory=dict)
    builds: list[Build] = field(default_factory=list)
    prefixes: dict[bytes, int] = field(default_factory=dict)
    prefix_of: list[int] = field(default_factory=list)


def assemble(state: PoolState, work: Work, segment: Segment) -> Chunk:
    """The next chunk of a segment for one replica, at least one item long. Changes nothing."""
    plan, mirror = state.plans[segment.window], work.mirror
    used = in_use(work)
    draft = _Draft(kept=used, kept_bytes=sum(mirror.entries[digest].size_bytes for digest in used))
    most_rows, most = _most_rows(state, work, plan, segment), most_items(state, work, segment)
    position, last_node, prefix_index, prefix_length = segment.begin, -2, -1, 0
    while position < segment.end:
        node = plan.node_of[position]
        if node != last_node:
            path = _path_to_use(state, mirror, draft, plan, node, position, segment.end)
            fitting = _fitting(state, mirror, draft, plan, path)
            if len(fitting) < len(path) and position > segment.begin:
                break
            prefix_index, prefix_length = _add_path(state, mirror, draft, plan, fitting)
            last_node = node
        draft.prefix_of.append(prefix_index)
        draft.rows += int(plan.head.rows[position]) - prefix_length
        position += 1
        if len(draft.prefix_of) >= most:
            break
        if draft.rows >= state.rules.chunk_rows and (
            draft.rows >= most_rows or len(draft.prefix_of) >= state.rules.chunk_items
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
        prefix_of=np.array(draft.prefix_of, dtype=np.int32),
        prefixes=tuple(draft.prefixes),
    )


def _most_rows(state: PoolState, work: Work, plan: Plan, segment: Segment) -> float:
    """Rows of chunk_seconds at the measured rate; fewer near a run's end, so that all finish together."""
    if not work.rates.measured:
        return state.rules.chunk_rows
    by_time = state.rules.chunk_seconds / work.rates.seconds(1, plan.head.depth)
    return min(by_time, plan.rows(segment.begin, segment.end) / 3)


def _path_to_use(
    state: PoolState, mirror: Mirror, draft: _Draft, plan: Plan, node: int, position: int, end: int
) -> list[int]:
    """The deepest held node on the way to `node`, then those below it worth building for this segment."""
    steps = plan.path(node)
    held = [
        i
        for i, s in enumerate(steps)
        if plan.digests[s] in mirror.entries or plan.digests[s] in draft.growths
    ]
    path = [steps[held[-1]]] if held else []
    base = plan.lengths[path[0]] if path else 0
    for step in steps[held[-1] + 1 if held else 0 :]:
        uses = min(plan.highs[step], end) - position
        saved = (uses - 1) * (plan.lengths[step] - base)
        if saved > state.rules.build_overhead_rows and plan.digests[step] not in state.unbuildable:
            path.append(step)
            base = plan.lengths[step]
    return path


def _fitting(state: PoolState, mirror: Mirror, draft: _Draft, plan: Plan, path: list[int]) -> list[int]:
    """The longest start of the path that fits into the budget beside what the chunk already reads."""
    room = _budget(state, mirror) - draft.kept_bytes
    base = 0
    for count, step in enumerate(path):
        digest = plan.digests[step]
        if digest in mirror.entries:
            room -= sum(
                mirror.entries[held].size_bytes for held in mirror.path(digest) if held not in draft.kept
            )
        elif digest not in draft.growths:
            room -= state.sizes.estimate(plan.lengths[step] - base, plan.head.depth)
        # What is held may stay, whatever the budget has become; but nothing may be built beside it then.
        if room < 0 and (draft.growths or digest not in mirror.entries):
            return path[:count]
        base = plan.lengths[step]
    return path


def _budget(state: PoolState, mirror: Mirror) -> int:
    """Bytes this replica may hold: its budget and its part of the pool's, less a reserve for estimates."""
    budget, pool = mirror.budget_bytes, state.rules.pool_budget_bytes
    if pool:
        others = sum(work.mirror.total_bytes for work in state.replicas.values() if work.mirror is not mirror)
        budget = max(min(budget, pool - others), 0)
    return budget * 95 // 100


def _add_path(
    state: PoolState, mirror: Mirror, draft: _Draft, plan: Plan, path: list[int]
) -> tuple[int, int]:
    """Put a path into the draft. Returns its deepest prefix as index (-1: none) and length."""
    above, base = b"", 0
    for step in path:
        digest, length = plan.digests[step], plan.lengths[step]
        if digest in mirror.entries:
            for held in mirror.path(digest):
                if held not in draft.kept:
                    draft.kept.add(held)
                    draft.kept_bytes += mirror.entries[held].size_bytes
        elif digest not in draft.growths:
            size_bytes = state.sizes.estimate(length - base, plan.head.depth)
            draft.growths[digest] = Growth(digest, above, length, length - base, size_bytes)
            draft.builds.append(Build(digest, above, int(plan.head.node_sources[step]), base, length))
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
    excess = mirror.total_bytes + growth - _budget(state, mirror)
    ahead = [rest, *list(work.run)[1:], *state.loose, *state.lone]
    return tuple(evictions(state, mirror, draft.kept, ahead, excess))


def evictions(
    state: PoolState, mirror: Mirror, kept: set[bytes], ahead: list[Segment], excess: int
) -> list[bytes]:
    """What to drop to free `excess` bytes: least wanted first, children before parents, nothing kept."""
    if excess <= 0:
        return []
    children = {digest: entry.children for digest, entry in mirror.entries.items()}
    ages = {digest: age for age, digest in enumerate(mirror.entries)}
    heap = [(*_keenness(state, mirror.slot, d, ahead), ages[d], d) for d, _ in mirror.leaves(kept)]
    heapify(heap)
    chosen: list[bytes] = []
    while excess > 0 and heap:
        digest = heappop(heap)[-1]
        entry = mirror.entries[digest]
        chosen.append(digest)
        excess -= entry.size_bytes
        if entry.parent:
            children[entry.parent] -= 1
            if not children[entry.parent] and entry.parent not in kept:
                keenness = _keenness(state, mirror.slot, entry.parent, ahead)
                heappush(heap, (*keenness, ages[entry.parent], entry.parent))
    return chosen


def regret_rows(state: PoolState, work: Work, segment: Segment) -> int:
    """Rows that a replica must compute again later if it makes room for a segment's longest prefix."""
    plan, mirror = state.plans[segment.window], work.mirror
    longest = max(
        (plan.lengths[plan.node_of[p]] for p in {segment.begin, segment.end - 1} if plan.node_of[p] >= 0),
        default=0,
    )
    excess = mirror.total_bytes + state.sizes.estimate(longest, plan.head.depth) - _budget(state, mirror)
    ahead = list(work.run)
    return sum(
        mirror.own_length(digest)
        for digest in evictions(state, mirror, set(), ahead, excess)
        if next_use(state, digest, ahead) != NEVER
    )


def _keenness(state: PoolState, slot: int, digest: bytes, ahead: list[Segment]) -> tuple[int, int, int]:
    """How much a replica wants to keep a prefix, as a sort key.

    (0, ..): not needed and held elsewhere; (1, ..): not needed; (2, ..): needed, the sooner the higher.
    """
    when = next_use(state, digest, ahead)
    if when == NEVER:
        return (0 if state.tree.held_elsewhere(digest, slot) else 1, 0, 0)
    return (2, -when[0], -when[1])


def next_use(state: PoolState, digest: bytes, ahead: list[Segment]) -> tuple[int, int]:
    """When a prefix is next needed by the segments ahead: (segments from now, position), or NEVER."""
    uses = state.tree[digest].uses
    for distance, segment in enumerate(ahead):
        run = uses.get(segment.window)
        if run is not None and run[0] < segment.end and run[1] > segment.begin:
            return distance, max(run[0], segment.begin)
    return NEVER
