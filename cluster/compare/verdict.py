"""Whether two runs are near enough, and the exit code that says so. Pure."""

from __future__ import annotations

from .comparison import Comparison

# The same number as a finished job with row errors: done, and something is to be looked at.
BEYOND = 3


def objections(rows: Comparison, *, max_drop: float | None, strict: bool) -> list[str]:
    """Why run B is not accepted; empty if it is.

    max_drop: how far each accuracy of B may be below that of A, as a share (0.01 is one in a hundred).
    strict: any difference between the rows is one too many. With neither nothing is asked for, so nothing is
    objected to.
    """
    found: list[str] = []
    if strict and not rows.is_equal:
        found.append(
            f"not equal: {rows.pairs - rows.identical:,} of {rows.pairs:,} pairs differ, {rows.only_a:,} "
            f"rows have a "
            f"result in A alone, {rows.only_b:,} in B alone"
        )
    if max_drop is not None:
        found += _drops(rows, max_drop)
    return found


def _drops(rows: Comparison, max_drop: float) -> list[str]:
    known = [
        (file, metric, accuracy)
        for (file, _), group in rows.groups.items()
        for metric, accuracy in group.accuracies.items()
    ]
    if not known:
        # What was not measured has not been shown to be within a limit.
        return ["no row has an accuracy in both runs, so no drop can be held against --max-drop"]
    found = [
        f"{metric} of {file} drops by {-accuracy.difference:.4f}, {max_drop:g} is allowed"
        for file, metric, accuracy in known
        if -accuracy.difference > max_drop
    ]
    if rows.only_a:
        # Rows that B lost would otherwise raise its accuracy.
        found.append(
            f"{rows.only_a:,} rows of A have no result in B, so the accuracies are not of the same rows"
        )
    return found
