"""One window as a line of positions in depth-first order: what each costs, and where the line may be cut.
Pure.

Costs are in rows here; a replica's measured rate turns them into seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..workers.wire import DIGEST_BYTES
from .wire import WindowHead

# A row computed twice costs a replica's time and the hit rate, a row done later only makes a run longer:
# weight of the first.
BETA = 2.0


@dataclass(slots=True)
class Segment:
    """Positions [begin, end) of one window, still to be dispatched."""

    window: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A window ready to be cut.

    digests: of each node. lows, highs: positions of its items. own: rows of each position after its deepest
    node.
    before: int64 [m + 1] rows of everything before a position, each node counted where it is first needed.
    totals: int64 [m + 1] rows of everything before a position if nothing is shared.
    shared: int32 [m + 1] tokens of the deepest node that a cut at a position would split (0 at both ends).
    is_stream: its items wait in groups for whoever has use for them, not in a run a replica.
    number: grows from window to window. uses: int64 [m + 1], how often items before a position read a
    prefix; None: a position is one item.
    """

    key: str
    head: WindowHead
    digests: list[bytes]
    lengths: list[int]
    parents: list[int]
    lows: list[int]
    highs: list[int]
    node_of: list[int]
    own: list[int]
    before: NDArray[np.int64]
    totals: NDArray[np.int64]
    shared: NDArray[np.int32]
    is_stream: bool = False
    number: int = 0
    uses: NDArray[np.int64] | None = None
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.node_of)

    def rows(self, begin: int, end: int) -> int:
        """Rows to compute positions [begin, end) on a replica that holds nothing."""
        return int(self.before[end] - self.before[begin] + self.shared[begin]) if end > begin else 0

    def num_uses(self, begin: int, end: int) -> int:
        """How often positions [begin, end) read a prefix."""
        return end - begin if self.uses is None else int(self.uses[end] - self.uses[begin])

    def total_rows(self, begin: int, end: int) -> int:
        """Rows of positions [begin, end) if nothing is shared."""
        return int(self.totals[end] - self.totals[begin])

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to this one, itself included."""
        if node < 0:
            return ()
        if node not in self.paths:
            self.paths[node] = (*self.path(self.parents[node]), node)
        return self.paths[node]

    def cut(self, begin: int, end: int, share: float) -> int:
        """Where to cut [begin, end) so that about `share` of its rows come first.

        The price of a position is its distance from the aim plus BETA x rows that both sides would compute.
        """
        aim = self.before[begin] + share * (self.before[end] - self.before[begin])
        price = np.abs(self.before[begin : end + 1] - aim) + BETA * self.shared[begin : end + 1]
        # The ends cut nothing off, so they cost no second computation: shared there is of the neighbours
        # outside.
        price[0] -= BETA * self.shared[begin]
        price[-1] -= BETA * self.shared[end]
        return begin + int(price.argmin())


def plan_window(key: str, head: WindowHead, *, is_stream: bool = False, number: int = 0) -> Plan:
    """Lay a window out as a line. O(items + nodes)."""
    lengths = head.node_lengths.astype(np.int64)
    parents = head.node_parents.astype(np.int64)
    node_lengths = np.append(lengths, 0)
    read = node_lengths[head.node_of]
    own = head.rows - (read if head.weights is None else read * head.weights)
    lows, highs = _runs(head)
    before = np.zeros(len(head.order) + 1, dtype=np.int64)
    before[1:] = own
    np.add.at(before, lows + 1, lengths - node_lengths[parents])
    shared = np.zeros(len(head.order) + 1, dtype=np.int32)
    shared[:-1] = node_lengths[head.node_of]
    # Where nodes begin, a cut splits only what lies above the outermost of them.
    borders, outermost = np.unique(lows, return_index=True)
    shared[borders] = node_lengths[parents[outermost]]
    shared[:1] = 0
    digests = [
        head.node_digests[i : i + DIGEST_BYTES] for i in range(0, len(head.node_digests), DIGEST_BYTES)
    ]
    return Plan(
        key=key,
        head=head,
        digests=digests,
        lengths=lengths.tolist(),
        parents=parents.tolist(),
        lows=lows.tolist(),
        highs=highs.tolist(),
        node_of=head.node_of.tolist(),
        own=own.tolist(),
        before=np.cumsum(before),
        totals=np.concatenate([[0], np.cumsum(head.rows, dtype=np.int64)]),
        shared=shared,
        is_stream=is_stream,
        number=number,
        uses=None if head.weights is None else np.concatenate([[0], np.cumsum(head.weights, dtype=np.int64)]),
    )


def _runs(head: WindowHead) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each node the first position of its items and the one after the last, children included."""
    num_nodes = len(head.node_lengths)
    lows = np.full(num_nodes, len(head.order), dtype=np.int64)
    highs = np.zeros(num_nodes, dtype=np.int64)
    positions = np.flatnonzero(head.node_of >= 0)
    np.minimum.at(lows, head.node_of[positions], positions)
    np.maximum.at(highs, head.node_of[positions], positions + 1)
    parents = head.node_parents.tolist()
    for node in range(num_nodes - 1, -1, -1):
        parent = parents[node]
        if parent >= 0:
            lows[parent] = min(lows[parent], lows[node])
            highs[parent] = max(highs[parent], highs[node])
    return lows, highs
