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


@dataclass(slots=True)
class Work:
    """One replica as placement sees it. run: its part of the plan. spared: late once, but it answered.

    generating: (window, position) of each item that it generates, with the command that sent it.
    """

    mirror: Mirror
    rates: Rates
    run: deque[Segment] = field(default_factory=deque)
    resyncing: bool = False
    spared: bool = False
    refusals_in_row: int = 0
    busy_s: float = 0.0
    generating: dict[tuple[str, int], Flight] = field(default_factory=dict)


@dataclass(slots=True)
class Counters:
    """Totals since the start. total_rows: rows without any sharing; ideal_rows: each prefix once a window."""

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
    """The data that placement decides on. An item not finished is in one run, loose, lone or in flight.

    loose: segments that no replica's run has. lone: items that must run alone. unbuildable: prefixes
    that an engine refused for a reason that will not pass.

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
    places: dict[str, dict[int, int]] = field(default_factory=dict)
    settled_early: dict[tuple[str, int], Owner] = field(default_factory=dict)
    cancels: list[tuple[int, Owner]] = field(default_factory=list)

    def segment_s(self, work: Work, segment: Segment) -> float:
        """Estimated seconds of a segment on a replica that holds nothing for it."""
        plan = self.plans[segment.window]
        return work.rates.seconds(plan.rows(segment.begin, segment.end), plan.head.depth)

    def backlog_s(self, work: Work) -> float:
        """Estimated seconds of everything a replica has ahead of it."""
        waiting = sum(self.segment_s(work, segment) for segment in work.run)
        sent = sum(flight.estimate_s for flight in work.mirror.flights)
        generating = sum(
            flight.estimate_s / (flight.end - flight.begin) for flight in work.generating.values()
        )
        return waiting + sent + generating
