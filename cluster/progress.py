"""How far a job is: a bar on a terminal, a plain line every 30 s elsewhere; also the clock of its files
progress.json and timeline.json.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TextIO

from .errors import InfrastructureError
from .lanes import ReplicaMoment
from .timeline import Moment, Timeline

LINE_INTERVAL_S = 30.0
FILE_INTERVAL_S = 2.0
# Every answer costs the router time.
FIGURES_INTERVAL_S = 1.0
# A kill loses at most so much of the story, and nothing else.
TIMELINE_INTERVAL_S = 15.0
# Longer than any command of a pool should take: who waits is told which rows are awaited.
STALL_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class PoolFigures:
    """What a pool knows of itself. Tokens are prompt tokens of the items delivered so far.

    hit_rate: share of tokens that were not computed because a prefix held them; ideal_hit_rate: the largest
    share possible. moments: each replica as the router sees it now.
    """

    replicas: int = 0
    replicas_alive: int = 0
    hit_rate: float | None = None
    ideal_hit_rate: float | None = None
    detail: dict[str, Any] | None = None
    moments: tuple[ReplicaMoment, ...] = ()


@dataclass(frozen=True, slots=True)
class Awaited:
    """A window that waits for rows. rows: how many; first: where the first few of them stand in the input."""

    begin: int
    rows: int
    waited_s: float
    first: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of a job.

    Rows are those of all runs of this folder; rate is of this run alone, in rows per second. idle_s: since a
    row last came back. awaited: only beyond STALL_LIMIT_S of that.
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
    awaited: tuple[Awaited, ...] = ()


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
    if snapshot.awaited:
        parts.append(f"nothing came back for {clock(snapshot.idle_s)}")
    return ", ".join(parts)


def stall_lines(snapshot: Snapshot) -> list[str]:
    """What is awaited, and who should be working on it. Empty unless the job stalls."""
    lines = [
        f"stalled: window of row {window.begin}: {counted(window.rows, 'row')} awaited for "
        f"{clock(window.waited_s)}, first {', '.join(window.first)}"
        for window in snapshot.awaited
    ]
    if lines:
        lines += [
            f"stalled: replica {moment.slot} on {moment.host or 'an unknown host'} is {moment.state}, "
            f"{counted(moment.in_flight, 'command')} sent to it"
            for moment in snapshot.pool.moments
        ]
    return lines


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
            for line in (describe(snapshot), *stall_lines(snapshot)):
                print(line, file=self._stream, flush=True)

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
        self._is_stalled = False

    def show(self, snapshot: Snapshot) -> None:
        if snapshot.awaited and not self._is_stalled:
            # Once a stall: printed above the bar.
            self._progress.console.print("\n".join(stall_lines(snapshot)), markup=False, highlight=False)
        self._is_stalled = bool(snapshot.awaited)
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
    """Counts rows and tells the display and the files. Nothing that it does may stop a job."""

    def __init__(
        self,
        rows_total: int,
        display: Display,
        write_file: Callable[[Snapshot], None],
        figures: Callable[[], PoolFigures],
        clock_s: Callable[[], float] = time.monotonic,
        *,
        timeline: Timeline | None = None,
        write_timeline: Callable[[dict[str, Any]], None] = lambda content: None,
    ) -> None:
        self._rows_total = rows_total
        self._display = display
        self._write_file = write_file
        self._write_timeline = write_timeline
        self._figures = figures
        self._clock_s = clock_s
        self._start_s = self._moved_s = clock_s()
        self._file_due_s = self._figures_due_s = self._timeline_due_s = self._start_s
        self._latest_figures = PoolFigures()
        self._awaited: Callable[[], Sequence[Awaited]] = tuple
        self._rows_before = 0
        self._num_tokens = 0
        self.timeline = timeline or Timeline(clock_s=clock_s)
        self.rows_done = 0
        self.errors = 0

    def begin_at(self, rows_done: int, errors: int) -> None:
        """Rows that earlier runs finished: they count as done and not for the rate."""
        self._rows_before = self.rows_done = rows_done
        self.errors = errors

    def ask_when_stalled(self, awaited: Callable[[], Sequence[Awaited]]) -> None:
        """Who knows which rows are awaited; asked only beyond STALL_LIMIT_S without one coming back."""
        self._awaited = awaited

    def window_sent(self, begin: int, rows: int, tokens: int) -> None:
        """Note a window that was handed to the pool; rows: those that it must work on."""
        self._num_tokens += tokens
        self._moved_s = self._clock_s()
        self.timeline.window_sent(begin, rows, tokens)

    def advance(self, rows: int, errors: int) -> None:
        """Note newly finished rows, errors among them."""
        self.rows_done += rows
        self.errors += errors
        self._moved_s = self._clock_s()

    def tell(self, state: str = "running", *, force: bool = False) -> Snapshot:
        """Show where the job is; progress.json is renewed every 2 s, or now with force."""
        is_due = force or self._clock_s() >= self._figures_due_s
        if is_due:
            self._figures_due_s = self._clock_s() + FIGURES_INTERVAL_S
            self._latest_figures = self._figures()
        snapshot = self._snapshot(state)
        self._display.show(snapshot)
        if is_due:
            self.timeline.sample(self._moment(), force=force)
        if force or self._clock_s() >= self._file_due_s:
            self._file_due_s = self._clock_s() + FILE_INTERVAL_S
            self._write(snapshot, force)
        return snapshot

    def close(self) -> None:
        """Take the display down."""
        self._display.close()

    def _write(self, snapshot: Snapshot, force: bool) -> None:
        try:
            self._write_file(snapshot)
            if force or self._clock_s() >= self._timeline_due_s:
                self._timeline_due_s = self._clock_s() + TIMELINE_INTERVAL_S
                self._write_timeline(self.timeline.content())
        except InfrastructureError:
            # A full disk is met, and said, where results are written.
            return

    def _moment(self) -> Moment:
        figures = self._latest_figures
        tokens = {"tokens_submitted": self._num_tokens, **(figures.detail or {})}
        return Moment(
            self.rows_done, self.errors, tokens, figures.replicas_alive, figures.moments, figures.replicas
        )

    def _snapshot(self, state: str) -> Snapshot:
        now = self._clock_s()
        elapsed = now - self._start_s
        scored = self.rows_done - self._rows_before
        rate = scored / elapsed if elapsed > 0 else 0.0
        idle_s = now - self._moved_s
        return Snapshot(
            state=state,
            rows_done=self.rows_done,
            rows_total=self._rows_total,
            errors=self.errors,
            rate_per_s=rate,
            eta_s=(self._rows_total - self.rows_done) / rate if rate > 0 else None,
            elapsed_s=elapsed,
            idle_s=idle_s,
            pool=self._latest_figures,
            awaited=tuple(self._awaited()) if state == "running" and idle_s > STALL_LIMIT_S else (),
        )
