"""Metrics through Ray: its agent on each node gives them to Prometheus, with ray_ before their names.

Ray has no counter of 0: the series of one begins with its first event.
"""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge

from .exporter import MetricsExporter
from .metrics import METRICS, Metric, Tags


class RayInstruments:
    """One of Ray's instruments for each metric of the table. Make one a process: Ray keeps them by name."""

    def __init__(self) -> None:
        self._gauges = {m.name: Gauge(m.name, m.help, m.tags) for m in METRICS if m.kind == "gauge"}
        self._counters = {m.name: Counter(m.name, m.help, m.tags) for m in METRICS if m.kind == "counter"}

    def set(self, metric: Metric, tags: Tags, value: float) -> None:
        """The value of a gauge now."""
        self._gauges[metric.name].set(value, dict(tags))

    def add(self, metric: Metric, tags: Tags, amount: float) -> None:
        """Growth of a counter, more than 0."""
        self._counters[metric.name].inc(amount, dict(tags))


def ray_exporter(pool: str) -> MetricsExporter:
    """Exports a pool's status from this process, which must be part of a Ray cluster."""
    return MetricsExporter(pool, RayInstruments())
