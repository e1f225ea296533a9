"""The pool tree against a dictionary of sets."""

from __future__ import annotations

from random import Random

import pytest
from tinyloop.cluster.pool_tree import PoolTree


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.mark.parametrize("seed", range(10))
def test_one_walk_gives_every_replicas_longest_hit(seed: int) -> None:
    random = Random(seed)
    tree = PoolTree()
    parents = {n: random.randrange(n) for n in range(1, 40)}
    lengths = {0: 0}
    held: dict[int, set[int]] = {slot: set() for slot in range(70)}
    for node, parent in parents.items():
        lengths[node] = lengths[parent] + random.randrange(1, 9)
        tree.add_use(key(node), key(parent) if parent else b"", lengths[node], "w", (0, 1))
    for _ in range(300):
        slot, node = random.randrange(70), random.randrange(1, 40)
        if node in held[slot]:
            held[slot].discard(node)
            tree.release(key(node), slot)
        else:
            held[slot].add(node)
            tree.hold(key(node), key(parents[node]) if parents[node] else b"", lengths[node], slot)
    for node in parents:
        path = [node]
        while parents[path[-1]]:
            path.append(parents[path[-1]])
        expected = {
            slot: max(lengths[n] for n in path if n in has) for slot, has in held.items() if has & set(path)
        }
        assert tree.hits(key(node)) == expected


def test_a_node_lives_as_long_as_its_last_holder_or_use() -> None:
    tree = PoolTree()
    tree.add_use(key(1), b"", 4, "w", (0, 2))
    tree.hold(key(1), b"", 4, 3)
    tree.end_use(key(1), "w")
    assert key(1) in tree
    assert not tree.held_elsewhere(key(1), 3)
    tree.release(key(1), 3)
    assert len(tree) == 0
