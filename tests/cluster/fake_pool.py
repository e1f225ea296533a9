"""A pool in this process whose log-probabilities are a pure function of the token ids.

The oracle of the job's tests.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable

import numpy as np
from tinyloop.cluster.items import Failed, Items, Scored


def fake_logprob(prefix: np.ndarray, token: int, depth: int) -> np.float32:
    """ln p of token after prefix: negative, exact in FP32, different for nearly any two arguments."""
    key = np.asarray(prefix, dtype="<i4").tobytes() + int(token).to_bytes(4, "little") + bytes([depth])
    code = int.from_bytes(hashlib.blake2b(key, digest_size=3).digest(), "little")
    return np.float32(-(code + 1) / 2**20)


def fake_scores(ids: np.ndarray, n_scored: int, depth: int) -> list[np.float32]:
    """Log-probabilities of the last n_scored ids."""
    return [fake_logprob(ids[:i], ids[i], depth) for i in range(len(ids) - n_scored, len(ids))]


class FakePool:
    """Delivers items shuffled, a few at a time, of all windows at once, as replicas would."""

    def __init__(
        self,
        *,
        seed: int = 0,
        items_per_collect: int = 37,
        override: Callable[[np.ndarray, list[np.float32]], list[np.float32] | str] | None = None,
        on_collect: Callable[[int], None] | None = None,
    ) -> None:
        """override: may change the scores of an item's ids, or name the class of a failure."""
        self.random = random.Random(seed)
        self.items_per_collect = items_per_collect
        self.override = override
        self.on_collect = on_collect
        self.queue: deque[tuple[int, int]] = deque()
        self.windows: dict[int, Items] = {}
        self.num_scored = 0
        self.num_collects = 0
        self.max_windows_waiting = 0

    def submit(self, window: int, items: Items) -> None:
        assert window not in self.windows
        assert items.token_ids.dtype == np.int32
        assert items.offsets.dtype == np.int64
        lengths = np.diff(items.offsets)
        assert (items.n_scored >= 1).all()
        assert (items.n_scored <= lengths - 1).all()
        self.windows[window] = items
        waiting = [*self.queue, *((window, i) for i in range(len(items)))]
        self.random.shuffle(waiting)
        self.queue = deque(waiting)
        self.max_windows_waiting = max(self.max_windows_waiting, len({w for w, _ in waiting}))

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        self.num_collects += 1
        if self.on_collect is not None:
            self.on_collect(self.num_collects)
        taken = [self.queue.popleft() for _ in range(min(self.items_per_collect, len(self.queue)))]
        arrivals: list[Scored | Failed] = []
        for window in sorted({w for w, _ in taken}):
            arrivals += self._deliver(window, [i for w, i in taken if w == window])
        return arrivals

    def _deliver(self, window: int, indices: list[int]) -> list[Scored | Failed]:
        items = self.windows[window]
        arrivals: list[Scored | Failed] = []
        scored: list[tuple[int, list[np.float32]]] = []
        for i in indices:
            ids = items.token_ids[items.offsets[i] : items.offsets[i + 1]]
            scores: list[np.float32] | str = fake_scores(ids, int(items.n_scored[i]), items.depth)
            if self.override is not None and not isinstance(scores, str):
                scores = self.override(ids, scores)
            if isinstance(scores, str):
                arrivals.append(Failed(window, i, scores, "made to fail", 3))
            else:
                scored.append((i, scores))
        self.num_scored += len(indices)
        values = [value for _, scores in scored for value in scores]
        arrivals.append(
            Scored(
                window=window,
                items=np.array([i for i, _ in scored], dtype=np.int32),
                logprobs=np.array(values, dtype=np.float32),
                greedy=np.array([value > np.float32(-8.0) for value in values], dtype=np.bool_),
                offsets=np.cumsum([0, *(len(scores) for _, scores in scored)], dtype=np.int64),
            )
        )
        return arrivals
