"""The mirror of one replica: order of use, bytes, and agreement with acknowledgements."""

from __future__ import annotations

from random import Random

import pytest
from tinyloop.cluster.mirror import Flight, Growth, Mirror
from tinyloop.cluster.pool_tree import PoolTree
from tinyloop.workers.wire import Ack, HeldPrefix, Inventory


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def flight(
    mirror: Mirror, sequence: int, builds: tuple[Growth, ...], drops: tuple[bytes, ...] = ()
) -> Flight:
    dropped = {digest: mirror.remove(digest) for digest in drops}
    for growth in builds:
        mirror.add(growth)
    made = Flight(sequence, "w", 0, 1, 10, 1, 0.1, 0.0, mirror.table, dropped, builds, mirror.total_bytes)
    mirror.flights.append(made)
    return made


@pytest.mark.parametrize("seed", range(10))
def test_the_least_recently_used_prefix_is_always_a_leaf(seed: int) -> None:
    random = Random(seed)
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    for number in range(1, 200):
        parent = random.choice([b"", *mirror.entries])
        mirror.add(Growth(key(number), parent, mirror.length_of(parent) + 3, 3, 10))
        mirror.touch(random.choice(list(mirror.entries)))
        if random.random() < 0.4:
            oldest = next(iter(mirror.entries))
            assert all(mirror.parent_of(digest) != oldest for digest in mirror.entries)
            mirror.remove(oldest)
        ages = {digest: age for age, digest in enumerate(mirror.entries)}
        parents = {digest: mirror.parent_of(digest) for digest in mirror.entries}
        assert all(not parent or ages[digest] < ages[parent] for digest, parent in parents.items())
        assert mirror.total_bytes == 10 * len(mirror.entries)
        assert len(mirror.tree) == len(mirror.entries)


def test_measured_bytes_replace_the_estimate() -> None:
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    _, agrees = mirror.confirm(Ack(1, 0, "", ((key(1), 128),), 128, key(1), 10, 0.1, 0), now_s=1.0)
    assert agrees
    assert mirror.total_bytes == mirror.confirmed_bytes == 128


@pytest.mark.parametrize("wrong", ["table", "bytes", "sequence"])
def test_a_replica_that_holds_something_else_is_noticed(wrong: str) -> None:
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    table, total = key(2 if wrong == "table" else 1), 129 if wrong == "bytes" else 128
    ack = Ack(1, 1 if wrong == "sequence" else 0, "", ((key(1), 128),), total, table, 10, 0.1, 0)
    assert not mirror.confirm(ack, now_s=1.0)[1]


def test_an_acknowledgement_is_held_against_the_state_of_its_own_command() -> None:
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    flight(mirror, 1, (Growth(key(2), b"", 3, 3, 100),), drops=(key(1),))
    assert mirror.confirm(Ack(1, 0, "", ((key(1), 128),), 128, key(1), 10, 0.1, 0), now_s=1.0)[1]
    assert mirror.flights[0].head_s == 1.0
    assert mirror.confirm(Ack(1, 1, "", ((key(2), 64),), 64, key(2), 10, 0.1, 0), now_s=2.0)[1]


def test_an_inventory_replaces_everything_and_returns_what_was_on_its_way() -> None:
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    lost = flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    entries = (HeldPrefix(key(7), b"", 4, 1, 40), HeldPrefix(key(8), key(7), 9, 1, 50))
    assert mirror.reset(Inventory(5, entries, 90)) == [lost]
    assert (mirror.epoch, mirror.sequence, mirror.total_bytes) == (5, 0, 90)
    assert list(mirror.entries) == [key(8), key(7)]
    assert mirror.confirmed == {key(7): 40, key(8): 50}


def test_what_is_confirmed_is_the_state_before_the_commands_on_their_way() -> None:
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    flight(mirror, 1, (Growth(key(2), b"", 3, 3, 100),), drops=(key(1),))
    flight(mirror, 2, (Growth(key(1), b"", 3, 3, 100),), drops=(key(2),))
    assert mirror.confirmed == {}
    mirror.confirm(Ack(1, 0, "", ((key(1), 128),), 128, key(1), 10, 0.1, 0), now_s=1.0)
    assert mirror.confirmed == {key(1): 128}
    assert mirror.entries == {key(1): 100}
    assert mirror.peak_bytes == 128
    assert mirror.confirm(Ack(1, 1, "", ((key(2), 90),), 90, key(2), 10, 0.1, 0), now_s=2.0)[1]
    assert mirror.confirmed == {key(2): 90}


def test_two_replicas_may_hold_one_prefix_on_different_parents() -> None:
    tree = PoolTree()
    first, second = Mirror(0, 1, 1 << 30, tree), Mirror(1, 1, 1 << 30, tree)
    first.add(Growth(key(2), b"", 6, 6, 10))
    second.add(Growth(key(1), b"", 4, 4, 10))
    second.add(Growth(key(2), key(1), 6, 2, 10))
    assert list(first.path(key(2))) == [key(2)]
    assert list(second.path(key(2))) == [key(2), key(1)]
    assert (first.own_length(key(2)), second.own_length(key(2))) == (6, 2)


def test_what_is_kept_or_pinned_protects_what_it_extends() -> None:
    mirror = Mirror(0, 1, 1 << 30, PoolTree())
    for number, parent in [(1, b""), (2, key(1)), (3, key(2)), (4, b""), (5, key(4)), (6, b"")]:
        mirror.add(Growth(key(number), parent, 3 * number, 3, 10))
    mirror.pins[key(2)] = 1
    assert mirror.protected({key(5)}) == {key(1), key(2), key(4), key(5)}
