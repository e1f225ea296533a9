"""One window of a job: rows in, items to the pool, scores back to rows.

Invariant: each row leaves a window exactly once, as a result or a failure. Equal items are sent once and
fan out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .errors import InfrastructureError, RowError
from .items import Failed, Items, Scored
from .rows import RowFailure
from .tasks import NOTHING_SCORED, ItemScore, RowPlan, RowResult, TaskOptions, finish_row


class Window:
    """Rows that are planned and run together. number is what the pool knows it by."""

    def __init__(self, number: int, plans: Sequence[RowPlan], depth: int, options: TaskOptions) -> None:
        """Pack the parts of all plans; parts without a scored token need no item."""
        self.number = number
        self.num_tokens = 0
        self.num_repeated = 0
        self._options = options
        self._plans = list(plans)
        self._scores: list[list[ItemScore | RowError | None]] = []
        self._missing: list[int] = []
        self._waiting: list[list[tuple[int, int]]] = []
        self._finished: list[RowResult | RowFailure] = []
        self._open = 0
        self.items = self._pack(depth)

    @property
    def is_done(self) -> bool:
        """Whether every row has left."""
        return self._open == 0 and not self._finished

    def take_finished(self) -> list[RowResult | RowFailure]:
        """Rows that are complete and were not taken before."""
        finished, self._finished = self._finished, []
        return finished

    def accept(self, arrival: Scored | Failed) -> None:
        """Note what the pool delivered. A second delivery of an item is counted and dropped: the first one
        holds.

        Raises: InfrastructureError if an item has not as many log-probabilities as scored tokens.
        """
        if isinstance(arrival, Failed):
            self._settle(arrival.item, RowError(arrival.error_class, arrival.message, arrival.attempts))
            return
        offsets = arrival.offsets.tolist()
        values = arrival.logprobs.tolist()
        greedy = arrival.greedy
        for k, item in enumerate(arrival.items.tolist()):
            begin, end = offsets[k], offsets[k + 1]
            expected = int(self.items.n_scored[item])
            if end - begin != expected:
                raise InfrastructureError(
                    f"window {self.number}, item {item}: {expected} tokens are scored, the pool delivered "
                    f"{end - begin} log-probabilities: the replicas do not fit this version"
                )
            self._settle(item, self._item_score(values[begin:end], bool(greedy[begin:end].all())))

    def _item_score(self, values: list[float], is_greedy: bool) -> ItemScore | RowError:
        for place, value in enumerate(values):
            if math.isnan(value) or value == math.inf:
                return RowError("non_finite", f"log-probability of scored token {place} is {value}")
        tokens = tuple(values) if self._options.token_logprobs else ()
        return ItemScore(math.fsum(values), is_greedy, tokens)

    def _settle(self, item: int, score: ItemScore | RowError) -> None:
        waiting = self._waiting[item]
        if not waiting:
            self.num_repeated += 1
            return
        self._waiting[item] = []
        for row, part in waiting:
            self._scores[row][part] = score
            self._missing[row] -= 1
            if self._missing[row] == 0:
                self._finish(row)

    def _finish(self, row: int) -> None:
        scores = [score for score in self._scores[row] if score is not None]
        self._finished.append(finish_row(self._plans[row], scores))
        self._scores[row] = []
        self._open -= 1

    def _pack(self, depth: int) -> Items:
        ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        n_scored: list[int] = []
        item_by_key: dict[tuple[int, bytes], int] = {}
        self._open = len(self._plans)
        for row, plan in enumerate(self._plans):
            scores: list[ItemScore | RowError | None] = [None] * len(plan.parts)
            missing = 0
            for part, encoded in enumerate(plan.parts):
                if encoded.n_continuation == 0:
                    scores[part] = NOTHING_SCORED
                    continue
                missing += 1
                key = (encoded.n_continuation, encoded.ids.tobytes())
                item = item_by_key.setdefault(key, len(ids))
                if item == len(ids):
                    ids.append(encoded.ids)
                    n_scored.append(encoded.n_continuation)
                    self._waiting.append([])
                self._waiting[item].append((row, part))
            self._scores.append(scores)
            self._missing.append(missing)
            if missing == 0:
                self._finish(row)
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in ids], out=offsets[1:])
        self.num_tokens = int(offsets[-1])
        return Items(
            token_ids=np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32),
            offsets=offsets,
            n_scored=np.array(n_scored, dtype=np.int32),
            depth=depth,
        )
