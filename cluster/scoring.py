"""Scoring rows on a pool from Python: the job without files.

for result in score_rows(pool, encoder, [{"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0}]): ...
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..workers.effort import Effort
from .depth_rule import refuse_ungated
from .encoding import Encoder
from .errors import RowError
from .items import ScoringPool
from .rows import Row, RowFailure, parse_task, take_id
from .tasks import RowPlan, RowResult, TaskOptions, encode_rows
from .window import Window

COLLECT_TIMEOUT_S = 1.0


class Scorer:
    """Encodes rows, numbers windows and keeps track of those that are in flight."""

    # Shared by all scorers of a process, so that no two windows of one pool ever have the same number.
    _numbers = itertools.count()

    def __init__(
        self, pool: ScoringPool, encoder: Encoder, depth: int, options: TaskOptions | None = None
    ) -> None:
        self.pool = pool
        self.encoder = encoder
        self.depth = depth
        self.options = options or TaskOptions()
        self._in_flight: dict[int, Window] = {}
        self.num_late = 0
        self.row_loops = self.full_row_loops = 0  # of windows that were released, as of Window

    def plan(self, rows: Sequence[Row]) -> list[RowPlan | RowFailure]:
        """Encode rows; one plan or failure a row, in order."""
        return encode_rows(self.encoder, rows, self.options)

    def submit(self, plans: Sequence[RowPlan]) -> Window:
        """Send one window to the pool. Blocks while the pool holds too many."""
        window = Window(next(self._numbers), plans, self.depth, self.options)
        if len(window.items):
            self._in_flight[window.number] = window
            self.pool.submit(window.number, window.items)
        return window

    def collect(self, timeout_s: float) -> None:
        """Hand what the pool has finished to its windows; waits up to timeout_s seconds for something."""
        for arrival in self.pool.collect(timeout_s):
            window = self._in_flight.get(arrival.window)
            if window is None:
                self.num_late += 1
            else:
                window.accept(arrival)

    def release(self, window: Window) -> None:
        """Forget a window whose rows have all left."""
        self._in_flight.pop(window.number, None)
        self.row_loops += window.row_loops
        self.full_row_loops += window.full_row_loops


def score_rows(
    pool: ScoringPool,
    encoder: Encoder,
    rows: Iterable[Mapping[str, Any]],
    *,
    depth: int,
    options: TaskOptions | None = None,
    cascade: Effort | None = None,
) -> list[RowResult | RowFailure]:
    """Score rows as they would stand in a JSONL file; one result or failure a row, in order.

    cascade: the rule that decides how deep each row goes, in place of depth; .depth of a result says how
    deep it went. Nothing else may use the pool meanwhile. Raises: what the pool raises; UsageError for a row
    without choices where the rule has no exit_threshold.
    """
    if cascade is not None:
        options = replace(options or TaskOptions(), effort=cascade)
    scorer = Scorer(pool, encoder, depth, options)
    outcomes: dict[int, RowResult | RowFailure] = {}
    read = [_row(number, fields) for number, fields in enumerate(rows)]
    refuse_ungated(read, scorer.options.effort)
    planned = iter(scorer.plan([row for row in read if isinstance(row, Row)]))
    plans: list[RowPlan] = []
    for row in read:
        plan = row if isinstance(row, RowFailure) else next(planned)
        if isinstance(plan, RowFailure):
            outcomes[plan.number] = plan
        else:
            plans.append(plan)
    window = scorer.submit(plans)
    while not window.is_done:
        for outcome in window.take_finished():
            outcomes[outcome.number if isinstance(outcome, RowFailure) else outcome.row.number] = outcome
        if not window.is_done:
            scorer.collect(COLLECT_TIMEOUT_S)
    scorer.release(window)
    return [outcomes[number] for number in range(len(read))]


def _row(number: int, fields: Mapping[str, Any]) -> Row | RowFailure:
    remaining = copy.copy(dict(fields))
    row_id = f"row:{number}"
    try:
        row_id = take_id(remaining) or row_id
        task, extra = parse_task(remaining)
    except RowError as error:
        return RowFailure(number, row_id, "", number + 1, error.error_class, error.message)
    return Row(number, row_id, "", number + 1, task, extra)
