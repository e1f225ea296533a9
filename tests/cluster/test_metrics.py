"""Metrics: one table, names by the rules of Prometheus, values of the status, a bounded price."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from tinyloop.cluster.exporter import COST_SHARE, PERIOD_S, MetricsExporter
from tinyloop.cluster.metrics import BY_NAME, METRICS, Metric, Tags, samples

from .recorded_statuses import EMPTY, OF_A_JOB, RUNNING

UNITS = ("", "seconds", "bytes", "tokens")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_follows_the_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"tinyloop(_[a-z]+)+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert metric.unit in UNITS
    assert metric.name.removesuffix("_total").endswith(metric.unit)
    assert metric.tags[0] == "pool"
    assert metric.help[0].isupper()
    assert not metric.help.endswith(".")


def test_names_and_sources_are_unique() -> None:
    assert len(BY_NAME) == len(METRICS) == len({metric.source for metric in METRICS})


def test_every_metric_has_its_value_from_the_status() -> None:
    found = {(s.metric.name, s.tags): s.value for s in samples("p", RUNNING)}
    assert {name for name, _ in found} == set(BY_NAME)
    expected = {
        ("tinyloop_computed_tokens_total", ()): 800_000,
        ("tinyloop_queued_items", ()): 70_000,
        ("tinyloop_client_windows", ()): 3,
        ("tinyloop_clients", ()): 2,
        ("tinyloop_replicas", (("state", "up"),)): 2,
        ("tinyloop_replicas", (("state", "waiting"),)): 1,
        ("tinyloop_replica_deaths_total", (("reason", "failed(out of memory)"),)): 2,
        ("tinyloop_replica_backlog_seconds", (("slot", "1"),)): 0.5,
        ("tinyloop_replica_prefix_budget_bytes", (("slot", "0"),)): 4 << 30,
    }
    assert {(name, tags): found[name, (("pool", "p"), *tags)] for name, tags in expected} == expected


def test_what_a_status_does_not_say_has_no_sample() -> None:
    assert not any(s.metric.name.startswith("tinyloop_replica_") for s in samples("p", EMPTY))
    of_a_job = {s.metric.name for s in samples("p", OF_A_JOB)}
    owned = {"tinyloop_replicas", "tinyloop_replicas_wanted", "tinyloop_replica_deaths_total"}
    assert of_a_job == set(BY_NAME) - owned


class Recorded:
    """Instruments that keep what they were given."""

    def __init__(self) -> None:
        self.gauges: dict[tuple[str, Tags], float] = {}
        self.counters: dict[tuple[str, Tags], float] = {}

    def set(self, metric: Metric, tags: Tags, value: float) -> None:
        assert metric.kind == "gauge"
        self.gauges[metric.name, tags] = value

    def add(self, metric: Metric, tags: Tags, amount: float) -> None:
        assert metric.kind == "counter"
        assert amount > 0, "Ray refuses anything else"
        self.counters[metric.name, tags] = self.counters.get((metric.name, tags), 0.0) + amount


class Clock:
    """A clock that a test turns."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def with_busy_s(busy_s: float) -> dict[str, Any]:
    replicas = {"0": {**RUNNING["replicas"]["0"], "busy_s": busy_s}}
    return {**RUNNING, "replicas": replicas}


def test_totals_become_increments_and_begin_anew_with_a_new_process() -> None:
    clock, recorded = Clock(), Recorded()
    exporter = MetricsExporter("p", recorded, clock=clock)
    for busy_s in (10.0, 10.0, 14.0, 3.0):  # the last is of a new process in the slot
        assert exporter.export(lambda busy_s=busy_s: with_busy_s(busy_s))
        clock.now_s += PERIOD_S
    key = ("tinyloop_replica_busy_seconds_total", (("pool", "p"), ("slot", "0")))
    assert recorded.counters[key] == 14.0 + 3.0


def test_an_export_that_is_not_due_does_not_even_ask() -> None:
    clock, asked = Clock(), []
    exporter = MetricsExporter("p", Recorded(), clock=clock)

    def status() -> Mapping[str, Any]:
        asked.append(clock.now_s)
        return RUNNING

    for _ in range(40):
        exporter.export(status)
        clock.now_s += 0.25
    assert asked == [0.0, PERIOD_S]


def test_the_price_stays_a_thousandth_however_much_there_is_to_say() -> None:
    clock, cpu, recorded = Clock(), Clock(), Recorded()
    exporter = MetricsExporter("p", recorded, clock=clock, cpu_clock=cpu)

    def status() -> Mapping[str, Any]:
        cpu.now_s += 0.040  # as with a thousand replicas
        return RUNNING

    while clock.now_s < 400.0:
        exporter.export(status)
        clock.now_s += 0.25
    assert cpu.now_s <= COST_SHARE * clock.now_s + 0.040
