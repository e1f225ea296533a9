"""Everything placement knows: replicas, windows, what lies loose, what was counted. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ..workers.outbox import Owner
from ..workers.wire import Int32Array
from .costs import PlacementRules, Rates, Sizes
from .mirror import Flight, Mirror
from .plan import Plan, Segment
from .pool_tree import PoolTree
from .stream import Stream


@dataclass(slots=True)
class Work:
    """One replica as placement sees it.

    run: its part of the plans. open: the prefix of the last item it was sent. stuck_at: the version of the
    pool's work at which it found nothing. idle_since_s: when its last command came back; idled_s: how long
    it had nothing to do in all since it last copied a prefix for want of better. spared: late once, but it
    answered. lacking_bytes: what its last chunk would have built if the rest of the pool had left it room.
    busy_s, computed_rows and total_rows are of finished commands, as in Counters; busy_s is of
    slices of generation too. generating: (window, position) of each item that it generates, with the command
    that sent it.
    """

    mirror: Mirror
    rates: Rates
    run: deque[Segment] = field(default_factory=deque)
    open: bytes = b""
    stuck_at: int = -1
    resyncing: bool = False
    draining: bool = False
    spared: bool = False
    refusals_in_row: int = 0
    busy_s: float = 0.0
    computed_rows: int = 0
    total_rows: int = 0
    idle_since_s: float = 0.0
    idled_s: float = 0.0
    lacking_bytes: int = 0
    generating: dict[tuple[str, int], Flight] = field(default_factory=dict)
    generated_tokens: int = 0

    @property
    def flights_s(self) -> float:
        """Estimated seconds of what is on its way there."""
        return sum(flight.estimate_s for flight in self.mirror.flights)

    @property
    def generating_s(self) -> float:
        """Estimated seconds of what it generates."""
        return sum(flight.estimate_s / (flight.end - flight.begin) for flight in self.generating.values())


@dataclass(slots=True)
class Counters:
    """Totals since the start.

    total_rows: rows without any sharing; ideal_rows: each prefix once a window; all rows are of what is
    scored.
    """

    items: int = 0
    total_rows: int = 0
    computed_rows: int = 0
    ideal_rows: int = 0
    chunks: int = 0
    steals: int = 0
    deaths: int = 0
    refusals: int = 0
    mirror_differences: int = 0
    evictions: int = 0
    copies: int = 0
    reclaims: int = 0
    cancelled: int = 0
    expired: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Items of a window that need nothing more. No error_class: they have scores. rows: computed for them."""

    window: str
    items: Int32Array
    error_class: str = ""
    message: str = ""
    attempts: int = 1
    rows: int = 0


@dataclass(slots=True)
class PoolState:
    """The data that placement decides on.

    An item not finished is in one run, loose, lone, a stream, in flight or generated. loose: segments that no
    replica's run has. lone: items that must run alone. streams: of each client what waits in groups.
    unbuildable: prefixes that an engine refused for a reason that will not pass. version: grows when work is
    added. clock: grows with every command; it stamps what is used.

    Of windows to generate, places: position of each item that its client has not settled, by window;
    settled_early: those settled while they were on their way to a replica; cancels: what replicas are to be
    told that nobody needs any more, with the slot of each.
    """

    rules: PlacementRules
    sizes: Sizes
    tree: PoolTree = field(default_factory=PoolTree)
    replicas: dict[int, Work] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    unbuildable: set[bytes] = field(default_factory=set)
    loose: deque[Segment] = field(default_factory=deque)
    lone: deque[Segment] = field(default_factory=deque)
    streams: dict[str, Stream] = field(default_factory=dict)
    deepest: int = 1
    version: int = 0
    clock: int = 0
    places: dict[str, dict[int, int]] = field(default_factory=dict)
    settled_early: dict[tuple[str, int], Owner] = field(default_factory=dict)
    cancels: list[tuple[int, Owner]] = field(default_factory=list)

    def client_of(self, segment: Segment) -> str:
        """The client that waits for a segment."""
        return self.plans[segment.window].head.client

    def segment_s(self, work: Work, segment: Segment) -> float:
        """Estimated seconds of a segment on a replica that holds nothing for it."""
        plan = self.plans[segment.window]
        return work.rates.seconds(plan.rows(segment.begin, segment.end), plan.head.depth)

    def backlog_s(self, work: Work) -> float:
        """Estimated seconds of everything a replica has ahead of it."""
        waiting_s = sum(self.segment_s(work, segment) for segment in work.run)
        return waiting_s + work.flights_s + work.generating_s
