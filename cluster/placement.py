"""Which replica computes what, when, and what it drops for it: plain data and plain calls.

No Ray, no clock of its own, no randomness: a test or a simulation drives it exactly as the router does.
Invariant: an item that is not finished is in exactly one of a run, the loose, the lone and a flight.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from ..workers.wire import GENERATE, Ack, Command, Int32Array, Inventory
from .chunks import Chunk, assemble
from .costs import PlacementRules, Rates, Sizes
from .generating import begin, close_window, is_alone, open_window, parts, settle, suspects, with_room
from .mirror import Flight, Mirror
from .plan import Segment, plan_window
from .runs import assign, next_segment
from .wire import WindowHead
from .work import Finished, PoolState, Work


class Placement(PoolState):
    """The router's mind. Methods are cheap; none waits."""

    def __init__(self, rules: PlacementRules, sizes: Sizes) -> None:
        super().__init__(rules, sizes)
        self._remaining: dict[str, int] = {}
        self._deaths: dict[tuple[str, int], int] = {}

    def attach(self, slot: int, generation: int, budget_bytes: int, inventory: Inventory) -> None:
        """A replica is ready for work. It starts with nothing to do and takes or steals what there is."""
        measured = [work.rates.row_s for work in self.replicas.values() if work.rates.measured]
        rates = Rates(sum(measured) / len(measured) if measured else None)
        work = Work(Mirror(slot, generation, budget_bytes), rates)
        work.mirror.reset(inventory)
        self.replicas[slot] = work
        for digest, entry in work.mirror.entries.items():
            self.tree.hold(digest, entry.parent, entry.length, slot)

    def detach(self, slot: int) -> list[Finished]:
        """A replica is gone; its work goes to others. Returns items given up: they ran at too many deaths."""
        work = self.replicas.pop(slot)
        self.counters.deaths += 1
        self._forget_holdings(slot, work.mirror)
        self.loose.extendleft(reversed(work.run))
        flights = list(work.mirror.flights)
        lost = [parts(self, flight) for flight in flights]
        for flight in reversed([part for later in lost[1:] for part in later]):
            self._put_back(flight, self.loose)
        blamed = [*(part for first in lost[:1] for part in first), *suspects(work)]
        return [finished for flight in blamed for finished in self._blame(flight)]

    def resync(self, slot: int, inventory: Inventory) -> None:
        """Believe what a replica says it holds; what was on its way there is to do again."""
        work = self.replicas[slot]
        self._forget_holdings(slot, work.mirror)
        lost = [part for flight in work.mirror.reset(inventory) for part in parts(self, flight)]
        for flight in reversed(lost):
            self._put_back(flight, work.run)
        for digest, entry in work.mirror.entries.items():
            self.tree.hold(digest, entry.parent, entry.length, slot)
        work.resyncing = False

    def add_window(self, key: str, head: WindowHead) -> None:
        """Take a window, or a part of one, and cut it into a run for each replica."""
        plan = self.plans[key] = plan_window(key, head)
        open_window(self, plan)
        self._remaining[key] = len(plan)
        self.counters.ideal_rows += head.ideal_rows
        for node, digest in enumerate(plan.digests):
            parent = plan.digests[plan.parents[node]] if plan.parents[node] >= 0 else b""
            self.tree.add_use(digest, parent, plan.lengths[node], key, (plan.lows[node], plan.highs[node]))
        if len(plan):
            assign(self, plan)
        else:
            self._end_window(key)

    def drop_window(self, key: str) -> None:
        """Forget a window: nobody waits for it. What is on its way will be acknowledged and ignored."""
        for queue in (self.loose, self.lone, *(work.run for work in self.replicas.values())):
            kept = [segment for segment in queue if segment.window != key]
            queue.clear()
            queue.extend(kept)
        if key in self.plans:
            self._end_window(key)

    def next_command(self, slot: int, now_s: float) -> Command | None:
        """The next command for a replica, or None while it has enough ahead or there is nothing to do."""
        work = self.replicas[slot]
        flights = work.mirror.flights
        if work.resyncing or len(flights) >= self.rules.commands_ahead or (flights and flights[-1].alone):
            return None
        if is_alone(work):
            return None
        segment = with_room(self, work, next_segment(self, work))
        if segment is None:
            return self._lone_command(work, now_s)
        chunk = assemble(self, work, segment)
        segment.begin = chunk.end
        if segment.begin == segment.end:
            work.run.popleft()
        return self._dispatch(work, chunk, now_s)

    def acknowledge(self, slot: int, ack: Ack, now_s: float) -> Finished | None:
        """A command came back. None if it was refused; see `resyncing` and `is_unfit`."""
        work = self.replicas[slot]
        if ack.epoch != work.mirror.epoch or work.resyncing:
            return None
        if ack.refused:
            self._refused(work, ack)
            return None
        flight, agrees = work.mirror.confirm(ack, now_s)
        work.refusals_in_row, work.spared = 0, False
        work.busy_s += ack.seconds
        work.rates.correct(ack.rows, flight.depth, ack.seconds)
        measured = dict(ack.built)
        for growth in flight.builds:
            self.sizes.correct(
                growth.own_length, flight.depth, measured.get(growth.digest, growth.size_bytes)
            )
        if not agrees:
            self.counters.mirror_differences += 1
            work.resyncing = True
        self.counters.computed_rows += ack.rows
        if flight.kind == GENERATE:
            begin(self, work, flight)
            return None
        return self._finish_flight(flight, ack.rows)

    def settle(self, key: str, items: Int32Array) -> None:
        """A client needs nothing more of these items that are generated for it; see `cancels` then."""
        settled = settle(self, key, items)
        if len(settled):
            self._finish(key, settled, "", "", 1)

    def is_unfit(self, slot: int) -> bool:
        """Whether a replica refuses everything it is asked, so that it must be replaced."""
        return self.replicas[slot].refusals_in_row >= self.rules.refusal_limit

    def overdue(self, now_s: float) -> list[int]:
        """Replicas whose oldest command takes far longer than it should."""
        late = []
        for slot, work in self.replicas.items():
            if work.mirror.flights:
                flight, rules = work.mirror.flights[0], self.rules
                floor_s = rules.hang_floor_s if work.mirror.acknowledged else rules.first_ack_s
                limit_s = max(floor_s, rules.hang_factor * flight.estimate_s)
                if now_s - flight.head_s > limit_s * (rules.answering_factor if work.spared else 1.0):
                    late.append(slot)
        return late

    def spare(self, slot: int) -> bool:
        """A late replica still answers: give its command more time. False if it has had that already.

        Estimates can be far off on a machine that others use too; killing what is slow makes it slower.
        """
        work = self.replicas[slot]
        first, work.spared = not work.spared, True
        return first

    @property
    def queued_items(self) -> int:
        """Items not finished."""
        return sum(self._remaining.values())

    def _forget_holdings(self, slot: int, mirror: Mirror) -> None:
        for digest in mirror.entries:
            self.tree.release(digest, slot)

    def _lone_command(self, work: Work, now_s: float) -> Command | None:
        if not self.lone or work.mirror.flights or work.generating:
            return None
        segment = self.lone.popleft()
        plan = self.plans[segment.window]
        rows = int(plan.head.rows[segment.begin])
        empty = np.full(1, -1, dtype=np.int32)
        chunk = Chunk(segment.window, segment.begin, segment.end, rows, (), (), (), empty, (), alone=True)
        return self._dispatch(work, chunk, now_s)

    def _dispatch(self, work: Work, chunk: Chunk, now_s: float) -> Command:
        mirror, plan = work.mirror, self.plans[chunk.window]
        for digest in chunk.drops:
            mirror.remove(digest)
            self.tree.release(digest, mirror.slot)
        for growth in chunk.growths:
            mirror.add(growth)
            self.tree.hold(growth.digest, growth.parent, growth.length, mirror.slot)
        for digest in chunk.prefixes:
            mirror.touch(digest)
        self.counters.chunks += 1
        self.counters.evictions += len(chunk.drops)
        depth = plan.head.depth
        mirror.flights.append(
            Flight(
                sequence=mirror.sequence,
                window=chunk.window,
                begin=chunk.begin,
                end=chunk.end,
                rows=chunk.rows,
                depth=depth,
                estimate_s=work.rates.seconds(chunk.rows, depth),
                head_s=now_s,
                table=mirror.table,
                drops=chunk.drops,
                builds=chunk.growths,
                planned_bytes=mirror.total_bytes,
                alone=chunk.alone,
                kind=plan.head.kind,
                leaves=_leaves(chunk) if plan.head.kind == GENERATE else (),
            )
        )
        mirror.sequence += 1
        items = plan.head.order[chunk.begin : chunk.end]
        return Command(
            epoch=mirror.epoch,
            sequence=mirror.sequence - 1,
            window=chunk.window,
            depth=depth,
            drops=chunk.drops,
            builds=chunk.builds,
            prefixes=chunk.prefixes,
            items=items,
            prefix_of=chunk.prefix_of,
            kind=plan.head.kind,
        )

    def _refused(self, work: Work, ack: Ack) -> None:
        """Nothing was done. Learn why; the replica must say what it holds before it is sent more."""
        self.counters.refusals += 1
        work.refusals_in_row += 1
        work.resyncing = True
        flight = next((f for f in work.mirror.flights if f.sequence == ack.sequence), None)
        if flight is None:
            return
        if ack.refused.startswith(("budget", "out_of_memory")):
            # Nine tenths of what did not fit: a few steps down to what does, and to no prefix at all if
            # nothing does.
            work.mirror.budget_bytes = min(work.mirror.budget_bytes, flight.planned_bytes) * 9 // 10
        elif ack.refused.startswith(("unbuildable", "mismatch")):
            self.unbuildable.update(growth.digest for growth in flight.builds)

    def _put_back(self, flight: Flight, queue: deque[Segment]) -> None:
        if flight.window in self.plans:
            (self.lone if flight.alone else queue).appendleft(
                Segment(flight.window, flight.begin, flight.end)
            )

    def _blame(self, flight: Flight) -> list[Finished]:
        """What was running at a death: once is bad luck, twice means alone, then given up."""
        plan = self.plans.get(flight.window)
        if plan is None:
            return []
        suspects = range(flight.begin, flight.end)
        counts = [self._deaths.get((flight.window, position), 0) + 1 for position in suspects]
        self._deaths.update(((flight.window, p), count) for p, count in zip(suspects, counts, strict=True))
        if flight.alone:
            item = plan.head.order[flight.begin : flight.end]
            message = (
                f"the replica died {counts[0]} times while it scored this item, the last time it was alone"
            )
            return [self._finish(flight.window, item, "replica_lost", message, counts[0])]
        if max(counts) < 2:
            self._put_back(flight, self.loose)
            return []
        for position in suspects:
            queue = self.lone if self._deaths[flight.window, position] >= 2 else self.loose
            queue.append(Segment(flight.window, position, position + 1))
        return []

    def _finish_flight(self, flight: Flight, rows: int) -> Finished | None:
        plan = self.plans.get(flight.window)
        if plan is None:
            return None
        self.counters.total_rows += int(plan.head.rows[flight.begin : flight.end].sum())
        finished = self._finish(flight.window, plan.head.order[flight.begin : flight.end], "", "", 1)
        return replace(finished, rows=rows)

    def _finish(self, key: str, items: Int32Array, kind: str, message: str, attempts: int) -> Finished:
        self.counters.items += len(items)
        self._remaining[key] -= len(items)
        for item in items.tolist() if key in self.places else ():
            self.places[key].pop(item, None)
        if not self._remaining[key]:
            self._end_window(key)
        return Finished(key, items, kind, message, attempts)

    def _end_window(self, key: str) -> None:
        plan = self.plans.pop(key)
        close_window(self, key)
        del self._remaining[key]
        for digest in plan.digests:
            self.tree.end_use(digest, key)
        for position in [entry for entry in self._deaths if entry[0] == key]:
            del self._deaths[position]


def _leaves(chunk: Chunk) -> tuple[bytes, ...]:
    """The prefix that each item of a chunk stands on; empty for none."""
    return tuple(chunk.prefixes[prefix] if prefix >= 0 else b"" for prefix in chunk.prefix_of.tolist())
