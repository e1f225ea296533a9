"""The books of a pool of prefixes against a naive model, through long random lives."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.native import ClosedHandleError, InvalidInputError, MismatchError, OutOfMemoryError
from tinyloop.native._core import _PoolLedger

Report = list[tuple[int, int, bool]]


@dataclass
class Held:
    ids: tuple[int, ...]
    depth: int
    size: int
    parent: int | None
    variant: int = 0
    pins: int = 0
    used: int = 0


@dataclass
class NaivePool:
    """The rules word by word: every question is a scan over everything that is held."""

    budget: int
    evict_lru: bool
    held: dict[int, Held] = field(default_factory=dict)
    report: Report = field(default_factory=list)
    clock: int = 0
    last_key: int = 0

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.held.values())

    def has_children(self, key: int) -> bool:
        return any(entry.parent == key for entry in self.held.values())

    def use(self, key: int | None) -> None:
        while key is not None:
            self.clock += 1
            self.held[key].used = self.clock
            key = self.held[key].parent

    def remove(self, key: int, asked: bool) -> None:
        self.report.append((key, self.held.pop(key).size, asked))

    def make_room(self, size: int, keep: int | None) -> None:
        """Frees or raises MemoryError with nothing changed, trying it out on a copy."""
        trial = NaivePool(self.budget, self.evict_lru, dict(self.held))
        while self.budget and trial.size + size > self.budget:
            free = [
                key
                for key, entry in trial.held.items()
                if not entry.pins and key != keep and not trial.has_children(key)
            ]
            if not free or not self.evict_lru or size > self.budget:
                raise MemoryError
            trial.remove(min(free, key=lambda key: trial.held[key].used), False)
        for key, _, _ in trial.report:
            self.remove(key, False)

    def put(self, ids: tuple[int, ...], depth: int, size: int, parent: int | None, variant: int) -> int:
        for key, entry in self.held.items():
            if (entry.ids, entry.depth, entry.variant) == (ids, depth, variant):
                self.use(key)
                return key
        self.make_room(size, parent)
        self.last_key += 1
        self.held[self.last_key] = Held(ids, depth, size, parent, variant)
        self.use(self.last_key)
        return self.last_key

    def find(self, ids: tuple[int, ...], depth: int, exactly: bool) -> int | None:
        fitting = [
            (-len(entry.ids), entry.depth, key)
            for key, entry in self.held.items()
            if ids[: len(entry.ids)] == entry.ids
            and (entry.depth == depth if exactly else entry.depth >= depth)
        ]
        return min(fitting)[2] if fitting else None


def array(ids: tuple[int, ...]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(ids, np.int32)


def put_both(rng: np.random.Generator, ledger: _PoolLedger, naive: NaivePool) -> None:
    parent = None
    ids = tuple(rng.integers(0, 2, rng.integers(1, 6)).tolist())
    if naive.held and rng.random() < 0.6:
        parent = int(rng.choice(list(naive.held)))
        ids = naive.held[parent].ids + ids
    depth, size, variant = int(rng.integers(1, 4)), int(rng.integers(0, 40)), int(rng.integers(0, 2))
    try:
        expected = naive.put(ids, depth, size, parent, variant)
    except MemoryError:
        with pytest.raises(OutOfMemoryError):
            ledger.put(array(ids), depth, size, parent, ids, variant)
    else:
        assert ledger.put(array(ids), depth, size, parent, ids, variant) == expected


def use_both(rng: np.random.Generator, ledger: _PoolLedger, naive: NaivePool, key: int) -> None:
    action = rng.choice(["get", "pin", "unpin", "evict"], p=[0.5, 0.15, 0.2, 0.15])
    entry = naive.held.get(key)
    refused = entry is None
    if entry is not None:
        refused = (action == "unpin" and not entry.pins) or (
            action == "evict" and bool(entry.pins or naive.has_children(key))
        )
    if refused:
        with pytest.raises(InvalidInputError, match=str(key)):
            getattr(ledger, action)(key)
        return
    assert entry is not None
    found = getattr(ledger, action)(key)
    if action == "get":
        assert found == entry.ids
        naive.use(key)
    elif action == "evict":
        naive.remove(key, True)
    else:
        entry.pins += 1 if action == "pin" else -1


@given(st.integers(0, 2**32 - 1), st.sampled_from([0, 60, 150, 400]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_random_life_is_the_naive_pools(seed: int, budget: int, evict_lru: bool) -> None:
    rng = np.random.default_rng(seed)
    ledger = _PoolLedger(budget, "lru" if evict_lru else "never")
    naive = NaivePool(budget, evict_lru)
    for _ in range(120):
        if rng.random() < 0.45:
            put_both(rng, ledger, naive)
        elif naive.last_key:
            use_both(rng, ledger, naive, int(rng.integers(1, naive.last_key + 2)))
        assert ledger.bytes == naive.size
        assert ledger.keys() == sorted(naive.held, key=lambda key: naive.held[key].used)
        assert not budget or ledger.bytes <= budget
        query = tuple(rng.integers(0, 2, rng.integers(0, 14)).tolist())
        depth, exactly = int(rng.integers(1, 5)), bool(rng.random() < 0.3)
        assert ledger.find(array(query), depth, exactly) == naive.find(query, depth, exactly)
        if rng.random() < 0.1:
            assert ledger.evicted() == naive.report
            naive.report = []
    assert ledger.evicted() == naive.report


def test_what_is_held_already_is_held_once() -> None:
    ledger = _PoolLedger(30)
    payload = Payload()
    key = ledger.put(array((1, 2)), 2, 10, payload=payload)
    other = ledger.put(array((3,)), 2, 10)
    ledger.pin(key)
    assert ledger.put(array((1, 2)), 2, 10, payload=Payload()) == key
    assert ledger.put(array((1, 2)), 2, 100) == key  # more than there is room for: it needs none
    assert (ledger.bytes, ledger.keys(), ledger.evicted()) == (20, [other, key], [])
    assert ledger.get(key) is payload
    with pytest.raises(InvalidInputError, match="1 pins"):
        ledger.evict(key)
    ledger.unpin(key)
    with pytest.raises(InvalidInputError, match="not pinned"):
        ledger.unpin(key)
    ledger.evict(key)
    assert ledger.put(array((1, 2)), 2, 10) not in (key, other)


def test_find_compares_ids_and_not_only_lengths() -> None:
    ledger = _PoolLedger(0)
    short = ledger.put(array((1, 2)), 1, 1)
    ledger.put(array((1, 2, 3, 4)), 1, 1)
    assert ledger.find(array((1, 2, 3, 5, 6)), 1) == short
    assert ledger.find(array((1, 3, 3, 4)), 1) is None
    assert ledger.find(array(()), 1) is None


def test_find_falls_back_to_a_shorter_prefix_that_is_deep_enough() -> None:
    ledger = _PoolLedger(0)
    deep = ledger.put(array((1,)), 4, 1)
    ledger.put(array((1, 2)), 2, 1)
    assert ledger.find(array((1, 2, 3)), 3) == deep
    assert ledger.find(array((1, 2, 3)), 3, exactly=True) is None
    assert ledger.find(array((1, 2, 3)), 4, exactly=True) == deep


def test_eviction_by_hand_of_a_parent_says_why_it_is_refused() -> None:
    ledger = _PoolLedger(0)
    parent = ledger.put(array((1,)), 1, 10)
    child = ledger.put(array((1, 2)), 1, 10, parent)
    with pytest.raises(InvalidInputError, match=f"entry {parent}: it has 1 held children"):
        ledger.evict(parent)
    ledger.evict(child)
    ledger.evict(parent)
    assert ledger.evicted() == [(child, 10, True), (parent, 10, True)]
    with pytest.raises(InvalidInputError, match="it was evicted"):
        ledger.get(parent)


def test_a_new_child_never_costs_its_parent() -> None:
    ledger = _PoolLedger(20)
    parent = ledger.put(array((1,)), 1, 10)
    other = ledger.put(array((5,)), 1, 10)
    ledger.get(other)
    child = ledger.put(array((1, 2)), 1, 10, parent)
    assert ledger.evicted() == [(other, 10, False)]
    with pytest.raises(OutOfMemoryError, match=r"10 bytes more .* 20 of 20 bytes in 2 entries"):
        ledger.make_room(10, child)
    assert ledger.keys() == [child, parent]


def test_refusal_evicts_nothing() -> None:
    ledger = _PoolLedger(30)
    pinned = ledger.put(array((1,)), 1, 20)
    free = ledger.put(array((2,)), 1, 10)
    ledger.pin(pinned)
    with pytest.raises(OutOfMemoryError):
        ledger.put(array((3,)), 1, 15)
    with pytest.raises(OutOfMemoryError):
        ledger.make_room(2**64 - 1)
    assert (ledger.keys(), ledger.evicted()) == ([pinned, free], [])


def test_never_refuses_and_names_the_policy() -> None:
    ledger = _PoolLedger(10, "never")
    ledger.put(array((1,)), 1, 8)
    with pytest.raises(OutOfMemoryError, match="evict is never"):
        ledger.put(array((2,)), 1, 3)


@pytest.mark.parametrize("ids", [(2, 1), (1, 2), (1,)])
def test_a_child_must_continue_its_parent(ids: tuple[int, ...]) -> None:
    ledger = _PoolLedger(0)
    parent = ledger.put(array((1, 2)), 1, 1)
    with pytest.raises(MismatchError, match="of the parent's 2"):
        ledger.put(array(ids), 1, 1, parent)
    assert ledger.keys() == [parent]


@pytest.mark.parametrize(("ids", "depth"), [((), 1), ((1,), 0)])
def test_an_entry_needs_ids_and_a_depth(ids: tuple[int, ...], depth: int) -> None:
    with pytest.raises(InvalidInputError, match="depth of 1 or more"):
        _PoolLedger(0).put(array(ids), depth, 1)


class Payload:
    """Something that a weak reference can watch."""


def test_payload_lives_as_long_as_the_entry_or_a_user_of_it() -> None:
    ledger = _PoolLedger(0)
    payload = Payload()
    watch = weakref.ref(payload)
    key = ledger.put(array((1,)), 1, 1, payload=payload)
    del payload
    user = ledger.get(key)
    ledger.evict(key)
    assert watch() is user
    del user
    assert watch() is None


def test_close_drops_everything_and_ends_the_calls() -> None:
    ledger = _PoolLedger(0)
    payload = Payload()
    watch = weakref.ref(payload)
    ledger.put(array((1,)), 1, 1, payload=payload)
    del payload
    ledger.close()
    ledger.close()
    assert watch() is None
    assert ledger.closed
    for call in (ledger.keys, ledger.evicted, lambda: ledger.bytes, lambda: ledger.find(array((1,)), 1)):
        with pytest.raises(ClosedHandleError, match="pool"):
            call()


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"'sometimes'.*lru nor never"):
        _PoolLedger(0, "sometimes")
