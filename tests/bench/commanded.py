"""Our placement on simulated replicas and a simulated clock: the very code that the router runs, no copy.

A replica is a serial server: 2 ms a request and 0.1 ms a token that it computes. It obeys commands on a
table of prefixes, refuses what it does not hold or has no room for, and never drops anything by itself.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from heads import Heads
from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.placement import Placement
from tinyloop.workers.wire import DIGEST_BYTES, Ack, Command, HeldPrefix, Inventory
from workloads import IntArray, Workload

REQUEST_S = 2e-3
TOKEN_S = 1e-4
DESCRIPTOR = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 8, "hidden_size": 0}
TOKEN_BYTES = 32  # what that descriptor means at depth 1
UNLIMITED = 1 << 50


@dataclass(frozen=True)
class Outcome:
    """One run. hit: share of tokens not computed; bound_s: no schedule takes less."""

    requests: int
    makespan_s: float
    bound_s: float
    busy_s: tuple[float, ...]
    hit: float
    ideal_hit: float
    decision_s: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)

    @property
    def hit_share(self) -> float:
        """Per cent of the ideal hit rate; 100 where nothing can be shared."""
        return 100.0 * self.hit / self.ideal_hit if self.ideal_hit > 0 else 100.0

    @property
    def slowdown(self) -> float:
        """Makespan over the bound."""
        return self.makespan_s / self.bound_s

    @property
    def imbalance(self) -> float:
        """Busy time of the busiest replica over the mean."""
        return max(self.busy_s) * len(self.busy_s) / sum(self.busy_s)


def bound_s(workload: Workload, replicas: int) -> float:
    """Seconds that the work takes if nothing is computed twice and nobody waits."""
    return (REQUEST_S * len(workload) + TOKEN_S * workload.unique_tokens) / replicas


class CommandedReplica:
    """One replica: a table of prefixes under a budget, and a clock."""

    def __init__(self, budget_bytes: int, speed: float = 1.0) -> None:
        self.budget_bytes = budget_bytes
        self.speed = speed
        self.held: dict[bytes, HeldPrefix] = {}
        self.total_bytes = self.table = self.epoch = 0
        self.most_bytes = 0
        self.free_s = self.busy_s = 0.0
        self.computed = 0
        self.waiting: deque[Command] = deque()
        self.answer: Ack | None = None

    def inventory(self) -> Inventory:
        """What it holds; a new epoch begins."""
        self.epoch += 1
        entries = tuple(sorted(self.held.values(), key=lambda held: held.length))
        return Inventory(self.epoch, entries, self.total_bytes)

    def run(self, command: Command, item_rows: IntArray) -> Ack:
        """Carry one command out at once; the caller moves the clock by the answer's seconds."""
        if command.epoch != self.epoch:
            return self._ack(command, "stale: another epoch", (), 0, 0.0)
        before = (dict(self.held), self.total_bytes, self.table)
        refused, built, rows = self._change(command)
        if not refused and any(digest not in self.held for digest in command.prefixes):
            refused = "missing: a prefix of an item is not held"
        if refused:
            self.held, self.total_bytes, self.table = before
            return self._ack(command, refused, (), 0, REQUEST_S)
        self.most_bytes = max(self.most_bytes, self.total_bytes)
        lengths = np.array([self.held[digest].length for digest in command.prefixes] + [0])
        own = item_rows[command.items] - lengths[command.prefix_of]
        assert len(own) == 0 or own.min() > 0, "a prefix must be shorter than what it serves"
        rows += int(own.sum())
        seconds = (REQUEST_S * len(own) + TOKEN_S * rows) / self.speed
        self.busy_s += seconds
        self.computed += rows
        return self._ack(command, "", built, rows, seconds)

    def _change(self, command: Command) -> tuple[str, tuple[tuple[bytes, int], ...], int]:
        extended = {held.parent for held in self.held.values()} if command.drops else set()
        for digest in command.drops:
            held = self.held.pop(digest, None)
            if held is None:
                return "missing: a prefix to drop is not held", (), 0
            if digest in extended and any(other.parent == digest for other in self.held.values()):
                return "missing: a prefix to drop is extended by another", (), 0
            self.total_bytes -= held.size_bytes
            self.table ^= int.from_bytes(digest, "little")
        built, rows = [], 0
        for build in command.builds:
            above = self.held[build.parent].length if build.parent in self.held else 0
            if build.digest in self.held or above != build.begin:
                return "missing: the parent of a build is not held, or the prefix is", (), 0
            size_bytes = (build.end - build.begin) * command.depth * TOKEN_BYTES
            self.held[build.digest] = HeldPrefix(
                build.digest, build.parent, build.end, command.depth, size_bytes
            )
            self.total_bytes += size_bytes
            self.table ^= int.from_bytes(build.digest, "little")
            built.append((build.digest, size_bytes))
            rows += build.end - build.begin
        if self.total_bytes > self.budget_bytes:
            return f"budget: {self.total_bytes} of {self.budget_bytes} bytes", (), 0
        return "", tuple(built), rows

    def _ack(
        self, command: Command, refused: str, built: tuple[tuple[bytes, int], ...], rows: int, seconds: float
    ) -> Ack:
        table = self.table.to_bytes(DIGEST_BYTES, "little")
        total = self.total_bytes
        return Ack(command.epoch, command.sequence, refused, built, total, table, rows, seconds, 0)


class Pool:
    """Placement and its replicas until nothing is left to do; the next event is the earliest answer.

    lookahead: requests that wait at the router at most, over all clients; None: the whole job is there at
    the start. clients: how many share the requests.
    """

    def __init__(
        self,
        workload: Workload,
        replicas: int,
        budget_bytes: int,
        *,
        lookahead: int | None = None,
        clients: int = 1,
        rules: PlacementRules | None = None,
    ) -> None:
        self.workload, self.heads = workload, Heads(workload)
        self.replicas = {slot: CommandedReplica(budget_bytes) for slot in range(replicas)}
        self.placement = Placement(rules or PlacementRules(), Sizes(DESCRIPTOR))
        self.now_s = self.decision_s = 0.0
        self.events: list[tuple[float, int]] = []
        self.windows: dict[str, IntArray] = {}
        self.submitted = 0
        self.served = 0
        self.lookahead = lookahead
        self._coming = [
            deque(np.arange(client, len(workload), clients).tolist()) for client in range(clients)
        ]
        for slot, replica in self.replicas.items():
            self.placement.attach(slot, 1, budget_bytes, replica.inventory())

    def run(self) -> Outcome:
        """Serve everything."""
        self._arrive()
        self._dispatch(list(self.replicas))
        while self.events:
            self.now_s, slot = heappop(self.events)
            self._answer(slot)
            arrived = self._arrive()
            idle = (
                [s for s, r in self.replicas.items() if not r.waiting] if arrived or self._streaming else []
            )
            self._dispatch([slot, *idle])
        assert self.served == len(self.workload), f"{self.served} of {len(self.workload)} were served"
        return self._outcome()

    @property
    def _streaming(self) -> bool:
        return self.lookahead is not None

    def _arrive(self) -> bool:
        """Windows come as long as fewer requests wait than the router may see."""
        arrived = False
        for client, coming in enumerate(self._coming):
            name = f"c{client}"
            if self.lookahead is None:
                if coming:
                    self._submit(name, np.array(coming))
                    coming.clear()
                    arrived = True
                continue
            most = self.lookahead // len(self._coming)
            size = max(most // 8, 1)
            while coming and most - self.placement.waiting_items(name) >= size:
                self._submit(name, np.array([coming.popleft() for _ in range(min(size, len(coming)))]))
                arrived = True
        return arrived

    def _submit(self, client: str, requests: IntArray) -> None:
        number, self.submitted = self.submitted, self.submitted + 1
        head = self.heads.window(requests, client=client, number=number, keep_all=self._streaming)
        self.windows[f"w{number}"] = self.workload.prompts[requests]
        start_s = time.process_time()
        self.placement.add_window(f"w{number}", head, stream=self._streaming)
        self.decision_s += time.process_time() - start_s

    def _dispatch(self, slots: list[int]) -> None:
        for slot in slots:
            replica = self.replicas[slot]
            while True:
                start_s = time.process_time()
                command = self.placement.next_command(slot, self.now_s)
                self.decision_s += time.process_time() - start_s
                if command is None:
                    break
                replica.waiting.append(command)
                if len(replica.waiting) == 1:
                    self._start(slot)

    def _start(self, slot: int) -> None:
        """The command at the head begins; its answer is an event."""
        replica = self.replicas[slot]
        command = replica.waiting[0]
        replica.answer = replica.run(command, self.windows[command.window])
        heappush(self.events, (self.now_s + replica.answer.seconds, slot))

    def _answer(self, slot: int) -> None:
        replica, placement = self.replicas[slot], self.placement
        command = replica.waiting.popleft()
        assert replica.answer is not None
        start_s = time.process_time()
        finished = placement.acknowledge(slot, replica.answer, self.now_s)
        self.decision_s += time.process_time() - start_s
        if finished is not None:
            self.served += len(finished.items)
        if finished is not None and command.window not in placement.plans:
            del self.windows[command.window]
        if placement.replicas[slot].resyncing:
            replica.waiting.clear()
            placement.resync(slot, replica.inventory())
        elif replica.waiting:
            self._start(slot)

    def _outcome(self) -> Outcome:
        counters = self.placement.counters
        names = ("steals", "evictions", "refusals", "copies", "mirror_differences", "chunks")
        total = int(self.workload.prompts.sum())
        return Outcome(
            requests=len(self.workload),
            makespan_s=self.now_s,
            bound_s=bound_s(self.workload, len(self.replicas)),
            busy_s=tuple(replica.busy_s for replica in self.replicas.values()),
            hit=1.0 - sum(replica.computed for replica in self.replicas.values()) / total,
            ideal_hit=self.workload.ideal_hit,
            decision_s=self.decision_s,
            counters={name: getattr(counters, name) for name in names},
        )
