"""The goals of placement on the simulator, small enough for the suite; tests/bench has the long forms.

Five workloads, each with its own difficulty: pressure, repeats, a long tail, one hot prefix, talks.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest
from tinyloop.cluster.costs import PlacementRules

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from commanded import TOKEN_BYTES, UNLIMITED, Outcome, Pool
from placement import flatness, index_bytes
from rivals import POLICIES, push
from workloads import Workload, conversations, groups, hot, rounds, unique, zipf

MAKERS = {
    "groups": lambda: groups("groups", 128, 16, 2048, 128, 20_000),
    "rounds": lambda: rounds("rounds", 40, 5, 4, 6000, 1200, 60_000),
    "zipf": lambda: zipf("zipf", 300, 1500, 60, 6000, 40_000),
    "hot": lambda: hot("hot", 200, 2000, 100, 8000, 20_000),
    "conversations": lambda: conversations("conversations", 1200, 200_000),
}


@cache
def workload(name: str) -> Workload:
    return MAKERS[name]()


def offline(name: str) -> Outcome:
    made = workload(name)
    return Pool(made, 8, made.budget_tokens * TOKEN_BYTES).run()


@pytest.mark.parametrize("name", MAKERS)
def test_offline_placement_reaches_the_ideal_and_the_bound_under_pressure(name: str) -> None:
    got = offline(name)
    assert got.hit_share >= 99.0
    assert got.slowdown <= 1.03
    assert got.counters["mirror_differences"] == got.counters["refusals"] == 0
    if name == "hot":
        assert got.imbalance <= 1.05


@pytest.mark.parametrize("name", ["rounds", "zipf", "conversations"])
def test_a_stream_of_64_reaches_the_ideal_where_pools_fit(name: str) -> None:
    assert Pool(workload(name), 8, UNLIMITED, lookahead=64).run().hit_share >= 97.0


@pytest.mark.parametrize("name", ["groups", "hot", "conversations"])
def test_a_stream_of_4096_reaches_the_ideal_where_pools_do_not_fit(name: str) -> None:
    made = workload(name)
    got = Pool(made, 8, made.budget_tokens * TOKEN_BYTES, lookahead=4096).run()
    assert got.hit_share >= 95.0


def test_several_clients_of_one_stream_reach_the_ideal_together() -> None:
    got = Pool(workload("groups"), 8, UNLIMITED, lookahead=256, clients=4).run()
    assert got.hit_share >= 97.0
    assert got.slowdown <= 1.1


def test_nothing_is_lost_where_nothing_is_shared() -> None:
    got = Pool(unique("unique", 1000, 2300, 20_000), 8, UNLIMITED).run()
    assert got.slowdown <= 1.01


@pytest.mark.parametrize(("replicas", "requests"), [(64, 24_000), (1024, 60_000)])
def test_many_replicas_are_used_well(replicas: int, requests: int) -> None:
    made = groups("many", requests // 20, 20, 2000, 200, 100_000)
    got = Pool(made, replicas, made.budget_tokens * TOKEN_BYTES).run()
    assert got.slowdown <= 1 / 0.95


def test_the_index_is_small_and_does_not_grow_with_what_has_passed() -> None:
    # 22,000 is just beyond a size at which a dictionary doubles: the dearest place to measure.
    assert index_bytes(22_000, holders=1) <= 256
    # A window names 42 prefixes: to keep them all would take 8 kB a window, 160 kB over the last twenty.
    early, late = flatness(40)
    assert late - early < 20_000


def test_the_simulator_tells_good_rules_from_bad_ones() -> None:
    """The negative control: rules that know less reach less, under the same clock and the same bound."""
    made = workload("groups")
    by_turns = push(made, 8, made.budget_tokens, POLICIES["round robin"])
    assert by_turns.hit_share < 50.0
    assert by_turns.slowdown > 2.0


def test_replicas_that_hold_less_than_they_say_refuse_and_the_work_is_still_done() -> None:
    made = workload("groups")
    pool = Pool(made, 4, 40_000 * TOKEN_BYTES, rules=PlacementRules())
    for slot, replica in pool.replicas.items():
        replica.budget_bytes = (5_000 + 1_000 * slot) * TOKEN_BYTES
    got = pool.run()
    assert got.counters["refusals"] > 0
    assert got.counters["mirror_differences"] == 0
    assert got.hit_share >= 95.0
    assert all(replica.most_bytes <= replica.budget_bytes for replica in pool.replicas.values())
