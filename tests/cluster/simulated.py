"""Replicas without a model or a process: a prefix table that obeys commands, driven by placement exactly as
the router does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.items import Items
from tinyloop.cluster.placement import Finished, Placement
from tinyloop.cluster.segments import CutRules, cut_window
from tinyloop.workers.inbox import Inbox
from tinyloop.workers.prefix_table import PrefixTable, Refused, Wanted
from tinyloop.workers.wire import Ack, Command, Inventory

DESCRIPTOR = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 8, "hidden_size": 0, "vocab_size": 1000}
RULES = CutRules("model", 1000)
BYTES_PER_TOKEN = 32  # at depth 1, as the estimate from the descriptor has it


@dataclass
class TableModel:
    """Enough of a model for a prefix table. block_tokens: memory is given out in units of so many tokens."""

    memory_bytes: int
    block_tokens: int = 1
    used_bytes: int = 0

    def prefix(self, token_ids: Any, depth: int = 1, parent: Any = None) -> TablePrefix:
        size_bytes = -(-len(token_ids) // self.block_tokens) * self.block_tokens * depth * BYTES_PER_TOKEN
        made = TablePrefix(self, len(token_ids) + (parent.length if parent else 0), size_bytes)
        if self.used_bytes + made.bytes > self.memory_bytes:
            raise MemoryError("simulated")
        self.used_bytes += made.bytes
        return made


@dataclass
class TablePrefix:
    model: TableModel
    length: int
    bytes: int

    def close(self) -> None:
        self.model.used_bytes -= self.bytes


@dataclass(frozen=True)
class Done:
    """One command that was carried out."""

    window: str
    seconds: float


@dataclass
class SimulatedReplica:
    """One replica on a clock of its own. row_s: seconds a row; call_s: seconds a command and a build."""

    budget_bytes: int = 1 << 30
    memory_bytes: int = 1 << 40
    row_s: float = 1e-4
    call_s: float = 2e-3
    block_tokens: int = 1
    free_s: float = 0.0
    waiting: list[tuple[Command, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = TableModel(self.memory_bytes, self.block_tokens)
        self.table = PrefixTable(self.model, self.budget_bytes)  # type: ignore[arg-type]
        self.inbox: Inbox[Command] = Inbox(8)
        self.rows = 0
        self.busy_s = 0.0
        self.done: list[Done] = []

    def inventory(self) -> Inventory:
        self.inbox.start_epoch(self.inbox.epoch + 1)
        return Inventory(self.inbox.epoch, self.table.entries(), self.table.total_bytes)

    def ends_s(self, windows: dict[str, Items]) -> float:
        """When the command at the head will be done."""
        command, sent_s = self.waiting[0]
        lengths = {entry.digest: entry.length for entry in self.table.entries()}
        lengths.update((build.digest, build.end) for build in command.builds)
        rows = sum(build.end - build.begin for build in command.builds)
        for item, prefix_of in zip(command.items.tolist(), command.prefix_of.tolist(), strict=True):
            known = lengths.get(command.prefixes[prefix_of], 0) if prefix_of >= 0 else 0
            rows += len(ids_of(windows[command.window], item)) - known - 1
        return max(self.free_s, sent_s) + rows * self.row_s + self.call_s * (1 + len(command.builds))

    def run(self, command: Command, items: Items) -> Ack:
        refused = self.inbox.offer(command.epoch, command.sequence, command, 0.0)
        if refused:
            return self._ack(command, refused[0][1], (), 0, 0.0)
        assert self.inbox.take() is command
        wanted = [
            Wanted(b.digest, b.parent, command.depth, ids_of(items, b.source)[: b.end])
            for b in command.builds
        ]
        try:
            self.table.require(command.prefixes, command.drops, wanted)
            built = self.table.change(command.drops, wanted)
        except Refused as refusal:
            self.inbox.end_epoch(str(refusal))
            return self._ack(command, str(refusal), (), 0, 0.0)
        rows = sum(build.end - build.begin for build in command.builds)
        for item, prefix_of in zip(command.items.tolist(), command.prefix_of.tolist(), strict=True):
            ids = ids_of(items, item)
            prefix = self.table.matching(command.prefixes[prefix_of], ids) if prefix_of >= 0 else None
            own = len(ids) - (prefix.length if prefix else 0)
            assert own > items.n_scored[item], "every scored id needs the row before it"
            rows += own - 1
        seconds = rows * self.row_s + self.call_s * (1 + len(command.builds))
        self.rows += rows
        self.busy_s += seconds
        self.done.append(Done(command.window, seconds))
        return self._ack(command, "", tuple((h.digest, h.size_bytes) for h in built), rows, seconds)

    def _ack(self, command: Command, refused: str, built: Any, rows: int, seconds: float) -> Ack:
        table, total = self.table.table_digest(), self.table.total_bytes
        return Ack(command.epoch, command.sequence, refused, built, total, table, rows, seconds, 0)


@dataclass
class Simulation:
    """Placement and replicas on one simulated clock; the next event is the earliest acknowledgement."""

    replicas: dict[int, SimulatedReplica]
    rules: PlacementRules = field(default_factory=PlacementRules)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.placement = Placement(self.rules, Sizes(DESCRIPTOR))
        self.windows: dict[str, Items] = {}
        self.finished: list[Finished] = []
        self.generation = 0
        self.answered = -1
        for slot, replica in self.replicas.items():
            self.attach(slot, replica)

    def attach(self, slot: int, replica: SimulatedReplica) -> None:
        self.generation += 1
        self.replicas[slot] = replica
        replica.free_s = self.now_s
        self.placement.attach(slot, self.generation, replica.budget_bytes, replica.inventory())

    def submit(
        self,
        key: str,
        items: Items,
        *,
        client: str = "c",
        deadline_s: float | None = None,
        stream: bool | None = None,
    ) -> None:
        self.windows[key] = items
        head = cut_window(items, RULES, client=client, window=len(self.windows))
        self.placement.add_window(key, head, deadline_s=deadline_s, stream=stream)

    def kill(self, slot: int) -> None:
        del self.replicas[slot]
        self.finished += self.placement.detach(slot)

    def dispatch(self) -> None:
        """Give every replica what it has room for."""
        for slot, replica in self.replicas.items():
            while (command := self.placement.next_command(slot, self.now_s)) is not None:
                replica.waiting.append((command, self.now_s))

    def step(self) -> bool:
        """Dispatch what can be, then let the replica that ends first answer. False when nothing is left to
        do.
        """
        self.dispatch()
        busy = {slot: replica for slot, replica in self.replicas.items() if replica.waiting}
        if not busy:
            return False
        slot = self.answered = min(busy, key=lambda s: (busy[s].ends_s(self.windows), s))
        replica = busy[slot]
        self.now_s = max(replica.ends_s(self.windows), self.now_s)
        command, _ = replica.waiting.pop(0)
        ack = replica.run(command, self.windows[command.window])
        replica.free_s = self.now_s
        done = self.placement.acknowledge(slot, ack, self.now_s)
        if done is not None:
            self.finished.append(done)
        if self.placement.replicas[slot].resyncing:
            replica.waiting.clear()
            self.placement.resync(slot, replica.inventory())
        return True

    def run(self) -> None:
        while self.step():
            pass


def ids_of(items: Items, index: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return items.token_ids[items.offsets[index] : items.offsets[index + 1]]


def shared_prefix_items(
    groups: int, each: int, shared: int, own: int, seed: int = 0, depth: int = 1
) -> Items:
    """Groups of prompts, shuffled: `shared` common ids, then `own` ids of which the last half is scored."""
    random = np.random.default_rng(seed)
    prefixes = random.integers(1, 1000, (groups, shared), dtype=np.int32)
    tails = random.integers(1, 1000, (groups, each, own), dtype=np.int32)
    rows = [np.concatenate([prefixes[g], tails[g, i]]) for g in range(groups) for i in range(each)]
    Random(seed).shuffle(rows)
    return ragged_items(rows, [own // 2] * len(rows), depth)


def ragged_items(rows: list[Any], scored: list[int], depth: int = 1) -> Items:
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Items(np.concatenate(rows).astype(np.int32), offsets, np.array(scored, dtype=np.int32), depth)
