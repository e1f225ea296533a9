"""Small windows that arrive over time: who takes what, whose turn it is, and how work ends early."""

from __future__ import annotations

import numpy as np
import pytest
from simulated import SimulatedReplica, Simulation, ragged_items, shared_prefix_items
from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.items import Items
from tinyloop.cluster.keys import at_depth
from tinyloop.cluster.placement import Placement
from tinyloop.workers.wire import Command, HeldPrefix, Inventory

SHARED = np.arange(1, 201)


def pool(replicas: int = 2, **rules: float) -> Simulation:
    return Simulation({slot: SimulatedReplica() for slot in range(replicas)}, PlacementRules(**rules))  # type: ignore[arg-type]


def prompts(prefix: np.ndarray, count: int, seed: int = 0, depth: int = 1) -> Items:
    random = np.random.default_rng(seed)
    rows = [np.concatenate([prefix, random.integers(300, 900, 12)]) for _ in range(count)]
    return ragged_items(rows, [4] * count, depth)


def finished(simulation: Simulation, key: str) -> list[int]:
    parts = [f.items for f in simulation.finished if f.window == key]
    return sorted(np.concatenate(parts).tolist()) if parts else []


def first_commands(simulation: Simulation) -> dict[int, list[Command]]:
    simulation.dispatch()
    return {slot: [c for c, _ in replica.waiting] for slot, replica in simulation.replicas.items()}


def test_a_later_window_goes_to_the_replica_that_holds_its_prefix() -> None:
    simulation = pool()
    simulation.submit("first", prompts(SHARED, 8))
    simulation.run()
    (holder,) = [slot for slot, r in simulation.replicas.items() if len(r.table)]
    rows = sum(replica.rows for replica in simulation.replicas.values())
    simulation.submit("second", prompts(SHARED, 8, seed=1))
    simulation.run()
    assert [slot for slot, r in simulation.replicas.items() if len(r.table)] == [holder]
    assert sum(replica.rows for replica in simulation.replicas.values()) - rows == 8 * 11
    assert finished(simulation, "second") == list(range(8))


def test_a_replica_does_not_take_what_only_another_holds_while_that_one_is_soon_done() -> None:
    simulation = pool()
    simulation.submit("first", prompts(SHARED, 8))
    simulation.run()
    simulation.submit("a", prompts(SHARED, 4, seed=1))
    simulation.submit("b", prompts(SHARED + 300, 4, seed=2))
    sent = first_commands(simulation)
    windows = {slot: {command.window for command in commands} for slot, commands in sent.items()}
    assert sorted(map(sorted, windows.values())) == [["a"], ["b"]]


def test_a_hot_prefix_is_copied_when_its_holder_has_more_of_it_than_a_copy_costs() -> None:
    simulation = pool(replicas=4)
    for window in range(40):
        simulation.submit(f"w{window}", prompts(SHARED, 25, seed=window))
    simulation.run()
    busy = [replica.busy_s for replica in simulation.replicas.values()]
    assert simulation.placement.counters.copies == 3
    assert max(busy) <= 1.1 * sum(busy) / len(busy)


def test_a_prefix_at_another_depth_is_another_one_but_a_deeper_one_serves_a_shallower_request() -> None:
    simulation = pool(replicas=1)
    simulation.submit("deep", prompts(SHARED, 8, depth=2))
    simulation.run()
    simulation.submit("shallow", prompts(SHARED, 8, seed=1, depth=1))
    (command, *_) = first_commands(simulation)[0]
    assert command.builds == ()
    assert command.prefixes == tuple(simulation.placement.replicas[0].mirror.entries)
    simulation.run()
    simulation.submit("deeper", prompts(SHARED, 8, seed=2, depth=3))
    (command, *_) = first_commands(simulation)[0]
    assert [build.digest for build in command.builds] == [
        at_depth(simulation.placement.plans["deeper"].digests[0], 3)
    ]


def test_planes_after_a_coda_belong_to_their_own_depth() -> None:
    simulation = pool(replicas=1)
    simulation.placement.sizes = Sizes({"head_dim": 8, "n_coda": 1})
    simulation.submit("deep", prompts(SHARED, 8, depth=2))
    simulation.run()
    simulation.submit("shallow", prompts(SHARED, 8, seed=1, depth=1))
    (command, *_) = first_commands(simulation)[0]
    assert len(command.builds) == 1


@pytest.mark.parametrize("stream", [True, False])
def test_two_clients_get_equal_shares_to_within_one_chunk(stream: bool) -> None:
    rules = PlacementRules(chunk_seconds=0.05, chunk_rows=100)
    simulation = Simulation({slot: SimulatedReplica() for slot in range(2)}, rules)
    owner = {}
    for client, groups, each in (("greedy", 24, 40), ("modest", 60, 8)):
        owner[f"{client} w"] = client
        items = shared_prefix_items(groups, each, shared=60, own=30, seed=len(client))
        simulation.submit(f"{client} w", items, client=client, stream=stream)
    served = {"greedy": 0.0, "modest": 0.0}
    longest = 0.0
    while simulation.step():
        seconds = dict.fromkeys(served, 0.0)
        for replica in simulation.replicas.values():
            for done in replica.done:
                seconds[owner[done.window]] += done.seconds
                longest = max(longest, done.seconds)
        served = seconds
        if not all(simulation.placement.waiting_items(client) for client in served):
            break
        # Each replica has one command of either that is not counted here yet.
        slack = 2 * longest * (len(simulation.replicas) + 1) + rules.chunk_seconds
        assert abs(served["greedy"] - served["modest"]) <= slack
    assert min(served.values()) > 10 * longest
    simulation.run()


def test_a_client_that_asks_little_does_not_wait_for_one_that_asks_much() -> None:
    rules = PlacementRules(chunk_seconds=0.05, chunk_rows=100)
    simulation = Simulation({0: SimulatedReplica()}, rules)
    simulation.submit("much", shared_prefix_items(100, 20, 60, 30), client="greedy")
    for _ in range(5):
        simulation.step()
    begun_s = simulation.now_s
    simulation.submit("little", prompts(SHARED, 4), client="modest")
    while not finished(simulation, "little"):
        assert simulation.step()
    assert simulation.now_s - begun_s < 1.0
    assert len(finished(simulation, "much")) < 1000
    simulation.run()
    assert len(finished(simulation, "much")) == 2000


@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_window_ends_at_once_and_what_is_on_its_way_is_ignored(stream: bool) -> None:
    simulation = pool(chunk_rows=50, chunk_items=4)
    items = prompts(SHARED, 64)
    simulation.submit("w", items, stream=stream)
    assert any(len(c.items) for commands in first_commands(simulation).values() for c in commands)
    assert sorted(simulation.placement.cancel("w").tolist()) == list(range(64))
    assert simulation.placement.cancel("w").tolist() == []
    simulation.run()
    assert finished(simulation, "w") == []
    assert not simulation.placement.plans
    assert simulation.placement.counters.cancelled == 64
    assert simulation.placement.cancel("never seen").tolist() == []


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_not_sent_by_its_deadline_comes_back_as_an_error(stream: bool) -> None:
    simulation = pool(chunk_rows=50, chunk_items=4)
    simulation.submit("late", prompts(SHARED, 64), stream=stream, deadline_s=5.0)
    simulation.submit("patient", prompts(SHARED + 300, 64), stream=stream)
    simulation.dispatch()
    assert simulation.placement.expire(4.9) == []
    (late,) = simulation.placement.expire(5.0)
    assert (late.window, late.error_class) == ("late", "timeout")
    assert "to be dispatched by 5.000 s, it is 5.000 s" in late.message
    assert simulation.placement.expire(99.0) == []
    simulation.finished.append(late)
    simulation.run()
    assert finished(simulation, "late") == finished(simulation, "patient") == list(range(64))


@pytest.mark.parametrize("stream", [True, False])
def test_a_draining_replica_finishes_two_chunks_at_most_and_gets_nothing_new(stream: bool) -> None:
    simulation = pool(chunk_rows=50, chunk_items=4)
    placement = simulation.placement
    simulation.submit("w", shared_prefix_items(8, 16, 60, 30), stream=stream)
    simulation.dispatch()
    commands = placement.replicas[0].mirror.sequence
    placement.drain(0)
    assert not placement.is_drained(0)
    while not placement.is_drained(0):
        assert simulation.step()
    assert placement.replicas[0].mirror.sequence == commands <= 2
    simulation.kill(0)
    simulation.attach(5, SimulatedReplica())
    simulation.run()
    assert finished(simulation, "w") == list(range(128))
    assert placement.replicas[5].mirror.sequence > 0


def test_a_group_of_a_draining_replica_is_taken_by_another() -> None:
    simulation = pool()
    simulation.submit("first", prompts(SHARED, 8))
    simulation.run()
    (holder,) = [slot for slot, r in simulation.replicas.items() if len(r.table)]
    simulation.placement.drain(holder)
    simulation.submit("second", prompts(SHARED, 8, seed=1))
    simulation.run()
    assert finished(simulation, "second") == list(range(8))


def test_a_pinned_prefix_outlives_the_pressure_of_others() -> None:
    budget = 500 * 32
    simulation = Simulation({0: SimulatedReplica(budget_bytes=budget)})
    simulation.submit("pinned", prompts(SHARED, 8))
    simulation.run()
    placement = simulation.placement
    (digest,) = placement.replicas[0].mirror.entries
    assert placement.pin(0, digest)
    assert not placement.pin(0, b"x" * 16)
    for number in range(6):
        simulation.submit(f"w{number}", shared_prefix_items(4, 8, 180, 20, seed=number))
        simulation.run()
        assert digest in placement.replicas[0].mirror.entries
        assert simulation.replicas[0].table.total_bytes <= budget
    assert placement.counters.evictions > 4
    placement.unpin(0, digest)
    simulation.submit("last", shared_prefix_items(4, 8, 180, 20, seed=77))
    simulation.run()
    assert digest not in placement.replicas[0].mirror.entries


def test_room_of_the_pool_goes_where_it_is_needed_and_the_oldest_leaf_pays() -> None:
    """Two prefixes fill the pool at replica 0, which then idles; replica 1 wants one: the older one goes."""
    placement = Placement(PlacementRules(pool_budget_bytes=100 * 40), Sizes({"head_dim": 8}))
    entries = tuple(HeldPrefix(bytes([n] * 14 + [1, 0]), b"", 60, 1, 1900) for n in (1, 2))
    placement.attach(0, 1, 1 << 30, Inventory(1, entries, 3800))
    placement.attach(1, 1, 1 << 30, Inventory(1, (), 0))
    placement.replicas[0].mirror.stamps = {entries[0].digest: 7, entries[1].digest: 3}
    placement.replicas[0].mirror.entries = {entries[1].digest: 1900, entries[0].digest: 1900}
    placement.clock = 9
    placement.replicas[1].lacking_bytes = 1000
    simulation = Simulation({})
    simulation.placement = placement
    simulation.submit("w", ragged_items([np.array([1, 2, 3])], [1]))
    assert placement.next_command(1, 0.0) is not None
    placement.replicas[1].lacking_bytes = 1000
    command = placement.next_command(0, 0.0)
    assert command is not None
    assert (command.drops, len(command.items)) == ((entries[1].digest,), 0)
    assert placement.next_command(0, 0.0) is None


def test_a_client_has_room_for_what_its_limit_leaves() -> None:
    simulation = pool(client_items=100)
    assert simulation.placement.room_for("c") == 100
    simulation.submit("w", prompts(SHARED, 64))
    assert simulation.placement.room_for("c") == 36
    assert simulation.placement.room_for("another") == 100
    simulation.run()
    assert simulation.placement.room_for("c") == 100
