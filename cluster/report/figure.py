"""A picture with its heading and its caption, or with the reason why there is none. Pure."""

from __future__ import annotations

from .markup import Markup, prose, tag


def figure(heading: str, caption: str, *content: Markup, kind: str = "") -> Markup:
    """caption: what the picture means and what would be bad."""
    return tag(
        "figure",
        tag("h3", heading),
        *content,
        tag("figcaption", prose(caption)),
        class_=f"card {kind}".strip(),
    )


def nothing(heading: str, why: str) -> Markup:
    """In the place of a picture without data."""
    return tag("figure", tag("h3", heading), tag("p", prose(why), class_="empty"), class_="card none")


def section(name: str, heading: str, *content: Markup) -> Markup:
    """A part of the page."""
    return tag("section", tag("h2", heading), *content, id=name)


def grid(*figures: Markup) -> Markup:
    """Pictures beside each other where there is room."""
    return tag("div", *figures, class_="grid")


def table(headings: list[str], rows: list[list[str]], *, numbers: frozenset[int] = frozenset()) -> Markup:
    """A table that becomes a list of cards on a narrow screen. numbers: columns that are set to the right."""
    head = tag(
        "tr",
        *(
            tag("th", heading, scope="col", class_="num" if k in numbers else None)
            for k, heading in enumerate(headings)
        ),
    )
    body = [
        tag(
            "tr",
            *(
                tag("td", cell, data_label=heading, class_="num" if k in numbers else None)
                for k, (heading, cell) in enumerate(zip(headings, row, strict=True))
            ),
        )
        for row in rows
    ]
    return tag("table", tag("thead", head), tag("tbody", *body))


def pairs(rows: list[tuple[str, str]]) -> Markup:
    """Names and values."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in rows))
