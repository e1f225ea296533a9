"""What went wrong or should be known: error classes with examples, warnings, faults of the pool. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import OUR_FAULTS
from ..progress import counted
from .figure import figure, nothing
from .markup import Markup, cut, tag
from .scale import percent
from .survey import ErrorClass

ERRORS = "Rows that failed, by class"
NOTES = "What to know of the rows"
POOL = "What the pool had to do"

# Counters of summary.json's pool: what each means, and whether a number above zero is worth a thought.
COUNTERS = {
    "replica_deaths": "replicas that died; their work was done again by others",
    "refusals": "commands that a replica refused, as when memory is short",
    "evictions": "prefixes dropped to make room for others",
    "steals": "runs that an idle replica took over from a busy one",
    "mirror_differences": "differences between what the router thought a replica holds and what it held: a "
    "defect",
    "chunks": "commands with rows to work on",
}


def errors(by_class: Mapping[str, Any], read: Mapping[str, ErrorClass]) -> Markup:
    """by_class: counts of the whole job, empty if it is not finished; read: what was read, with examples."""
    counts = {str(name): count for name, count in by_class.items() if type(count) is int}
    for name, entry in read.items():
        counts.setdefault(name, entry.rows)
    if not counts:
        return nothing(ERRORS, "No row failed.")
    largest = max(counts.values())
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rows = [_error_class(name, count, largest, total, read.get(name)) for name, count in ordered]
    return figure(
        ERRORS,
        "A row that cannot be scored never stops the job: it is a line of errors.jsonl, with file, line and "
        "reason. "
        "Bad: a class with most of the rows (the inputs are not in the format that was meant), or any of "
        f"{', '.join(sorted(OUR_FAULTS))}: those are faults of the machine and are tried again with "
        f"--resume.",
        tag("div", *rows, class_="meters"),
        kind="wide",
    )


def notes(warnings: Any, damaged: Sequence[str], sampling: Sequence[str]) -> Markup:
    """Truncations, merged boundaries, ties and the like, and what this page could not read."""
    said = [str(warning) for warning in warnings] if isinstance(warnings, list) else []
    said += [f"{name} could not be read and is left out of this page" for name in damaged]
    said += sampling
    if not said:
        return nothing(
            NOTES, "No context was truncated, no boundary merged, no choice tied; nothing else to report."
        )
    return figure(
        NOTES,
        "Each of these may change what a number means. Truncated: the row was longer than the model's "
        "window and lost "
        "context at its left. Merged boundary: a token spans context and continuation, so the continuation "
        "was encoded "
        "alone. Tie: two choices were equally likely, and the first counts.",
        tag("ul", *(tag("li", text) for text in said), class_="notes"),
        kind="wide",
    )


def pool_counters(pool: Any) -> Markup:
    """Counters of the pool that tell of trouble or of work."""
    known = pool if isinstance(pool, Mapping) else {}
    known = {**known, **(known["detail"] if isinstance(known.get("detail"), Mapping) else {})}
    shown = [(name, known[name], text) for name, text in COUNTERS.items() if type(known.get(name)) is int]
    if not shown:
        return nothing(POOL, "The folder does not say what the pool had to do.")
    rows = [
        tag("div", tag("dt", f"{count:,} ", tag("span", name.replace("_", " "))), tag("dd", text))
        for name, count, text in shown
    ]
    return figure(
        POOL,
        "Bad: refusals and evictions together with a hit rate below the ideal (memory is short), deaths "
        "(see the lanes), "
        "and any mirror difference.",
        tag("dl", *rows, class_="counters"),
    )


def _error_class(name: str, count: int, largest: int, total: int, read: ErrorClass | None) -> Markup:
    bar = tag("svg", tag("rect", width="100%", height="10", class_="meter-room"),
              tag("rect", width=f"{100 * count / largest:.2f}%", height="10", class_="bar wrong"),
              width="100%", height="10", role="img")  # fmt: skip
    examples = [_example(failure) for failure in read.examples] if read is not None else []
    return tag(
        "div",
        tag(
            "p",
            tag("b", cut(name, 60)),
            f" {counted(count, 'row')}, {percent(count / total)} of errors",
            class_="meter-text",
        ),
        bar,
        *([tag("ul", *examples, class_="examples")] if examples else []),
    )


def _example(failure: Mapping[str, Any]) -> Markup:
    place = f"{cut(str(failure.get('file', '')), 60)}:{failure.get('line', '?')}"
    attempts = failure.get("attempts")
    tried = f" (tried {attempts} times)" if type(attempts) is int and attempts > 1 else ""
    return tag("li", tag("code", place), f" {cut(str(failure.get('message', '')), 300)}{tried}")
