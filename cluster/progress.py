"""How far a job is: a bar on a terminal, a plain line every 30 s elsewhere, progress.json for other tools."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO

from .errors import InfrastructureError

LINE_INTERVAL_S = 30.0
FILE_INTERVAL_S = 2.0
# Every answer costs the router time.
FIGURES_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What a pool knows of itself. Tokens are prompt tokens of the items delivered so far.

    hit_rate: share of tokens that were not computed because a prefix held them; ideal_hit_rate: the largest
    share possible.
    """

    replicas: int = 0
    replicas_alive: int = 0
    hit_rate: float | None = None
    ideal_hit_rate: float | None = None
    detail: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a job.

    Rows are those of all runs of this folder; rate is of this run alone, in rows per second.
    """

    state: str
    rows_done: int
    rows_total: int
    errors: int
    rate_per_s: float
    eta_s: float | None
    elapsed_s: float
    idle_s: float
    pool: PoolFigures


class Display(Protocol):
    """Something that shows snapshots to a person."""

    def show(self, snapshot: Snapshot) -> None:
        """Called several times a second."""

    def close(self) -> None:
        """The last snapshot was shown."""


def describe(snapshot: Snapshot) -> str:
    """One line of text: rows, rate, ETA, hit rate, replicas, errors."""
    share = 100.0 * snapshot.rows_done / snapshot.rows_total if snapshot.rows_total else 100.0
    parts = [
        f"{snapshot.rows_done:,}/{snapshot.rows_total:,} rows ({share:.0f} %)",
        f"{snapshot.rate_per_s:,.1f} rows/s",
        f"ETA {clock(snapshot.eta_s)}",
    ]
    if snapshot.pool.hit_rate is not None:
        parts.append(f"hit rate {100 * snapshot.pool.hit_rate:.1f} %")
    if snapshot.pool.replicas:
        parts.append(f"replicas {snapshot.pool.replicas_alive}/{snapshot.pool.replicas}")
    parts.append(f"errors {snapshot.errors:,}")
    return ", ".join(parts)


def clock(seconds: float | None) -> str:
    """Seconds as m:ss or h:mm:ss; '-' if unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def counted(number: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


class LineDisplay:
    """A plain line every 30 s, for logs."""

    def __init__(self, stream: TextIO, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock_s = clock_s
        self._due_s = clock_s() + LINE_INTERVAL_S

    def show(self, snapshot: Snapshot) -> None:
        if self._clock_s() >= self._due_s:
            self._due_s = self._clock_s() + LINE_INTERVAL_S
            print(describe(snapshot), file=self._stream, flush=True)

    def close(self) -> None:
        self._stream.flush()


class BarDisplay:
    """A bar in rows, for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        # Imported here: rich takes longer to load than a short command should take.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=Console(file=stream),
            transient=True,
        )
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, snapshot: Snapshot) -> None:
        self._progress.update(
            self._task,
            total=max(1, snapshot.rows_total),
            completed=snapshot.rows_done,
            description=describe(snapshot),
        )

    def close(self) -> None:
        self._progress.stop()


def display_for(stream: TextIO = sys.stderr) -> Display:
    """A bar if the stream is a terminal, else lines."""
    return BarDisplay(stream) if stream.isatty() else LineDisplay(stream)


class Progress:
    """Counts rows and tells the display and the file. Nothing that it does may stop a job."""

    def __init__(
        self,
        rows_total: int,
        display: Display,
        write_file: Callable[[dict[str, Any]], None],
        figures: Callable[[], PoolFigures],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows_total = rows_total
        self._display = display
        self._write_file = write_file
        self._figures = figures
        self._clock_s = clock_s
        self._start_s = self._moved_s = clock_s()
        self._file_due_s = self._figures_due_s = self._start_s
        self._latest_figures = PoolFigures()
        self._rows_before = 0
        self.rows_done = 0
        self.errors = 0

    def begin_at(self, rows_done: int, errors: int) -> None:
        """Rows that earlier runs finished: they count as done and not for the rate."""
        self._rows_before = self.rows_done = rows_done
        self.errors = errors

    def advance(self, rows: int, errors: int) -> None:
        """Note newly finished rows, errors among them."""
        self.rows_done += rows
        self.errors += errors
        self._moved_s = self._clock_s()

    def tell(self, state: str = "running", *, force: bool = False) -> Snapshot:
        """Show where the job is; progress.json is renewed every 2 s, or now with force."""
        if force or self._clock_s() >= self._figures_due_s:
            self._figures_due_s = self._clock_s() + FIGURES_INTERVAL_S
            self._latest_figures = self._figures()
        snapshot = self._snapshot(state)
        self._display.show(snapshot)
        if force or self._clock_s() >= self._file_due_s:
            self._file_due_s = self._clock_s() + FILE_INTERVAL_S
            try:
                self._write_file(asdict(snapshot))
            except InfrastructureError:
                # A full disk is met, and said, where results are written.
                return snapshot
        return snapshot

    def close(self) -> None:
        """Take the display down."""
        self._display.close()

    def _snapshot(self, state: str) -> Snapshot:
        now = self._clock_s()
        elapsed = now - self._start_s
        scored = self.rows_done - self._rows_before
        rate = scored / elapsed if elapsed > 0 else 0.0
        return Snapshot(
            state=state,
            rows_done=self.rows_done,
            rows_total=self._rows_total,
            errors=self.errors,
            rate_per_s=rate,
            eta_s=(self._rows_total - self.rows_done) / rate if rate > 0 else None,
            elapsed_s=elapsed,
            idle_s=now - self._moved_s,
            pool=self._latest_figures,
        )
