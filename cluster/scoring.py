"""Scoring rows on a pool from Python: the job without files.

for result in score_rows(pool, encoder, [{"context": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0}]): ...
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .encoding import Encoder
from .errors import RowError
from .items import CancellingPool, ScoringPool
from .rows import Row, RowFailure, parse_task, take_id
from .tasks import RowPlan, RowResult, TaskOptions, encode_rows
from .window import Window

COLLECT_TIMEOUT_S = 1.0
MAX_OPEN_WINDOWS = 2


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

    def plan(self, rows: Sequence[Row]) -> list[RowPlan | RowFailure]:
        """Encode rows; one plan or failure a row, in order."""
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

    def release(self, window: Window) -> None:
        """Forget a window whose rows have all left."""
        self._in_flight.pop(window.number, None)

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
) -> list[RowResult | RowFailure]:
    """Score rows as they would stand in a JSONL file; one result or failure a row, in order.

    Nothing else may use the pool meanwhile. Raises: what the pool raises.
    """
    scorer = Scorer(pool, encoder, depth, options)
    rows = list(rows)
    return list(score_windows(scorer, rows, window_rows=max(len(rows), 1)))


def score_windows(
    scorer: Scorer, rows: Iterable[Mapping[str, Any]], *, window_rows: int
) -> Iterator[RowResult | RowFailure]:
    """Score rows in windows of window_rows, of which two at most are in memory; outcomes come in order.

    While nobody takes outcomes nothing more is read. Leaving early gives up what is on its way, where the
    pool can. Raises: what the pool raises.
    """
    numbered = enumerate(rows)
    open_windows: deque[_Begun] = deque()
    try:
        while True:
            while len(open_windows) < MAX_OPEN_WINDOWS:
                batch = [_row(number, fields) for number, fields in itertools.islice(numbered, window_rows)]
                if not batch:
                    break
                open_windows.append(_begin(scorer, batch))
            if not open_windows:
                return
            yield from _finish(scorer, open_windows[0])
            open_windows.popleft()
    finally:
        for begun in open_windows:
            scorer.give_up(begun.window)


@dataclass(slots=True)
class _Begun:
    """A window on its way. outcomes: by row number, what is known of it already."""

    window: Window
    numbers: range
    outcomes: dict[int, RowResult | RowFailure]


def _begin(scorer: Scorer, batch: Sequence[Row | RowFailure]) -> _Begun:
    outcomes: dict[int, RowResult | RowFailure] = {}
    planned = iter(scorer.plan([row for row in batch if isinstance(row, Row)]))
    plans: list[RowPlan] = []
    for row in batch:
        plan = row if isinstance(row, RowFailure) else next(planned)
        if isinstance(plan, RowFailure):
            outcomes[plan.number] = plan
        else:
            plans.append(plan)
    first = batch[0].number
    return _Begun(scorer.submit(plans), range(first, first + len(batch)), outcomes)


def _finish(scorer: Scorer, begun: _Begun) -> Iterator[RowResult | RowFailure]:
    while not begun.window.is_done:
        for outcome in begun.window.take_finished():
            begun.outcomes[outcome.number if isinstance(outcome, RowFailure) else outcome.row.number] = (
                outcome
            )
        if not begun.window.is_done:
            scorer.collect(COLLECT_TIMEOUT_S)
    scorer.release(begun.window)
    for number in begun.numbers:
        yield begun.outcomes.pop(number)


def _row(number: int, fields: Mapping[str, Any]) -> Row | RowFailure:
    remaining = copy.copy(dict(fields))
    row_id = f"row:{number}"
    try:
        row_id = take_id(remaining) or row_id
        task, extra = parse_task(remaining)
    except RowError as error:
        return RowFailure(number, row_id, "", number + 1, error.error_class, error.message)
    return Row(number, row_id, "", number + 1, task, extra)
