"""The page about one job: facts in, HTML out. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import time_pictures as when
from .figure import grid, nothing, section
from .markup import Markup, tag
from .overview import groups, headline, outcome_of
from .problems import errors, notes, pool_counters
from .provenance import reproduce, settings
from .score_pictures import score_pictures
from .story import Story
from .style import style_sheet
from .survey import ErrorClass, Survey


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the page says. no_story: why there is no story. sampling: what was not read whole, in
    words.

    so_far: said of the main numbers when they are not final.
    """

    name: str
    summary: Mapping[str, Any]
    progress: Mapping[str, Any]
    run: Mapping[str, Any]
    fingerprint: Mapping[str, Any]
    survey: Survey
    failures: Mapping[str, ErrorClass]
    story: Story | None
    no_story: str
    made_unix_s: float
    damaged: Sequence[str] = ()
    sampling: Sequence[str] = ()
    so_far: str = ""
    groups: Mapping[str, Any] = field(default_factory=dict)


def job_page(facts: Facts) -> str:
    """A whole HTML document."""
    story = facts.story
    outcome = outcome_of(
        facts.summary,
        facts.progress,
        ran_s=story.end_s if story is not None else None,
        deaths=story.num_deaths if story is not None else 0,
        now_unix_s=facts.made_unix_s,
    )
    body = [
        headline(facts.name, outcome, _verb(facts)),
        section(
            "numbers",
            "Main numbers",
            groups(facts.groups or facts.summary, facts.survey, so_far=facts.so_far),
        ),
        section("scores", "Scores", grid(*score_pictures(facts.survey))),
        section("time", "Time and replicas", grid(*_time(facts))),
        section("problems", "Problems and notes", grid(*_problems(facts))),
        section(
            "provenance",
            "How to get these numbers again",
            reproduce(_command(facts)),
            grid(*settings(facts.run, facts.fingerprint)),
        ),
    ]
    return document(f"{facts.name}: {outcome.state}", body, facts.made_unix_s)


def document(title: str, body: list[Markup], made_unix_s: float) -> str:
    """A page that needs nothing from outside; nothing in it is run."""
    from datetime import UTC, datetime

    made = datetime.fromtimestamp(made_unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        # Nothing is loaded and nothing runs, whatever a row manages to put in here.
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="default-src 'none'; style-src 'unsafe-inline'",
        ),
        tag("title", title),
        tag("style", Markup(style_sheet())),
    )
    footer = tag("footer", f"Made {made}. Hover over a picture for its numbers.")
    page = tag("html", head, tag("body", tag("main", *body, footer)), lang="en")
    return f"<!DOCTYPE html>\n{page}\n"


def _time(facts: Facts) -> list[Markup]:
    story = facts.story
    if story is None or not story.times:
        why = facts.no_story or "The run was over before it was looked at."
        return [nothing("Throughput, hit rate, replicas and memory over time", why)]
    return [
        when.throughput(story),
        when.hit_rate(story),
        when.lanes(story),
        when.windows(story),
        when.memory(story),
        pool_counters(facts.summary.get("pool") or facts.progress.get("pool")),
    ]


def _problems(facts: Facts) -> list[Markup]:
    by_class = facts.summary.get("errors_by_class")
    return [
        errors(by_class if isinstance(by_class, Mapping) else {}, facts.failures),
        notes((facts.groups or facts.summary).get("warnings"), facts.damaged, facts.sampling),
    ]


def _command(facts: Facts) -> Sequence[str]:
    command = facts.run.get("command")
    if isinstance(command, list) and command:
        return [str(word) for word in command]
    return facts.story.command if facts.story is not None else ()


def _verb(facts: Facts) -> str:
    command = [word for word in _command(facts)[1:2] if word in ("score", "generate")]
    return command[0] if command else "batch"
