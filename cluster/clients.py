"""Who uses a pool: what each client has in flight and has not fetched, and when it was last heard of.

Invariant: what is kept for a client is bounded, since it may have MAX_WINDOWS windows here at most, counting
those whose results it has not acknowledged, and MAX_CLIENTS clients at most are known.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .wire import Delivery
from .work import Finished

# A client keeps two in flight; two more may be finished and not acknowledged yet.
MAX_WINDOWS = 4
MAX_CLIENTS = 256
# Heads of that many items take some 200 MB; one window is taken whatever its size.
MAX_QUEUED_ITEMS = 4_000_000


class TooManyClients(RuntimeError):
    """The pool serves as many clients as it can keep results for."""


@dataclass(slots=True)
class Client:
    """One client. label: who it is, for people. lease_s: silence after which it is dropped; 0: never."""

    label: str
    lease_s: float
    seen_s: float
    parts: dict[int, int] = field(default_factory=dict)
    deliveries: deque[tuple[Delivery, Any]] = field(default_factory=deque)
    delivered: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def has_room(self, window: int) -> bool:
        """Whether it may have this window in flight too."""
        held = self.parts.keys() | {delivery.window for delivery, _ in self.deliveries}
        return window in held or len(held) < MAX_WINDOWS

    def forget(self, after: int) -> None:
        """It has fetched the deliveries up to this number."""
        while self.deliveries and self.deliveries[0][0].number <= after:
            self.deliveries.popleft()


@dataclass(frozen=True, slots=True)
class _Part:
    """A window of a client, or a part of one that was submitted again. tokens: a reference in a list."""

    client: str
    window: int
    tokens: list[Any]


class Clients:
    """The clients of one router and the windows they have in flight, by the key that placement knows."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._parts: dict[str, _Part] = {}
        self._submissions = 0

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients.values())

    def meet(self, name: str, label: str, lease_s: float, now_s: float) -> None:
        """A client comes, or comes again. Raises TooManyClients."""
        if name not in self._clients and len(self._clients) >= MAX_CLIENTS:
            labels = ", ".join(sorted({client.label for client in self})[:5])
            raise TooManyClients(f"the pool has {MAX_CLIENTS} clients, among them {labels}: close some")
        client = self._clients.setdefault(name, Client(label, lease_s, now_s))
        client.seen_s = now_s

    def seen(self, name: str, now_s: float) -> Client | None:
        """A sign of life. None for a client that is not known, or not any more."""
        client = self._clients.get(name)
        if client is not None:
            client.seen_s = now_s
        return client

    def expired(self, now_s: float) -> list[str]:
        """Clients that were silent for longer than their lease."""
        return [n for n, c in self._clients.items() if c.lease_s and now_s - c.seen_s > c.lease_s]

    def drop(self, name: str) -> list[str]:
        """Forget a client. Returns the keys of its windows."""
        if self._clients.pop(name, None) is None:
            return []
        keys = [key for key, part in self._parts.items() if part.client == name]
        for key in keys:
            del self._parts[key]
        return keys

    def open(self, name: str, window: int, tokens: list[Any]) -> str:
        """A window of a client is submitted. Returns the key that it has from now on."""
        self._submissions += 1
        key = f"{name}/{window}/{self._submissions}"
        self._parts[key] = _Part(name, window, tokens)
        parts = self._clients[name].parts
        parts[window] = parts.get(window, 0) + 1
        return key

    def tokens(self, key: str) -> list[Any]:
        """The reference of a window's ids."""
        return self._parts[key].tokens

    def cancel(self, name: str, window: int) -> list[str]:
        """Forget a window of a client. Returns its keys."""
        keys = self.keys_of(name, window)
        for key in keys:
            self.close(key)
        return keys

    def keys_of(self, name: str, window: int) -> list[str]:
        """The keys under which a window of a client is in flight."""
        return [key for key, part in self._parts.items() if (part.client, part.window) == (name, window)]

    def deliver(self, finished: Finished, result: Any, *, last: bool) -> None:
        """Keep what is finished until its client has fetched it. last: nothing of its key will follow."""
        part = self._parts.get(finished.window)
        if part is None:
            return
        client = self._clients[part.client]
        client.delivered += 1
        delivery = Delivery(
            number=client.delivered,
            window=part.window,
            items=finished.items,
            error_class=finished.error_class,
            message=finished.message,
            attempts=finished.attempts,
            rows=finished.rows,
        )
        client.deliveries.append((delivery, result))
        client.news.set()
        if last:
            self.close(finished.window)

    def views(self, now_s: float) -> list[dict[str, Any]]:
        """What is shown of each client."""
        return [
            {
                "client": name,
                "label": client.label,
                "windows": len(client.parts),
                "unfetched": len(client.deliveries),
                "silent_s": now_s - client.seen_s,
            }
            for name, client in self._clients.items()
        ]

    def close(self, key: str) -> None:
        """Nothing of a key will follow."""
        part = self._parts.pop(key)
        parts = self._clients[part.client].parts
        parts[part.window] -= 1
        if not parts[part.window]:
            del parts[part.window]
