"""One pass over the rows of a job: what the pictures of scores need, in memory that does not grow with the
job.
"""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappush, heappushpop
from typing import Any

from ..openai_records import native_view
from . import row_fields

# Values that a histogram is made of; beyond, a uniform sample of them (reservoir), which is said.
MOST_VALUES = 200_000
HEAVIEST = 10
EXAMPLES_PER_CLASS = 3
MOST_CLASSES = 50


@dataclass(slots=True)
class Values:
    """Numbers for a histogram: all of them, or a uniform sample. seen: how many there were."""

    seen: int = 0
    kept: array[float] = field(default_factory=lambda: array("d"))
    _random: random.Random = field(default_factory=lambda: random.Random(0))

    def add(self, value: float) -> None:
        self.seen += 1
        if len(self.kept) < MOST_VALUES:
            self.kept.append(value)
        elif (place := self._random.randrange(self.seen)) < MOST_VALUES:
            self.kept[place] = value


@dataclass(slots=True)
class Guessing:
    """How often a random choice would be right, over the rows with gold."""

    rows: int = 0
    chance: float = 0.0


@dataclass(slots=True)
class Survey:
    """rows: read here; unreadable: lines that are not what a job writes, which are left out."""

    rows: int = 0
    unreadable: int = 0
    logprobs: dict[str, Values] = field(default_factory=dict)
    bits_per_byte: Values = field(default_factory=Values)
    margins: dict[bool | None, Values] = field(default_factory=dict)
    depths: Counter[float] = field(default_factory=Counter)
    guessing: dict[tuple[str, str], Guessing] = field(default_factory=dict)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    lengths: Values = field(default_factory=Values)
    heaviest: list[tuple[int, int, str, str, Any]] = field(default_factory=list)

    def add_line(self, line: bytes) -> dict[str, Any] | None:
        """Count one line of results.jsonl. Returns its fields, None if it is unreadable."""
        try:
            row = native_view(json.loads(line))
        except (ValueError, RecursionError, LookupError, TypeError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("id"), str):
            self.unreadable += 1
            return None
        self.add(row)
        return row

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one result."""
        self.rows += 1
        task = row_fields.task_of(row)
        for value in row_fields.logprobs_per_token(row):
            self.logprobs.setdefault(task, Values()).add(value)
        if (bits := row_fields.bits_per_byte(row)) is not None:
            self.bits_per_byte.add(bits)
        if (margin := row_fields.margin(row)) is not None:
            self.margins.setdefault(row_fields.is_correct(row), Values()).add(margin)
        if (depth := row_fields.depth_of(row)) is not None:
            self.depths[depth] += 1
        self._guess(row)
        self._generation(row)
        self._weigh(row)

    def _guess(self, row: Mapping[str, Any]) -> None:
        choices = row_fields.parts_of(row)
        if choices and row_fields.is_correct(row) is not None:
            key = str(row.get("file", "")), row_fields.task_of(row)
            guessing = self.guessing.setdefault(key, Guessing())
            guessing.rows += 1
            guessing.chance += 1 / len(choices)

    def _generation(self, row: Mapping[str, Any]) -> None:
        for one in row_fields.completions_of(row):
            if isinstance(reason := one.get("finish_reason"), str):
                self.finish_reasons[reason] += 1
            if (length := row_fields.number(one.get("n_tokens"))) is not None:
                self.lengths.add(length)

    def _weigh(self, row: Mapping[str, Any]) -> None:
        # The number in between breaks ties by order of the file, before anything that cannot be compared.
        entry = (
            row_fields.tokens_of(row), -self.rows, str(row["id"]), str(row.get("file", "")), row.get("line")
        )  # fmt: skip
        if len(self.heaviest) < HEAVIEST:
            heappush(self.heaviest, entry)
        else:
            heappushpop(self.heaviest, entry)


@dataclass(slots=True)
class ErrorClass:
    """Failures of one class that were read, and the first of them."""

    rows: int = 0
    examples: list[dict[str, Any]] = field(default_factory=list)


def survey_failures(lines: Iterable[bytes]) -> dict[str, ErrorClass]:
    """Failures by class, in order of their first one; beyond 50 classes the rest are one."""
    classes: dict[str, ErrorClass] = {}
    for line in lines:
        try:
            failure = native_view(json.loads(line))
            name = str(failure["class"])
        except (ValueError, LookupError, TypeError, RecursionError):
            name, failure = "unreadable line", {"message": repr(line[:200])}
        if name not in classes and len(classes) >= MOST_CLASSES:
            name = "other classes"
        entry = classes.setdefault(name, ErrorClass())
        entry.rows += 1
        if len(entry.examples) < EXAMPLES_PER_CLASS:
            entry.examples.append(failure)
    return classes
