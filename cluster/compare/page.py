"""A comparison as one self-contained page. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..report.figure import figure, grid, nothing, pairs, section, table
from ..report.markup import Markup, cut, shown, tag
from ..report.page import document
from ..report.scale import duration, percent, short
from .text import lines

Compared = Mapping[str, Any]


def compare_page(compared: Compared, objections: Sequence[str], made_unix_s: float) -> str:
    """A whole HTML document. compared: what Compared.as_json gives."""
    body = [
        _header(compared, objections),
        section("accuracy", "Accuracy", *_accuracy(compared)),
        section("scores", "Scores", grid(_logprobs(compared), _bits(compared), _depth(compared))),
        section("changed", "Rows that changed their choice", _changed(compared)),
        section("runs", "The two runs", grid(*_runs(compared), _settings(compared))),
        section("text", "The same in words", _text(compared, objections)),
    ]
    return document("TinyLoop: two runs compared", body, made_unix_s)


def _header(compared: Compared, objections: Sequence[str]) -> Markup:
    is_equal = compared["identical_lines"] == compared["pairs"] and not (
        compared["only_a"] or compared["only_b"]
    )
    word = "beyond" if objections else "equal" if is_equal else "compared"
    style = "bad" if objections else "good"
    return tag(
        "header",
        tag("p", "TinyLoop, two runs row by row", class_="kind"),
        tag("h1", "A against B ", tag("span", word, class_=f"badge {style}")),
        tag("p", _sentence(compared, is_equal), class_="lead"),
        *(tag("p", f"Beyond what is allowed: {objection}.", class_="bad") for objection in objections),
        tag(
            "div",
            *(
                tag("div", tag("b", value), tag("span", name), class_="tile")
                for name, value in (
                    ("rows in both", f"{compared['pairs']:,}"),
                    ("identical", f"{compared['identical_lines']:,}"),
                    ("changed choices", f"{compared['changed_choice']:,}"),
                    ("in A alone", f"{compared['only_a']:,}"),
                    ("in B alone", f"{compared['only_b']:,}"),
                )
            ),
            class_="tiles",
        ),
    )


def _sentence(compared: Compared, is_equal: bool) -> str:
    if not compared["pairs"]:
        return "No row is in both runs: there is nothing to compare."
    if is_equal:
        return "Every row has the same line in both runs, byte for byte."
    largest = compared["logprob_difference"]["largest"]
    return (
        f"{compared['pairs'] - compared['identical_lines']:,} of {compared['pairs']:,} rows differ; the "
        f"largest "
        f"difference of a log-probability is {largest:.3g}."
    )


def _accuracy(compared: Compared) -> list[Markup]:
    rows = [
        [
            cut(group["file"], 40),
            metric,
            percent(values["a"], 2),
            percent(values["b"], 2),
            f"{100 * values['difference']:+.2f} ({100 * values['difference_low']:+.2f} to "
            f"{100 * values['difference_high']:+.2f})",
            f"{values['only_a_right']:,} / {values['only_b_right']:,}",
            f"{values['mcnemar_p']:.3g}",
        ]
        for group in compared["groups"]
        for metric, values in group["accuracy"].items()
    ]
    if not rows:
        return [nothing("Accuracy of A and B", "No row has gold in both runs.")]
    headings = ["file", "metric", "A", "B", "difference in points", "right in one alone (A / B)", "McNemar p"]
    return [
        figure(
            "Accuracy of A and B",
            "The difference is B less A in points of a hundred, with Wald's 95 % interval for paired "
            "shares. p is that of "
            "McNemar's exact test: how often rows that only one run has right would be split at least so "
            "unevenly by "
            "chance. Bad: a difference below zero with a small p, such as 0.01.",
            table(headings, rows, numbers=frozenset(range(2, 7))),
        )
    ]


def _logprobs(compared: Compared) -> Markup:
    values = compared["logprob_difference"]
    heading = "Size of differences of log-probabilities"
    if not values["scores"]:
        return nothing(heading, "No score is in both runs.")
    rows = [("scores compared", f"{values['scores']:,}"), ("exactly equal", f"{values['equal']:,}")]
    rows += [(f"{name} are at most", f"{value:.3g}") for name, value in values["quantiles"].items()]
    rows += [
        ("largest", f"{values['largest']:.3g}"),
        ("mean, B less A", f"{values['mean_b_less_a']:+.3g} ± {values['half_width_95']:.3g}"),
        ("zero probability in one alone", f"{values['zero_probability_in_one']:,}"),
    ]
    return figure(
        heading,
        "In nats, of every scored part. Quantiles are at most 2 % too large. ± is 1.96 standard errors. "
        "Same weights and "
        "arithmetic give 0; other arithmetic gives about 0.001 to 0.01 a token. Bad: a mean well away from "
        "zero, or a few "
        "differences far beyond the others.",
        pairs(rows),
    )


def _bits(compared: Compared) -> Markup:
    heading = "Bits per byte of documents, B less A"
    rows = [
        (
            cut(group["file"], 40),
            f"{bits['mean']:+.6f} ± {bits['half_width_95']:.6f} on {bits['documents']:,}",
        )
        for group in compared["groups"]
        if (bits := group.get("bits_per_byte_difference"))
    ]
    if not rows:
        return nothing(heading, "No document is in both runs.")
    return figure(
        heading,
        "Mean over documents; ± is 1.96 standard errors of the paired differences. Above zero B is worse.",
        pairs(rows),
    )


def _depth(compared: Compared) -> Markup:
    depth, heading = compared["depth"], "Loops"
    if depth["a"]["mean"] is None or depth["b"]["mean"] is None:
        return nothing(heading, "The rows do not say how many loops they were given.")
    rows = [
        (
            side.upper(),
            f"{depth[side]['mean']:.2f} on average ("
            + ", ".join(f"{loops}: {n:,}" for loops, n in depth[side]["rows"].items())
            + ")",
        )
        for side in "ab"
    ]
    return figure(heading, "Loops of the rows that are in both runs.", pairs(rows))


def _changed(compared: Compared) -> Markup:
    rows = [
        [
            cut(row["id"], 60),
            f"{cut(row['file'], 40)}:{row['line']}",
            str(row["a"]),
            str(row["b"]),
            "-" if row["gold"] is None else str(row["gold"]),
            f"{_margin(row['margin_a'])} / {_margin(row['margin_b'])}",
        ]
        for row in compared["changed_rows"]
    ]
    if not rows:
        return nothing("Changed choices", "No row that is in both runs changed its choice.")
    headings = ["row", "file and line", "choice in A", "in B", "gold", "margin in nats (A / B)"]
    return figure(
        "Changed choices",
        f"The first {len(rows):,} of {compared['changed_choice']:,}, by acc. Small margins change by "
        f"rounding alone. Bad: a "
        "change of a choice with a large margin.",
        table(headings, rows, numbers=frozenset({2, 3, 4, 5})),
    )


def _runs(compared: Compared) -> list[Markup]:
    cards: list[Markup] = []
    for side in "ab":
        run = compared[side]
        rows = [("folder", run["folder"]), ("state", str(run["state"]))]
        rows += [(name, f"{run[name]:,}") for name in ("rows", "errors") if run[name] is not None]
        if run["elapsed_s"] is not None:
            rows.append(("time of the last run", duration(run["elapsed_s"])))
        if run["rows_per_s"] is not None:
            rows.append(("rows a second", short(run["rows_per_s"])))
        if run["hit_rate"] is not None:
            rows.append(("hit rate", percent(run["hit_rate"])))
        cards.append(tag("div", tag("h3", side.upper()), pairs(rows), class_="card"))
    return cards


def _settings(compared: Compared) -> Markup:
    if not compared["settings"]:
        return nothing("Settings that differ", "None: the same model, inputs and settings.")
    rows = [
        (key, f"A: {_value(values['a'])}; B: {_value(values['b'])}")
        for key, values in compared["settings"].items()
    ]
    return figure(
        "Settings that differ",
        "Differences of the scores come from these, if from anything. default: not set.",
        pairs(rows),
        kind="even",
    )


def _text(compared: Compared, objections: Sequence[str]) -> Markup:
    return tag(
        "div", tag("pre", "\n".join(shown(line) for line in lines(compared, objections))), class_="card"
    )


def _margin(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _value(value: Any) -> str:
    return "default" if value is None else cut(str(value), 200)
