"""What two runs have in common and where they differ, counted pair by pair. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..report import row_fields
from ..summary import METRICS
from .statistics import Magnitudes, Mean, mcnemar_exact, paired_interval

CHANGED_SHOWN = 50
ONLY_SHOWN = 20
QUANTILES = (0.5, 0.9, 0.99, 0.999)

Row = Mapping[str, Any]


@dataclass(slots=True)
class Accuracy:
    """Pairs with gold of one file, task and metric: both right, A alone, B alone, neither."""

    both: int = 0
    only_a: int = 0
    only_b: int = 0
    neither: int = 0

    def add(self, a: bool, b: bool) -> None:
        self.both += a and b
        self.only_a += a and not b
        self.only_b += b and not a
        self.neither += not (a or b)

    @property
    def rows(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def difference(self) -> float:
        """Accuracy of B less that of A."""
        return (self.only_b - self.only_a) / self.rows if self.rows else 0.0

    def as_json(self) -> dict[str, Any]:
        rows = self.rows
        low, high = paired_interval(self.only_a, self.only_b, rows)
        return {
            "rows": rows,
            "a": (self.both + self.only_a) / rows if rows else None,
            "b": (self.both + self.only_b) / rows if rows else None,
            "difference": self.difference,
            "difference_low": low,
            "difference_high": high,
            "only_a_right": self.only_a,
            "only_b_right": self.only_b,
            "mcnemar_p": mcnemar_exact(self.only_a, self.only_b),
        }


@dataclass(slots=True)
class Group:
    """Pairs of one file and task. bits: of B less A, a document each."""

    pairs: int = 0
    accuracies: dict[str, Accuracy] = field(default_factory=dict)
    changed_choice: int = 0
    bits: Mean = field(default_factory=Mean)

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"pairs": self.pairs, "changed_choice": self.changed_choice}
        known = {name: self.accuracies[name] for name in METRICS if name in self.accuracies}
        shown["accuracy"] = {name: accuracy.as_json() for name, accuracy in known.items()}
        if self.bits.count:
            shown["bits_per_byte_difference"] = {
                "documents": self.bits.count,
                "mean": self.bits.mean,
                "half_width_95": self.bits.half_width,
            }
        return shown


@dataclass(slots=True)
class Comparison:
    """Everything counted. identical: pairs whose lines are the same bytes.

    incomparable: pairs of another task or another number of choices; unreadable: lines that no job writes.
    failed_in_a, failed_in_b: of the rows with a result in the other run alone, those that are errors here.
    """

    pairs: int = 0
    identical: int = 0
    incomparable: int = 0
    unreadable: int = 0
    only_a: int = 0
    only_b: int = 0
    failed_in_a: int = 0
    failed_in_b: int = 0
    null_in_one: int = 0
    groups: dict[tuple[str, str], Group] = field(default_factory=dict)
    magnitudes: Magnitudes = field(default_factory=Magnitudes)
    signed: Mean = field(default_factory=Mean)
    depths: tuple[Counter[float], Counter[float]] = field(default_factory=lambda: (Counter(), Counter()))
    changed: list[dict[str, Any]] = field(default_factory=list)
    num_changed: int = 0
    only_ids: tuple[list[str], list[str]] = field(default_factory=lambda: ([], []))

    def add(self, line_a: bytes | None, line_b: bytes | None) -> None:
        """Count one pair, or a row of which the other run has no result."""
        if line_a is None or line_b is None:
            self._add_only(line_a, line_b)
            return
        a = _parsed(line_a)
        b = a if line_a == line_b else _parsed(line_b)
        if a is None or b is None:
            self.unreadable += 1
            return
        self.pairs += 1
        self.identical += line_a == line_b
        for row, depths in zip((a, b), self.depths, strict=True):
            if (depth := row_fields.depth_of(row)) is not None:
                depths[depth] += 1
        if row_fields.task_of(a) != row_fields.task_of(b) or len(_scores(a)) != len(_scores(b)):
            self.incomparable += 1
            return
        self._compare(a, b)

    def as_json(self) -> dict[str, Any]:
        """The part of --json that the rows decide."""
        sizes = self.magnitudes
        return {
            "pairs": self.pairs,
            "identical_lines": self.identical,
            "incomparable": self.incomparable,
            "unreadable": self.unreadable,
            "only_a": self.only_a,
            "only_b": self.only_b,
            "failed_in_a": self.failed_in_a,
            "failed_in_b": self.failed_in_b,
            "only_a_ids": self.only_ids[0],
            "only_b_ids": self.only_ids[1],
            "groups": [
                {"file": file, "task": task, **group.as_json()} for (file, task), group in self.groups.items()
            ],
            "logprob_difference": {
                "scores": sizes.count,
                "equal": sizes.zeros,
                "zero_probability_in_one": self.null_in_one,
                "mean_b_less_a": self.signed.mean,
                "half_width_95": self.signed.half_width,
                "mean_size": sizes.total / sizes.count if sizes.count else None,
                "largest": sizes.largest,
                "quantiles": {f"{100 * q:g}%": sizes.quantile(q) for q in QUANTILES} if sizes.count else {},
            },
            "depth": {
                side: {
                    "mean": _mean(depths),
                    "rows": {f"{depth:g}": n for depth, n in sorted(depths.items())},
                }
                for side, depths in zip("ab", self.depths, strict=True)
            },
            "changed_choice": self.num_changed,
            "changed_rows": self.changed,
        }

    @property
    def is_equal(self) -> bool:
        """Every row has the same line in both runs."""
        ones = self.only_a, self.only_b, self.unreadable
        return self.pairs == self.identical and not any(ones)

    def _compare(self, a: Row, b: Row) -> None:
        key = str(a.get("file", "")), row_fields.task_of(a)
        group = self.groups.setdefault(key, Group())
        group.pairs += 1
        for one, other in zip(_scores(a), _scores(b), strict=True):
            if one is None or other is None:
                self.null_in_one += (one is None) != (other is None)
                continue
            self.magnitudes.add(abs(other - one))
            self.signed.add(other - one)
        bits_a, bits_b = row_fields.bits_per_byte(a), row_fields.bits_per_byte(b)
        if bits_a is not None and bits_b is not None:
            group.bits.add(bits_b - bits_a)
        for metric in METRICS:
            right_a, right_b = row_fields.is_correct(a, metric), row_fields.is_correct(b, metric)
            if right_a is not None and right_b is not None:
                group.accuracies.setdefault(metric, Accuracy()).add(right_a, right_b)
        self._note_change(a, b, group)

    def _note_change(self, a: Row, b: Row, group: Group) -> None:
        choice_a, choice_b = row_fields.choice_of(a), row_fields.choice_of(b)
        if choice_a == choice_b:
            return
        group.changed_choice += 1
        self.num_changed += 1
        if len(self.changed) < CHANGED_SHOWN:
            self.changed.append(
                {
                    "id": str(a.get("id")),
                    "file": str(a.get("file", "")),
                    "line": a.get("line"),
                    "a": choice_a,
                    "b": choice_b,
                    "gold": a.get("gold"),
                    "margin_a": row_fields.margin(a),
                    "margin_b": row_fields.margin(b),
                }
            )

    def _add_only(self, line_a: bytes | None, line_b: bytes | None) -> None:
        side = 0 if line_a is not None else 1
        row = _parsed(line_a or line_b or b"")
        if row is None:
            self.unreadable += 1
            return
        if side == 0:
            self.only_a += 1
        else:
            self.only_b += 1
        if len(self.only_ids[side]) < ONLY_SHOWN:
            self.only_ids[side].append(str(row.get("id")))


def _scores(row: Row) -> list[float | None]:
    """Every log-probability that a row has, None for a zero probability."""
    if "choices" in row:
        return [row_fields.number(part.get("logprob")) for part in row_fields.parts_of(row)]
    return [row_fields.number(row["logprob"])] if "logprob" in row else []


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _mean(depths: Counter[float]) -> float | None:
    total = sum(depths.values())
    return sum(depth * n for depth, n in depths.items()) / total if total else None
