"""What one replica holds, exactly: the router commands every build and drop, so its mirror is not a guess.
Pure.

The mirror runs ahead: a command changes it when it is dispatched, and the replica's acknowledgement must then
confirm it.
Invariant: in the order of last use a prefix stands before its parent, so the oldest entry is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..workers.wire import DIGEST_BYTES, SCORE, Ack, Inventory


@dataclass(slots=True)
class Entry:
    """One held prefix. size_bytes is an estimate until the replica has measured it."""

    parent: bytes
    length: int
    size_bytes: int
    children: int = 0


@dataclass(frozen=True, slots=True)
class Growth:
    """A prefix to build, as the mirror sees it: whole length, tokens after its parent, own size."""

    digest: bytes
    parent: bytes
    length: int
    own_length: int
    size_bytes: int


@dataclass(slots=True)
class Flight:
    """A command on its way. window and [begin, end): the positions it scores. rows: those it should compute.

    kind: SCORE or GENERATE; of the latter, leaves: the prefix that each position stands on, empty for none.
    table: exclusive or of the digests held after it. head_s: when it became the oldest of its replica.
    """

    sequence: int
    window: str
    begin: int
    end: int
    rows: int
    depth: int
    estimate_s: float
    head_s: float
    table: int
    drops: tuple[bytes, ...]
    builds: tuple[Growth, ...]
    planned_bytes: int
    alone: bool = False
    kind: str = SCORE
    leaves: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Mirror:
    """The state of one replica as of its last dispatched command, and what is on its way there."""

    slot: int
    generation: int
    budget_bytes: int
    epoch: int = 0
    sequence: int = 0
    entries: OrderedDict[bytes, Entry] = field(default_factory=OrderedDict)
    total_bytes: int = 0
    table: int = 0
    flights: deque[Flight] = field(default_factory=deque)
    confirmed: dict[bytes, int] = field(default_factory=dict)
    confirmed_bytes: int = 0
    acknowledged: int = 0

    def reset(self, inventory: Inventory) -> list[Flight]:
        """Take the replica's own word for what it holds. Returns what was on its way and is lost."""
        lost, self.flights = list(self.flights), deque()
        self.entries.clear()
        self.total_bytes = self.table = 0
        self.epoch, self.sequence = inventory.epoch, 0
        for held in inventory.entries:
            own = held.length - self.length_of(held.parent)
            self.add(Growth(held.digest, held.parent, held.length, own, held.size_bytes))
        self.confirmed = {held.digest: held.size_bytes for held in inventory.entries}
        self.confirmed_bytes = self.total_bytes
        return lost

    def add(self, growth: Growth) -> None:
        """A build was dispatched. Its parent, if any, is held."""
        self.entries[growth.digest] = Entry(growth.parent, growth.length, growth.size_bytes)
        if growth.parent:
            self.entries[growth.parent].children += 1
        self.total_bytes += growth.size_bytes
        self.table ^= int.from_bytes(growth.digest, "little")
        self.touch(growth.digest)

    def remove(self, digest: bytes) -> Entry:
        """A drop was dispatched. The entry is a leaf."""
        entry = self.entries.pop(digest)
        if entry.parent:
            self.entries[entry.parent].children -= 1
        self.total_bytes -= entry.size_bytes
        self.table ^= int.from_bytes(digest, "little")
        return entry

    def touch(self, digest: bytes) -> None:
        """Make a prefix and its ancestors the latest used, leaf first, so that a parent is never older."""
        for held in self.path(digest):
            self.entries.move_to_end(held)

    def length_of(self, digest: bytes) -> int:
        """Whole length of a held prefix in tokens; 0 for one that is not held."""
        entry = self.entries.get(digest)
        return entry.length if entry is not None else 0

    def own_length(self, digest: bytes) -> int:
        """Tokens of a held prefix after its parent's."""
        entry = self.entries[digest]
        return entry.length - self.length_of(entry.parent)

    def path(self, digest: bytes) -> Iterator[bytes]:
        """The prefix and its held ancestors, leaf to root."""
        while digest:
            parent = self.entries[digest].parent
            yield digest
            digest = parent

    def leaves(self, kept: Iterable[bytes] = ()) -> Iterator[tuple[bytes, Entry]]:
        """Entries that nothing held extends, oldest first, without those kept."""
        kept_set = set(kept)
        return ((d, e) for d, e in self.entries.items() if not e.children and d not in kept_set)

    def confirm(self, ack: Ack, now_s: float) -> tuple[Flight, bool]:
        """The oldest command was done. Returns it, and whether the replica then held what it should."""
        flight = self.flights.popleft()
        if self.flights:
            self.flights[0].head_s = now_s
        for digest in flight.drops:
            self.confirmed_bytes -= self.confirmed.pop(digest, 0)
        for digest, size_bytes in ack.built:
            self.confirmed[digest] = size_bytes
            self.confirmed_bytes += size_bytes
            self._measure(digest, size_bytes)
        self.acknowledged += 1
        table = flight.table.to_bytes(DIGEST_BYTES, "little")
        agrees = (
            ack.sequence == flight.sequence and ack.table == table and ack.total_bytes == self.confirmed_bytes
        )
        return flight, agrees

    def _measure(self, digest: bytes, size_bytes: int) -> None:
        entry = self.entries.get(digest)
        if entry is not None:
            self.total_bytes += size_bytes - entry.size_bytes
            entry.size_bytes = size_bytes
