"""Requests that wait in groups, of one client, for whichever replica has most use for them. Pure.

A branch is a prefix that a waiting request needs; a request waits at its deepest one. Replicas pull: what
one takes next depends on what it and the others hold at that moment, so nothing is assigned ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from .plan import Plan, Segment
from .pool_tree import PoolTree, bits


@dataclass(slots=True)
class Branch:
    """A prefix with waiting requests below it. rows, items: of those, rows after their deepest prefix.

    since: number of the window whose request has waited here for longest when nothing was taken yet.
    """

    digest: bytes
    parent: bytes
    length: int
    own_length: int
    since: int
    rows: int = 0
    items: int = 0
    waiting: deque[Segment] = field(default_factory=deque)
    children: dict[bytes, None] = field(default_factory=dict)


class Stream:
    """The waiting requests of one client as a tree of branches, with an index of what each replica holds.

    warm: slot -> branches that it holds. tokens: of all branches together, each counted once.
    """

    def __init__(self, tree: PoolTree) -> None:
        self._tree = tree
        self.branches: dict[bytes, Branch] = {}
        self.warm: dict[int, dict[bytes, None]] = {}
        self.singles: deque[Segment] = deque()
        self.tokens = 0
        self.items = 0
        self._cold: dict[bytes, list[tuple[int, bytes]]] = {}

    def add(self, plan: Plan) -> None:
        """Let the items of a window wait. O(items + nodes x their holders)."""
        for node, digest in enumerate(plan.digests):
            parent = plan.parents[node]
            self._branch(plan, node, digest, plan.digests[parent] if parent >= 0 else b"")
        for segment, node in _runs(plan):
            self._wait(plan, segment, node)

    def put_back(self, plan: Plan, segment: Segment) -> None:
        """Let positions wait again that were on their way."""
        for part, node in _runs(plan, segment.begin, segment.end):
            for step in plan.path(node):
                parent = plan.parents[step]
                self._branch(plan, step, plan.digests[step], plan.digests[parent] if parent >= 0 else b"")
            self._wait(plan, part, node, first=True)

    def take(self, plan: Plan, segment: Segment, end: int) -> None:
        """Positions from the begin of a waiting segment to `end` are on their way."""
        node = plan.node_of[segment.begin]
        queue = self.branches[plan.digests[node]].waiting if node >= 0 else self.singles
        self._gone(plan, segment.begin, end, node)
        segment.begin = end
        if segment.begin == segment.end:
            queue.remove(segment)

    def withdraw(self, plan: Plan) -> list[Segment]:
        """Take back everything of a window that still waits."""
        found = []
        for node in {node for _, node in _runs(plan)}:
            branch = self.branches.get(plan.digests[node]) if node >= 0 else None
            queue = self.singles if node < 0 else branch.waiting if branch is not None else deque[Segment]()
            for segment in [s for s in queue if s.window == plan.key]:
                queue.remove(segment)
                self._gone(plan, segment.begin, segment.end, node)
                found.append(segment)
        return found

    def held(self, slot: int, digest: bytes) -> None:
        """A replica holds a prefix from now on."""
        if digest in self.branches:
            self.warm.setdefault(slot, {})[digest] = None

    def released(self, slot: int, digest: bytes) -> None:
        """A replica holds a prefix no more."""
        self.warm.get(slot, {}).pop(digest, None)
        self._note_cold(digest)

    def forget(self, slot: int) -> None:
        """A replica is gone or must say anew what it holds."""
        for digest in self.warm.pop(slot, {}):
            self._note_cold(digest)

    def advantage(self, branch: Branch, slot: int) -> int:
        """Tokens that a holder saves here beyond what the best other replica would; never negative."""
        mine = 1 << slot
        other: Branch | None = branch
        while other is not None:
            if self._tree.holders(other.digest) & ~mine:
                return branch.length - other.length
            other = self.branches.get(other.parent)
        return branch.length

    def oldest_cold(self, parent: bytes) -> Branch | None:
        """The group right below a prefix (b"": at the top) that nobody holds and that has waited longest."""
        cold = self._cold.get(parent, [])
        while cold:
            since, digest = cold[0]
            branch = self.branches.get(digest)
            if branch is not None and branch.since == since and not self._tree.holders(digest):
                return branch
            heappop(cold)
        self._cold.pop(parent, None)
        return None

    def waiting_below(self, branch: Branch, slot: int) -> Branch:
        """The branch at or below this one whose requests a replica takes first.

        Depth first, so that the path stays in use: where the replica holds the next step, then where nobody
        does; a step that only others hold comes last.
        """
        mine = 1 << slot
        while not branch.waiting:
            best, rank = None, (-1, -1 << 62)
            for digest in list(branch.children):
                child = self.branches.get(digest)
                if child is None or child.items == 0:
                    del branch.children[digest]
                    continue
                holders = self._tree.holders(digest)
                now = (2 if holders & mine else 0 if holders else 1, -child.since)
                if now > rank:
                    best, rank = child, now
            assert best is not None, "a branch with waiting items has them here or below"
            branch = best
        return branch

    def _branch(self, plan: Plan, node: int, digest: bytes, parent: bytes) -> Branch:
        branch = self.branches.get(digest)
        if branch is None:
            above = plan.lengths[plan.parents[node]] if plan.parents[node] >= 0 else 0
            branch = Branch(digest, parent, plan.lengths[node], plan.lengths[node] - above, plan.number)
            self.branches[digest] = branch
            self._note_cold(digest)
            self.tokens += branch.own_length
            for slot in bits(self._tree.holders(digest)):
                self.warm.setdefault(slot, {})[digest] = None
        if parent:
            self.branches[parent].children[digest] = None
        return branch

    def _wait(self, plan: Plan, segment: Segment, node: int, *, first: bool = False) -> None:
        queue = self.branches[plan.digests[node]].waiting if node >= 0 else self.singles
        if first:
            queue.appendleft(segment)
        else:
            queue.append(segment)
        items = segment.end - segment.begin
        rows = sum(plan.own[segment.begin : segment.end])
        self.items += items
        for step in plan.path(node):
            branch = self.branches[plan.digests[step]]
            branch.rows += rows
            branch.items += items

    def _gone(self, plan: Plan, begin: int, end: int, node: int) -> None:
        items, rows = end - begin, sum(plan.own[begin:end])
        self.items -= items
        for step in reversed(plan.path(node)):
            branch = self.branches[plan.digests[step]]
            branch.rows -= rows
            branch.items -= items
            if not branch.items:
                self._remove(branch)

    def _remove(self, branch: Branch) -> None:
        del self.branches[branch.digest]
        self.tokens -= branch.own_length
        for slot in bits(self._tree.holders(branch.digest)):
            self.warm.get(slot, {}).pop(branch.digest, None)
        above = self.branches.get(branch.parent)
        if above is not None:
            above.children.pop(branch.digest, None)
        self._cold.pop(branch.digest, None)

    def _note_cold(self, digest: bytes) -> None:
        """Rank a group that nobody holds among its like, by age: so nothing waits for ever."""
        branch = self.branches.get(digest)
        if branch is not None and not self._tree.holders(digest):
            heappush(self._cold.setdefault(branch.parent, []), (branch.since, digest))


def _runs(plan: Plan, begin: int = 0, end: int | None = None) -> Iterator[tuple[Segment, int]]:
    """Positions [begin, end) of a plan as segments of one deepest node each, with that node."""
    stop = len(plan) if end is None else end
    nodes = plan.node_of
    while begin < stop:
        node, at = nodes[begin], begin + 1
        while at < stop and nodes[at] == node:
            at += 1
        yield Segment(plan.key, begin, at), node
        begin = at
