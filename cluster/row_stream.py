"""Rows through a pool without files: windows of them on their way, outcomes in the order of the rows."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .errors import RowError
from .rows import Fields, Row, RowFailure, Task, take_id

COLLECT_TIMEOUT_S = 1.0
MAX_OPEN_WINDOWS = 2

Outcome = TypeVar("Outcome")


class RowWork(Protocol[Outcome]):
    """A kind of work on an open pool. Plans and what was sent are its own."""

    def parse(self, fields: Fields) -> tuple[Task, Fields]:
        """The typed task of a row without its id, and its other fields. Raises RowError."""

    def plan(self, rows: Sequence[Row]) -> Sequence[Any]:
        """One plan or RowFailure a row, in order."""

    def submit(self, plans: Sequence[Any]) -> Any:
        """Send one window. May block while the pool holds too many."""

    def collect(self, timeout_s: float) -> None:
        """Take in what the pool has finished; waits up to timeout_s seconds for something."""

    def take(self, sent: Any) -> list[tuple[int, Outcome | RowFailure]]:
        """Rows that left since the last call, by number."""

    def release(self, sent: Any) -> None:
        """Forget a window whose rows have all left."""

    def give_up(self, sent: Any) -> None:
        """Forget a window that is on its way; the pool drops it where it can."""


@dataclass(slots=True)
class _Begun:
    """A window on its way. outcomes: by row number, what is known already."""

    sent: Any
    numbers: range
    outcomes: dict[int, Any]


def stream_rows(
    work: RowWork[Outcome], rows: Iterable[Mapping[str, Any]], *, window_rows: int
) -> Generator[Outcome | RowFailure, None, None]:
    """One outcome a row, in order; two windows of window_rows are in memory.

    While nobody takes outcomes nothing more is read. Leaving early gives up what is on its way. Raises: what
    the pool raises.
    """
    numbered = enumerate(rows)
    begun: deque[_Begun] = deque()
    try:
        while True:
            # The next window is sent before this one is waited for, so that the pool is never idle between.
            while len(begun) < MAX_OPEN_WINDOWS:
                batch = [_row(work, *one) for one in itertools.islice(numbered, window_rows)]
                if not batch:
                    break
                begun.append(_begin(work, batch))
            if not begun:
                return
            _wait(work, begun[0])
            window = begun.popleft()
            work.release(window.sent)
            for number in window.numbers:
                yield window.outcomes.pop(number)
    finally:
        for window in begun:
            work.give_up(window.sent)


def _begin(work: RowWork[Any], batch: Sequence[Row | RowFailure]) -> _Begun:
    outcomes: dict[int, Any] = {}
    planned = iter(work.plan([row for row in batch if isinstance(row, Row)]))
    plans = []
    for row in batch:
        plan = row if isinstance(row, RowFailure) else next(planned)
        if isinstance(plan, RowFailure):
            outcomes[plan.number] = plan
        else:
            plans.append(plan)
    first = batch[0].number
    return _Begun(work.submit(plans), range(first, first + len(batch)), outcomes)


def _wait(work: RowWork[Any], window: _Begun) -> None:
    while len(window.outcomes) < len(window.numbers):
        left = work.take(window.sent)
        window.outcomes.update(left)
        if not left:
            work.collect(COLLECT_TIMEOUT_S)


def _row(work: RowWork[Any], number: int, fields: Mapping[str, Any]) -> Row | RowFailure:
    remaining, row_id = dict(fields), f"row:{number}"
    try:
        row_id = take_id(remaining) or row_id
        task, extra = work.parse(remaining)
    except RowError as error:
        return RowFailure(number, row_id, "", number + 1, error.error_class, error.message)
    return Row(number, row_id, "", number + 1, task, extra)
