"""What the numbers look like: log-probabilities, margins, bits per byte, depth, completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from .chart import Axis, Bar, bars, legend
from .figure import figure, nothing, table
from .markup import Markup, cut
from .scale import edges_of, histogram, percent, short
from .survey import MOST_VALUES, Survey, Values

LOGPROBS = "Log-probability per token"
MARGINS = "How sure the choices are"
BITS = "Bits per byte of documents"
DEPTH = "Depth: loops that each row was given"
HEAVIEST = "Heaviest rows"
LENGTHS = "Length of completions"
ENDS = "How completions ended"

TASKS = {"continuation": "continuations", "choices": "choices", "text": "documents"}


def score_pictures(survey: Survey) -> list[Markup]:
    """Every picture of scores that this job has rows for; one line for what it has none of."""
    drawn = [_logprobs(task, values) for task, values in sorted(survey.logprobs.items())]
    if survey.margins:
        drawn.append(_margins(survey.margins))
    if survey.bits_per_byte.seen:
        drawn.append(_bits(survey.bits_per_byte))
    if survey.lengths.seen:
        drawn.append(_lengths(survey.lengths))
    if survey.finish_reasons:
        drawn.append(_ends(survey.finish_reasons))
    if not drawn:
        drawn.append(nothing("Distribution of scores", "No row with a score was there to be counted."))
    return [*drawn, _depth(survey), _heaviest(survey)]


def _logprobs(task: str, values: Values) -> Markup:
    what = TASKS.get(task, task)
    return figure(
        f"{LOGPROBS}: {what}",
        f"Each of the {values.seen:,} {what} by ln p(tokens) / number of tokens. 0 is certain, -2.3 is one "
        f"in ten, "
        f"-9 is about one of 8,000. Bad: a second hump far to the left (rows in another language, format or "
        f"encoding than the model knows), or everything in one bar.{_sampled(values)}{_middle(values)}",
        _histogram({"one": values}, "ln p per token", lambda v: f"{v:.3g}"),
    )


def _margins(margins: Mapping[bool | None, Values]) -> Markup:
    styles = {True: "right", False: "wrong", None: "unknown"}
    names = {True: "right", False: "wrong", None: "no gold"}
    shown = {styles[key]: values for key, values in margins.items()}
    largest = max(margins.values(), key=lambda values: values.seen)
    return figure(
        MARGINS,
        "ln p of the best choice less that of the second best. At 0.7 the best is twice as likely, at 2.3 "
        "ten times. "
        "Good: wrong answers crowd at the left, where the model was unsure. Bad: wrong answers far to the "
        "right, "
        f"which it was sure of: look whether gold is right and how the choices are "
        f"written.{_sampled(largest)}",
        legend([(styles[key], names[key]) for key in (True, False, None) if key in margins]),
        _histogram(shown, "margin in nats", lambda v: f"{v:.3g}"),
    )


def _bits(values: Values) -> Markup:
    return figure(
        BITS,
        "Lower is better. English prose is near 1 for a good model; 8 is no better than guessing bytes. "
        "Bad: documents "
        f"far to the right (another language, binary data, broken "
        f"encoding).{_sampled(values)}{_middle(values)}",
        _histogram({"one": values}, "bits per byte", lambda v: f"{v:.3g}"),
    )


def _lengths(values: Values) -> Markup:
    return figure(
        LENGTHS,
        "Tokens that were generated for each row. Bad: most of them at the limit: they were cut off there."
        + _sampled(values)
        + _middle(values),
        _histogram({"one": values}, "tokens", short),
    )


def _ends(reasons: Mapping[str, int]) -> Markup:
    total = sum(reasons.values())
    rows = [[cut(name, 40), f"{n:,}", percent(n / total)] for name, n in sorted(reasons.items())]
    return figure(
        ENDS,
        "stop: the model or a stop string ended it; length: it was cut off at the limit. Bad: many of "
        "length where "
        "whole answers are wanted.",
        table(["reason", "rows", "share"], rows, numbers=frozenset({1, 2})),
    )


def _depth(survey: Survey) -> Markup:
    depths = survey.depths
    if not depths:
        return nothing(DEPTH, "No result says how many loops it was given.")
    if len(depths) == 1:
        (depth,) = depths
        return nothing(
            DEPTH,
            f"Every row was given {depth:g} loops: there is nothing to compare. --depth or a cascade "
            f"changes that.",
        )
    total = sum(depths.values())
    mean = sum(depth * n for depth, n in depths.items()) / total
    axis = Axis(min(depths) - 0.5, max(depths) + 0.5, lambda v: f"{v:g}", parts=10)
    columns = [
        Bar(d - 0.35, d + 0.35, [("one", n)], f"{d:g} loops: {n:,} rows ({percent(n / total)})")
        for d, n in sorted(depths.items())
    ]
    return figure(
        DEPTH,
        f"Rows by loops: {mean:.2f} on average. More loops cost more time and score better. Bad: all rows "
        f"at the "
        "deepest bar, where stopping early saves nothing: then a larger margin is asked for than rows have.",
        bars(axis, columns, about="rows by depth"),
    )


def _heaviest(survey: Survey) -> Markup:
    entries = sorted(survey.heaviest, reverse=True)
    if not entries or not entries[0][0]:
        return nothing(HEAVIEST, "No result says how many tokens its row has.")
    rows = [
        [cut(row_id, 60), f"{cut(file, 40)}:{line}", f"{tokens:,}"]
        for tokens, _, row_id, file, line in entries
    ]
    return figure(
        HEAVIEST,
        "Rows with the most tokens, contexts counted once a choice. They take the most time where their "
        "contexts are "
        "not shared; the time of a single row is not measured, since rows share prefixes and batches. Bad: "
        "a few rows "
        "that are far longer than the rest, when they should not be.",
        table(["row", "file and line", "tokens"], rows, numbers=frozenset({2})),
    )


def _histogram(values: Mapping[str, Values], unit: str, label: Any) -> Markup:
    """Bars of each set of values, stacked in the order given."""
    everything: list[float] = [value for one in values.values() for value in one.kept]
    edges = edges_of(everything)
    binned = {style: histogram(one.kept, edges) for style, one in values.items()}
    columns: list[Bar] = []
    for i, (low, high) in enumerate(pairwise(edges)):
        # Samples of different sizes are scaled back to what they stand for.
        parts = [(s, bins.counts[i] * values[s].seen / len(values[s].kept)) for s, bins in binned.items()]
        said = ", ".join(f"{name} {n:,.0f}" if len(parts) > 1 else f"{n:,.0f}" for name, n in parts)
        gap = (high - low) * 0.06
        columns.append(
            Bar(low + gap, high - gap, parts, f"{label(low)} to {label(high)}: {said}{_outside(binned, i)}")
        )
    axis = Axis(edges[0], edges[-1], label)
    return bars(axis, columns, about=f"number by {unit}")


def _outside(binned: Mapping[str, Any], at: int) -> str:
    below = sum(bins.below for bins in binned.values())
    above = sum(bins.above for bins in binned.values())
    last = max(len(bins.counts) for bins in binned.values()) - 1
    said = f", {below:,} further left" if at == 0 and below else ""
    return said + (f", {above:,} further right" if at == last and above else "")


def _middle(values: Values) -> str:
    quantiles: Sequence[float] = np.quantile(np.asarray(values.kept), [0.05, 0.5, 0.95]).tolist()
    low, middle, high = quantiles
    return f" Median {middle:.3g}; nine in ten between {low:.3g} and {high:.3g}."


def _sampled(values: Values) -> str:
    return f" Drawn from {MOST_VALUES:,} of them, chosen at random." if values.seen > MOST_VALUES else ""
