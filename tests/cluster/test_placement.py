"""Placement against simulated replicas: nothing is lost or doubled, the mirror is exact, shared prefixes are
computed once.
"""

from __future__ import annotations

import numpy as np
import pytest
from shaken import Shaken
from simulated import SimulatedReplica, Simulation, ragged_items, shared_prefix_items
from tinyloop.cluster.costs import PlacementRules


def finished_items(simulation: Simulation, key: str) -> list[int]:
    parts = [f.items for f in simulation.finished if f.window == key]
    return sorted(np.concatenate(parts).tolist()) if parts else []


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_shared_prefixes_are_computed_almost_once(replicas: int) -> None:
    simulation = Simulation({slot: SimulatedReplica() for slot in range(replicas)})
    items = shared_prefix_items(groups=64, each=16, shared=256, own=32)
    simulation.submit("w", items)
    simulation.run()
    counters = simulation.placement.counters
    assert finished_items(simulation, "w") == list(range(len(items)))
    assert counters.computed_rows <= 1.02 * counters.ideal_rows
    assert counters.computed_rows == sum(replica.rows for replica in simulation.replicas.values())


def test_a_budget_of_one_prefix_is_enough_for_the_ideal() -> None:
    simulation = Simulation({0: SimulatedReplica(budget_bytes=300 * 32)})
    simulation.submit("w", shared_prefix_items(groups=32, each=16, shared=256, own=32))
    simulation.run()
    counters = simulation.placement.counters
    assert counters.computed_rows <= 1.02 * counters.ideal_rows
    assert counters.refusals <= 1
    assert counters.evictions >= 30


def test_a_second_window_finds_what_the_first_one_built() -> None:
    simulation = Simulation({0: SimulatedReplica(), 1: SimulatedReplica()})
    simulation.submit("first", shared_prefix_items(groups=16, each=16, shared=256, own=32))
    simulation.run()
    rows = simulation.placement.counters.computed_rows
    simulation.submit("second", shared_prefix_items(groups=16, each=16, shared=256, own=32))
    simulation.run()
    again = simulation.placement.counters.computed_rows - rows
    assert again <= rows - 15 * 256


def test_work_is_spread_evenly_also_when_one_prefix_has_most_of_it() -> None:
    random = np.random.default_rng(3)
    hot = random.integers(1, 1000, 400)
    rows = [np.concatenate([hot, random.integers(1, 1000, 20)]) for _ in range(1200)]
    rows += [random.integers(1, 1000, 420) for _ in range(100)]
    simulation = Simulation({slot: SimulatedReplica() for slot in range(4)})
    simulation.submit("w", ragged_items(rows, [10] * len(rows)))
    simulation.run()
    busy = [replica.busy_s for replica in simulation.replicas.values()]
    assert max(busy) <= 1.1 * sum(busy) / len(busy)
    assert simulation.placement.counters.computed_rows <= 1.05 * simulation.placement.counters.ideal_rows


def test_a_slow_replica_is_relieved_by_the_others() -> None:
    simulation = Simulation({0: SimulatedReplica(row_s=4e-4), 1: SimulatedReplica(), 2: SimulatedReplica()})
    simulation.submit("w", shared_prefix_items(groups=60, each=16, shared=128, own=64))
    simulation.run()
    busy = [replica.busy_s for replica in simulation.replicas.values()]
    assert simulation.placement.counters.steals > 0
    assert max(busy) <= 1.25 * sum(busy) / len(busy)


def test_a_prefix_larger_than_the_budget_is_done_without() -> None:
    simulation = Simulation({0: SimulatedReplica(budget_bytes=1000)})
    items = shared_prefix_items(groups=2, each=8, shared=256, own=32)
    simulation.submit("w", items)
    simulation.run()
    assert finished_items(simulation, "w") == list(range(len(items)))
    assert simulation.placement.counters.computed_rows == simulation.placement.counters.total_rows


@pytest.mark.parametrize("stream_items", [0, 256])
def test_an_item_that_kills_every_time_is_given_up_and_the_rest_is_scored(stream_items: int) -> None:
    simulation = Simulation({0: SimulatedReplica()}, PlacementRules(stream_items=stream_items))
    items = shared_prefix_items(groups=4, each=16, shared=64, own=32)
    simulation.submit("w", items)
    poison, deaths = 37, 0
    while True:
        simulation.dispatch()
        running = simulation.replicas[0].waiting
        if running and poison in running[0][0].items.tolist():
            deaths += 1
            simulation.kill(0)
            simulation.attach(0, SimulatedReplica())
        elif not simulation.step():
            break
    lost = [f for f in simulation.finished if f.error_class]
    assert finished_items(simulation, "w") == list(range(len(items)))
    assert [(f.items.tolist(), f.error_class, f.attempts) for f in lost] == [([poison], "replica_lost", 5)]
    assert deaths == 5


def test_a_replica_that_refuses_everything_is_called_unfit() -> None:
    replica = SimulatedReplica()
    simulation = Simulation({0: replica}, PlacementRules(refusal_limit=5))
    simulation.submit("w", shared_prefix_items(groups=4, each=16, shared=64, own=32))
    replica.run = lambda command, items: replica._ack(command, "odd: no reason", (), 0, 0.0)  # type: ignore[method-assign]
    for _ in range(5):
        assert simulation.step()
    assert simulation.placement.is_unfit(0)


def test_the_deadline_of_a_command_is_long_before_the_first_answer_and_short_after() -> None:
    simulation = Simulation({0: SimulatedReplica(row_s=1e-6)})
    simulation.submit("w", shared_prefix_items(groups=64, each=64, shared=64, own=32))
    placement = simulation.placement
    assert placement.next_command(0, 0.0) is not None
    assert placement.overdue(59.0) == []
    assert placement.overdue(61.0) == [0]
    simulation.placement.detach(0)
    simulation.attach(0, SimulatedReplica(row_s=1e-6))
    assert simulation.step()
    assert placement.next_command(0, simulation.now_s) is not None
    assert placement.overdue(simulation.now_s + 4.9) == []
    assert placement.overdue(simulation.now_s + 5.1) == [0]


@pytest.mark.parametrize("seed", range(4))
def test_the_mirror_is_exact_whatever_happens(seed: int) -> None:
    shaken = Shaken(seed)
    for _ in range(1000):
        shaken.shake()
    shaken.settle()
    counters = shaken.placement.counters
    assert min(counters.refusals, counters.deaths, counters.cancelled, counters.expired) > 0


def test_a_replica_that_forgets_by_itself_is_found_out() -> None:
    shaken = Shaken(0)

    def shake_and_forget() -> None:
        for _ in range(400):
            shaken.shake()
            for replica in shaken.simulation.replicas.values():
                for entry in replica.table.entries()[-1:]:
                    replica.table._remove(entry.digest)

    with pytest.raises(AssertionError):
        shake_and_forget()
