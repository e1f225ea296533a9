"""Statuses in the shape that routers give them: data of the tests of metrics and of the live view."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30


def slot(index: int, state: str, verdict: str, **others: Any) -> dict[str, Any]:
    known = {"generation": 1, "pid": 4000 + index, "host": "node-a", "trouble": "", "notice": ""}
    return {"slot": index, "state": state, "verdict": verdict, **known, **others}


def client(name: str, **others: Any) -> dict[str, Any]:
    return {"client": name, **others}


def replica(**others: Any) -> dict[str, Any]:
    known = {
        "generation": 1,
        "in_flight": 2,
        "backlog_s": 12.5,
        "busy_s": 98.25,
        "prefixes": 12,
        "prefix_bytes": 3 * GIB,
        "prefix_budget_bytes": 4 * GIB,
        "memory_bytes": 5 * GIB,
        "computed_rows": 400_000,
        "total_rows": 1_600_000,
        "generating": 12,
        "generated_tokens": 617,
    }
    return {**known, **others}


COUNTERS = {
    "items": 5_000,
    "total_rows": 3_200_000,
    "computed_rows": 800_000,
    "ideal_rows": 790_000,
    "chunks": 160,
    "steals": 3,
    "deaths": 1,
    "refusals": 2,
    "mirror_differences": 0,
    "evictions": 40,
    "copies": 1,
    "reclaims": 4,
    "cancelled": 6,
    "expired": 7,
    "generated_tokens": 1_234,
}

# Two replicas of three work, one has died twice and waits for its next start.
RUNNING: dict[str, Any] = {
    "counters": COUNTERS,
    "replicas": {"0": replica(), "1": replica(generation=2, backlog_s=0.5, in_flight=1)},
    "slots": [
        slot(0, "up", "busy"),
        slot(1, "up", "busy", generation=2, trouble="ActorDiedError", notice="GPU 1 is shared"),
        slot(2, "waiting", "failed(out of memory)", generation=3, trouble="OutOfMemoryError: 9 GiB asked"),
    ],
    "wanted": 3,
    "deaths": 3,
    "deaths_by_reason": {"dead": 1, "failed(out of memory)": 2},
    "clients": [
        client("a1", label="score@node-a", windows=2, streams=1, unfetched=1, silent_s=0.25),
        client("b2", label="notebook@node-b", windows=1, streams=0, unfetched=0, silent_s=4.0),
    ],
    "queued": 70_000,
    "cpu_s": 1.75,
    "pid": 3999,
    "host": "node-a",
}

# Just started: nothing is loaded yet.
EMPTY: dict[str, Any] = {
    "counters": dict.fromkeys(COUNTERS, 0),
    "replicas": {},
    "slots": [],
    "wanted": 0,
    "deaths": 0,
    "deaths_by_reason": {},
    "clients": [],
    "queued": 0,
    "cpu_s": 0.01,
    "pid": 3999,
    "host": "node-a",
}

# The router of a job: the job itself owns the replicas, and slots are not its own.
OF_A_JOB: dict[str, Any] = {
    key: value
    for key, value in RUNNING.items()
    if key not in ("slots", "wanted", "deaths", "deaths_by_reason")
}
