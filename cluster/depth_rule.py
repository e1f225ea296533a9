"""How deep rows go where that is not one number for all: what is asked, and which models and rows fit.

A cascade decides by the margin between choices, an exit gate by the model's own word for each token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..workers.effort import Effort
from .errors import UsageError
from .rows import Choices, Row, RowFailure, Task

# Printed by --help and written to run.json beside what is done to text.


@dataclass(frozen=True, slots=True)
class DepthRequest:
    """What the command line says of depth beside --depth. agreement_rows: how many are checked afterwards."""

    cascade: tuple[int, ...] | None = None
    margin: float | None = None
    exit_threshold: float | None = None
    min_depth: int | None = None
    agreement_rows: int = 200

    def effort(self, depth: int | None, descriptor: Mapping[str, Any]) -> Effort | None:
        """The rule for a model; None for a fixed depth. depth: --depth.

        Raises: UsageError for options that do not go together or that the model cannot do.
        """
        self._refuse_combinations(depth)
        threshold = self.exit_threshold
        if self.cascade is None and threshold is None:
            return None
        if threshold is not None and not descriptor["exit_gate"]:
            raise UsageError(
                f"--exit-threshold is {threshold:g}, the model has no exit gate: use --depth, or --cascade "
                "and --margin for rows with choices"
            )
        if descriptor["loops"] == 1:
            raise UsageError(
                "--cascade and --exit-threshold are for looped models, this one is none: leave them out"
            )
        if self.cascade is not None:
            return Effort(self.cascade, self.margin, threshold)
        last = int(descriptor["loops"]) if depth is None else depth
        first = self.min_depth or 1
        if first > last:
            raise UsageError(f"--min-depth is {first}, the depth is {last}: ask for at most that")
        return Effort((first, last) if first < last else (last,), None, threshold)

    def _refuse_combinations(self, depth: int | None) -> None:
        if self.cascade is None and self.margin is not None:
            raise UsageError("--margin is of a cascade: give --cascade too, such as --cascade 3:4")
        if self.cascade is not None and self.margin is None:
            raise UsageError("--cascade needs --margin: below how many nats a row goes deeper, such as 1")
        if self.cascade is not None and (depth is not None or self.min_depth is not None):
            other = "--depth" if depth is not None else "--min-depth"
            raise UsageError(f"--cascade and {other} exclude each other: --cascade names every depth")
        if self.min_depth is not None and self.exit_threshold is None:
            raise UsageError("--min-depth is of an exit gate: give --exit-threshold too")
        if self.margin is not None and not 0 <= self.margin < float("inf"):
            raise UsageError(f"--margin is {self.margin:g}: give a number of nats, 0 or more")
        if self.exit_threshold is not None and not 0 < self.exit_threshold < 1:
            raise UsageError(
                f"--exit-threshold is {self.exit_threshold:g}: give a probability between 0 and 1; 1 would "
                "be a fixed depth"
            )


def parse_cascade(text: str | None) -> tuple[int, ...] | None:
    """Read --cascade: "2:4" or "2:3:4". Raises: UsageError for anything else."""
    if text is None:
        return None
    from ..native.digits import parse_whole  # --help does not wait for the engine

    try:
        depths = tuple(parse_whole(part) for part in text.split(":"))
    except ValueError:
        depths = ()
    if len(depths) < 2 or depths[0] < 1 or any(a >= b for a, b in pairwise(depths)):
        raise UsageError(f"--cascade is {text!r}: give two or more rising depths, such as 2:4 or 2:3:4")
    if fault := Effort(depths, 0.0).fault():
        raise UsageError(f"--cascade is {text!r}: {fault}")
    return depths


def beyond(effort: Effort | None, loops: int) -> tuple[str, ...]:
    """A warning where a rule goes deeper than the model was made for."""
    if effort is None or effort.depths[-1] <= loops:
        return ()
    return (
        f"depth {effort.depths[-1]} is beyond the {loops} loops the model was made for: scores get worse, "
        "and full depth is no measure of agreement",
    )


def needs_gate(task: Task) -> bool:
    """Whether a row has no second choice, so that no margin can say how deep it goes."""
    return not isinstance(task, Choices) or len(task.choices) < 2


def refuse_ungated(rows: Iterable[Row | RowFailure], effort: Effort | None) -> None:
    """Raises: UsageError for the first row that a margin cannot decide, if no gate is to do it."""
    if effort is None or effort.exit_threshold is not None:
        return
    for row in rows:
        if isinstance(row, Row) and needs_gate(row.task):
            raise UsageError(
                f"row {row.id!r} (line {row.line}) has no two choices and so no margin to cascade by: give "
                "--exit-threshold too if the model has an exit gate, or score such rows at one --depth"
            )
