"""A pool that everything happens to, at random, and what must hold whatever does.

Kills, refusals, budgets that shrink unannounced, drains, cancelled windows, deadlines, pins, two clients.
After every answer the mirror of the replica that gave it must be its table; now and then every item is
looked for.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
from simulated import SimulatedReplica, Simulation, ragged_items
from tinyloop.cluster.costs import PlacementRules
from tinyloop.cluster.items import Items
from tinyloop.cluster.work import Finished


class Shaken:
    """One pool under one seed. Call `shake` as often as wanted, then `settle`."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.rules = PlacementRules(
            chunk_items=3,
            chunk_rows=20,
            pool_budget_bytes=[0, 30_000][seed % 2],
            stream_items=self.random.choice([0, 30, 256]),
        )
        # Sizes that fit no formula or, where the pool as a whole has a budget, blocks as engines have them.
        self.block = 64 if self.rules.pool_budget_bytes else 1
        self.unit = 64 * 32 if self.rules.pool_budget_bytes else 600
        self.simulation = Simulation({slot: self._replica() for slot in range(3)}, self.rules)
        self.placement = self.simulation.placement
        self.windows = self.events = 0
        self.open: dict[str, tuple[int, set[int]]] = {}
        self.pinned: set[tuple[int, int, bytes]] = set()

    def shake(self) -> None:
        """One event of each kind that chance allows, then one answer."""
        random, simulation, placement = self.random, self.simulation, self.placement
        self.events += 1
        if placement.queued_items < 100:
            self.windows += 1
            deadline_s = simulation.now_s + 0.1 * random.random() if random.random() < 0.2 else None
            items = random_window(random)
            self.open[f"w{self.windows}"] = (len(items), set())
            simulation.submit(
                f"w{self.windows}",
                items,
                client=random.choice("ab"),
                deadline_s=deadline_s,
            )
        if random.random() < 0.01:
            self._replace(random.choice(list(simulation.replicas)), kill=True)
        if random.random() < 0.01:
            placement.drain(random.choice(list(simulation.replicas)))
        if self.open and random.random() < 0.01:
            window = random.choice(list(self.open))
            simulation.finished.append(Finished(window, placement.cancel(window), "cancelled"))
        if random.random() < 0.02:
            replica = random.choice(list(simulation.replicas.values()))
            replica.model.memory_bytes = random.choice([2 * self.unit, 8 * self.unit, 1 << 30])
        if random.random() < 0.02:
            replica = random.choice(list(simulation.replicas.values()))
            replica.table._budget_bytes = random.choice([2 * self.unit, 8 * self.unit, 1 << 20])
        if random.random() < 0.05:
            self._pin_or_unpin()
        simulation.finished += placement.expire(simulation.now_s)
        simulation.step()
        for slot in [s for s in simulation.replicas if placement.is_drained(s)]:
            self._replace(slot, kill=False)
        self.check()

    def settle(self) -> None:
        """Let everything end, and see that every item came back once and nothing is left over."""
        for slot in list(self.simulation.replicas):
            self._replace(slot, kill=True)
        while self.simulation.step():
            self.check()
        assert not self.open
        held = {digest for work in self.placement.replicas.values() for digest in work.mirror.entries}
        assert len(self.placement.tree) == len(held)
        assert not self.placement.plans
        assert not self.placement.streams

    def _take_finished(self) -> None:
        """Note what came back; nothing may come twice. A window that is complete is forgotten."""
        for finished in self.simulation.finished:
            count, found = self.open[finished.window]
            items = finished.items.tolist()
            assert not found.intersection(items)
            found.update(items)
            assert found <= set(range(count))
            if len(found) == count:
                assert finished.window not in self.placement.plans
                del self.open[finished.window]
        self.simulation.finished.clear()

    def check(self) -> None:
        """The mirror is exact, budgets hold, pins hold; every 50 events also: each item is in one place."""
        self._take_finished()
        simulation, placement = self.simulation, self.placement
        replica = simulation.replicas.get(simulation.answered)
        if replica is not None:
            mirror = placement.replicas[simulation.answered].mirror
            assert {e.digest: e.size_bytes for e in replica.table.entries()} == mirror.confirmed
            assert mirror.total_bytes == sum(mirror.entries.values())
        assert placement.counters.mirror_differences == 0
        if self.rules.pool_budget_bytes:
            held = sum(replica.table.total_bytes for replica in simulation.replicas.values())
            assert held <= self.rules.pool_budget_bytes
        for slot, generation, digest in self.pinned:
            mirror = placement.replicas[slot].mirror
            assert mirror.generation != generation or digest in mirror.entries
        if self.events % 50 == 0:
            self._find_every_item()

    def _find_every_item(self) -> None:
        placement = self.placement
        places: Counter[tuple[str, int]] = Counter()
        segments = [*placement.loose, *placement.lone]
        for work in placement.replicas.values():
            segments += work.run
            segments += [flight for flight in work.mirror.flights if flight.window in placement.plans]
        for stream in placement.streams.values():
            segments += [s for branch in stream.branches.values() for s in branch.waiting]
            segments += stream.singles
        for segment in segments:
            order = placement.plans[segment.window].head.order
            places.update((segment.window, int(item)) for item in order[segment.begin : segment.end])
        for key, (_, found) in self.open.items():
            places.update((key, item) for item in found)
        wanted = {(key, item) for key, (count, _) in self.open.items() for item in range(count)}
        assert places.keys() == wanted
        assert set(places.values()) <= {1}

    def _pin_or_unpin(self) -> None:
        slot = self.random.choice(list(self.simulation.replicas))
        mirror = self.placement.replicas[slot].mirror
        mine = [pin for pin in self.pinned if pin[:2] == (slot, mirror.generation)]
        if len(mine) >= 2:
            self.placement.unpin(slot, mine[0][2])
            self.pinned.discard(mine[0])
        elif mirror.entries:
            # Only what the replica has confirmed: a build on its way may still be refused.
            digest = self.random.choice(list(mirror.entries))
            if digest in mirror.confirmed and self.placement.pin(slot, digest):
                self.pinned.add((slot, mirror.generation, digest))

    def _replace(self, slot: int, *, kill: bool) -> None:
        assert kill or not self.placement.replicas[slot].mirror.flights
        self.simulation.kill(slot)
        self.pinned = {pin for pin in self.pinned if pin[0] != slot}
        self.simulation.attach(slot, self._replica())

    def _replica(self) -> SimulatedReplica:
        budget = self.random.choice([self.unit, 5 * self.unit, 1 << 20])
        memory = self.random.choice([3 * self.unit, 1 << 30])
        return SimulatedReplica(budget, memory, block_tokens=self.block)


def random_window(random: Random, alphabet: int = 3) -> Items:
    """Up to 60 items on four stems, cut anywhere, at one of two depths."""
    count = random.randrange(1, 60)
    stems = [[random.randrange(1, alphabet + 1) for _ in range(random.randrange(5, 60))] for _ in range(4)]
    rows, scored = [], []
    for _ in range(count):
        stem = random.choice(stems)
        row = stem[: random.randrange(1, len(stem) + 1)] + [
            random.randrange(1, 9) for _ in range(random.randrange(2, 8))
        ]
        rows.append(np.array(row))
        scored.append(random.randrange(1, len(row)))
    return ragged_items(rows, scored, depth=random.randrange(1, 3))
