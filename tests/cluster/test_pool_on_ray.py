"""The pool on Ray with the fake model: the same numbers whatever the number of replicas and whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from random import Random

import numpy as np
import pytest
from collecting import MakePool, expected, gather, values_of
from simulated import ragged_items, shared_prefix_items
from tinyloop.cluster.fleet import PoolError
from tinyloop.cluster.items import Failed, Items
from tinyloop.cluster.pool import ReplicaPool


@pytest.mark.parametrize("replicas", [1, 2])
def test_scores_do_not_depend_on_the_number_of_replicas(make_pool: MakePool, replicas: int) -> None:
    pool = make_pool(replicas)
    windows = [shared_prefix_items(64, 8, 64, 16, seed=seed, depth=2) for seed in range(2)]
    for number, items in enumerate(windows):
        pool.submit(number, items)
        assert gather(pool, number, items) == expected(items)
    status = pool.status()
    assert status.tokens_computed <= 1.02 * status.tokens_ideal
    assert status.alive == replicas
    assert (status.mirror_differences, status.deaths, status.queued_items) == (0, 0, 0)


def _pid_of(pool: ReplicaPool, slot: int) -> int:
    return pool.status().replicas[slot].pid


def _start_slow_window(pool: ReplicaPool) -> tuple[Items, dict[int, bytes | Failed]]:
    """A window in progress: submitted, and something of it has come back."""
    items = shared_prefix_items(24, 8, 64, 16, seed=5)
    pool.submit(0, items)
    found: dict[int, bytes | Failed] = {}
    while not found:
        for part in pool.collect(10.0):
            found.update(values_of(part))
    return items, found


def _finish(pool: ReplicaPool, items: Items, found: dict[int, bytes | Failed]) -> None:
    deadline = time.monotonic() + 60
    while len(found) < len(items):
        assert time.monotonic() < deadline, f"{len(found)} of {len(items)} items came back"
        for part in pool.collect(1.0):
            for item, value in values_of(part):
                assert item not in found
                found[item] = value
    assert found == expected(items)


SLOW = {"row_seconds": 3e-4}
SEED = 11


@pytest.mark.chaos
def test_a_lone_replica_that_is_killed_is_replaced_and_nothing_is_lost(
    make_pool: MakePool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool(1, SLOW, chunk_rows=400)
    items, found = _start_slow_window(pool)
    os.kill(_pid_of(pool, 0), signal.SIGKILL)
    _finish(pool, items, found)
    assert pool.status().deaths == 1
    # One line of the pool's own, and none of Ray's.
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == ["replica 0 was lost"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.chaos
def test_random_kills_of_replicas_and_router_lose_and_double_nothing(make_pool: MakePool) -> None:
    random, seed = Random(SEED), SEED
    pool = make_pool(2, SLOW, chunk_rows=300)
    items = shared_prefix_items(60, 8, 64, 16, seed=7)
    pool.submit(0, items)
    found: dict[int, bytes | Failed] = {}
    kills = 0
    deadline = time.monotonic() + 90
    while len(found) < len(items):
        assert time.monotonic() < deadline, f"seed {seed}: {len(found)} of {len(items)} after {kills} kills"
        before = len(found)
        for part in pool.collect(1.0):
            for item, value in values_of(part):
                assert item not in found, f"seed {seed}"
                found[item] = value
        if kills < 5 and len(found) > before and random.random() < 0.5:
            pids = [pool._router_pid, *(r.pid for r in pool.status().replicas if r.state == "up")]
            victim = random.choice(pids)
            with suppress(ProcessLookupError):  # it may have died of an earlier kill
                os.kill(victim, signal.SIGKILL)
                kills += 1
    assert found == expected(items), f"seed {seed}"
    assert kills >= 3
    assert pool.status().mirror_differences == 0


@pytest.mark.chaos
def test_a_frozen_replica_is_found_by_its_deadline(make_pool: MakePool) -> None:
    pool = make_pool(2, SLOW, chunk_rows=400, hang_floor_s=0.5)
    items, found = _start_slow_window(pool)
    os.kill(_pid_of(pool, 0), signal.SIGSTOP)
    _finish(pool, items, found)
    assert pool.status().deaths == 1


@pytest.mark.chaos
def test_an_item_that_kills_its_process_is_reported_and_the_rest_is_scored(make_pool: MakePool) -> None:
    pool = make_pool(2, {"exit_on": 999}, chunk_rows=300)
    rows = [np.array([1, 2, 3, 4, 5, 6, 10 + i, 7, 8]) for i in range(40)]
    rows[17][-2] = 999
    items = ragged_items(rows, [2] * len(rows))
    pool.submit(0, items)
    found = gather(pool, 0, items)
    lost = found.pop(17)
    assert isinstance(lost, Failed)
    assert (lost.error_class, lost.attempts) == ("replica_lost", 5)
    assert found == {item: values for item, values in expected(items).items() if item != 17}


@pytest.mark.chaos
def test_a_killed_router_comes_back_with_every_prefix(make_pool: MakePool) -> None:
    pool = make_pool(2, SLOW, chunk_rows=400)
    items, found = _start_slow_window(pool)
    os.kill(pool._router_pid, signal.SIGKILL)
    _finish(pool, items, found)
    assert pool.status().deaths == 0
    # The new router was told what the replicas hold: the same window again builds nothing.
    before = pool.status().tokens_computed
    pool.submit(1, items)
    again = gather(pool, 1, items)
    assert again == expected(items)
    assert pool.status().tokens_computed - before <= len(items) * 15 + 2 * 64


def test_a_failed_load_says_phase_and_reason(make_pool: MakePool) -> None:
    with pytest.raises(PoolError, match=r"phase load: LoadError: tensor embed: 12 of 16 bytes"):
        make_pool(1, {"fail_load": "tensor embed: 12 of 16 bytes"})


def test_a_replica_that_cannot_be_placed_says_what_was_asked(make_pool: MakePool) -> None:
    with pytest.raises(PoolError, match=r"was not ready in 0.5 s: it asked for .*the cluster has"):
        make_pool(1, threads=1, device="cuda", start_timeout_s=0.5)


def test_a_replica_that_only_dies_ends_the_job_with_an_error(make_pool: MakePool) -> None:
    pool = make_pool(1, {"break_on": 999}, crash_limit=2, chunk_rows=10)
    rows = [np.array([999, i + 1, 3]) for i in range(40)]
    items = ragged_items(rows, [1] * len(rows))
    pool.submit(0, items)
    with pytest.raises(PoolError, match=r"all 1 replicas were lost; the last: RuntimeError: device lost"):
        gather(pool, 0, items)


def test_a_third_window_waits_for_one_of_two_and_everything_comes_back(make_pool: MakePool) -> None:
    pool = make_pool(1)
    windows = [shared_prefix_items(4, 8, 32, 16, seed=seed) for seed in range(5)]
    for number, items in enumerate(windows):
        pool.submit(number, items)
        assert pool._ledger.windows_in_flight <= 2
    found: dict[tuple[int, int], bytes | Failed] = {}
    while len(found) < sum(map(len, windows)):
        for part in pool.collect(5.0):
            found.update({(part.window, item): value for item, value in values_of(part)})
    for number, items in enumerate(windows):
        assert {item: found[number, item] for item in range(len(items))} == expected(items)


def test_a_pool_of_a_job_grows_and_shrinks_while_it_works(make_pool: MakePool) -> None:
    pool = make_pool(1, SLOW, chunk_rows=400)
    items, found = _start_slow_window(pool)
    pool.scale(2)
    _wait_until(lambda: pool.status().alive == 2)
    _finish(pool, items, found)
    leaving = _pid_of(pool, 1)
    pool.submit(1, items)
    pool.scale(1)
    assert gather(pool, 1, items) == expected(items)
    _wait_until(lambda: len(pool.status().replicas) == 1)
    status = pool.status()
    assert (status.deaths, status.mirror_differences) == (0, 0)
    assert leaving not in {replica.pid for replica in status.replicas}
    with pytest.raises(ValueError, match="cannot have 0 replicas: ask for 1 to 1024"):
        pool.scale(0)


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
