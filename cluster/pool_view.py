"""A pool's status as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MB = 1e6


def pool_line(name: str, body: Mapping[str, Any]) -> str:
    """One line a pool."""
    ready = sum(slot["state"] == "up" for slot in body["slots"])
    return (
        f"pool {name}: {ready} of {body['wanted']} replicas ready, "
        f"{_counted(len(body['clients']), 'client')}, {body['queued']:,} items queued, "
        f"{_counted(body['deaths'], 'death')}, router {body['pid']}@{body['host']}"
    )


def pool_lines(name: str, body: Mapping[str, Any]) -> Iterator[str]:
    """A pool with its replicas and clients."""
    yield pool_line(name, body)
    for slot in body["slots"]:
        seen = body["replicas"].get(str(slot["slot"]), {})
        line = f"  replica {slot['slot']} generation {slot['generation']}: {slot['verdict']}"
        if slot["state"] in ("up", "draining"):
            line += (
                f", {slot['pid']}@{slot['host']}, {seen.get('in_flight', 0)} commands ahead, "
                f"{_counted(seen.get('generating', 0), 'completion')} on their way, "
                f"{seen.get('prefixes', 0):,} prefixes of {seen.get('prefix_bytes', 0) / MB:,.1f} MB"
            )
        yield line
        if slot["notice"] and slot["state"] == "up":
            yield f"    notice: {slot['notice']}"
        if slot["trouble"]:
            yield f"    last death: {slot['trouble']}"
    for client in body["clients"]:
        yield (
            f"  client {client['label']}: {_counted(client['windows'], 'window')} in flight, "
            f"{_counted(client['streams'], 'stream')}, "
            f"{client['unfetched']} deliveries unfetched, heard of {client['silent_s']:.1f} s ago"
        )


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
