"""What one replica holds, exactly: the router commands every build and drop, so its mirror is not a guess.
Pure.

The mirror runs ahead: a command changes it when it is dispatched, and the replica's acknowledgement must then
confirm it.
Invariants: in the order of last use a prefix stands before its parent, so the oldest entry is always a leaf;
the tree's holder bit of this slot is set for exactly the entries here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..workers.wire import DIGEST_BYTES, SCORE, Ack, Inventory
from .keys import at_depth, depth_of
from .pool_tree import PoolTree


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
    drops: bytes of each prefix it drops. planned_bytes: held after it.
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
    drops: dict[bytes, int]
    builds: tuple[Growth, ...]
    planned_bytes: int
    alone: bool = False
    kind: str = SCORE
    leaves: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Mirror:
    """The state of one replica as of its last dispatched command, and what is on its way there.

    entries: own bytes of each held prefix, least recently used first; estimates until they are measured.
    stamps: when each was last used on the pool's clock; kept only where the pool as a whole has a budget.
    """

    slot: int
    generation: int
    budget_bytes: int
    tree: PoolTree
    stamps: dict[bytes, int] | None = None
    epoch: int = 0
    sequence: int = 0
    entries: dict[bytes, int] = field(default_factory=dict)
    pins: dict[bytes, int] = field(default_factory=dict)
    total_bytes: int = 0
    table: int = 0
    flights: deque[Flight] = field(default_factory=deque)
    confirmed_bytes: int = 0
    acknowledged: int = 0
    _parents: dict[bytes, bytes] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)
    _moves: int = 0

    def reset(self, inventory: Inventory) -> list[Flight]:
        """Take the replica's own word for what it holds. Returns what was on its way and is lost."""
        lost, self.flights = list(self.flights), deque()
        self.clear()
        self.epoch, self.sequence = inventory.epoch, 0
        for held in inventory.entries:
            own = held.length - self.length_of(held.parent)
            self.add(Growth(held.digest, held.parent, held.length, own, held.size_bytes))
        self.confirmed_bytes = self.total_bytes
        self.pins = {digest: count for digest, count in self.pins.items() if digest in self.entries}
        return lost

    def clear(self) -> None:
        """Nothing is held any more, as far as anybody knows."""
        for digest in self.entries:
            self.tree.release(digest, self.slot)
        self.entries.clear()
        self._parents.clear()
        self._sizes.clear()
        if self.stamps is not None:
            self.stamps.clear()
        self.total_bytes = self.table = 0

    def add(self, growth: Growth, now: int = 0) -> None:
        """A build was dispatched. Its parent, if any, is held."""
        digest = self.tree.hold(growth.digest, growth.parent, growth.length, self.slot)
        # The tree's parent is that of whoever came first; a replica may have left steps out, or in.
        if self.tree[digest].parent != growth.parent:
            self._parents[digest] = growth.parent
        self.entries[digest] = self._shared(growth.size_bytes)
        self.total_bytes += growth.size_bytes
        self.table ^= int.from_bytes(digest, "little")
        if self.stamps is not None:
            self.stamps[digest] = now
        self.touch(growth.parent, now)

    def remove(self, digest: bytes) -> int:
        """A drop was dispatched. The entry is a leaf. Returns its bytes."""
        size_bytes = self.entries.pop(digest)
        self._parents.pop(digest, None)
        if self.stamps is not None:
            self.stamps.pop(digest, None)
        self.total_bytes -= size_bytes
        self.table ^= int.from_bytes(digest, "little")
        self.tree.release(digest, self.slot)
        return size_bytes

    def touch(self, digest: bytes, now: int = 0) -> None:
        """Make a prefix and its ancestors the latest used, leaf first, so that a parent is never older."""
        # Moving an entry leaves a hole, and a dictionary full of holes grows to twice what it needs: a copy
        # now and then closes them, at less than a move's price each.
        if self._moves > 16 + len(self.entries) // 2:
            self.entries, self._moves = dict(self.entries), 0
        entries, stamps = self.entries, self.stamps
        for held in self.path(digest):
            entries[held] = entries.pop(held)
            self._moves += 1
            if stamps is not None:
                stamps[held] = now

    def serving(self, digest: bytes, *, exactly: bool = False) -> bytes:
        """The key of what serves a prefix here: itself or, unless `exactly`, deeper; b"" if none."""
        if digest in self.entries:
            return digest
        depths = self.tree.depths
        if not exactly and depths and depths[-1] > (depth := depth_of(digest)):
            for deeper in depths:
                if deeper > depth and (other := at_depth(digest, deeper)) in self.entries:
                    return other
        return b""

    def length_of(self, digest: bytes) -> int:
        """Whole length of a held prefix in tokens; 0 for one that is not held."""
        return self.tree[digest].length if digest in self.entries else 0

    def parent_of(self, digest: bytes) -> bytes:
        """The held prefix that a held one extends; b"" for none."""
        parent = self._parents.get(digest)
        return self.tree[digest].parent if parent is None else parent

    def own_length(self, digest: bytes) -> int:
        """Tokens of a held prefix after its parent's."""
        return self.length_of(digest) - self.length_of(self.parent_of(digest))

    def path(self, digest: bytes) -> Iterator[bytes]:
        """The prefix and its held ancestors, leaf to root."""
        while digest:
            parent = self.parent_of(digest)
            yield digest
            digest = parent

    def protected(self, kept: set[bytes]) -> set[bytes]:
        """What must not be dropped: those kept, those pinned, and whatever they extend."""
        safe: set[bytes] = set()
        for digest in (*kept, *self.pins):
            while digest and digest not in safe and digest in self.entries:
                safe.add(digest)
                digest = self.parent_of(digest)
        return safe

    @property
    def peak_bytes(self) -> int:
        """The most that the replica holds at any time until its last command is done."""
        held = self.confirmed_bytes
        return max([held, self.total_bytes, *(flight.planned_bytes for flight in self.flights)])

    @property
    def confirmed(self) -> dict[bytes, int]:
        """Bytes of each prefix held after the last acknowledged command. O(entries): for checks."""
        held = dict(self.entries)
        for flight in reversed(self.flights):
            for growth in flight.builds:
                held.pop(growth.digest, None)
            held.update(flight.drops)
        return held

    def confirm(self, ack: Ack, now_s: float) -> tuple[Flight, bool]:
        """The oldest command was done. Returns it, and whether the replica then held what it should."""
        flight = self.flights.popleft()
        if self.flights:
            self.flights[0].head_s = now_s
        self.confirmed_bytes -= sum(flight.drops.values())
        for digest, size_bytes in ack.built:
            self.confirmed_bytes += size_bytes
            self._measure(digest, size_bytes)
        self.acknowledged += 1
        table = flight.table.to_bytes(DIGEST_BYTES, "little")
        agrees = (
            ack.sequence == flight.sequence and ack.table == table and ack.total_bytes == self.confirmed_bytes
        )
        return flight, agrees

    def _measure(self, digest: bytes, size_bytes: int) -> None:
        """Replace an estimate, up to where a later command on its way drops the prefix again."""
        dropping = next((flight for flight in self.flights if digest in flight.drops), None)
        estimate = dropping.drops[digest] if dropping is not None else self.entries.get(digest)
        if estimate is None:
            return
        for flight in self.flights:
            if flight is dropping:
                flight.drops[digest] = size_bytes
                return
            flight.planned_bytes += size_bytes - estimate
        self.total_bytes += size_bytes - estimate
        self.entries[digest] = self._shared(size_bytes)

    def _shared(self, size_bytes: int) -> int:
        # Sizes repeat (whole blocks); one object each saves 32 bytes a prefix. The table is bounded by what
        # is held: it is emptied when it outgrows that.
        if len(self._sizes) > 2 * len(self.entries) + 16:
            self._sizes = {size: size for size in self.entries.values()}
        return self._sizes.setdefault(size_bytes, size_bytes)
