"""The live view: what a status says stands in the terminal, however narrow; rates are true differences."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from rich.console import Console, RenderableType
from tinyloop.cluster.top import COLUMNS, View, render
from tinyloop.cluster.watching import show_once, watch

from .recorded_statuses import COUNTERS, EMPTY, OF_A_JOB, RUNNING, replica, slot


def printed(block: RenderableType, width: int = 160) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(block)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def line_of(text: str, start: str) -> str:
    """The line of the table that begins so."""
    return next(line for line in text.splitlines() if line.split()[:1] == [start] and "tokens" not in line)


def later(**changed: Any) -> dict[str, Any]:
    """RUNNING two seconds on: 3,000 tokens computed of 12,000 needed, all of them on replica 0."""
    counters = {
        **COUNTERS,
        "computed_rows": COUNTERS["computed_rows"] + 3_000,
        "total_rows": COUNTERS["total_rows"] + 12_000,
    }
    first = replica(computed_rows=403_000, total_rows=1_612_000)
    replicas = {"0": first, "1": RUNNING["replicas"]["1"]}
    return {**RUNNING, "counters": counters, "replicas": replicas, "cpu_s": 1.77, **changed}


def test_rates_are_differences_over_the_time_between_two_views() -> None:
    text = printed(render("p", View(later(), 12.0), View(RUNNING, 10.0)))
    assert "1,500 tokens/s computed, 6,000 needed, hit rate 75.0%, router 1.0% of a core" in text
    assert line_of(text, "0").split()[:4] == ["0", "busy", "1,500", "75.0%"]
    assert line_of(text, "1").split()[:4] == ["1", "busy", "0", "-"]


def test_one_view_alone_shows_totals_and_no_rates() -> None:
    text = printed(render("p", View(RUNNING, 10.0)))
    assert "pool p: 2 of 3 replicas up, 3 deaths, 5,000 items done, 70,000 queued" in text
    assert "- tokens/s computed, - needed, hit rate 75.0%" in text
    assert "3.0 GiB of 4.0 GiB" in line_of(text, "0")


def test_counters_of_another_router_process_are_not_subtracted() -> None:
    text = printed(render("p", View(later(pid=1), 12.0), View(RUNNING, 10.0)))
    assert "- tokens/s computed" in text


def test_a_new_process_in_a_slot_has_no_rate_yet() -> None:
    replicas = {"0": replica(generation=2, computed_rows=5, total_rows=5)}
    text = printed(render("p", View(later(replicas=replicas), 12.0), View(RUNNING, 10.0)))
    assert line_of(text, "0").split()[:4] == ["0", "busy", "-", "-"]


def test_a_dead_replica_keeps_its_line_and_says_why() -> None:
    text = printed(render("p", View(RUNNING, 10.0)))
    assert line_of(text, "2").split()[:5] == ["2", "failed(out", "of", "memory)", "-"]
    assert "replica 2: last death: OutOfMemoryError: 9 GiB asked" in text
    assert "replica 1: last death: ActorDiedError; GPU 1 is shared" in text


def test_a_pool_without_replicas_and_clients_says_so() -> None:
    text = printed(render("p", View(EMPTY, 10.0)))
    assert "no replica" in text
    assert "no client" in text


def test_the_pool_of_a_job_shows_the_replicas_that_its_router_knows() -> None:
    text = printed(render("p", View(OF_A_JOB, 10.0)))
    assert "2 of 2 replicas up, 1 death" in text
    assert line_of(text, "1").split()[:2] == ["1", "busy"]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160])
def test_a_narrow_terminal_loses_columns_by_name_and_nothing_else(width: int) -> None:
    text = printed(render("p", View(RUNNING, 10.0)), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "…" not in text
    words = text.split()
    joined = " ".join(words)
    missing = joined.partition("no room for: ")[2]
    for column in COLUMNS:
        assert column.title in missing or column.title.split()[0] in words or width < 30, column
    for said in ("5,000 items done", "9 GiB asked", "client score@node-a"):
        assert said in joined


def test_columns_that_matter_most_stay_longest() -> None:
    text = printed(render("p", View(RUNNING, 10.0)), 60)
    shown, _, missing = text.partition("no room for: ")
    assert "tokens/s" in shown
    assert "backlog" in shown
    assert "process" in missing


def test_a_label_with_markup_is_shown_as_it_is() -> None:
    client = {"client": "c", "label": "[red]x[/red]", "windows": 0, "unfetched": 0}
    client |= {"streams": 0, "silent_s": 0.0}
    hostile = {**RUNNING, "clients": [client], "slots": [slot(0, "up", "busy", notice="[bold]n[/bold]")]}
    text = printed(render("p", View(hostile, 10.0)))
    assert "[red]x[/red]" in text
    assert "[bold]n[/bold]" in text


class RouterGone(Exception):
    pass


def test_once_prints_two_looks_apart_and_no_escape_codes() -> None:
    looks: Iterator[dict[str, Any]] = iter([RUNNING, later()])
    console, pauses = Console(file=StringIO(), width=160), []
    show_once("p", lambda: next(looks), console, period_s=1.0, pause=pauses.append)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert pauses == [1.0]
    assert "hit rate 75.0%" in text
    assert "\x1b" not in text


def test_watching_goes_on_while_the_router_does_not_answer() -> None:
    console = Console(file=StringIO(), width=160, force_terminal=True)
    answers = iter([RUNNING, RouterGone("the router does not answer"), later()])

    def look() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pause(_: float) -> None:
        if next(left) == 0:
            raise KeyboardInterrupt

    left = iter([2, 1, 0])
    with pytest.raises(KeyboardInterrupt):
        watch("p", look, console, failure=RouterGone, period_s=1.0, pause=pause)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the router does not answer" in text
    assert text.index("the router does not answer") < text.rindex("hit rate 75.0%")


def test_a_first_look_that_fails_is_the_callers() -> None:
    def look() -> dict[str, Any]:
        raise RouterGone("no pool")

    with pytest.raises(RouterGone):
        watch("p", look, Console(file=StringIO()), failure=RouterGone, period_s=1.0)
