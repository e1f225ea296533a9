"""Placement alone, on simulated replicas: share of the ideal, makespan, decisions a second.

Run as a script; it needs neither Ray nor a model. A decision is one item placed, its prefixes and evictions
included.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from simulated import BYTES_PER_TOKEN, RULES, SimulatedReplica, Simulation, shared_prefix_items
from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.placement import Placement
from tinyloop.cluster.segments import cut_window
from tinyloop.workers.wire import DIGEST_BYTES, Ack, Inventory

WORKLOADS = {  # name: groups, prompts of each, shared tokens, own tokens, budget in tokens, replicas
    "gsp 64 x 16": (64, 16, 2048, 128, 20_000, 8),
    "gsp 1,024 x 16": (1024, 16, 512, 64, 25_000, 8),
    "hot 1 x 4,000": (1, 4000, 1024, 32, 64_000, 8),
    "64 x 16, two replicas": (64, 16, 256, 32, 64_000, 2),
}


def quality(name: str) -> None:
    groups, each, shared, own, budget, num_replicas = WORKLOADS[name]
    replicas = {slot: SimulatedReplica(budget * BYTES_PER_TOKEN, call_s=2e-3) for slot in range(num_replicas)}
    simulation = Simulation(replicas)
    items = shared_prefix_items(groups, each, shared, own)
    simulation.submit("w", items)
    simulation.run()
    counters = simulation.placement.counters
    hit, ideal_hit = (
        1 - rows / counters.total_rows for rows in (counters.computed_rows, counters.ideal_rows)
    )
    bound_s = sum(replica.busy_s for replica in replicas.values()) / num_replicas
    print(
        f"{name:24} hit {100 * hit:5.1f} % ({100 * hit / ideal_hit:5.1f} % of ideal), rows / ideal "
        f"{counters.computed_rows / counters.ideal_rows:.4f}, makespan / bound "
        f"{simulation.now_s / bound_s:.3f}, steals {counters.steals}, "
        f"evictions {counters.evictions}, refusals {counters.refusals}, "
        f"differences {counters.mirror_differences}"
    )


def speed(groups: int, each: int) -> None:
    items = shared_prefix_items(groups, each, 64, 16)
    start_s = time.perf_counter()
    head = cut_window(items, RULES, client="c", window=0)
    cut_s = time.perf_counter() - start_s
    placement = Placement(PlacementRules(), Sizes({}))
    for slot in range(8):
        placement.attach(slot, 1, 1 << 40, Inventory(1, (), 0))
    start_s = time.perf_counter()
    placement.add_window("w", head)
    plan_s = time.perf_counter() - start_s
    busy = True
    while busy:
        busy = False
        for slot in range(8):
            while placement.next_command(slot, 0.0) is not None:
                busy = True
            flights = placement.replicas[slot].mirror.flights
            while flights:
                flight = flights[0]
                built = tuple((growth.digest, growth.size_bytes) for growth in flight.builds)
                total = placement.replicas[slot].mirror.confirmed_bytes + sum(size for _, size in built)
                table = flight.table.to_bytes(DIGEST_BYTES, "little")
                placement.acknowledge(
                    slot, Ack(1, flight.sequence, "", built, total, table, flight.rows, 0.1, 0), 0.0
                )
    total_s = time.perf_counter() - start_s
    print(
        f"{len(items):,} items in {groups:,} groups: cut {cut_s:.2f} s (client), plan {plan_s:.2f} s, "
        f"plan and place {total_s:.2f} s = {len(items) / total_s:,.0f} decisions/s, "
        f"{placement.counters.chunks} commands"
    )


if __name__ == "__main__":
    for workload in WORKLOADS:
        quality(workload)
    speed(64, 1024)
    speed(16384, 4)
