"""The tree of every prefix that anybody holds or will need: one node a key, a bit a replica that holds it.
Pure.

A node costs about 200 bytes and each holder about 50 more, so keys and numbers are shared, not repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .keys import depth_of


@dataclass(slots=True)
class Node:
    """One prefix.

    digest: the one copy of its key. holders: bit r is set while replica slot r holds it. uses: window -> its
    run [low, high) of positions, or None for none.
    """

    digest: bytes
    parent: bytes
    length: int
    holders: int = 0
    uses: dict[str, tuple[int, int]] | None = None


class PoolTree:
    """Nodes by digest, each kept while it has a holder or a use: the tree never outgrows work and pools."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        # Numbers that repeat are kept once: most prefixes have one holder, and lengths are bounded.
        self._lengths: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        self._held_at: dict[int, int] = {}
        self.depths: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    def __getitem__(self, digest: bytes) -> Node:
        return self._nodes[digest]

    def holders(self, digest: bytes) -> int:
        """Bits of the replicas that hold a prefix; 0 for one that nobody knows."""
        node = self._nodes.get(digest)
        return node.holders if node is not None else 0

    def uses(self, digest: bytes) -> dict[str, tuple[int, int]]:
        """Window -> run of positions that need a prefix."""
        node = self._nodes.get(digest)
        return node.uses or {} if node is not None else {}

    def add_use(self, digest: bytes, parent: bytes, length: int, window: str, run: tuple[int, int]) -> None:
        """A window will need this prefix at positions [low, high)."""
        node = self._node(digest, parent, length)
        if node.uses is None:
            node.uses = {}
        node.uses[window] = run

    def end_use(self, digest: bytes, window: str) -> None:
        """The window is done with this prefix."""
        node = self._nodes.get(digest)
        if node is not None and node.uses is not None:
            node.uses.pop(window, None)
            if not node.uses:
                node.uses = None
            self._prune(node)

    def hold(self, digest: bytes, parent: bytes, length: int, slot: int) -> bytes:
        """Replica `slot` holds this prefix from now on. Returns the one copy of its key."""
        node = self._node(digest, parent, length)
        if not node.holders:
            self._count_depth(digest, 1)
        bit = self._bits.setdefault(slot, 1 << slot)
        node.holders = node.holders | bit if node.holders else bit
        return node.digest

    def release(self, digest: bytes, slot: int) -> None:
        """Replica `slot` holds it no more."""
        node = self._nodes[digest]
        node.holders &= ~(1 << slot)
        if not node.holders:
            self._count_depth(digest, -1)
        self._prune(node)

    def held_elsewhere(self, digest: bytes, slot: int) -> bool:
        """Whether a replica other than `slot` holds it."""
        return bool(self._nodes[digest].holders & ~(1 << slot))

    def hits(self, digest: bytes) -> dict[int, int]:
        """The longest prefix, in tokens, that each replica holds on the way to this node. One walk."""
        found: dict[int, int] = {}
        seen = 0
        node = self._nodes.get(digest)
        while node is not None:
            for slot in bits(node.holders & ~seen):
                found[slot] = node.length
            seen |= node.holders
            node = self._nodes.get(node.parent)
        return found

    def _node(self, digest: bytes, parent: bytes, length: int) -> Node:
        node = self._nodes.get(digest)
        if node is None:
            above = self._nodes.get(parent)
            shared_length = self._lengths.setdefault(length, length)
            node = Node(digest, above.digest if above is not None else parent, shared_length)
            self._nodes[digest] = node
        return node

    def _prune(self, node: Node) -> None:
        if not node.holders and not node.uses:
            self._nodes.pop(node.digest, None)

    def _count_depth(self, digest: bytes, change: int) -> None:
        depth = depth_of(digest)
        count = self._held_at.get(depth, 0) + change
        if count:
            self._held_at[depth] = count
        else:
            del self._held_at[depth]
        if len(self._held_at) != len(self.depths) or depth not in self.depths:
            self.depths = tuple(sorted(self._held_at))


def bits(mask: int) -> Iterator[int]:
    """Numbers of the bits that are set, lowest first."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
