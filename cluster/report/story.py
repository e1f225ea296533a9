"""timeline.json as typed values, and rates from its counters. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..lanes import Lane
from ..timeline import COLUMNS, FORMAT_VERSION, WindowTimes, finite

MOST_BUCKETS = 120


@dataclass(frozen=True, slots=True)
class Story:
    """series: column to its values, equally long; times are seconds of the job."""

    series: Mapping[str, Sequence[float]]
    lanes: Sequence[Lane]
    windows: Sequence[WindowTimes]
    run_begins_s: Sequence[float]
    command: Sequence[str]
    started_unix_s: float | None
    deaths: Sequence[tuple[float, int, str]]
    num_runs: int
    num_deaths: int
    is_partial: bool

    @property
    def times(self) -> Sequence[float]:
        return self.series["t_s"]

    @property
    def end_s(self) -> float:
        """The last moment that is known."""
        ends = [lane.intervals[-1].end_s for lane in self.lanes if lane.intervals]
        return max([*self.times[-1:], *ends], default=0.0)


def read_story(timeline: Mapping[str, Any]) -> tuple[Story | None, str]:
    """The story, or None and why there is none."""
    if not timeline:
        return None, "This folder has no timeline.json: it was written by a version that did not keep one."
    if timeline.get("format_version") != FORMAT_VERSION:
        return None, "timeline.json was written by another version and cannot be read by this one."
    try:
        return _story(timeline), ""
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        return None, "timeline.json is damaged and was left out."


def _story(timeline: Mapping[str, Any]) -> Story:
    columns = [str(name) for name in timeline["columns"]]
    samples = [[finite(value) for value in row] for row in timeline["samples"]]
    series = {name: [row[k] for row in samples] for k, name in enumerate(columns)}
    if not set(COLUMNS) <= series.keys():
        raise ValueError("a column is missing")
    runs = [run for run in timeline["runs"] if isinstance(run, Mapping)]
    return Story(
        series=series,
        lanes=[Lane.from_json(lane) for lane in timeline["lanes"]],
        windows=[WindowTimes(**window) for window in timeline["windows"]],
        run_begins_s=[finite(run["begin_s"]) for run in runs],
        command=[str(word) for word in runs[-1].get("command", [])] if runs else [],
        started_unix_s=finite(runs[0]["started_unix_s"]) if runs else None,
        deaths=[(finite(at), int(slot), str(trouble)) for at, slot, trouble in timeline["deaths"]],
        num_runs=int(timeline["num_runs"]),
        num_deaths=int(timeline["num_deaths"]),
        is_partial=bool(timeline.get("earlier_lost")),
    )


def rates(story: Story, column: str) -> list[tuple[float, float | None]]:
    """What a counter grew a second, in at most 120 equal stretches of time: (middle, rate).

    None where no run was on its way for the whole stretch.
    """
    times, counts, runs = story.times, story.series.get(column, ()), story.series["run"]
    if len(times) < 2 or len(counts) != len(times):
        return []
    begin, end = times[0], times[-1]
    num = min(MOST_BUCKETS, len(times) - 1)
    width = (end - begin) / num
    if width <= 0:
        return []
    found: list[tuple[float, float | None]] = []
    for k in range(num):
        low, high = begin + k * width, begin + (k + 1) * width
        found.append(((low + high) / 2, _growth(times, counts, runs, low, high)))
    return found


def hit_rates(story: Story) -> list[tuple[float, float | None]]:
    """Share of the tokens that came back so far that were not computed."""
    return _shares(story, "tokens_computed", "tokens_total")


def ideal_rates(story: Story) -> list[tuple[float, float | None]]:
    """The largest share possible of the tokens that were sent so far."""
    return _shares(story, "tokens_ideal", "tokens_sent")


def _shares(story: Story, part: str, whole: str) -> list[tuple[float, float | None]]:
    step = max(1, len(story.times) // MOST_BUCKETS)
    rows = list(zip(story.times, story.series[part], story.series[whole], strict=True))
    kept = [*rows[:-1:step], *rows[-1:]]
    return [(t, max(0.0, 1 - done / needed) if needed else None) for t, done, needed in kept]


def _growth(
    times: Sequence[float], counts: Sequence[float], runs: Sequence[float], low: float, high: float
) -> float | None:
    """Mean rate between two times, counts taken as straight between samples of one run."""
    grown = covered = 0.0
    first = max(0, bisect_left(times, low) - 1)
    for i in range(first, len(times) - 1):
        if times[i] >= high:
            break
        overlap = min(high, times[i + 1]) - max(low, times[i])
        span = times[i + 1] - times[i]
        if overlap <= 0 or span <= 0 or runs[i] != runs[i + 1]:
            continue
        covered += overlap
        grown += (counts[i + 1] - counts[i]) * overlap / span
    return grown / covered if covered > 0 else None
