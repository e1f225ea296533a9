"""PrefixPool with real prefixes: its books are the model's memory, what it holds serves as promised."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from engine_cases import random_ids
from stateful_cases import KINDS, MODES, Ids, assert_same_bits, lasting_memory, load_family, score_one
from tinyloop.native import (
    ClosedHandleError,
    ConcurrentUseError,
    GenerateRequest,
    InvalidInputError,
    MismatchError,
    Model,
    OutOfMemoryError,
    PrefixPool,
)

TAIL = random_ids(12, seed=99)


@pytest.fixture
def model() -> Iterator[Model]:
    with load_family("ouro") as loaded:
        yield loaded


def prefix_ids(i: int) -> Ids:
    return random_ids(20, seed=i)


def one_prefix(model: Model) -> int:
    with model.prefix(prefix_ids(0)) as prefix:
        return prefix.bytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [f for f in KINDS if f != "hrm_text"])
def test_a_held_chain_serves_what_it_was_built_for(family: str, mode: str) -> None:
    ids = random_ids(90)
    with load_family(family, mode, prefill_chunk=16) as model, PrefixPool(model, None) as pool:
        start = lasting_memory(model)
        a = pool.create(ids[:30], depth=2)
        b = pool.create(ids[30:70], depth=2, parent_key=a)
        assert pool.find(ids, depth=2) == b
        with pool.get(b) as prefix:
            assert_same_bits(prefix.token_ids, ids[:70])
            assert_same_bits(score_one(model, ids[70:], 19, 2, prefix=prefix), score_one(model, ids, 19, 2))
        assert pool.bytes == model.memory_report()["prefix"] == lasting_memory(model) - start


def test_room_is_made_for_the_new_by_the_least_recently_used(model: Model) -> None:
    size = one_prefix(model)
    start = model.vram_usage_bytes
    with PrefixPool(model, 3 * size) as pool:
        keys = [pool.create(prefix_ids(i)) for i in range(3)]
        assert (pool.bytes, pool.keys(), pool.evicted()) == (3 * size, keys, [])
        pool.get(keys[0]).close()
        new = pool.create(prefix_ids(3))
        assert pool.keys() == [keys[2], keys[0], new]
        assert pool.evicted() == [(keys[1], size, False)]
        assert pool.evicted() == []
        assert model.vram_usage_bytes == start + 3 * size == start + pool.bytes
        with pytest.raises(InvalidInputError, match=f"{keys[1]}"):
            pool.get(keys[1])
        assert pool.find(prefix_ids(1)) is None
    assert model.vram_usage_bytes == start


def test_pins_hold_and_parents_outlive_their_children(model: Model) -> None:
    size = one_prefix(model)
    with PrefixPool(model, 3 * size) as pool:
        parent = pool.create(prefix_ids(0))
        child = pool.create(prefix_ids(1), parent_key=parent)
        pinned = pool.create(prefix_ids(2))
        pool.pin(pinned)
        pool.pin(pinned)
        with pytest.raises(InvalidInputError, match=str(parent)):
            pool.evict(parent)
        new = pool.create(prefix_ids(3))  # the child is the only one that may go
        assert pool.evicted() == [(child, size, False)]
        assert set(pool.keys()) == {parent, pinned, new}
        pool.unpin(pinned)
        with pytest.raises(InvalidInputError, match=str(pinned)):
            pool.evict(pinned)  # pinned twice
        pool.unpin(pinned)
        pool.evict(pinned)
        assert pool.evicted() == [(pinned, size, True)]
        with pytest.raises(InvalidInputError, match=str(pinned)):
            pool.unpin(pinned)


def test_a_pool_that_never_evicts_refuses(model: Model) -> None:
    size = one_prefix(model)
    with PrefixPool(model, 2 * size, evict="never") as pool:
        keys = [pool.create(prefix_ids(i)) for i in range(2)]
        before, rows = model.vram_usage_bytes, model.counters["rows"]
        with pytest.raises(OutOfMemoryError):
            pool.create(prefix_ids(2))
        assert model.counters["rows"] == rows  # refused before it was computed
        assert (pool.keys(), pool.evicted(), model.vram_usage_bytes) == (keys, [], before)
        pool.evict(keys[0])
        assert pool.create(prefix_ids(2)) not in keys


@pytest.mark.parametrize("ids", [random_ids(200), random_ids(100)])
def test_what_is_larger_than_the_pool_evicts_nobody(model: Model, ids: Ids) -> None:
    with PrefixPool(model, 2 * one_prefix(model)) as pool:
        key = pool.create(prefix_ids(0))
        with pytest.raises(OutOfMemoryError):
            pool.create(ids)
        assert pool.keys() == [key]


def test_a_refused_prefix_evicts_nobody(model: Model) -> None:
    """What is wrong with it is found before room is made for it."""
    size = one_prefix(model)
    with PrefixPool(model, 2 * size) as pool:
        keys = [pool.create(prefix_ids(0), depth=2), pool.create(prefix_ids(1))]
        wrong = prefix_ids(2)
        wrong[7] = 61
        refused = [
            (InvalidInputError, "token id 61 at index 7", (wrong,)),
            (InvalidInputError, "0 tokens", (wrong[:0],)),
            (InvalidInputError, "depth 0", (prefix_ids(2), 0)),
            (MismatchError, "prefix of depth 2 at depth 1", (prefix_ids(2), 1, keys[0])),
            (MismatchError, "built at depth 2", (prefix_ids(2), 4, keys[0])),
            (InvalidInputError, "77", (prefix_ids(2), 4, 77)),
        ]
        for kind, named, arguments in refused:
            with pytest.raises(kind, match=named):
                pool.create(*arguments)
            assert sorted(pool.keys()) == keys
        outcome: list[BaseException | int] = []

        def create_beside_a_forward(*_: object) -> None:
            try:
                outcome.append(pool.create(prefix_ids(2)))
            except ConcurrentUseError as error:
                outcome.append(error)

        model.generate([GenerateRequest(TAIL, 1)], on_token=create_beside_a_forward)
        assert isinstance(outcome[0], ConcurrentUseError)
        assert sorted(pool.keys()) == keys
        assert pool.evicted() == []


def test_an_evicted_prefix_lives_as_long_as_its_user(model: Model) -> None:
    start = model.vram_usage_bytes
    with PrefixPool(model, None) as pool:
        key = pool.create(prefix_ids(0), depth=2)
        size = pool.bytes
        held = pool.get(key)
        pool.evict(key)
        assert pool.bytes == 0
        assert model.vram_usage_bytes == start + size
        expected = score_one(model, np.r_[prefix_ids(0), TAIL], 11, 2)
        assert_same_bits(score_one(model, TAIL, 11, 2, prefix=held), expected)
        held.close()
        assert model.vram_usage_bytes == start


def test_a_prefix_that_was_built_elsewhere_is_held_with_its_ancestors(model: Model) -> None:
    start = model.vram_usage_bytes
    with PrefixPool(model, None) as pool:
        parent = model.prefix(prefix_ids(0))
        child = model.prefix(prefix_ids(1), parent=parent)
        key = pool.put(child)
        assert pool.bytes == child.bytes
        with model.start(np.r_[prefix_ids(2), TAIL], 4) as handle, handle.prefix() as rows:
            from_handle = pool.put(rows)
        parent.close()
        child.close()
        whole = np.r_[prefix_ids(0), prefix_ids(1)]
        assert pool.find(np.r_[whole, TAIL]) == key
        with pool.get(key) as found:
            expected = score_one(model, np.r_[whole, TAIL], 11, 4)
            assert_same_bits(score_one(model, TAIL, 11, 4, prefix=found), expected)
        assert pool.find(np.r_[prefix_ids(2), TAIL]) == from_handle
        pool.evict(key)
        pool.evict(from_handle)
        assert model.vram_usage_bytes == start


def test_an_equal_prefix_is_held_once_and_not_computed_again(model: Model) -> None:
    whole = np.r_[prefix_ids(0), prefix_ids(1)]
    start = model.vram_usage_bytes
    with PrefixPool(model, None) as pool:
        parent = pool.create(prefix_ids(0))
        child = pool.create(prefix_ids(1), parent_key=parent)
        pool.pin(child)
        size, rows = pool.bytes, model.counters["rows"]
        beside: list[int] = []

        def ask_beside_a_forward(*_: object) -> None:
            beside.append(pool.create(whole))  # it needs no forward of its own

        assert pool.create(prefix_ids(0)) == parent
        assert pool.keys() == [child, parent]  # a use
        assert pool.create(prefix_ids(1), parent_key=parent) == pool.create(whole) == child
        assert pool.keys() == [child, parent]  # of its ancestors too
        assert (pool.bytes, model.counters["rows"]) == (size, rows)
        model.generate([GenerateRequest(TAIL, 1)], on_token=ask_beside_a_forward)
        assert beside == [child]
        with model.prefix(whole) as built:
            assert pool.put(built) == child
        assert pool.bytes == size == model.vram_usage_bytes - start
        with pytest.raises(InvalidInputError, match="1 pins"):
            pool.evict(child)
        # What is refused otherwise is refused all the same.
        with pytest.raises(InvalidInputError, match="77"):
            pool.create(prefix_ids(1), parent_key=77)
        with pytest.raises(MismatchError):
            pool.create(prefix_ids(1), depth=2, parent_key=parent)
        assert pool.evicted() == []


def test_an_equal_prefix_needs_no_room(model: Model) -> None:
    size = one_prefix(model)
    for policy in ("lru", "never"):
        with PrefixPool(model, 2 * size, evict=policy) as pool:  # type: ignore[arg-type]
            keys = [pool.create(prefix_ids(i)) for i in range(2)]
            assert pool.create(prefix_ids(0)) == keys[0]
            with model.prefix(prefix_ids(1)) as built:
                assert pool.put(built) == keys[1]
            assert (pool.keys(), pool.evicted(), pool.bytes) == (keys, [], 2 * size)


def test_another_depth_or_states_make_another_prefix(model: Model) -> None:
    with PrefixPool(model, None) as pool:
        kinds = [(depth, upgradable) for depth in (1, 4) for upgradable in (True, False)]
        keys = [pool.create(prefix_ids(0), depth, upgradable=states) for depth, states in kinds]
        assert len(set(keys)) == len(keys)
        for key, (depth, states) in zip(keys, kinds, strict=True):
            with pool.get(key) as held:
                assert (held.depth, held.upgradable) == (depth, states)
            with model.prefix(prefix_ids(0), depth, upgradable=states) as built:
                assert pool.put(built) == key
        with pool.get(keys[0]) as shallow, shallow.upgrade(4) as upgraded:
            assert pool.put(upgraded) == keys[2]  # the same numbers, come by another way


def test_a_prompt_and_rows_that_were_no_prompt_are_two_prefixes() -> None:
    ids = prefix_ids(0)
    with load_family("hrm_text") as model, PrefixPool(model, None) as pool:
        prompt = pool.create(ids, depth=2)
        flat = np.r_[ids, TAIL[:1]]
        args = (flat, np.array([0, len(flat)]), np.array([1], np.int32), 2)
        for prompt_len, same in ((0, False), (7, False), (len(ids), True)):
            lens = np.array([prompt_len], np.int32)
            (handle,) = model.start_many(*args, keep_cache=True, prompt_lens=lens)
            with handle, handle.prefix() as rows:
                assert (pool.put(rows) == prompt) is same
        assert len(pool.keys()) == 3


def test_find_takes_the_longest_that_is_deep_enough(model: Model) -> None:
    ids = random_ids(60)
    with PrefixPool(model, None) as pool:
        deep = pool.create(ids[:20], depth=4)
        shallow = pool.create(ids[:40], depth=2)
        assert pool.find(ids, depth=1) == pool.find(ids, depth=2) == shallow
        assert pool.find(ids, depth=3) == pool.find(ids) == deep
        assert pool.find(ids[:39], depth=2) == deep
        assert pool.find(ids[:20]) == deep
        assert pool.find(ids[:19]) is pool.find(ids[1:]) is pool.find(ids, depth=5) is None
        assert pool.keys() == [deep, shallow]  # not a use


def test_find_asks_for_the_very_depth_where_a_coda_needs_it() -> None:
    ids = random_ids(40)
    with load_family("loop_range") as model, PrefixPool(model, None) as pool:
        key = pool.create(ids, depth=3)
        assert pool.find(ids, depth=3) == key
        assert pool.find(ids, depth=2) is pool.find(ids, depth=4) is None


def test_a_prefix_of_another_model_is_not_held(model: Model) -> None:
    with load_family("ouro") as other, other.prefix(TAIL) as foreign, PrefixPool(model, None) as pool:
        with pytest.raises(MismatchError, match="another model"):
            pool.put(foreign)
        assert pool.keys() == []


def test_a_closed_pool_or_model_says_so() -> None:
    model = load_family("ouro")
    pool, closed = PrefixPool(model, None), PrefixPool(model, None)
    key, prefix = pool.create(TAIL), model.prefix(TAIL)
    closed.close()
    closed.close()
    assert closed.closed

    def uses(of: PrefixPool) -> list[Callable[[], object]]:
        return [
            lambda: of.create(TAIL),
            lambda: of.put(prefix),
            lambda: of.get(key),
            lambda: of.find(TAIL),
            lambda: of.pin(key),
            lambda: of.evict(key),
            of.evicted,
            of.keys,
            lambda: of.bytes,
        ]

    for use in uses(closed):
        with pytest.raises(ClosedHandleError, match="the pool: it was closed"):
            use()
    model.close()
    for use in uses(pool):
        with pytest.raises(ClosedHandleError, match="its model was closed"):
            use()
    assert not pool.closed
    pool.close()
    with pytest.raises(InvalidInputError, match="evict='fifo'"), load_family("ouro") as model:
        PrefixPool(model, 100, evict="fifo")


def test_a_random_life_is_accounted_for(model: Model) -> None:
    """Prefixes of random lengths, parents and depths: the pool's bytes are what the model holds for it."""
    rng = np.random.default_rng(3)
    start = model.vram_usage_bytes
    budget = 6 * one_prefix(model)
    built: dict[int, Ids] = {}
    with PrefixPool(model, budget) as pool:
        for step in range(150):
            keys = pool.keys()
            parent = int(rng.choice(keys)) if keys and rng.random() < 0.5 else None
            own = random_ids(int(rng.integers(1, 30)), seed=step)
            depth = int(rng.integers(1, 5))
            if parent is not None:
                with pool.get(parent) as held:
                    depth = held.depth
            try:
                key = pool.create(own, depth, parent)
            except OutOfMemoryError:
                pass
            else:
                built[key] = np.r_[built[parent], own] if parent is not None else own
                assert pool.find(built[key], depth) is not None
            assert pool.bytes == model.vram_usage_bytes - start <= budget
            if keys and rng.random() < 0.3:
                key = int(rng.choice(pool.keys()))
                with pool.get(key) as held:
                    assert_same_bits(held.token_ids, built[key])
                    expected = score_one(model, np.r_[built[key], TAIL], 11, held.depth)
                    assert_same_bits(score_one(model, TAIL, 11, held.depth, prefix=held), expected)
        assert len(pool.evicted()) > 50
    assert model.vram_usage_bytes == start


def test_threads_that_share_a_pool_keep_its_books() -> None:
    """create() lets go of the interpreter while it computes; the others meet an error or a whole pool."""
    with load_family("ouro") as model:
        size = one_prefix(model)
        start = model.vram_usage_bytes
        with PrefixPool(model, 4 * size) as pool:
            unexpected: list[BaseException] = []
            made: list[int] = []

            def work(seed: int) -> None:
                rng = np.random.default_rng(seed)
                left = 25
                while left and not unexpected:
                    try:
                        made.append(pool.create(random_ids(20, seed=1000 * seed + left)))
                        left -= 1
                        if keys := pool.keys():
                            pool.get(int(rng.choice(keys))).close()
                    except (ConcurrentUseError, InvalidInputError):
                        continue
                    except BaseException as error:
                        unexpected.append(error)

            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not unexpected
            assert len(set(made)) == len(made) == 3 * 25
            assert pool.bytes == model.vram_usage_bytes - start == len(pool.keys()) * size


def test_a_prefix_that_fails_to_be_built_evicts_nothing(model: Model) -> None:
    """Not even when the pool is full: room is made once the new prefix is there."""
    with PrefixPool(model, 2 * one_prefix(model)) as pool:
        keys = [pool.create(prefix_ids(i)) for i in range(2)]
        pool.pin(keys[0])
        pool.pin(keys[1])
        with pytest.raises(OutOfMemoryError):
            pool.create(prefix_ids(2))
        pool.unpin(keys[0])
        pool.unpin(keys[1])
        ids = prefix_ids(3).copy()
        ids[-1] = -1
        with pytest.raises(InvalidInputError, match="token id -1"):
            pool.create(ids)
        assert (pool.keys(), pool.evicted()) == (keys, [])
        model._fail_allocation(1)  # once: the second attempt has the memory of the one that goes
        new = pool.create(prefix_ids(2))
        assert pool.keys() == [keys[1], new]


def test_a_pool_needs_a_budget_or_none(model: Model) -> None:
    with pytest.raises(InvalidInputError, match="budget_bytes=0"):
        PrefixPool(model, 0)
    with PrefixPool(model, None) as pool, pytest.raises(InvalidInputError, match="depth 0"):
        pool.find(prefix_ids(0), depth=0)
