"""The mirror of one replica: order of use, bytes, and agreement with acknowledgements."""

from __future__ import annotations

from random import Random

import pytest
from tinyloop.cluster.mirror import Flight, Growth, Mirror
from tinyloop.workers.wire import Ack, HeldPrefix, Inventory


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def flight(
    mirror: Mirror, sequence: int, builds: tuple[Growth, ...], drops: tuple[bytes, ...] = ()
) -> Flight:
    for digest in drops:
        mirror.remove(digest)
    for growth in builds:
        mirror.add(growth)
    made = Flight(sequence, "w", 0, 1, 10, 1, 0.1, 0.0, mirror.table, drops, builds, mirror.total_bytes)
    mirror.flights.append(made)
    return made


@pytest.mark.parametrize("seed", range(10))
def test_the_least_recently_used_prefix_is_always_a_leaf(seed: int) -> None:
    random = Random(seed)
    mirror = Mirror(0, 1, 1 << 30)
    for number in range(1, 200):
        parent = random.choice([b"", *mirror.entries])
        mirror.add(Growth(key(number), parent, mirror.length_of(parent) + 3, 3, 10))
        mirror.touch(random.choice(list(mirror.entries)))
        if random.random() < 0.4:
            oldest = next(iter(mirror.entries))
            assert not mirror.entries[oldest].children
            mirror.remove(oldest)
        ages = list(mirror.entries)
        assert all(not e.parent or ages.index(d) < ages.index(e.parent) for d, e in mirror.entries.items())
        assert mirror.total_bytes == 10 * len(mirror.entries)


def test_measured_bytes_replace_the_estimate() -> None:
    mirror = Mirror(0, 1, 1 << 30)
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    _, agrees = mirror.confirm(Ack(1, 0, "", ((key(1), 128),), 128, key(1), 10, 0.1, 0), now_s=1.0)
    assert agrees
    assert mirror.total_bytes == mirror.confirmed_bytes == 128


@pytest.mark.parametrize("wrong", ["table", "bytes", "sequence"])
def test_a_replica_that_holds_something_else_is_noticed(wrong: str) -> None:
    mirror = Mirror(0, 1, 1 << 30)
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    table, total = key(2 if wrong == "table" else 1), 129 if wrong == "bytes" else 128
    ack = Ack(1, 1 if wrong == "sequence" else 0, "", ((key(1), 128),), total, table, 10, 0.1, 0)
    assert not mirror.confirm(ack, now_s=1.0)[1]


def test_an_acknowledgement_is_held_against_the_state_of_its_own_command() -> None:
    mirror = Mirror(0, 1, 1 << 30)
    flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    flight(mirror, 1, (Growth(key(2), b"", 3, 3, 100),), drops=(key(1),))
    assert mirror.confirm(Ack(1, 0, "", ((key(1), 128),), 128, key(1), 10, 0.1, 0), now_s=1.0)[1]
    assert mirror.flights[0].head_s == 1.0
    assert mirror.confirm(Ack(1, 1, "", ((key(2), 64),), 64, key(2), 10, 0.1, 0), now_s=2.0)[1]


def test_an_inventory_replaces_everything_and_returns_what_was_on_its_way() -> None:
    mirror = Mirror(0, 1, 1 << 30)
    lost = flight(mirror, 0, (Growth(key(1), b"", 3, 3, 100),))
    entries = (HeldPrefix(key(7), b"", 4, 1, 40), HeldPrefix(key(8), key(7), 9, 1, 50))
    assert mirror.reset(Inventory(5, entries, 90)) == [lost]
    assert (mirror.epoch, mirror.sequence, mirror.total_bytes) == (5, 0, 90)
    assert [digest for digest, _ in mirror.leaves()] == [key(8)]
