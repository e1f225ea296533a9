"""Scoring rows on a pool from Python: the job without files.

for result in score_rows(pool, encoder, [{"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0}]): ...
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..workers.effort import Effort
from .depth_rule import refuse_ungated
from .encoding import Encoder
from .items import CancellingPool, ScoringPool
from .row_stream import RowWork, stream_rows
from .rows import Fields, Row, RowFailure, Task, parse_task
from .tasks import RowPlan, RowResult, TaskOptions, encode_rows
from .window import Window


class Scorer:
    """Encodes rows, numbers windows and keeps track of those that are in flight."""

    # Shared by all scorers of a process, so that no two windows of one pool ever have the same number.
    _numbers = itertools.count()

    def __init__(
        self,
        pool: ScoringPool,
        encoder: Encoder,
        depth: int,
        options: TaskOptions | None = None,
        in_flight: dict[int, Window] | None = None,
    ) -> None:
        """in_flight: shared by the scorers of one pool, so that whichever collects serves them all."""
        self.pool = pool
        self.encoder = encoder
        self.depth = depth
        self.options = options or TaskOptions()
        self._in_flight: dict[int, Window] = {} if in_flight is None else in_flight
        self.num_late = 0
        self.row_loops = self.full_row_loops = 0  # of windows that were released, as of Window

    def parse(self, fields: Fields) -> tuple[Task, Fields]:
        """The typed task of a row without its id, and its other fields. Raises RowError."""
        return parse_task(fields)

    def plan(self, rows: Sequence[Row]) -> list[RowPlan | RowFailure]:
        """Encode rows; one plan or failure a row, in order. Raises: UsageError (refuse_ungated)."""
        refuse_ungated(rows, self.options.effort)
        return encode_rows(self.encoder, rows, self.options)

    def submit(self, plans: Sequence[RowPlan]) -> Window:
        """Send one window to the pool. Blocks while the pool holds too many."""
        window = Window(next(self._numbers), plans, self.depth, self.options)
        if len(window.items):
            self.pool.submit(window.number, window.items)
            self._in_flight[window.number] = window
        return window

    def collect(self, timeout_s: float) -> None:
        """Hand what the pool has finished to its windows; waits up to timeout_s seconds for something."""
        for arrival in self.pool.collect(timeout_s):
            window = self._in_flight.get(arrival.window)
            if window is None:
                self.num_late += 1
            else:
                window.accept(arrival)

    def take(self, window: Window) -> list[tuple[int, RowResult | RowFailure]]:
        """Rows that left the window since the last call, by number."""
        finished = window.take_finished()
        return [(one.number if isinstance(one, RowFailure) else one.row.number, one) for one in finished]

    def release(self, window: Window) -> None:
        """Forget a window whose rows have all left."""
        self._in_flight.pop(window.number, None)
        self.row_loops += window.row_loops
        self.full_row_loops += window.full_row_loops

    def give_up(self, window: Window) -> None:
        """Forget a window that is on its way, and have the pool drop it where it can."""
        if self._in_flight.pop(window.number, None) is not None and isinstance(self.pool, CancellingPool):
            self.pool.cancel(window.number)


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
    rows = list(rows)
    scorer = Scorer(pool, encoder, depth, options)
    work: RowWork[RowResult] = scorer
    outcomes = stream_rows(work, rows, window_rows=max(len(rows), 1))
    return list(outcomes)
