"""What the Grafana dashboard shows: titles, units and queries from the table of metrics. Data, pure."""

from __future__ import annotations

from dataclasses import dataclass

from .metrics import BY_NAME

# Ray reports every 10 s; a rate needs several reports to be one.
RATE_WINDOW = "1m"


@dataclass(frozen=True, slots=True)
class Line:
    """One query. legend: with names of tags in double braces."""

    query: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A time series. unit: as Grafana calls it."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    text: str = ""
    most: float | None = None


def series(name: str) -> str:
    """A metric of the chosen pools. Raises KeyError for a name that is not in the table."""
    return f'{BY_NAME[f"tinyloop_{name}"].exported_name}{{pool=~"$pool"}}'


def rate(name: str) -> str:
    """Growth of a counter a second. Raises ValueError for a gauge."""
    if BY_NAME[f"tinyloop_{name}"].kind != "counter":
        raise ValueError(f"cannot take the rate of {name}: it is no counter")
    return f"rate({series(name)}[{RATE_WINDOW}])"


def total(query: str, *by: str) -> str:
    """The sum of what the processes of a pool report."""
    return f"sum by ({', '.join(('pool', *by))}) ({query})"


def _pool(name: str, legend: str) -> Line:
    return Line(total(series(name)), f"{{{{pool}}}} {legend}")


def _pool_rate(name: str, legend: str) -> Line:
    return Line(total(rate(name)), f"{{{{pool}}}} {legend}")


def _slots(query: str, legend: str = "") -> Line:
    return Line(total(query, "slot"), f"{{{{pool}}}} {{{{slot}}}} {legend}".strip())


def _hit_rate(scope: str, *by: str) -> str:
    computed = total(rate(f"{scope}computed_tokens_total"), *by)
    needed = total(rate(f"{scope}needed_tokens_total"), *by)
    return f"clamp_min(1 - {computed} / {needed}, 0)"


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Pools",
        (
            Panel(
                "Tokens a second",
                "short",
                (
                    _pool_rate("needed_tokens_total", "needed"),
                    _pool_rate("computed_tokens_total", "computed"),
                    _pool_rate("generated_tokens_total", "generated"),
                ),
                "Needed: what the scored items cost if nothing is shared. Computed: what ran for them.",
            ),
            Panel(
                "Hit rate",
                "percentunit",
                (Line(_hit_rate(""), "{{pool}}"),),
                "Part of the needed tokens that was read from a held prefix.",
                most=1,
            ),
            Panel(
                "Items",
                "short",
                (_pool_rate("items_total", "finished a second"), _pool("queued_items", "queued")),
            ),
            Panel(
                "Replicas",
                "short",
                (
                    Line(total(series("replicas"), "state"), "{{pool}} {{state}}"),
                    _pool("replicas_wanted", "wanted"),
                ),
            ),
            Panel(
                "Clients",
                "short",
                (
                    _pool("clients", "known"),
                    _pool("client_windows", "windows in flight"),
                    _pool("client_streams", "streams open"),
                    _pool("client_unfetched_results", "results not fetched"),
                ),
                "Results that nobody fetches: a client is slow or gone.",
            ),
            Panel(
                "Router",
                "percentunit",
                (_pool_rate("router_cpu_seconds_total", "CPU"),),
                "Part of one core.",
            ),
        ),
    ),
    (
        "Replicas",
        (
            Panel(
                "Tokens a second",
                "short",
                (
                    _slots(rate("replica_computed_tokens_total")),
                    _slots(rate("replica_generated_tokens_total"), "generated"),
                ),
            ),
            Panel("Completions on their way", "short", (_slots(series("replica_generating")),)),
            Panel(
                "Hit rate", "percentunit", (Line(_hit_rate("replica_", "slot"), "{{pool}} {{slot}}"),), most=1
            ),
            Panel(
                "Busy",
                "percentunit",
                (_slots(rate("replica_busy_seconds_total")),),
                "Part of the time that the engine ran. Low with a queue: router or clients hold it up.",
                most=1,
            ),
            Panel(
                "Backlog",
                "s",
                (_slots(series("replica_backlog_seconds")),),
                "Estimated time of what it has ahead.",
            ),
            Panel("Commands in flight", "short", (_slots(series("replica_commands_in_flight")),)),
            Panel(
                "Memory of prefixes",
                "bytes",
                (
                    _slots(series("replica_prefix_bytes")),
                    _slots(series("replica_prefix_budget_bytes"), "budget"),
                ),
                "At the budget with a falling hit rate: prefixes are dropped before they are used again.",
            ),
            Panel("Memory", "bytes", (_slots(series("replica_memory_bytes")),), "Model and prefixes."),
            Panel("Prefixes", "short", (_slots(series("replica_prefixes")),)),
            Panel(
                "Generation",
                "short",
                (_slots(series("replica_generation")),),
                "A step up is a replica that was replaced.",
            ),
        ),
    ),
    (
        "Trouble",
        (
            Panel(
                "Deaths",
                "short",
                (Line(total(series("replica_deaths_total"), "reason"), "{{pool}} {{reason}}"),),
                "In all: the series of a reason begins with its first death, which no rate would show.",
            ),
            Panel(
                "Refusals and differences",
                "short",
                (
                    _pool_rate("refusals_total", "refusals a second"),
                    _pool("mirror_differences_total", "mirror differences"),
                ),
                "Each makes the replica say what it holds. A difference is a defect: report it.",
            ),
            Panel(
                "Work moved",
                "short",
                (
                    _pool_rate("steals_total", "steals a second"),
                    _pool_rate("reclaims_total", "reclaims a second"),
                    _pool_rate("copies_total", "copies a second"),
                    _pool_rate("evictions_total", "evictions a second"),
                ),
            ),
            Panel(
                "Items not wanted",
                "short",
                (
                    _pool_rate("cancelled_items_total", "cancelled a second"),
                    _pool_rate("expired_items_total", "expired a second"),
                ),
            ),
            Panel("Commands", "short", (_pool_rate("chunks_total", "a second"),)),
            Panel(
                "Tokens beyond the ideal",
                "short",
                (
                    Line(
                        f"{total(series('computed_tokens_total'))} - {total(series('ideal_tokens_total'))}",
                        "{{pool}}",
                    ),
                ),
                "Computed more than once, in all: prefixes on several replicas, dropped ones, deaths.",
            ),
        ),
    ),
)
