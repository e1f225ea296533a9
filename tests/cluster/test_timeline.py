"""The story of a job: bounded whatever its length, conserved by thinning, continued through a resume."""

from __future__ import annotations

import copy
import json
import random
from itertools import pairwise
from typing import Any

import pytest
from tinyloop.cluster import timeline as timeline_module
from tinyloop.cluster.lanes import MOST_INTERVALS, ReplicaMoment
from tinyloop.cluster.timeline import (
    COLUMNS,
    MOST_SAMPLES,
    MOST_WINDOWS,
    Moment,
    Timeline,
)

STATES = ("busy", "ready", "loading", "draining")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def moment(rows: int, tokens: int, replicas: list[ReplicaMoment] | None = None) -> Moment:
    counted = {"tokens_total": 4 * tokens, "tokens_computed": tokens}
    return Moment(rows, 0, counted, 2, replicas or [], 2)


def column(timeline: Timeline, name: str) -> list[float]:
    content = timeline.content()
    return [row[content["columns"].index(name)] for row in content["samples"]]


def test_a_long_job_keeps_few_samples_and_both_ends() -> None:
    clock = Clock()
    timeline = Timeline(clock_s=clock)
    for second in range(30_000):
        clock.now = float(second)
        timeline.sample(moment(second, 10 * second))
    timeline.sample(moment(30_000, 300_000), force=True)
    times, rows = column(timeline, "t_s"), column(timeline, "rows_done")
    assert MOST_SAMPLES / 3 < len(times) <= MOST_SAMPLES
    assert (times[0], rows[0], rows[-1]) == (0.0, 0, 30_000)
    # A count at a time is what it was then: thinning moves nothing.
    assert rows[:-1] == times[:-1]
    assert column(timeline, "tokens_computed") == [10 * row for row in rows]
    gaps = [after - before for before, after in pairwise(times[:-1])]
    assert max(gaps) <= 2 * timeline.content()["interval_s"]


def test_lanes_stay_few_lose_no_engine_second_and_no_death() -> None:
    rng, clock = random.Random(5), Clock()
    timeline = Timeline(clock_s=clock)
    busy_s = 0.0
    died_at = 1_500
    for second in range(1, 4_000):
        clock.now = float(second)
        busy_s += rng.random()
        state = "dead" if second == died_at else rng.choice(STATES)
        replicas = [
            ReplicaMoment(slot, 1, state if slot == 0 else rng.choice(STATES), busy_s=busy_s)
            for slot in range(4)
        ]
        timeline.sample(moment(second, second, replicas))
    lanes = timeline.content()["lanes"]
    assert sum(len(lane["intervals"]) for lane in lanes) <= MOST_INTERVALS
    for lane in lanes:
        begins, ends = [i[0] for i in lane["intervals"]], [i[1] for i in lane["intervals"]]
        assert begins[1:] == ends[:-1]
        assert (begins[0], ends[-1]) == (0.0, 3_999.0)
        # Each interval is rounded to a hundredth of a second.
        assert sum(i[4] for i in lane["intervals"]) == pytest.approx(busy_s, abs=0.01 * MOST_INTERVALS)
        assert sum(i[5] for i in lane["intervals"]) > len(lane["intervals"])
    dead = [i for i in lanes[0]["intervals"] if i[2] == "dead"]
    assert [i[0] <= died_at - 1 <= died_at <= i[1] for i in dead] == [True]


def test_windows_stay_few_and_their_rows_are_conserved() -> None:
    clock = Clock()
    timeline = Timeline(clock_s=clock)
    for k in range(3_000):
        clock.now = float(k)
        timeline.window_sent(10 * k, 10, 50)
        timeline.rows_back(10 * k, 4, f"early-{k}")
        clock.now += 0.25
        timeline.rows_back(10 * k, 6, f"late-{k}")
        timeline.window_committed(10 * k)
    windows = timeline.content()["windows"]
    assert len(windows) <= MOST_WINDOWS + 1
    assert sum(window["rows"] for window in windows) == 30_000
    assert sum(window["windows"] for window in windows) == 3_000
    assert [window["begin"] for window in windows] == sorted(window["begin"] for window in windows)
    assert all(window["last_id"].startswith("late-") for window in windows)


def test_half_and_end_of_a_window_are_when_those_rows_came() -> None:
    clock = Clock()
    timeline = Timeline(clock_s=clock)
    clock.now = 1.0
    timeline.window_sent(0, 10, 50)
    for now, rows in ((2.0, 4), (3.0, 1), (7.0, 5)):
        clock.now = now
        timeline.rows_back(0, rows, f"at-{now}")
    (window,) = timeline.content()["windows"]
    assert (window["sent_s"], window["half_s"], window["back_s"]) == (1.0, 3.0, 7.0)
    assert window["committed_s"] is None
    assert window["last_id"] == "at-7.0"


def test_a_resume_goes_on_in_time_and_in_counts() -> None:
    clock = Clock()
    first = Timeline(clock_s=clock, command=["tinyloop", "score"], wall_s=lambda: 1_000.0)
    first.sample(moment(0, 0), force=True)
    clock.now = 30.0
    first.sample(moment(300, 900), force=True)
    first.window_sent(0, 5, 5)
    stored = json.loads(json.dumps(first.content()))
    clock.now = 50_000.0
    second = Timeline(clock_s=clock, earlier=stored, wall_s=lambda: 90_000.0)
    clock.now += 10.0
    second.sample(moment(350, 100), force=True)
    assert column(second, "t_s") == [0, 30.0, 40.0]
    assert column(second, "rows_done") == [0, 300, 350]
    assert column(second, "tokens_computed") == [0, 900, 1_000]
    assert column(second, "run") == [0, 0, 1]
    content = second.content()
    assert [run["begin_s"] for run in content["runs"]] == [0.0, 30.0]
    # What the first run had sent and not committed is sent again.
    assert content["windows"] == []


def test_many_resumes_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, most in (("MOST_SAMPLES", 30), ("MOST_RUNS", 10), ("MOST_DEATHS", 10)):
        monkeypatch.setattr(timeline_module, name, most)
    content: dict[str, Any] | None = None
    for k in range(60):
        clock = Clock()
        timeline = Timeline(clock_s=clock, earlier=content)
        clock.now = 1.0
        dead = [ReplicaMoment(0, k, "dead", trouble=f"death {k}")]
        timeline.sample(moment(k, 1, dead), force=True)
        content = json.loads(json.dumps(timeline.content()))
    assert content is not None
    assert len(content["samples"]) <= 30
    assert len(content["runs"]) <= 10
    assert len(content["deaths"]) == 10
    assert (content["num_runs"], content["num_deaths"]) == (60, 60)
    assert not content["earlier_lost"]


@pytest.mark.parametrize("value", [None, "x", -1, [], [[1]], {"a": 1}, float("inf")])
@pytest.mark.parametrize("key", ["samples", "lanes", "windows", "runs", "columns", "interval_s", "num_runs"])
def test_a_damaged_story_is_left_out_and_said(key: str, value: object) -> None:
    timeline = Timeline()
    timeline.sample(moment(1, 1, [ReplicaMoment(0, 1, "busy")]), force=True)
    timeline.window_sent(0, 1, 1)
    timeline.rows_back(0, 1, "a")
    timeline.window_committed(0)
    content = copy.deepcopy(timeline.content())
    content[key] = value
    after = Timeline(earlier=content)
    after.sample(moment(2, 2), force=True)
    assert json.loads(json.dumps(after.content()))["columns"] == list(COLUMNS)
    del content[key]
    assert Timeline(earlier=content).content()["earlier_lost"]
