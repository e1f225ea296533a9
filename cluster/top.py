"""The live view of a pool in a terminal: a pure function from its router's status to what rich prints.

Rates are differences of two statuses; the first one alone shows none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

UNKNOWN = "-"
STATE_STYLES = {
    "busy": "green",
    "ready": "green",
    "loading": "yellow",
    "draining": "yellow",
}
TROUBLE_STYLE = "red"


@dataclass(frozen=True, slots=True)
class View:
    """A status and when it was taken, in seconds of a clock that only runs forward."""

    body: Mapping[str, Any]
    taken_s: float


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of replicas. rank: the highest go first where the terminal is too narrow."""

    title: str
    rank: int
    left: bool = False


COLUMNS = (
    Column("replica", 0),
    Column("state", 0, left=True),
    Column("tokens/s", 1),
    Column("hit", 2),
    Column("backlog", 1),
    Column("sent", 4),
    Column("prefixes", 5),
    Column("prefix memory", 3),
    Column("memory", 3),
    Column("completions", 6),
    Column("generated/s", 6),
    Column("generation", 7),
    Column("process", 8, left=True),
)


def render(pool: str, now: View, before: View | None = None) -> RenderableType:
    """A pool as a block for the terminal. before: an earlier view of the same router."""
    if before is not None and not _same_router(now, before):
        before = None
    parts: list[RenderableType] = [_headline(pool, now, before)]
    slots = _slots(now.body)
    if slots:
        rows = [(_cells(slot, now, before), _style(slot)) for slot in slots]
        parts.append(Replicas(rows))
    else:
        parts.append(Text("no replica", style=TROUBLE_STYLE))
    parts += [_trouble_line(slot) for slot in slots if slot["trouble"] or slot["notice"]]
    parts += _client_lines(now.body)
    return Group(*parts)


class Replicas:
    """The table of replicas with as many columns as the terminal has room for; what is left out is said."""

    def __init__(self, rows: list[tuple[dict[str, str], str]]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(COLUMNS)
        while (table := self._table(shown)) and _width(console, options, table) > options.max_width:
            last = max(shown, key=lambda column: column.rank)
            if last.rank == 0:
                break
            shown.remove(last)
        yield table
        if missing := [column.title for column in COLUMNS if column not in shown]:
            yield Text(f"no room for: {', '.join(missing)}", style="dim")

    def _table(self, columns: list[Column]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column in columns:
            justify: JustifyMethod = "left" if column.left else "right"
            table.add_column(column.title, justify=justify, overflow="fold")
        for cells, style in self._rows:
            styled = [Text(cells[c.title], style=style if c.title == "state" else "") for c in columns]
            table.add_row(*styled)
        return table


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    # Without a limit: within one, a table says that it fits and cuts its cells.
    return Measurement.get(console, options.update(width=10_000), table).maximum


def _same_router(now: View, before: View) -> bool:
    """Whether counters of the two go on from one to the other."""
    process = now.body.get("pid"), now.body.get("host")
    return process == (before.body.get("pid"), before.body.get("host")) and now.taken_s > before.taken_s


def _headline(pool: str, now: View, before: View | None) -> Text:
    body, counters = now.body, now.body["counters"]
    slots = _slots(body)
    up = sum(slot["state"] == "up" for slot in slots)
    wanted = body.get("wanted", len(slots))
    deaths = body.get("deaths", counters["deaths"])
    lines = [
        f"pool {pool}: {up} of {wanted} replicas up, {_plural(deaths, 'death')}, "
        f"{_count(counters['items'])} items done, {_count(body['queued'])} queued",
        f"{_rate(_grown(now, before, 'computed_rows'), now, before)} tokens/s computed, "
        f"{_rate(_grown(now, before, 'total_rows'), now, before)} needed, hit rate {_pool_hit(now, before)}, "
        f"router {_router_share(now, before)} of a core",
    ]
    if counters["generated_tokens"]:
        lines.append(f"{_rate(_grown(now, before, 'generated_tokens'), now, before)} tokens/s generated")
    if counters["mirror_differences"]:
        lines.append(f"{counters['mirror_differences']} mirror differences: a defect, please report it")
    return Text("\n".join(lines), style="red" if wanted and not up else "")


def _slots(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Every slot; where the router does not own the replicas, the ones that it was given."""
    if "slots" in body:
        return list(body["slots"])
    return [
        {
            "slot": int(slot),
            "generation": seen["generation"],
            "state": "up",
            "verdict": "busy" if seen["in_flight"] or seen["generating"] else "ready",
            "pid": 0,
            "host": "",
            "trouble": "",
            "notice": "",
        }
        for slot, seen in body["replicas"].items()
    ]


def _cells(slot: Mapping[str, Any], now: View, before: View | None) -> dict[str, str]:
    """The text of each column."""
    key = str(slot["slot"])
    cells = {column.title: UNKNOWN for column in COLUMNS}
    cells |= {"replica": key, "state": slot["verdict"], "generation": str(slot["generation"])}
    if slot["pid"]:
        cells["process"] = f"{slot['pid']}@{slot['host']}"
    seen = now.body["replicas"].get(key)
    if seen is None:
        return cells
    earlier = before.body["replicas"].get(key) if before is not None else None
    if earlier is not None and earlier["generation"] != seen["generation"]:
        earlier = None
    budget = seen.get("prefix_budget_bytes")
    return cells | {
        "tokens/s": _rate(_difference(seen, earlier, "computed_rows"), now, before),
        "hit": _hit(_difference(seen, earlier, "computed_rows"), _difference(seen, earlier, "total_rows")),
        "backlog": _seconds(seen["backlog_s"]),
        "sent": str(seen["in_flight"]),
        "completions": _count(seen["generating"]),
        "generated/s": _rate(_difference(seen, earlier, "generated_tokens"), now, before),
        "prefixes": _count(seen["prefixes"]),
        "prefix memory": _size(seen["prefix_bytes"]) + (f" of {_size(budget)}" if budget is not None else ""),
        "memory": _size(seen.get("memory_bytes")),
    }


def _style(slot: Mapping[str, Any]) -> str:
    return STATE_STYLES.get(slot["verdict"], TROUBLE_STYLE)


def _trouble_line(slot: Mapping[str, Any]) -> Text:
    said = [f"last death: {slot['trouble']}"] if slot["trouble"] else []
    said += [slot["notice"]] if slot["notice"] else []
    return Text(f"replica {slot['slot']}: {'; '.join(said)}", style="yellow")


def _client_lines(body: Mapping[str, Any]) -> list[RenderableType]:
    if not body.get("clients"):
        return [Text("no client", style="dim")]
    return [
        Text(
            f"client {client['label']}: {_plural(client['windows'], 'window')} in flight, "
            f"{_plural(client['streams'], 'stream')}, "
            f"{_plural(client['unfetched'], 'delivery', 'deliveries')} unfetched, "
            f"silent for {_seconds(client['silent_s'])}"
        )
        for client in body["clients"]
    ]


def _grown(now: View, before: View | None, counter: str) -> float | None:
    return _difference(now.body["counters"], before.body["counters"] if before else None, counter)


def _difference(now: Mapping[str, Any], before: Mapping[str, Any] | None, key: str) -> float | None:
    if before is None or key not in now or key not in before:
        return None
    return float(now[key] - before[key])


def _rate(grown: float | None, now: View, before: View | None) -> str:
    if grown is None or before is None:
        return UNKNOWN
    return _count(round(grown / (now.taken_s - before.taken_s)))


def _pool_hit(now: View, before: View | None) -> str:
    """Since the view before; without one since the start, which is what a single look can say."""
    if before is None:
        counters = now.body["counters"]
        return _hit(counters["computed_rows"], counters["total_rows"])
    return _hit(_grown(now, before, "computed_rows"), _grown(now, before, "total_rows"))


def _hit(computed: float | None, needed: float | None) -> str:
    return UNKNOWN if computed is None or not needed else f"{max(1 - computed / needed, 0.0):.1%}"


def _router_share(now: View, before: View | None) -> str:
    if before is None:
        return UNKNOWN
    return f"{(now.body['cpu_s'] - before.body['cpu_s']) / (now.taken_s - before.taken_s):.1%}"


def _count(number: int) -> str:
    return f"{number:,}"


def _plural(number: int, noun: str, plural: str = "") -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _size(size_bytes: int | None) -> str:
    if size_bytes is None:
        return UNKNOWN
    size, units = float(size_bytes), ("B", "KiB", "MiB", "GiB", "TiB")
    index = 0
    while size >= 1024 and index < len(units) - 1:
        size, index = size / 1024, index + 1
    return f"{size:.0f} {units[index]}" if index == 0 or size >= 100 else f"{size:.1f} {units[index]}"
