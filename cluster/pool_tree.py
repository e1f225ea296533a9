"""The tree of every prefix that anybody holds or will need: one node a key, a bit a replica that holds it.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class Node:
    """One prefix.

    holders: bit r is set while replica slot r holds it. uses: window -> its run [low, high) of positions.
    """

    digest: bytes
    parent: bytes
    length: int
    holders: int = 0
    uses: dict[str, tuple[int, int]] = field(default_factory=dict)


class PoolTree:
    """Nodes by digest, each kept while it has a holder or a use: the tree never outgrows work and pools."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._nodes

    def __getitem__(self, digest: bytes) -> Node:
        return self._nodes[digest]

    def add_use(self, digest: bytes, parent: bytes, length: int, window: str, run: tuple[int, int]) -> None:
        """A window will need this prefix at positions [low, high)."""
        self._node(digest, parent, length).uses[window] = run

    def end_use(self, digest: bytes, window: str) -> None:
        """The window is done with this prefix."""
        node = self._nodes.get(digest)
        if node is not None:
            node.uses.pop(window, None)
            self._prune(node)

    def hold(self, digest: bytes, parent: bytes, length: int, slot: int) -> None:
        """Replica `slot` holds this prefix from now on."""
        self._node(digest, parent, length).holders |= 1 << slot

    def release(self, digest: bytes, slot: int) -> None:
        """Replica `slot` holds it no more."""
        node = self._nodes[digest]
        node.holders &= ~(1 << slot)
        self._prune(node)

    def held_elsewhere(self, digest: bytes, slot: int) -> bool:
        """Whether a replica other than `slot` holds it."""
        return bool(self._nodes[digest].holders & ~(1 << slot))

    def hits(self, digest: bytes) -> dict[int, int]:
        """The longest prefix, in tokens, that each replica holds on the way to this node. One walk."""
        found: dict[int, int] = {}
        seen = 0
        while digest:
            node = self._nodes[digest]
            for slot in _bits(node.holders & ~seen):
                found[slot] = node.length
            seen |= node.holders
            digest = node.parent
        return found

    def _node(self, digest: bytes, parent: bytes, length: int) -> Node:
        node = self._nodes.get(digest)
        if node is None:
            node = self._nodes[digest] = Node(digest, parent, length)
        return node

    def _prune(self, node: Node) -> None:
        if not node.holders and not node.uses:
            self._nodes.pop(node.digest, None)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest
