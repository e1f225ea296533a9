"""What happened when: throughput, hit rate, replicas, windows. Pure: a story in, figures out."""

from __future__ import annotations

from collections.abc import Sequence

from ..lanes import Interval, Lane
from ..timeline import WindowTimes
from ..verdicts import BUSY, DRAINING, LOADING, READY
from .chart import Axis, Series, axis_labels, curves, legend, stretch
from .figure import figure, nothing
from .markup import Markup, cut, tag
from .scale import duration, percent, short, size
from .story import Story, hit_rates, ideal_rates, rates

Death = tuple[float, int, str]

MOST_LANES = 64
MOST_WINDOWS = 24
LABEL, LANE, GAP = 14.0, 12.0, 8.0

THROUGHPUT = "Throughput over time"
HIT_RATE = "Hit rate against the ideal"
LANES = "What each replica did"
WINDOWS = "Windows: sent, half back, all back"
MEMORY = "Memory of prefixes against the budget"


def throughput(story: Story) -> Markup:
    """Rows a second, and below it tokens a second."""
    rows, tokens = rates(story, "rows_done"), rates(story, "tokens_computed")
    if not any(rate for _, rate in rows):
        return nothing(
            THROUGHPUT, "The run was over before a second look was taken: there is nothing to plot."
        )
    axis = _time_axis(story)
    content = [
        tag("p", "rows a second", class_="axis-name"),
        curves(axis, [Series("rows/s", "one", rows, True)], about="rows a second", marks=_resumes(story)),
    ]
    if any(rate for _, rate in tokens):
        content += [
            tag("p", "tokens computed a second", class_="axis-name"),
            curves(
                axis,
                [Series("tokens/s", "two", tokens, True)],
                about="tokens computed a second",
                marks=_resumes(story),
            ),
        ]
    return figure(
        THROUGHPUT,
        "Rows come back in chunks, so short dips are normal. Bad: a long stretch at zero (a stall), or a "
        "level "
        "that falls for good (a replica was lost; see the lanes). Rows per second also fall where rows are "
        "longer: "
        "then tokens per second stay level." + _resume_note(story),
        *content,
    )


def hit_rate(story: Story) -> Markup:
    """Share of tokens that did not have to be computed so far."""
    actual, ideal = hit_rates(story), ideal_rates(story)
    if not any(share is not None for _, share in actual):
        return nothing(HIT_RATE, "No prompt token had come back from the pool when the run was looked at.")
    series = [Series("ideal", "ideal", ideal), Series("hit rate", "one", actual)]
    picture = curves(
        _time_axis(story),
        series,
        about="hit rate and ideal over time",
        y_label=lambda share: percent(share, 0),
        y_high=1.0,
        marks=_resumes(story),
    )
    return figure(
        HIT_RATE,
        "Hit rate: the share of prompt tokens that were not computed, because a replica already held that "
        "prefix. "
        "Ideal: the same if every prefix that rows of a window share were computed exactly once. Bad: a "
        "line far "
        "below the ideal (too little memory for prefixes, or replicas that were lost). A low ideal is no "
        "fault: "
        "these rows share little.",
        legend([("one", "hit rate so far"), ("ideal", "ideal")]),
        picture,
    )


def lanes(story: Story) -> Markup:
    """A lane a replica."""
    known = [lane for lane in story.lanes if lane.intervals]
    if not known:
        return nothing(LANES, "No replica was seen while the run was looked at.")
    shown = sorted(known, key=_interest)[:MOST_LANES]
    shown.sort(key=lambda lane: lane.slot)
    axis = Axis(0.0, max(story.end_s, 0.1), duration)
    step = LABEL + LANE + GAP
    height = step * len(shown) + 22
    drawn = [mark for k, lane in enumerate(shown) for mark in _lane(lane, axis, k * step, story.deaths)]
    picture = tag(
        "svg",
        tag("title", "states of replicas over time"),
        *drawn,
        *axis_labels(axis, height),
        class_="chart",
        width="100%",
        height=height,
        role="img",
    )
    left_out = len(known) - len(shown)
    more = (
        f" {left_out} replicas without deaths and with the fewest changes are not shown." if left_out else ""
    )
    return figure(
        LANES,
        "Looked at about once a second. Busy: commands were on their way to it; the share is of its "
        "engine's own "
        "seconds. Bad: thin gaps of idling while others are busy, or red (the process died; what it had was "
        "done "
        f"again by others, so no row is lost).{more}{_death_note(story)}",
        legend(
            [
                ("busy", "busy"),
                ("ready", "idle"),
                ("loading", "loading"),
                ("draining", "draining"),
                ("dead", "dead or failed"),
            ]
        ),
        picture,
        *_deaths(story),
    )


def windows(story: Story) -> Markup:
    """When windows were sent and came back."""
    known = [w for w in story.windows if w.back_s is not None and w.rows]
    if not known:
        return nothing(WINDOWS, "No window had come back whole when the run was looked at.")
    slowest = sorted(known, key=lambda w: w.sent_s - (w.back_s or 0.0))[:MOST_WINDOWS]
    shown = sorted(slowest, key=lambda w: (w.sent_s, w.begin))
    axis = Axis(0.0, max(max(w.back_s or 0.0 for w in known), 0.1), duration)
    step = LABEL + LANE + GAP
    height = step * len(shown) + 22
    drawn = [mark for k, window in enumerate(shown) for mark in _window(window, axis, k * step)]
    picture = tag(
        "svg",
        tag("title", "windows over time"),
        *drawn,
        *axis_labels(axis, height),
        class_="chart",
        width="100%",
        height=height,
        role="img",
    )
    some = (
        f" Of {len(known):,} entries the {len(shown)} slowest are shown." if len(shown) < len(known) else ""
    )
    return figure(
        WINDOWS,
        "Rows are planned in windows, two at a time, so a window also waits for the one before it. No row "
        "has a "
        "time of its own: rows share prefixes and batches. Measured are the moments at which a window was "
        "handed "
        "to the pool, half of its rows were back, and all were. Bad: a long second half, where few replicas "
        "work "
        f"on the last rows while others wait.{some}",
        legend([("first-half", "first half of the rows"), ("second-half", "second half")]),
        picture,
    )


def memory(story: Story) -> Markup:
    """The most bytes of prefixes that each replica held."""
    known = [lane for lane in story.lanes if lane.prefix_budget_bytes]
    if not known:
        return nothing(MEMORY, "The pool did not say how much memory its replicas may use.")
    shown = sorted(known, key=lambda lane: -lane.peak_prefix_bytes)[:MOST_LANES]
    rows = [_memory_row(lane) for lane in sorted(shown, key=lambda lane: lane.slot)]
    more = (
        f" {len(known) - len(shown)} replicas that held less are not shown."
        if len(shown) < len(known)
        else ""
    )
    return figure(
        MEMORY,
        "The most that prefixes took on each replica, of what they may take; looked at about once a second. "
        "Bad: "
        "full bars together with a hit rate far below the ideal: prefixes were dropped and computed again. "
        "Give "
        f"replicas a larger prefix_budget_bytes.{more}",
        tag("div", *rows, class_="meters"),
    )


def _memory_row(lane: Lane) -> Markup:
    budget = lane.prefix_budget_bytes or 1
    share = min(lane.peak_prefix_bytes / budget, 1.0)
    whole = "" if lane.peak_memory_bytes is None else f"; with the model {size(lane.peak_memory_bytes)}"
    text = f"replica {lane.slot}: {size(lane.peak_prefix_bytes)} of {size(budget)} ({percent(share)}){whole}"
    bar = tag("svg", tag("rect", width="100%", height="10", class_="meter-room"),
              tag("rect", width=f"{100 * share:.2f}%", height="10", class_="bar one"),
              width="100%", height="10", role="img")  # fmt: skip
    return tag("div", tag("p", text, class_="meter-text"), bar)


def _time_axis(story: Story) -> Axis:
    return Axis(0.0, max(story.times[-1], 0.1), duration)


def _resumes(story: Story) -> list[tuple[float, str]]:
    inside = [begin for begin in story.run_begins_s if story.times[0] < begin < story.times[-1]]
    return [(begin, f"resumed at {duration(begin)}") for begin in inside]


def _resume_note(story: Story) -> str:
    if story.num_runs < 2:
        return ""
    lost = " The story of earlier runs could not be read and is missing." if story.is_partial else ""
    return f" Dashed lines: the job was stopped and resumed there; the time in between is left out.{lost}"


def _interest(lane: Lane) -> tuple[bool, int]:
    """Lanes with trouble first, then those where most happened."""
    ordinary = {BUSY, READY, LOADING, DRAINING}
    return all(i.state in ordinary for i in lane.intervals), -len(lane.intervals)


def style_of(state: str) -> str:
    """The class of the style sheet for a state; every failure looks like a death."""
    return state if state in (BUSY, READY, LOADING, DRAINING) else "dead"


def _lane(lane: Lane, axis: Axis, y: float, deaths: Sequence[Death]) -> list[Markup]:
    ups = [i for i in lane.intervals if i.state in (BUSY, READY, DRAINING)]
    up_s = sum(i.end_s - i.begin_s for i in ups)
    share = f", engine busy {percent(min(1.0, sum(i.busy_s for i in ups) / up_s), 0)}" if up_s > 0 else ""
    host = f" on {cut(lane.host, 24)}" if lane.host else ""
    label = tag("text", f"replica {lane.slot}{host}{share}", x="0", y=y + LABEL - 3, class_="lane-label")
    intervals = [_interval(i, axis, y + LABEL) for i in lane.intervals]
    # A replica is replaced at once, so a look a second later finds it loading: its death is a mark of its
    # own.
    marks = [
        stretch(
            axis.place(at) - 0.4, axis.place(at) + 0.4, y + LABEL, LANE, "bar dead", _death_title(at, why)
        )
        for at, slot, why in deaths
        if slot == lane.slot
    ]
    return [label, *intervals, *marks]


def _death_title(at: float, why: str) -> Markup:
    return tag("title", f"died at about {duration(at)}: {cut(why, 120)}")


def _interval(interval: Interval, axis: Axis, y: float) -> Markup:
    begin, end = axis.place(interval.begin_s), axis.place(interval.end_s)
    style = style_of(interval.state)
    # Idling is a thin line: the state is told by height too, and not by colour alone.
    inset = 4.5 if style == "ready" else 2.0 if style in ("loading", "draining") else 0.0
    merged = f"; {interval.merged} short changes in one" if interval.merged > 1 else ""
    text = (
        f"{'idle' if interval.state == READY else interval.state}, {duration(interval.begin_s)} to "
        f"{duration(interval.end_s)}, process {interval.generation}{merged}"
    )
    place = y + inset, LANE - 2 * inset
    return stretch(begin, end, *place, f"bar {style}", tag("title", text))


def _window(window: WindowTimes, axis: Axis, y: float) -> list[Markup]:
    back = window.back_s or window.sent_s
    half = window.half_s if window.half_s is not None else back
    # Merged neighbours overlap: half of the last one may be before the sending of the first.
    half = min(max(half, window.sent_s), back)
    name = f"{window.windows} windows from row {window.begin + 1:,}" if window.windows > 1 else (
        f"rows from {window.begin + 1:,}")  # fmt: skip
    text = f"{name}: {window.rows:,} rows, {short(window.tokens)} tokens, {duration(back - window.sent_s)}"
    last = tag("title", f"last row back: {cut(window.last_id, 80)}")
    spans: Sequence[tuple[float, float, str]] = (
        (window.sent_s, half, "first-half"),
        (half, back, "second-half"),
    )
    rects = [
        stretch(axis.place(begin), axis.place(end), y + LABEL, LANE, f"bar {style}", last)
        for begin, end, style in spans
    ]
    return [tag("text", text, x="0", y=y + LABEL - 3, class_="lane-label"), *rects]


def _death_note(story: Story) -> str:
    return f" Deaths seen: {story.num_deaths:,}." if story.num_deaths else ""


def _deaths(story: Story) -> list[Markup]:
    if not story.deaths:
        return []
    items = [
        tag("li", f"{duration(at)}: replica {slot}: {cut(trouble, 300)}")
        for at, slot, trouble in story.deaths[:5]
    ]
    return [tag("ul", *items, class_="notes")]
