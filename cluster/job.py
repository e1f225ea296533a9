"""A job of any kind: sends windows to a pool, journals what comes back, commits it in order, publishes,
reconciles.

Invariant: each input row becomes one line, in input order, of results.jsonl or errors.jsonl, whatever was
killed and however often. Lines depend on the row, the model and the settings alone.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from .errors import OUR_FAULTS, ErrorBudgetExceeded, InfrastructureError, Interrupted
from .folder import JobFolder
from .inputs import InputFile
from .interrupts import Interrupts
from .journal import Journal
from .kinds import Backend, Kind
from .planning import OpenWindow, WindowReader
from .progress import Awaited, Progress, counted
from .records import FAILURE_START, id_of
from .results import Parts, publish
from .settings import JobSettings
from .stalls import awaited
from .summary import Tally

COLLECT_TIMEOUT_S = 0.2
MAX_OPEN_WINDOWS = 2


class Job:
    """One run over a locked folder. Call run once, then publish."""

    def __init__(
        self,
        settings: JobSettings,
        kind: Kind,
        files: list[InputFile],
        folder: JobFolder,
        backend: Backend,
        progress: Progress,
        interrupts: Interrupts,
    ) -> None:
        """Read what earlier runs left in the folder. Raises: InfrastructureError if that is not whole."""
        self._folder = folder
        self._settings = settings
        self._progress = progress
        self._interrupts = interrupts
        self._kind = kind
        self._work = kind.begin(backend)
        self._parts = Parts(folder.work / "parts")
        self._journal = Journal(folder.work / "journal")
        recovered = self._read_journal()
        self._reader = WindowReader(
            settings, files, kind, self._work, self._parts.end, recovered, after_batch=self._after_batch
        )
        self._open: deque[OpenWindow] = deque()
        self.rows_resumed = self._parts.end + len(recovered)
        self.num_tokens = 0
        recovered_errors = sum(line.startswith(FAILURE_START) for line in recovered.values())
        self._files = files
        progress.ask_when_stalled(self._awaited)
        progress.begin_at(self.rows_resumed, self._parts.num_failures + recovered_errors)

    def run(self) -> None:
        """Do everything that is not committed yet, and commit it.

        Raises: Interrupted, ErrorBudgetExceeded, InfrastructureError; the folder can then be resumed.
        """
        try:
            self._check_budget()
            self._go_on()
        except (Interrupted, ErrorBudgetExceeded):
            self._journal.sync()
            raise
        finally:
            self._work.close()
            self._journal.close()

    def figures(self, elapsed_s: float) -> dict[str, Any]:
        """What the kind of work says of this run."""
        return self._work.figures(elapsed_s)

    def publish(self) -> Tally:
        """Build the final files and hold them against what was read.

        Raises: InfrastructureError if input rows are not exactly the results and errors.
        """
        publish(self._parts, self._folder.output, self._kind.error_line)
        tally = Tally.of_files(self._folder.output)
        if tally.ids != self._reader.ids:
            raise InfrastructureError(
                f"reconciliation failed: {self._reader.ids.count} rows were read, {tally.results} results "
                f"and {sum(tally.failures.values())} errors were written, or their ids differ: start again "
                "with --overwrite"
            )
        return tally

    def _read_journal(self) -> dict[int, bytes]:
        """Lines that need not be made again. Failures of our own are tried again."""
        ours = tuple(FAILURE_START + f' "{name}"'.encode() for name in sorted(OUR_FAULTS))
        recovered = self._journal.recover(self._parts.end)
        return {number: line for number, line in recovered.items() if not line.startswith(ours)}

    def _go_on(self) -> None:
        windows = self._reader.windows()
        exhausted = False
        while self._open or not exhausted:
            # The next window is read, encoded and sent while the pool works on the one before.
            while len(self._open) < MAX_OPEN_WINDOWS and not exhausted:
                window = next(windows, None)
                exhausted = window is None
                if window is not None:
                    self._send(window)
            self._settle()
            self._interrupts.check()
            self._progress.tell()
            if self._open:
                self._work.collect(COLLECT_TIMEOUT_S)
                self._settle()

    def _send(self, window: OpenWindow) -> None:
        window.sent = self._work.submit(window.plans)
        window.plans = []
        self.num_tokens += window.sent.num_tokens
        self._open.append(window)
        self._progress.window_sent(window.begin, window.num_missing, window.sent.num_tokens)

    def _settle(self) -> None:
        """Journal every row that has left its window, then commit whole windows, oldest first."""
        for window in self._open:
            self._take(window)
        while self._open and self._open[0].num_missing == 0:
            window = self._open.popleft()
            assert window.sent is not None
            self._work.release(window.sent)
            self._parts.commit([line for line in window.lines if line is not None])
            self._journal.forget(self._parts.end)
            self._progress.timeline.window_committed(window.begin)

    def _take(self, window: OpenWindow) -> None:
        assert window.sent is not None
        lines = self._work.take_lines(window.sent)
        if not lines:
            return
        self._journal.append(lines)
        for number, line in lines:
            window.lines[number - window.begin] = line
        window.num_missing -= len(lines)
        self._progress.advance(len(lines), sum(line.startswith(FAILURE_START) for _, line in lines))
        self._progress.timeline.rows_back(window.begin, len(lines), id_of(lines[-1][1]))
        self._check_budget()

    def _awaited(self) -> list[Awaited]:
        """What open windows wait for."""
        return [
            awaited(window.begin, window.lines, self._files, self._progress.timeline.waited_s(window.begin))
            for window in self._open
            if window.num_missing
        ]

    def _after_batch(self, num_failed: int) -> None:
        """Between batches of a window that is being read: reading a large one takes seconds."""
        self._interrupts.check()
        self._progress.advance(num_failed, num_failed)
        self._progress.tell()
        self._check_budget()

    def _check_budget(self) -> None:
        allowed = self._settings.budget.allowed(self._reader.rows_total)
        if self._progress.errors > allowed:
            raise ErrorBudgetExceeded(
                f"{counted(self._progress.errors, 'row')} failed, {allowed} are allowed: repair the input "
                "and use --overwrite, or run again with --resume and a larger --max-errors"
            )
