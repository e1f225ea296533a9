"""What each replica did and when: intervals of one state, few enough to keep. Pure.

Invariant: the intervals of a lane follow each other in time and there are never more than it was allowed;
where two must be merged, the graver state names both, so that a death never disappears.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .verdicts import BUSY, DRAINING, LOADING, READY

# Gravest last: what a merged interval is called.
_GRAVITY = (BUSY, READY, DRAINING, LOADING)
MOST_INTERVALS = 4096
FEWEST_PER_LANE = 8


@dataclass(frozen=True, slots=True)
class ReplicaMoment:
    """One replica as the router sees it now.

    state: a verdict (verdicts.py). busy_s: seconds of its engine since the router knows it; memory_bytes:
    model and prefixes. trouble: of its last death.
    """

    slot: int
    generation: int
    state: str
    host: str = ""
    busy_s: float = 0.0
    in_flight: int = 0
    prefix_bytes: int = 0
    prefix_budget_bytes: int | None = None
    memory_bytes: int | None = None
    trouble: str = ""


@dataclass(slots=True)
class Interval:
    """[begin_s, end_s] of one state; busy_s: engine seconds in it; merged: how many were made one."""

    begin_s: float
    end_s: float
    state: str
    generation: int
    busy_s: float = 0.0
    merged: int = 1


@dataclass(slots=True)
class Lane:
    """A slot's intervals and its largest figures."""

    slot: int
    host: str = ""
    intervals: list[Interval] = field(default_factory=list)
    peak_prefix_bytes: int = 0
    prefix_budget_bytes: int | None = None
    peak_memory_bytes: int | None = None
    _busy_s: float = 0.0
    _generation: int = -1
    _begins_anew: bool = True

    def observe(self, moment: ReplicaMoment, since_s: float, now_s: float, most: int) -> None:
        """A state that is taken to have held from since_s, when it was last looked at, to now_s."""
        self._note_memory(moment)
        grown_s = moment.busy_s - self._busy_s if moment.generation == self._generation else moment.busy_s
        self._busy_s, self._generation = moment.busy_s, moment.generation
        last = self.intervals[-1] if self.intervals and not self._begins_anew else None
        if last is None or (last.state, last.generation) != (moment.state, moment.generation):
            last = Interval(since_s, since_s, moment.state, moment.generation)
            self.intervals.append(last)
            self._begins_anew = False
        last.end_s = now_s
        last.busy_s += max(0.0, grown_s)
        while len(self.intervals) > most:
            _merge_shortest(self.intervals)

    def as_json(self) -> dict[str, Any]:
        return {
            "slot": self.slot,
            "host": self.host,
            "peak_prefix_bytes": self.peak_prefix_bytes,
            "prefix_budget_bytes": self.prefix_budget_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "intervals": [
                [round(i.begin_s, 2), round(i.end_s, 2), i.state, i.generation, round(i.busy_s, 2), i.merged]
                for i in self.intervals
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Lane:
        """What as_json gave. Raises LookupError, TypeError or ValueError for anything else."""
        return cls(
            int(content["slot"]),
            str(content["host"]),
            [
                Interval(float(begin), float(end), str(state), int(generation), float(busy), int(merged))
                for begin, end, state, generation, busy, merged in content["intervals"]
            ],
            int(content["peak_prefix_bytes"]),
            _optional_int(content["prefix_budget_bytes"]),
            _optional_int(content["peak_memory_bytes"]),
        )

    def _note_memory(self, moment: ReplicaMoment) -> None:
        self.host = moment.host or self.host
        self.peak_prefix_bytes = max(self.peak_prefix_bytes, moment.prefix_bytes)
        if moment.prefix_budget_bytes is not None:
            self.prefix_budget_bytes = moment.prefix_budget_bytes
        if moment.memory_bytes is not None:
            self.peak_memory_bytes = max(self.peak_memory_bytes or 0, moment.memory_bytes)


def most_per_lane(num_lanes: int) -> int:
    """Intervals that each lane may have."""
    return max(FEWEST_PER_LANE, MOST_INTERVALS // max(1, num_lanes))


def graver(one: str, other: str) -> str:
    """Of two states the one that a reader should not miss; what is not ordinary comes first."""

    def rank(state: str) -> int:
        return _GRAVITY.index(state) if state in _GRAVITY else len(_GRAVITY)

    return one if rank(one) >= rank(other) else other


def _merge_shortest(intervals: list[Interval]) -> None:
    """Make the shortest interval one with its shorter neighbour."""
    spans = [i.end_s - i.begin_s for i in intervals]
    at = min(range(len(intervals)), key=spans.__getitem__)
    neighbours = [k for k in (at - 1, at + 1) if 0 <= k < len(intervals)]
    first = min(at, min(neighbours, key=spans.__getitem__))
    left, right = intervals[first], intervals.pop(first + 1)
    left.end_s = right.end_s
    left.state = graver(left.state, right.state)
    left.generation = right.generation
    left.busy_s += right.busy_s
    left.merged += right.merged


def _optional_int(value: Any) -> int | None:
    return None if value is None else int(value)
