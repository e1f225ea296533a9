"""Numbers to places and to words: ticks, histogram bins, short labels. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

MOST_BINS = 40
FEWEST_BINS = 4


@dataclass(frozen=True, slots=True)
class Bins:
    """counts[i] of values in [edges[i], edges[i + 1]); the first and last also hold what lies outside.

    below, above: how many those are.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    below: int = 0
    above: int = 0


def nice_step(span: float, parts: int) -> float:
    """1, 2 or 5 times a power of ten: the smallest that cuts a span into at most so many parts."""
    if span <= 0 or not math.isfinite(span):
        return 1.0
    raw = span / parts
    power = 10.0 ** math.floor(math.log10(raw))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))


def ticks(low: float, high: float, parts: int = 4) -> list[float]:
    """Round numbers from low to high, both ends included where they are round."""
    step = nice_step(high - low, parts)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(k * step, 12) for k in range(first, last + 1)]


def ceiling(value: float, parts: int = 4) -> float:
    """The first round number at or above a value."""
    step = nice_step(value, parts)
    return max(1, math.ceil(value / step - 1e-9)) * step


def edges_of(values: Sequence[float]) -> tuple[float, ...]:
    """Edges of at most about 40 equal bins with round borders, over the middle 99.8 % of the values.

    A single odd value would otherwise make one bar of all the others.
    """
    low, high = (float(q) for q in np.quantile(np.asarray(values), [0.001, 0.999]))
    if low == high:
        low, high = low - 0.5, high + 0.5
    # About the square root of their number, so that ten values do not become ten lone bars.
    step = nice_step(high - low, max(FEWEST_BINS, min(MOST_BINS, round(2 * len(values) ** 0.5))))
    first, last = math.floor(low / step), math.floor(high / step) + 1
    return tuple(round(k * step, 12) for k in range(first, last + 1))


def histogram(values: Sequence[float], edges: tuple[float, ...]) -> Bins:
    """Count values into bins; those outside go to the first and the last bin."""
    array = np.asarray(values, dtype=np.float64)
    places = np.clip(np.searchsorted(np.asarray(edges), array, side="right") - 1, 0, len(edges) - 2)
    counts = np.bincount(places, minlength=len(edges) - 1)
    below, above = int((array < edges[0]).sum()), int((array >= edges[-1]).sum())
    return Bins(edges, tuple(int(count) for count in counts), below, above)


def short(value: float) -> str:
    """A count or rate as a short word: 950, 12k, 3.4M; small ones with as many digits as they need."""
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(value) >= limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def percent(share: float, digits: int = 1) -> str:
    """0.523 as 52.3 %."""
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """Seconds in the two units that matter: 0 s, 0.4 s, 34 s, 5 min 7 s, 2 h 10 min, 3 d 4 h."""
    if 0 < seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    units = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))
    for (size, name), (smaller, smaller_name) in pairwise(units):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {name} {rest} {smaller_name}" if rest else f"{whole // size} {name}"
    return f"{whole} s"


def size(size_bytes: float) -> str:
    """Bytes in binary units."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    index = 0
    while size_bytes >= 1024 and index < len(units) - 1:
        size_bytes, index = size_bytes / 1024, index + 1
    return (
        f"{size_bytes:.0f} {units[index]}"
        if index == 0 or size_bytes >= 100
        else f"{size_bytes:.1f} {units[index]}"
    )
