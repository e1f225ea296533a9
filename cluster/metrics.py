"""Every metric of a pool in one table, and the samples of a router's status. Pure: knows no exporter.

Names follow Prometheus: the unit in the name, base units, counters end in _total. Ray puts ray_ before them.
Replicas are told apart by slot, clients not at all, so that no series is left behind by what has gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["counter", "gauge"]
Tags = tuple[tuple[str, str], ...]

EXPORTED_PREFIX = "ray_"
POOL_TAGS = ("pool",)
REPLICA_TAGS = ("pool", "slot")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. unit: what its name ends in, before _total; empty for what is counted itself.

    source: where a router's status has it, as "counters.items"; in a map of replicas "replicas.*.busy_s", of
    numbers by a tag "deaths_by_reason.*". Without a value there is no sample.
    """

    name: str
    kind: Kind
    unit: str
    tags: tuple[str, ...]
    help: str
    source: str

    @property
    def exported_name(self) -> str:
        """As Prometheus and the dashboard see it."""
        return EXPORTED_PREFIX + self.name


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of a metric, of a counter the total. tags: name and value, in the order of the metric's."""

    metric: Metric
    tags: Tags
    value: float


def _counter(name: str, help: str, source: str, unit: str = "") -> Metric:
    return Metric(f"tinyloop_{name}_total", "counter", unit, POOL_TAGS, help, source)


def _gauge(name: str, help: str, source: str, unit: str = "") -> Metric:
    return Metric(f"tinyloop_{name}", "gauge", unit, POOL_TAGS, help, source)


def _of_replica(name: str, kind: Kind, help: str, key: str, unit: str = "") -> Metric:
    suffix = "_total" if kind == "counter" else ""
    source = f"replicas.*.{key}"
    return Metric(f"tinyloop_replica_{name}{suffix}", kind, unit, REPLICA_TAGS, help, source)


METRICS: tuple[Metric, ...] = (
    _counter("items", "Items finished, given up ones included", "counters.items"),
    _counter(
        "needed_tokens", "Tokens of scored items if nothing were shared", "counters.total_rows", "tokens"
    ),
    _counter("computed_tokens", "Tokens run through the model to score", "counters.computed_rows", "tokens"),
    _counter(
        "ideal_tokens", "Tokens needed if each window computed a prefix once", "counters.ideal_rows", "tokens"
    ),
    _counter("generated_tokens", "Tokens generated", "counters.generated_tokens", "tokens"),
    _counter("chunks", "Commands sent to replicas", "counters.chunks"),
    _counter("steals", "Runs taken over by an idle replica", "counters.steals"),
    _counter(
        "copies",
        "Prefixes built on one more replica because many wait for them",
        "counters.copies",
    ),
    _counter("evictions", "Prefixes dropped to make room", "counters.evictions"),
    _counter(
        "reclaims",
        "Prefixes dropped to give another replica room in the pool's budget",
        "counters.reclaims",
    ),
    _counter(
        "refusals", "Commands that a replica refused, unchanged, as when memory is short", "counters.refusals"
    ),
    _counter(
        "mirror_differences",
        "Replicas that held something else than commanded; must stay 0",
        "counters.mirror_differences",
    ),
    _counter("cancelled_items", "Items that their client took back", "counters.cancelled"),
    _counter("expired_items", "Items whose deadline passed", "counters.expired"),
    _gauge("queued_items", "Items taken and not finished", "queued"),
    _gauge("clients", "Clients that are known", "clients.count"),
    _gauge("client_windows", "Windows of all clients in flight", "clients.windows"),
    _gauge("client_streams", "Streams of completions that clients have open", "clients.streams"),
    _gauge("client_unfetched_results", "Deliveries that clients have not fetched", "clients.unfetched"),
    _gauge("replicas_wanted", "Replicas that the pool should have", "wanted"),
    Metric(
        "tinyloop_replicas",
        "gauge",
        "",
        ("pool", "state"),
        "Replicas by state: starting, up, draining, waiting, given up",
        "states.*",
    ),
    Metric(
        "tinyloop_replica_deaths_total",
        "counter",
        "",
        ("pool", "reason"),
        "Replicas lost, by what was found",
        "deaths_by_reason.*",
    ),
    _counter("router_cpu_seconds", "CPU time of the router's process since it began", "cpu_s", "seconds"),
    _of_replica("generation", "gauge", "Which process of the slot this is, 1 for the first", "generation"),
    _of_replica("commands_in_flight", "gauge", "Commands sent and not acknowledged", "in_flight"),
    _of_replica(
        "backlog_seconds", "gauge", "Estimated time of everything it has ahead", "backlog_s", "seconds"
    ),
    _of_replica(
        "busy_seconds", "counter", "Engine time of finished commands and generation", "busy_s", "seconds"
    ),
    _of_replica(
        "computed_tokens", "counter", "Tokens run through the model to score", "computed_rows", "tokens"
    ),
    _of_replica(
        "needed_tokens", "counter", "Tokens of scored items if nothing were shared", "total_rows", "tokens"
    ),
    _of_replica("generating", "gauge", "Completions sent to it that their clients need", "generating"),
    _of_replica("generated_tokens", "counter", "Tokens generated", "generated_tokens", "tokens"),
    _of_replica("prefixes", "gauge", "Prefixes held", "prefixes"),
    _of_replica("prefix_bytes", "gauge", "Memory of the prefixes held", "prefix_bytes", "bytes"),
    _of_replica("prefix_budget_bytes", "gauge", "Most memory of prefixes", "prefix_budget_bytes", "bytes"),
    _of_replica("memory_bytes", "gauge", "Memory of model and prefixes", "memory_bytes", "bytes"),
)

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}


def samples(pool: str, body: Mapping[str, Any]) -> Iterator[Sample]:
    """The samples of a router's status, metric by metric. pool: its name.

    A metric that the status has no value for has no sample: a missing series says so, a zero would not.
    """
    view = _with_sums(body)
    for metric in METRICS:
        for tag_value, value in _values(view, metric.source.split(".")):
            tags = [pool] if tag_value is None else [pool, tag_value]
            yield Sample(metric, tuple(zip(metric.tags, tags, strict=True)), float(value))


def _with_sums(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The status with slots counted by state and clients summed up."""
    view = dict(body)
    if "clients" in body:
        keys = ("windows", "streams", "unfetched")
        sums = {key: sum(client[key] for client in body["clients"]) for key in keys}
        view["clients"] = {"count": len(body["clients"]), **sums}
    if "slots" in body:
        states = [slot["state"] for slot in body["slots"]]
        view["states"] = {state: states.count(state) for state in dict.fromkeys(states)}
    return view


def _values(node: Any, path: list[str]) -> Iterator[tuple[str | None, float]]:
    """Values at a path with the name that took the place of its star, if it has one."""
    for index, key in enumerate(path):
        if key == "*":
            for name, child in node.items():
                for _, value in _values(child, path[index + 1 :]):
                    yield name, value
            return
        if key not in node:
            return
        node = node[key]
    if node is not None:
        yield None, node
