"""Generated ids that wait for their clients to fetch them. One lock; nobody waits in here for anything else.

Invariant: of each completion the ids come in order and without a gap, each in one bundle, and a bundle is
kept until its client has named it. What waits is bounded by what a client has not settled, since no more
requests of it are sent here before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .tokens import End, TokenBundle
from .wire import ItemFailure

Owner = tuple[str, int, int]  # client, window, item


@dataclass(slots=True)
class _Waiting:
    """The ids of one completion that are in no bundle yet."""

    first: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    end: End = End.OPEN
    failure: ItemFailure | None = None


@dataclass(slots=True)
class _Client:
    number: int = 0
    sent: TokenBundle | None = None
    waiting: dict[tuple[int, int], _Waiting] = field(default_factory=dict)


class Outbox:
    """Filled by the engine thread, emptied by whoever answers clients.

    on_news: called on the engine thread with each client that has something to fetch.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self.on_news: Callable[[str], None] = lambda client: None

    def begin(self, owner: Owner) -> None:
        """A completion starts, or starts anew: ids of it that were not fetched will come again."""
        client, *place = owner
        with self._lock:
            self._client(client).waiting.pop((place[0], place[1]), None)

    def put(
        self, owner: Owner, first: int, token_ids: list[int], logprobs: list[float], depths: list[int]
    ) -> None:
        """Ids of a completion that has `first` before them."""
        with self._lock:
            waiting = self._waiting(owner, first)
            waiting.token_ids += token_ids
            waiting.logprobs += logprobs
            waiting.depths += depths

    def end(self, owner: Owner, length: int, end: End, failure: ItemFailure | None = None) -> None:
        """A completion of that many ids has ended."""
        with self._lock:
            waiting = self._waiting(owner, length)
            waiting.end, waiting.failure = end, failure

    def tell(self, clients: set[str]) -> None:
        """Say to on_news who has something to fetch."""
        for client in clients:
            self.on_news(client)

    def take(self, client: str, after: int) -> TokenBundle | None:
        """The bundle after the one numbered `after`: the last one again, or all that has come since; or None.

        A client that names a bundle it cannot have gets None, as one that is up to date.
        """
        with self._lock:
            box = self._client(client)
            if box.sent is not None and after < box.number:
                return box.sent
            box.sent = None
            if not box.waiting:
                return None
            box.number += 1
            box.sent = _bundle(box.number, box.waiting)
            box.waiting = {}
            return box.sent

    def _client(self, client: str) -> _Client:
        return self._clients.setdefault(client, _Client())

    def _waiting(self, owner: Owner, first: int) -> _Waiting:
        client, window, item = owner
        waiting = self._client(client).waiting.setdefault((window, item), _Waiting(first))
        known = waiting.first + len(waiting.token_ids)
        assert known == first, f"ids of {owner} up to {known} are known, and those from {first} came"
        return waiting


def _bundle(number: int, waiting: dict[tuple[int, int], _Waiting]) -> TokenBundle:
    entries = list(waiting.values())
    places = np.array(list(waiting), dtype=np.int64).reshape(-1, 2)

    def joined(name: str, dtype: type) -> NDArray[Any]:
        return np.array([value for entry in entries for value in getattr(entry, name)], dtype=dtype)

    return TokenBundle(
        number=number,
        windows=places[:, 0],
        items=places[:, 1].astype(np.int32),
        first=np.array([entry.first for entry in entries], dtype=np.int32),
        ends=np.array([entry.end for entry in entries], dtype=np.uint8),
        offsets=np.cumsum([0, *(len(entry.token_ids) for entry in entries)], dtype=np.int64),
        token_ids=joined("token_ids", np.int32),
        logprobs=joined("logprobs", np.float32),
        depths=joined("depths", np.int32),
        failures=tuple(entry.failure for entry in entries if entry.failure is not None),
    )
