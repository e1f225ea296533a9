"""The story of a job for its report: what only the run knows, kept small. Pure; nothing here decides a
result.

Time is the job's own: seconds that runs of this folder took, added up, so that a night between a kill and
--resume is no gap. Counters are of all runs together.

Invariant: at most 600 samples, 256 windows, 100 runs and 100 deaths, whatever the job's length; what is
thinned or left out is said by interval_s, by "windows" and "merged", and by the num_ fields.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .lanes import Lane, ReplicaMoment, most_per_lane

FORMAT_VERSION = 1
MOST_SAMPLES = 600
MOST_WINDOWS = 256
MOST_RUNS = 100
MOST_DEATHS = 100
FIRST_INTERVAL_S = 1.0

# Cumulative but for the last three. t_s: seconds of the job; run: index of the run; tokens_submitted: of what
# was sent; the other tokens: pool_status.py.
COLUMNS = (
    "t_s",
    "rows_done",
    "errors",
    "tokens_submitted",
    "tokens_total",
    "tokens_sent",
    "tokens_computed",
    "tokens_ideal",
    "tokens_generated",
    "run",
    "replicas_alive",
    "replicas",
)
TOKENS = tuple(name for name in COLUMNS if name.startswith("tokens_"))


@dataclass(frozen=True, slots=True)
class Moment:
    """What is sampled. tokens: by name of TOKENS, of this run alone; absent ones do not grow."""

    rows_done: int
    errors: int
    tokens: Mapping[str, int]
    replicas_alive: int
    replicas: Sequence[ReplicaMoment]
    num_replicas: int


@dataclass(slots=True)
class WindowTimes:
    """Seconds of the job at which a window was sent, half of its rows were back, all were, and it was
    committed.

    windows: how many neighbours this stands for. last_id: of the row that came back last.
    """

    begin: int
    rows: int
    tokens: int
    sent_s: float
    half_s: float | None = None
    back_s: float | None = None
    committed_s: float | None = None
    last_id: str = ""
    windows: int = 1
    num_back: int = 0


class Timeline:
    """The recorder of one run, which goes on where earlier runs of the folder stopped."""

    def __init__(
        self,
        *,
        command: Sequence[str] = (),
        earlier: Mapping[str, Any] | None = None,
        clock_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """earlier: the content that the last run wrote; what cannot be read of it is left out, and said."""
        self._clock_s = clock_s
        self._interval_s = FIRST_INTERVAL_S
        self._samples: list[list[float]] = []
        self._lanes: dict[int, Lane] = {}
        self._windows: list[WindowTimes] = []
        self._runs: list[dict[str, Any]] = []
        self._deaths: list[list[Any]] = []
        self._num_runs = self._num_deaths = 0
        self._lost = False
        if earlier is not None:
            self._go_on_from(earlier)
        self._base_s = self._samples[-1][0] if self._samples else 0.0
        self._base = dict(zip(COLUMNS, self._samples[-1], strict=True)) if self._samples else {}
        self._started_s = clock_s()
        self._looked_s = self._base_s
        self._open: dict[int, WindowTimes] = {}
        self._troubles: dict[int, str] = {}
        self._num_runs += 1
        run = {"begin_s": round(self._base_s, 2), "started_unix_s": round(wall_s(), 1), "command": [*command]}
        self._runs = [*self._runs, run][-MOST_RUNS:]

    def now_s(self) -> float:
        """Seconds of the job."""
        return self._base_s + self._clock_s() - self._started_s

    def sample(self, moment: Moment, *, force: bool = False) -> None:
        """Note one look at the job; lanes always, the series at its interval or with force."""
        now_s = self.now_s()
        self._look_at(moment.replicas, now_s)
        if not force and self._samples and now_s - self._samples[-1][0] < self._interval_s * 0.9:
            return
        values = {name: moment.tokens.get(name, 0) + self._base.get(name, 0) for name in TOKENS}
        values |= {"t_s": round(now_s, 2), "rows_done": moment.rows_done, "errors": moment.errors}
        values |= {"run": self._num_runs - 1}
        values |= {"replicas_alive": moment.replicas_alive, "replicas": moment.num_replicas}
        self._samples.append([values[name] for name in COLUMNS])
        if len(self._samples) > MOST_SAMPLES:
            # The last one stays: cumulative counters lose resolution by this and no count.
            self._samples = [*self._samples[:-1:2], self._samples[-1]]
            self._interval_s *= 2

    def window_sent(self, begin: int, rows: int, tokens: int) -> None:
        """A window of rows [begin, begin + rows) was handed to the pool; rows: those that it must score."""
        times = WindowTimes(begin, rows, tokens, self.now_s())
        self._open[begin] = times
        self._windows.append(times)
        if len(self._windows) > MOST_WINDOWS:
            self._merge_windows()

    def rows_back(self, begin: int, rows: int, last_id: str) -> None:
        """Rows of a window came back, the last of them with this id."""
        times = self._open[begin]
        times.num_back += rows
        times.last_id = last_id
        if times.half_s is None and 2 * times.num_back >= times.rows:
            times.half_s = self.now_s()
        if times.num_back >= times.rows:
            times.back_s = self.now_s()

    def window_committed(self, begin: int) -> None:
        """All rows of a window are in a part."""
        self._open.pop(begin).committed_s = self.now_s()

    def waited_s(self, begin: int) -> float:
        """Seconds since an open window was sent."""
        return self.now_s() - self._open[begin].sent_s

    def content(self) -> dict[str, Any]:
        """What is written to timeline.json."""
        return {
            "format_version": FORMAT_VERSION,
            "interval_s": self._interval_s,
            "columns": list(COLUMNS),
            "samples": self._samples,
            "lanes": [lane.as_json() for _, lane in sorted(self._lanes.items())],
            "windows": [_window_json(times) for times in self._windows],
            "runs": self._runs,
            "num_runs": self._num_runs,
            "deaths": self._deaths,
            "num_deaths": self._num_deaths,
            "earlier_lost": self._lost,
        }

    def _look_at(self, replicas: Sequence[ReplicaMoment], now_s: float) -> None:
        slots = self._lanes.keys() | {replica.slot for replica in replicas}
        most = most_per_lane(len(slots))
        for replica in replicas:
            lane = self._lanes.setdefault(replica.slot, Lane(replica.slot))
            lane.observe(replica, self._looked_s, now_s, most)
            self._note_death(replica, now_s)
        self._looked_s = now_s

    def _note_death(self, replica: ReplicaMoment, now_s: float) -> None:
        # The trouble of a slot stays when it is filled again: only a new one is a new death.
        if replica.trouble and self._troubles.get(replica.slot) != replica.trouble:
            self._num_deaths += 1
            if len(self._deaths) < MOST_DEATHS:
                self._deaths.append([round(now_s, 2), replica.slot, replica.trouble])
        self._troubles[replica.slot] = replica.trouble

    def _merge_windows(self) -> None:
        """Make each two neighbours that are committed one."""
        closed = [times for times in self._windows if times.begin not in self._open]
        pairs = [closed[i : i + 2] for i in range(0, len(closed), 2)]
        merged = [_merged(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
        self._windows = [*merged, *(times for times in self._windows if times.begin in self._open)]

    def _go_on_from(self, earlier: Mapping[str, Any]) -> None:
        try:
            if earlier["format_version"] != FORMAT_VERSION or tuple(earlier["columns"]) != COLUMNS:
                raise ValueError("another version's")
            samples = [[finite(value) for value in row] for row in earlier["samples"]]
            if any(len(row) != len(COLUMNS) for row in samples):
                raise ValueError("a sample lacks a column")
            lanes = [Lane.from_json(lane) for lane in earlier["lanes"]]
            # What a killed run had sent and not committed is sent again.
            windows = [WindowTimes(**w) for w in earlier["windows"] if w["committed_s"] is not None]
            runs, deaths = list(earlier["runs"]), list(earlier["deaths"])
            counts = int(earlier["num_runs"]), int(earlier["num_deaths"])
            interval_s = max(FIRST_INTERVAL_S, finite(earlier["interval_s"]))
        except (LookupError, TypeError, ValueError, ArithmeticError):
            # The story of earlier runs is lost, their results are not.
            self._lost = True
            return
        self._samples = [[_whole(value) for value in row] for row in samples[-MOST_SAMPLES:]]
        self._lanes = {lane.slot: lane for lane in lanes}
        self._windows, self._runs, self._deaths = windows[-MOST_WINDOWS:], runs, deaths[:MOST_DEATHS]
        self._num_runs, self._num_deaths = counts
        self._interval_s, self._lost = interval_s, bool(earlier.get("earlier_lost"))


def finite(value: Any) -> float:
    """A number of a file. Raises ValueError or TypeError if it is none or not finite."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} is not finite")
    return number


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _merged(one: WindowTimes, other: WindowTimes) -> WindowTimes:
    slower = max((one, other), key=lambda times: (times.back_s or 0.0) - (times.half_s or 0.0))
    return WindowTimes(
        one.begin,
        one.rows + other.rows,
        one.tokens + other.tokens,
        one.sent_s,
        other.half_s,
        other.back_s,
        other.committed_s,
        slower.last_id,
        one.windows + other.windows,
        one.num_back + other.num_back,
    )


def _window_json(times: WindowTimes) -> dict[str, Any]:
    shown: dict[str, Any] = {"begin": times.begin, "rows": times.rows, "tokens": times.tokens}
    for name in ("sent_s", "half_s", "back_s", "committed_s"):
        value = getattr(times, name)
        shown[name] = None if value is None else round(value, 2)
    return shown | {"last_id": times.last_id, "windows": times.windows, "num_back": times.num_back}
