"""One window of a job: rows in, items to the pool, scores back to rows.

Invariant: each row leaves a window exactly once, as a result or a failure. Equal items are sent once and
fan out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..workers.effort import Effort
from .errors import InfrastructureError, RowError
from .items import Failed, Groups, Items, Scored
from .rows import Choices, RowFailure
from .tasks import NOTHING_SCORED, ItemScore, RowPlan, RowResult, TaskOptions, finish_row


class Window:
    """Rows that are planned and run together. number is what the pool knows it by.

    row_loops, full_row_loops: rows of the engine times loops, of what has come back, where a rule decides on
    depth: those that were run, and those that the rule's last depth would have been.
    """

    def __init__(self, number: int, plans: Sequence[RowPlan], depth: int, options: TaskOptions) -> None:
        """Pack the parts of all plans; parts without a scored token need no item.

        depth: of all items, unless options leave it to a rule.
        """
        self.number = number
        self.num_tokens = 0
        self.num_repeated = 0
        self.row_loops = self.full_row_loops = 0
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
        self.row_loops += arrival.row_loops
        self.full_row_loops += arrival.full_row_loops
        depths = (
            [self.items.depth] * len(arrival.items) if arrival.depths is None else arrival.depths.tolist()
        )
        for k, item in enumerate(arrival.items.tolist()):
            begin, end = offsets[k], offsets[k + 1]
            expected = int(self.items.n_scored[item])
            if end - begin != expected:
                raise InfrastructureError(
                    f"window {self.number}, item {item}: {expected} tokens are scored, the pool delivered "
                    f"{end - begin} log-probabilities: the replicas do not fit this version"
                )
            self._settle(item, self._item_score(values[begin:end], bool(greedy[begin:end].all()), depths[k]))

    def _item_score(self, values: list[float], is_greedy: bool, depth: int) -> ItemScore | RowError:
        for place, value in enumerate(values):
            if math.isnan(value) or value == math.inf:
                return RowError("non_finite", f"log-probability of scored token {place} is {value}")
        tokens = tuple(values) if self._options.token_logprobs else ()
        return ItemScore(math.fsum(values), is_greedy, tokens, depth)

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
        effort = self._options.effort
        ids: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        n_scored: list[int] = []
        item_by_key: dict[tuple[tuple[int, bytes], ...], int] = {}
        group_ends: list[int] = []
        compared: list[bool] = []
        self._open = len(self._plans)
        for row, plan in enumerate(self._plans):
            scores: list[ItemScore | RowError | None] = [None] * len(plan.parts)
            missing = 0
            for group, num_compared in _groups(plan, effort):
                encoded = plan.parts[group.start]
                if len(group) == 1 and encoded.n_continuation == 0:
                    scores[group.start] = NOTHING_SCORED
                    continue
                missing += len(group)
                parts = [plan.parts[part] for part in group]
                key = tuple((part.n_continuation, part.ids.tobytes()) for part in parts)
                first = item_by_key.setdefault(key, len(ids))
                if first == len(ids):
                    ids += [part.ids for part in parts]
                    n_scored += [part.n_continuation for part in parts]
                    self._waiting += [[] for _ in parts]
                    group_ends.append(len(ids))
                    compared += [place < num_compared for place in range(len(parts))]
                for place, part_number in enumerate(group):
                    self._waiting[first + place].append((row, part_number))
            self._scores.append(scores)
            self._missing.append(missing)
            if missing == 0:
                self._finish(row)
        offsets = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in ids], out=offsets[1:])
        self.num_tokens = int(offsets[-1])
        groups = None
        if effort is not None:
            ends = np.array([0, *group_ends], dtype=np.int64)
            groups = Groups(ends, np.array(compared, dtype=np.bool_), effort)
        return Items(
            token_ids=np.concatenate(ids) if ids else np.zeros(0, dtype=np.int32),
            offsets=offsets,
            n_scored=np.array(n_scored, dtype=np.int32),
            depth=effort.build_depth if effort else depth,
            groups=groups,
        )


def _groups(plan: RowPlan, effort: Effort | None) -> list[tuple[range, int]]:
    """Parts that must go to one depth, and how many of each group are compared: the choices of a row.

    At a fixed depth each part is on its own, so that equal ones of all rows are sent once.
    """
    task = plan.row.task
    if effort is not None and isinstance(task, Choices):
        return [(range(len(plan.parts)), len(task.choices))]
    return [(range(part, part + 1), 1) for part in range(len(plan.parts))]
