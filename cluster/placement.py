"""Which replica computes what, when, and what it drops for it: plain data and plain calls.

No Ray, no clock of its own, no randomness: a test or a simulation drives it exactly as the router does.
Invariant: an item that is not finished is in one of a run, the loose, the lone, a stream, a flight and what a
replica generates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from ..workers.wire import GENERATE, SCORE, Ack, Command, Int32Array, Inventory
from .chunks import Chunk, assemble
from .costs import PlacementRules, Rates, Sizes
from .generating import abandon, begin, close_window, is_alone, open_window, parts, settle, suspects
from .mirror import Flight, Mirror
from .plan import Plan, Segment, plan_window
from .pull import choose
from .reclaim import reclaim
from .runs import assign, next_segment
from .shares import Shares
from .stream import Stream
from .wire import WindowHead
from .work import Finished, PoolState, Work

# Deaths that an item was running at. It is then alone for three more: one that kills its process does so each
# time, while one that something else struck beside is not lost to the third blow from outside.
ALONE_AT, GIVEN_UP_AT = 2, 5


class Placement(PoolState):
    """The router's mind. Methods are cheap; none waits."""

    def __init__(self, rules: PlacementRules, sizes: Sizes) -> None:
        super().__init__(rules, sizes)
        self._remaining: dict[str, int] = {}
        self._waiting: dict[str, int] = {}
        self._deadlines: dict[str, float] = {}
        self._deaths: dict[tuple[str, int], int] = {}
        self._shares = Shares(rules.chunk_seconds)

    def attach(self, slot: int, generation: int, budget_bytes: int, inventory: Inventory) -> None:
        """A replica is ready for work. It starts with nothing to do and takes or steals what there is."""
        measured = [work.rates.row_s for work in self.replicas.values() if work.rates.measured]
        rates = Rates(sum(measured) / len(measured) if measured else None)
        stamps: dict[bytes, int] | None = {} if self.rules.pool_budget_bytes else None
        work = Work(Mirror(slot, generation, budget_bytes, self.tree, stamps), rates)
        self.replicas[slot] = work
        self._believe(work, inventory)

    def detach(self, slot: int, *, died: bool = True) -> list[Finished]:
        """A replica is gone; its work goes to others. Returns items given up: they ran at too many deaths.

        died: one that left is not counted, and nothing is blamed for it.
        """
        work = self.replicas.pop(slot)
        self._forget_holdings(work)
        self.loose.extendleft(reversed(work.run))
        self.version += 1
        lost = [parts(self, flight) for flight in work.mirror.flights]
        running = [*(lost[0] if lost else []), *suspects(work)]
        for flight in reversed([part for later in lost[1:] for part in later]):
            self._put_back(flight)
        if not died:
            for flight in reversed(running):
                self._put_back(flight)
            return []
        self.counters.deaths += 1
        return [finished for flight in running for finished in self._blame(flight)]

    def resync(self, slot: int, inventory: Inventory) -> None:
        """Believe what a replica says it holds; what was on its way there is to do again."""
        work = self.replicas[slot]
        lost = [part for flight in self._believe(work, inventory) for part in parts(self, flight)]
        for flight in reversed(lost):
            self._put_back(flight, work)
        work.resyncing = False

    def add_window(
        self, key: str, head: WindowHead, *, deadline_s: float | None = None, stream: bool | None = None
    ) -> None:
        """Take a window, or a part of one.

        stream: let its items wait in groups for whichever replica has use for them, rather than cut it into
        a run for each. By default so for a window of at most rules.stream_items items to score. deadline_s:
        on the clock of `now_s`; what is not dispatched by then comes back from `expire`.
        """
        self.version += 1
        is_small = head.kind == SCORE and len(head.order) <= self.rules.stream_items
        is_stream = is_small if stream is None else stream
        plan = self.plans[key] = plan_window(key, head, is_stream=is_stream, number=self.version)
        open_window(self, plan)
        self._remaining[key] = len(plan)
        self.counters.ideal_rows += head.ideal_rows
        self.deepest = max(self.deepest, head.depth)
        if not len(plan):
            self._end_window(key)
            return
        if deadline_s is not None:
            self._deadlines[key] = deadline_s
        self._now_waits(head.client, len(plan))
        if is_stream:
            self.streams.setdefault(head.client, Stream(self.tree)).add(plan)
            return
        for node, digest in enumerate(plan.digests):
            parent = plan.digests[plan.parents[node]] if plan.parents[node] >= 0 else b""
            self.tree.add_use(digest, parent, plan.lengths[node], key, (plan.lows[node], plan.highs[node]))
        assign(self, plan)

    def cancel(self, key: str, *, late: bool = False) -> Int32Array:
        """Forget a window: nobody waits for it. What is on its way will be acknowledged and ignored.

        late: since its deadline passed, which is counted apart. Returns its items that were not finished.
        """
        plan = self.plans.get(key)
        if plan is None:
            return np.empty(0, dtype=np.int32)
        places = {place for segment in self._withdraw(key) for place in range(segment.begin, segment.end)}
        places.update(abandon(self, plan))
        self._end_window(key)
        if late:
            self.counters.expired += len(places)
        else:
            self.counters.cancelled += len(places)
        return plan.head.order[sorted(places)]

    def expire(self, now_s: float) -> list[Finished]:
        """Items of windows past their deadline that no replica was sent."""
        late = [key for key, deadline_s in self._deadlines.items() if deadline_s <= now_s]
        found: list[Finished] = []
        for key in late:
            message = (
                f"its window was to be dispatched by {self._deadlines[key]:.3f} s, it is {now_s:.3f} s: "
                "give it more time, or the pool more replicas"
            )
            found += self._give_up(key, "timeout", message)
        self.counters.expired += sum(len(finished.items) for finished in found)
        return found

    def drain(self, slot: int) -> None:
        """Send a replica nothing more: it ends rules.commands_ahead chunks at most, and what it generates."""
        work = self.replicas[slot]
        work.draining = True
        self.loose.extendleft(reversed(work.run))
        work.run.clear()
        self.version += 1

    def is_drained(self, slot: int) -> bool:
        """Whether a draining replica has nothing left to finish: it can be detached without losing work."""
        work = self.replicas[slot]
        return work.draining and not work.mirror.flights and not work.generating

    def pin(self, slot: int, digest: bytes) -> bool:
        """Keep a prefix on a replica until as many `unpin`. False if the replica does not hold it."""
        mirror = self.replicas[slot].mirror
        if digest not in mirror.entries:
            return False
        mirror.pins[digest] = mirror.pins.get(digest, 0) + 1
        return True

    def unpin(self, slot: int, digest: bytes) -> None:
        """Take one pin away; one that ended with its replica or by a resync is no error."""
        pins = self.replicas[slot].mirror.pins
        count = pins.pop(digest, 0)
        if count > 1:
            pins[digest] = count - 1

    def waiting_items(self, client: str) -> int:
        """Items of a client that no replica was sent yet."""
        return self._waiting.get(client, 0)

    def room_for(self, client: str) -> int:
        """Items that a client may still submit before it should wait: never more than rules.client_items."""
        return max(self.rules.client_items - self.waiting_items(client), 0)

    def next_command(self, slot: int, now_s: float) -> Command | None:
        """The next command for a replica, or None while it has enough ahead or there is nothing to do."""
        work = self.replicas[slot]
        flights = work.mirror.flights
        if work.resyncing or len(flights) >= self.rules.commands_ahead or (flights and flights[-1].alone):
            return None
        if is_alone(work):
            return None
        if not work.draining:
            for client in self._shares.in_turn():
                command = self._command_for(work, client, now_s)
                if command is not None:
                    return command
            work.stuck_at = self.version
            command = self._lone_command(work, now_s)
            if command is not None:
                return command
        return self._drop_command(work, now_s)

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
        work.idle_since_s = now_s
        work.rates.correct(ack.rows, flight.depth, ack.seconds)
        measured = dict(ack.built)
        for growth in flight.builds:
            self.sizes.correct(
                growth.own_length, flight.depth, measured.get(growth.digest, growth.size_bytes)
            )
        if not agrees:
            self.counters.mirror_differences += 1
            work.resyncing = True
        if flight.kind == GENERATE:
            self._charge(flight, ack)
            begin(self, work, flight)
            return None
        self.counters.computed_rows += ack.rows
        work.computed_rows += ack.rows
        before = self.counters.total_rows
        finished = self._finish_flight(flight, ack)
        work.total_rows += self.counters.total_rows - before
        return finished

    def generated(self, slot: int, tokens: int, seconds: float) -> None:
        """A replica says what it has generated since it last did: ids, and the engine's time for them.

        Its clients pay for that time by the items that they have there: a step costs them all alike.
        """
        work = self.replicas[slot]
        self.counters.generated_tokens += tokens
        work.generated_tokens += tokens
        work.busy_s += seconds
        items = Counter(self.plans[window].head.client for window, _ in work.generating)
        for client, count in items.items():
            self._shares.charge(client, seconds * count / items.total())

    def settle(self, key: str, items: Iterable[int]) -> None:
        """A client needs nothing more of these items that are generated for it; see `cancels` then."""
        settled, waiting = settle(self, key, items)
        if len(settled):
            # There is room for others now, so it is worth looking for work again.
            self.version += 1
            self._now_waits(self.plans[key].head.client, -waiting)
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

    def _believe(self, work: Work, inventory: Inventory) -> list[Flight]:
        slot = work.mirror.slot
        lost = work.mirror.reset(inventory)
        for stream in self.streams.values():
            stream.forget(slot)
            for digest in work.mirror.entries:
                stream.held(slot, digest)
        self.version += 1
        return lost

    def _forget_holdings(self, work: Work) -> None:
        work.mirror.clear()
        for stream in self.streams.values():
            stream.forget(work.mirror.slot)

    def _now_waits(self, client: str, change: int) -> None:
        """So many more of a client's items wait to be dispatched."""
        waiting = self._waiting.get(client, 0) + change
        if waiting:
            self._waiting[client] = waiting
            self._shares.join(client)
            return
        self._waiting.pop(client, None)
        self._shares.leave(client)
        stream = self.streams.get(client)
        if stream is not None and not stream.branches:
            del self.streams[client]

    def _command_for(self, work: Work, client: str, now_s: float) -> Command | None:
        """A client's next chunk for a replica, of what waits in groups first: it is what came last."""
        stream = self.streams.get(client)
        segment = choose(self, work, stream, now_s) if stream is not None else None
        if segment is not None and stream is not None:
            chunk = assemble(self, work, segment)
            stream.take(self.plans[segment.window], segment, chunk.end)
            return self._dispatch(work, chunk, now_s)
        segment = next_segment(self, work, client)
        if segment is None:
            return None
        chunk = assemble(self, work, segment)
        segment.begin = chunk.end
        if segment.begin == segment.end:
            work.run.remove(segment)
        return self._dispatch(work, chunk, now_s)

    def _lone_command(self, work: Work, now_s: float) -> Command | None:
        if not self.lone or work.mirror.flights or work.generating:
            return None
        segment = self.lone.popleft()
        plan = self.plans[segment.window]
        rows = int(plan.head.rows[segment.begin])
        empty = np.full(1, -1, dtype=np.int32)
        chunk = Chunk(segment.window, segment.begin, segment.end, rows, (), (), (), empty, (), alone=True)
        return self._dispatch(work, chunk, now_s)

    def _drop_command(self, work: Work, now_s: float) -> Command | None:
        """A command of nothing but drops, where another replica needs the pool's room more."""
        drops = reclaim(self, work, now_s) if self.rules.pool_budget_bytes and self.plans else ()
        if not drops:
            return None
        self.counters.reclaims += len(drops)
        window = next(reversed(self.plans))
        none = np.empty(0, dtype=np.int32)
        return self._dispatch(work, Chunk(window, 0, 0, 0, drops, (), (), none, ()), now_s)

    def _dispatch(self, work: Work, chunk: Chunk, now_s: float) -> Command:
        mirror, plan = work.mirror, self.plans[chunk.window]
        self.clock += 1
        dropped = {digest: mirror.remove(digest) for digest in chunk.drops}
        for growth in chunk.growths:
            self.counters.copies += bool(self.tree.holders(growth.digest))
            mirror.add(growth, self.clock)
        for digest in chunk.prefixes:
            mirror.touch(digest, self.clock)
        for stream in self.streams.values():
            for digest in chunk.drops:
                stream.released(mirror.slot, digest)
            for growth in chunk.growths:
                stream.held(mirror.slot, growth.digest)
        self.counters.chunks += 1
        self.counters.evictions += len(chunk.drops)
        depth = plan.head.depth
        estimate_s = work.rates.seconds(chunk.rows, depth)
        if not mirror.flights:
            work.idled_s += max(now_s - work.idle_since_s, 0.0)
        mirror.flights.append(
            Flight(
                sequence=mirror.sequence,
                window=chunk.window,
                begin=chunk.begin,
                end=chunk.end,
                rows=chunk.rows,
                depth=depth,
                estimate_s=estimate_s,
                head_s=now_s,
                table=mirror.table,
                drops=dropped,
                builds=chunk.growths,
                planned_bytes=mirror.total_bytes,
                alone=chunk.alone,
                kind=plan.head.kind,
                leaves=_leaves(chunk) if plan.head.kind == GENERATE else (),
            )
        )
        mirror.sequence += 1
        work.lacking_bytes = chunk.lacking_bytes
        if chunk.prefixes:
            work.open = chunk.prefixes[-1]
        if chunk.end > chunk.begin:
            self._shares.charge(plan.head.client, estimate_s)
            self._now_waits(plan.head.client, chunk.begin - chunk.end)
        return Command(
            epoch=mirror.epoch,
            sequence=mirror.sequence - 1,
            window=chunk.window,
            depth=depth,
            drops=chunk.drops,
            builds=chunk.builds,
            prefixes=chunk.prefixes,
            items=plan.head.order[chunk.begin : chunk.end],
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

    def _put_back(self, flight: Flight, work: Work | None = None) -> None:
        """What was on its way waits again: with the replica that had it, if that is still there."""
        plan = self.plans.get(flight.window)
        if plan is not None and flight.end > flight.begin:
            segment = Segment(flight.window, flight.begin, flight.end)
            self._wait_again(plan, segment, alone=flight.alone, work=work)

    def _wait_again(
        self, plan: Plan, segment: Segment, *, alone: bool = False, work: Work | None = None
    ) -> None:
        self.version += 1
        self._now_waits(plan.head.client, segment.end - segment.begin)
        if alone:
            self.lone.appendleft(segment)
        elif plan.is_stream:
            self.streams.setdefault(plan.head.client, Stream(self.tree)).put_back(plan, segment)
        elif work is not None and not work.draining:
            work.run.appendleft(segment)
        else:
            self.loose.appendleft(segment)

    def _blame(self, flight: Flight) -> list[Finished]:
        """What was running at a death: once is bad luck, twice means alone, and there it dies or is done."""
        plan = self.plans.get(flight.window)
        if plan is None or flight.begin == flight.end:
            return []
        suspects = range(flight.begin, flight.end)
        counts = [self._deaths.get((flight.window, position), 0) + 1 for position in suspects]
        self._deaths.update(((flight.window, p), count) for p, count in zip(suspects, counts, strict=True))
        if flight.alone and counts[0] < GIVEN_UP_AT:
            self._put_back(flight)
            return []
        if flight.alone:
            item = plan.head.order[flight.begin : flight.end]
            message = f"the replica died {counts[0]} times over this item, the last time it was alone"
            return [self._finish(flight.window, item, "replica_lost", message, counts[0])]
        if max(counts) < ALONE_AT:
            self._put_back(flight)
            return []
        for position in reversed(suspects):
            alone = self._deaths[flight.window, position] >= ALONE_AT
            self._wait_again(plan, Segment(flight.window, position, position + 1), alone=alone)
        return []

    def _finish_flight(self, flight: Flight, ack: Ack) -> Finished | None:
        plan = self.plans.get(flight.window)
        if plan is None or flight.begin == flight.end:
            return None
        self._charge(flight, ack)
        self.counters.total_rows += plan.total_rows(flight.begin, flight.end)
        items = plan.head.order[flight.begin : flight.end]
        return self._finish(flight.window, items, "", "", 1, ack.rows)

    def _charge(self, flight: Flight, ack: Ack) -> None:
        """Put the measured price of a command in the place of the estimated one."""
        plan = self.plans.get(flight.window)
        if plan is not None:
            self._shares.charge(plan.head.client, ack.seconds - flight.estimate_s)

    def _finish(
        self, key: str, items: Int32Array, kind: str, message: str, attempts: int, rows: int = 0
    ) -> Finished:
        self.counters.items += len(items)
        self._remaining[key] -= len(items)
        for item in items.tolist() if key in self.places else ():
            self.places[key].pop(item, None)
        if not self._remaining[key]:
            self._end_window(key)
        return Finished(key, items, kind, message, attempts, rows)

    def _give_up(self, key: str, kind: str, message: str) -> list[Finished]:
        """Finish with an error what of a window is not on its way; of an unknown window that is nothing."""
        self._deadlines.pop(key, None)
        plan = self.plans.get(key)
        segments = self._withdraw(key) if plan is not None else []
        if plan is None or not segments:
            return []
        items = np.concatenate([plan.head.order[segment.begin : segment.end] for segment in segments])
        return [self._finish(key, items, kind, message, 0)]

    def _withdraw(self, key: str) -> list[Segment]:
        """Take back what of a window is not on its way."""
        plan = self.plans[key]
        found: list[Segment] = []
        for queue in (self.loose, self.lone, *(work.run for work in self.replicas.values())):
            mine = [segment for segment in queue if segment.window == key]
            if mine:
                kept = [segment for segment in queue if segment.window != key]
                queue.clear()
                queue.extend(kept)
                found += mine
        if plan.is_stream and plan.head.client in self.streams:
            found += self.streams[plan.head.client].withdraw(plan)
        if found:
            self._now_waits(plan.head.client, -sum(segment.end - segment.begin for segment in found))
        return found

    def _end_window(self, key: str) -> None:
        plan = self.plans.pop(key)
        close_window(self, key)
        del self._remaining[key]
        self._deadlines.pop(key, None)
        if not plan.is_stream:
            for digest in plan.digests:
                self.tree.end_use(digest, key)
        for position in [entry for entry in self._deaths if entry[0] == key]:
            del self._deaths[position]


def _leaves(chunk: Chunk) -> tuple[bytes, ...]:
    """The prefix that each item of a chunk stands on; empty for none."""
    return tuple(chunk.prefixes[prefix] if prefix >= 0 else b"" for prefix in chunk.prefix_of.tolist())
