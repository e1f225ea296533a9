"""What a client would send for requests of a workload: the head of a window, from its tree of prefixes."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from tinyloop.cluster.keys import DEPTH_BYTES, IDS_BYTES
from tinyloop.cluster.wire import WindowHead
from workloads import IntArray, Workload

OVERHEAD_ROWS = 8


class Heads:
    """Cuts a workload into windows. digest_of: the key of each node, at depth 1."""

    def __init__(self, workload: Workload, depth: int = 1) -> None:
        self.workload, self.depth = workload, depth
        self._rank = _depth_first_rank(workload)
        tail = depth.to_bytes(DEPTH_BYTES, "little")
        salt = workload.name.encode()
        self.digest_of = [
            blake2b(node.to_bytes(8, "little"), digest_size=IDS_BYTES, key=salt).digest() + tail
            for node in range(len(workload.own))
        ]

    def window(self, requests: IntArray, *, client: str, number: int, keep_all: bool) -> WindowHead:
        """The head of a window of these requests; item i is requests[i].

        keep_all: name every node, as a client does that will send more of the same; else only those where
        at least two of these requests part and that pay.
        """
        workload, rank = self.workload, self._rank
        leaves = workload.leaves[requests]
        order = np.argsort(rank[leaves], kind="stable")
        kept = self._kept(leaves, requests, keep_all=keep_all)
        nodes = np.flatnonzero(kept)
        nodes = nodes[np.argsort(rank[nodes])]
        index = np.full(len(kept) + 1, -1, dtype=np.int64)
        index[nodes] = np.arange(len(nodes))
        nearest = self._nearest(kept, leaves)
        node_of = index[nearest[leaves[order]]]
        parents = index[nearest[workload.parents[nodes]]] if len(nodes) else np.empty(0, np.int64)
        return WindowHead(
            client=client,
            window=number,
            depth=self.depth,
            node_digests=b"".join([self.digest_of[node] for node in nodes.tolist()]),
            node_lengths=workload.lengths[nodes].astype(np.int32),
            node_parents=parents.astype(np.int32),
            node_sources=np.zeros(len(nodes), dtype=np.int32),
            order=order.astype(np.int32),
            rows=workload.prompts[requests][order].astype(np.int32),
            node_of=node_of.astype(np.int32),
            ideal_rows=workload.unique_of(requests),
        )

    def _kept(self, leaves: IntArray, requests: IntArray, *, keep_all: bool) -> np.ndarray:
        workload = self.workload
        used = workload.used_by(requests)
        if keep_all:
            return used
        direct = np.bincount(leaves[leaves >= 0], minlength=len(used))
        uses, branches = direct.copy(), (direct > 0).astype(np.int64)
        for node in np.flatnonzero(used)[::-1].tolist():
            parent = workload.parents[node]
            if parent >= 0:
                uses[parent] += uses[node]
                branches[parent] += 1
        parting = used & (uses > 1) & ((branches > 1) | (direct > 1))
        return parting & ((uses - 1) * workload.own > OVERHEAD_ROWS)

    def _nearest(self, kept: np.ndarray, leaves: IntArray) -> IntArray:
        """int64 [nodes + 1]: each node's deepest kept ancestor or itself, -1 for none."""
        nearest = np.full(len(kept) + 1, -1, dtype=np.int64)
        wanted = self.workload.used_by_leaves(leaves)
        for node in wanted.tolist():
            nearest[node] = node if kept[node] else nearest[self.workload.parents[node]]
        return nearest


def _depth_first_rank(workload: Workload) -> IntArray:
    """int64 [nodes + 1]: place of each node in a depth-first walk; the last, for no node, comes first."""
    children: list[list[int]] = [[] for _ in range(len(workload.own) + 1)]
    for node, parent in enumerate(workload.parents.tolist()):
        children[parent].append(node)
    rank = np.full(len(workload.own) + 1, -1, dtype=np.int64)
    stack, at = children[-1][::-1], 0
    while stack:
        node = stack.pop()
        rank[node] = at
        at += 1
        stack.extend(reversed(children[node]))
    return rank
