"""Turns statuses into what an exporter of metrics takes, at a bounded price. Knows no Ray.

Totals become increments, as counters want them, and no more than COST_SHARE of the time is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from .metrics import Metric, Tags, samples

# Ray reads the gauges every 10 s and forgets them then: each period must set them again.
PERIOD_S = 5.0
COST_SHARE = 0.001


class Instruments(Protocol):
    """Where values go."""

    def set(self, metric: Metric, tags: Tags, value: float) -> None: ...
    def add(self, metric: Metric, tags: Tags, amount: float) -> None: ...


class MetricsExporter:
    """Exports the status of one pool. Not thread-safe.

    pool: its name. period_s: least time between two exports; it grows where they cost more than their share:
    with Ray's instruments beyond a hundred replicas, whose gauges then have gaps.
    """

    def __init__(
        self,
        pool: str,
        instruments: Instruments,
        *,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._pool, self._instruments = pool, instruments
        self._period_s, self._clock, self._cpu_clock = period_s, clock, cpu_clock
        self._totals: dict[tuple[str, Tags], float] = {}
        self._due_s = clock()

    def export(self, status: Callable[[], Mapping[str, Any]]) -> bool:
        """Export what `status` returns, if it is time; else it is not called. Returns whether it was time."""
        if self._clock() < self._due_s:
            return False
        began_s = self._cpu_clock()
        for sample in samples(self._pool, status()):
            if sample.metric.kind == "gauge":
                self._instruments.set(sample.metric, sample.tags, sample.value)
            elif grown := self._grown(sample.metric.name, sample.tags, sample.value):
                self._instruments.add(sample.metric, sample.tags, grown)
        spent_s = self._cpu_clock() - began_s
        self._due_s = self._clock() + max(self._period_s, spent_s / COST_SHARE)
        return True

    def _grown(self, name: str, tags: Tags, total: float) -> float:
        """What a total has grown by; all of it where it began anew, as with a new process in a slot."""
        before = self._totals.get((name, tags), 0.0)
        self._totals[name, tags] = total
        return total - before if total >= before else total
