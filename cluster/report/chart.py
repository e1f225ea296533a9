"""Charts as SVG that keeps its text at one size on every screen. Pure: numbers in, markup out.

A chart is as wide as its column and so many pixels high: places across are percentages, places down are
pixels. Curves lie in an inner SVG that is stretched, with strokes that are not. Every mark has a title, which
browsers show on hover and readers of screens read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .markup import Markup, join, tag
from .scale import ceiling, short, ticks

HEIGHT = 176.0
# Room above for the highest label, below for the labels of the x axis.
TOP, BOTTOM = 10.0, 20.0
SCALE_WIDE = 40.0
WIDE = 1000.0

Label = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Series:
    """A curve: points are (x, y), y None where it is not known. style: a class of the style sheet."""

    name: str
    style: str
    points: Sequence[tuple[float, float | None]]
    is_area: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from x to x_end that is stacked of (style, height), with what it means."""

    x: float
    x_end: float
    parts: Sequence[tuple[str, float]]
    title: str


@dataclass(frozen=True, slots=True)
class Axis:
    """low to high across, with ticks and how they are called."""

    low: float
    high: float
    label: Label
    parts: int = 4

    def place(self, x: float) -> float:
        """Percent of the width."""
        return 100 * (x - self.low) / (self.high - self.low) if self.high > self.low else 0.0


def curves(
    axis: Axis,
    series: Sequence[Series],
    *,
    about: str,
    y_label: Label = short,
    y_high: float | None = None,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """A chart of curves from 0 up. marks: vertical lines with a title, such as resumes."""
    highest = max((y for one in series for _, y in one.points if y is not None), default=0.0)
    high = y_high if y_high is not None else ceiling(highest)
    inner = [_curve(axis, one, high) for one in series]
    stretched = tag(
        "svg",
        *inner,
        x="0",
        y="0",
        width="100%",
        height=HEIGHT,
        viewBox=f"0 0 {WIDE:.0f} {HEIGHT:.0f}",
        preserveAspectRatio="none",
    )
    lines = [_mark(axis, x, title) for x, title in marks]
    return _frame(axis, high, y_label, [stretched, *lines, *_hover(axis, series, y_label)], about)


def bars(
    axis: Axis,
    columns: Sequence[Bar],
    *,
    about: str,
    y_label: Label = short,
    marks: Sequence[tuple[float, str]] = (),
) -> Markup:
    """A chart of bars from 0 up."""
    highest = max((sum(height for _, height in bar.parts) for bar in columns), default=0.0)
    high = ceiling(highest)
    drawn = [_bar(axis, bar, high) for bar in columns]
    return _frame(axis, high, y_label, drawn + [_mark(axis, x, title) for x, title in marks], about)


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Style and name of each thing that a picture shows."""
    keys = [tag("span", tag("i", class_=f"key {style}"), name) for style, name in entries]
    return tag("p", *keys, class_="legend")


def down(value: float, high: float) -> float:
    """Pixels from the top."""
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value / high if high > 0 else 0.0)


def stretch(begin: float, end: float, y: float, height: float, style: str, *content: Markup) -> Markup:
    """A rectangle between two places in percent; never so narrow that it is not seen."""
    place, width = f"{begin:.3f}%", f"{max(end - begin, 0.15):.3f}%"
    return tag("rect", *content, x=place, width=width, y=y, height=height, class_=style)


def axis_labels(axis: Axis, height: float) -> list[Markup]:
    """Ticks of the x axis below a picture of that height."""
    labels: list[Markup] = []
    found = ticks(axis.low, axis.high, axis.parts)
    for value in found:
        place = axis.place(value)
        anchor = "start" if place < 6 else "end" if place > 94 else "middle"
        labels.append(
            tag("text", axis.label(value), x=f"{place:.3f}%", y=height - 5, text_anchor=anchor, class_="tick")
        )
    return labels


def _frame(axis: Axis, high: float, y_label: Label, marks: list[Markup], about: str) -> Markup:
    grid: list[Markup] = []
    labels: list[Markup] = []
    for value in ticks(0.0, high):
        y = round(down(value, high), 1)
        grid.append(tag("line", x1="0", x2="100%", y1=y, y2=y, class_="axis" if value == 0 else "grid"))
        labels.append(
            tag("text", y_label(value), x=SCALE_WIDE - 6, y=y + 4, text_anchor="end", class_="tick")
        )
    content = [tag("title", about), *grid, *marks, *axis_labels(axis, HEIGHT)]
    scale = tag("svg", *labels, class_="scale", width=SCALE_WIDE, height=HEIGHT, aria_hidden="true")
    return tag("div", scale, tag("svg", *content, class_="chart", height=HEIGHT, role="img"), class_="plot")


def _curve(axis: Axis, series: Series, high: float) -> Markup:
    runs: list[list[str]] = [[]]
    firsts: list[float] = []
    for x, y in series.points:
        if y is None:
            runs.append([])
            continue
        place = axis.place(x) * WIDE / 100
        if not runs[-1]:
            firsts.append(place)
        runs[-1].append(f"{place:.1f},{down(y, high):.1f}")
    known = [run for run in runs if run]
    path = "".join("M" + "L".join(run if len(run) > 1 else run * 2) for run in known)
    line = tag("path", d=path, class_=f"curve {series.style}")
    if not series.is_area:
        return line
    floor = HEIGHT - BOTTOM
    area = "".join(
        f"M{first:.1f},{floor:.1f}L{'L'.join(run)}L{run[-1].split(',')[0]},{floor:.1f}Z"
        for first, run in zip(firsts, known, strict=True)
    )
    return join([tag("path", d=area, class_=f"area {series.style}"), line])


def _hover(axis: Axis, series: Sequence[Series], y_label: Label) -> list[Markup]:
    """An unseen column a point, with what each curve is there."""
    xs = [x for x, _ in series[0].points] if series else []
    columns: list[Markup] = []
    for i, x in enumerate(xs):
        before = xs[i - 1] if i else axis.low
        after = xs[i + 1] if i + 1 < len(xs) else axis.high
        begin, end = axis.place((before + x) / 2), axis.place((x + after) / 2)
        values = [
            f"{one.name}: {y_label(y)}"
            for one in series
            if i < len(one.points) and (y := one.points[i][1]) is not None
        ]
        title = tag("title", f"{axis.label(x)}\n" + "\n".join(values))
        columns.append(stretch(begin, end, 0, HEIGHT - BOTTOM, "hover", title))
    return columns


def _bar(axis: Axis, bar: Bar, high: float) -> Markup:
    begin, end = axis.place(bar.x), axis.place(bar.x_end)
    base = 0.0
    drawn: list[Markup] = [tag("title", bar.title)]
    for style, height in bar.parts:
        top, bottom = down(base + height, high), down(base, high)
        # What is there at all must be seen: a count of one beside a million is a pixel high.
        tall = max(bottom - top, 1.5) if height else 0.0
        drawn.append(stretch(begin, end, bottom - tall, tall, f"bar {style}"))
        base += height
    column = stretch(begin, end, TOP, HEIGHT - TOP - BOTTOM, "hover")
    return tag("g", *drawn, column)


def _mark(axis: Axis, x: float, title: str) -> Markup:
    place = f"{axis.place(x):.3f}%"
    return tag("line", tag("title", title), x1=place, x2=place, y1=TOP, y2=HEIGHT - BOTTOM, class_="mark")
