"""Requests of every kind as one window, and what a replica's bundles add up to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tinyloop.workers.outbox import Outbox
from tinyloop.workers.prompts import DTYPES, RAGGED, SETTINGS, Prompts
from tinyloop.workers.tokens import End, decode_tokens, encode_tokens

PLAIN: dict[str, Any] = {
    "max_new_tokens": 8,
    "depth": 2,
    "min_depth": 1,
    "exit_threshold": np.inf,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "seed": 0,
    "stop_ids": [],
}
Found = tuple[list[int], list[float], list[int], str]
Item = tuple[Sequence[int], dict[str, Any]]


def prompts_of(items: Sequence[Item], client: str = "c", window: int = 0) -> Prompts:
    """One window of (ids, settings that differ from PLAIN)."""
    rows = [PLAIN | settings for _, settings in items]
    columns = {name: np.array([row[name] for row in rows], dtype=DTYPES[name]) for name in SETTINGS}
    ragged = {"token_ids": [ids for ids, _ in items], "stop_ids": [row["stop_ids"] for row in rows]}
    for name, lists in ragged.items():
        columns[name] = np.array([i for one in lists for i in one], dtype=DTYPES[name])
        columns[RAGGED[name]] = np.cumsum([0, *map(len, lists)], dtype=np.int64)
    return Prompts(client=client, window=window, **columns)


def mixed_items(count: int, vocab: int, depths: int, length: int = 40) -> list[Item]:
    """Greedy and drawn, short and long, of all depths, with stops, penalties and early exits."""
    items: list[Item] = []
    for i in range(count):
        random = np.random.default_rng(i)
        settings: dict[str, Any] = {"depth": 1 + i % depths, "max_new_tokens": 1 + (11 * i) % 30}
        if i % 3 == 0:
            settings |= {"temperature": 1.0, "seed": 2**63 + i, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
        if i % 4 == 0:
            settings |= {"stop_ids": random.integers(0, vocab, vocab // 20 + 1).tolist()}
        if i % 5 == 0:
            settings |= {"repetition_penalty": 1.3}
        if i % 7 == 0 and depths > 1:
            settings |= {"depth": depths, "exit_threshold": 0.3}
        items.append((random.integers(0, vocab, 1 + (37 * i) % length).tolist(), settings))
    return items


class Collected:
    """What the bundles of one client bring, checked as they come: each id once, in order."""

    def __init__(self, client: str = "c") -> None:
        self.client, self.after = client, 0
        self.ids: dict[tuple[int, int], tuple[list[int], list[float], list[int]]] = {}
        self.ends: dict[tuple[int, int], str] = {}
        self.failures: dict[tuple[int, int], str] = {}
        self.bundles = 0

    def fetch(self, outbox: Outbox) -> bool:
        bundle = outbox.take(self.client, self.after)
        if bundle is None:
            return False
        self.take(encode_tokens(bundle))
        return True

    def take(self, message: bytes) -> None:
        bundle = decode_tokens(message)
        assert bundle.number == self.after + 1
        self.after, self.bundles = bundle.number, self.bundles + 1
        failures = list(bundle.failures)
        bounds = bundle.offsets.tolist()
        for entry, place in enumerate(zip(bundle.windows.tolist(), bundle.items.tolist(), strict=True)):
            mine = self.ids.setdefault(place, ([], [], []))
            assert place not in self.ends
            assert len(mine[0]) == bundle.first[entry]
            for column, values in zip(mine, (bundle.token_ids, bundle.logprobs, bundle.depths), strict=True):
                column.extend(values[bounds[entry] : bounds[entry + 1]].tolist())
            end = End(int(bundle.ends[entry]))
            if end is End.FAILED:
                failure = failures.pop(0)
                assert failure.item == place[1]
                self.failures[place] = failure.error_class
            if end is not End.OPEN:
                self.ends[place] = end.name.lower()
        assert not failures

    def completion(self, item: int, window: int = 0) -> Found:
        return (*self.ids[window, item], self.ends[window, item])
