"""Input rows to planned windows: read, skip what is committed, take what the journal has, plan the rest.

Invariant: windows follow each other without a gap from the first row that is not committed, whatever their
sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .inputs import InputFile, read_rows
from .kinds import Kind, Plan, Sent, Work
from .records import failure_line
from .rows import Row, RowFailure
from .settings import FIRST_WINDOW_ROWS, JobSettings
from .summary import IdSum

# Rows are encoded in batches, which tokenizers spread over all cores; signals are looked at between batches.
BATCH_ROWS = 1_024
BATCH_CHARACTERS = 4 << 20
# A window of long rows is closed early: it is held in memory, twice.
WINDOW_CHARACTERS = 64 << 20
WINDOW_TOKENS = 16 << 20


class KeptLines(Protocol):
    """Lines of rows that need not be made again."""

    def pop(self, number: int) -> bytes | None:
        """The line of the next row that is asked for, None if it has to be made."""


@dataclass
class OpenWindow:
    """Rows [begin, begin + len(lines)) on their way: lines are filled in as rows leave."""

    begin: int
    lines: list[bytes | None] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    num_missing: int = 0
    num_tokens: int = 0
    num_characters: int = 0
    sent: Sent | None = None


class WindowReader:
    """Reads the inputs of one job once.

    ids sums up the ids of all rows that were read, committed ones included.
    """

    def __init__(
        self,
        settings: JobSettings,
        files: list[InputFile],
        kind: Kind,
        work: Work,
        first_row: int,
        kept: KeptLines,
        after_batch: Callable[[int], None],
    ) -> None:
        """first_row: rows before it are committed. kept: lines of later rows that are not made again.

        after_batch: called after each batch with the number of its rows that failed; what it raises ends
        the reading.
        """
        self._settings = settings
        self._files = files
        self._kind = kind
        self._work = work
        self._first_row = first_row
        self._kept = kept
        self._after_batch = after_batch
        self.rows_total = total_rows(settings, files)
        self.ids = IdSum()

    def windows(self) -> Iterator[OpenWindow]:
        """Planned windows of rows that are not committed: 2,048 rows first, then doubling."""
        most = self._settings.max_window_rows or max(1, self.rows_total)
        size = most if self._settings.max_window_rows is None else min(FIRST_WINDOW_ROWS, most)
        window = OpenWindow(self._first_row)
        for batch in self._batches():
            self._after_batch(self._add(window, batch))
            is_large = window.num_tokens >= WINDOW_TOKENS or window.num_characters >= WINDOW_CHARACTERS
            if len(window.lines) >= size or is_large:
                yield window
                window = OpenWindow(window.begin + len(window.lines))
                size = min(2 * size, most)
        if window.lines:
            yield window

    def _batches(self) -> Iterator[list[Row | RowFailure]]:
        """Rows that are not committed, in batches. Every row's id is noted, committed or not."""
        batch_rows = min(BATCH_ROWS, self._settings.max_window_rows or BATCH_ROWS)
        batch: list[Row | RowFailure] = []
        num_characters = 0
        rows = read_rows(
            self._files, limit=self._settings.limit, parse=self._kind.parse, columns=self._kind.columns
        )
        for row in rows:
            self.ids.add(row.id)
            if row.number < self._first_row:
                continue
            batch.append(row)
            num_characters += self._characters(row)
            if len(batch) >= batch_rows or num_characters >= BATCH_CHARACTERS:
                yield batch
                batch, num_characters = [], 0
        if batch:
            yield batch

    def _add(self, window: OpenWindow, batch: list[Row | RowFailure]) -> int:
        """Plan a batch into a window. Returns how many of its rows failed."""
        first = len(window.lines)
        window.lines += [self._kept.pop(row.number) for row in batch]
        fresh = [row for row, line in zip(batch, window.lines[first:], strict=True) if line is None]
        plans = iter(self._work.plan([row for row in fresh if isinstance(row, Row)]))
        num_failed = 0
        for row in fresh:
            plan = row if isinstance(row, RowFailure) else next(plans)
            if isinstance(plan, RowFailure):
                window.lines[plan.number - window.begin] = failure_line(plan)
                num_failed += 1
            else:
                window.plans.append(plan)
                window.num_missing += 1
                window.num_tokens += plan.num_tokens
                window.num_characters += self._characters(plan.row)
        return num_failed

    def _characters(self, row: Row | RowFailure) -> int:
        return 0 if isinstance(row, RowFailure) else self._kind.characters(row.task)


def total_rows(settings: JobSettings, files: list[InputFile]) -> int:
    """Rows that the job will read."""
    total = sum(file.num_rows for file in files)
    return total if settings.limit is None else min(total, settings.limit)
