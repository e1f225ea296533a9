"""Which rows a job waits for, by their place in the input. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from .inputs import InputFile
from .progress import Awaited

SHOWN = 5


def awaited(
    begin: int, lines: Sequence[bytes | None], files: Sequence[InputFile], waited_s: float
) -> Awaited:
    """A window whose first row is begin; lines: None for each row that has not come back."""
    missing = (begin + k for k, line in enumerate(lines) if line is None)
    first = tuple(place_of(number, files) for number in islice(missing, SHOWN))
    return Awaited(begin, sum(line is None for line in lines), waited_s, first)


def place_of(number: int, files: Sequence[InputFile]) -> str:
    """Where a row stands, counted from 1 in its file and without blank lines."""
    for file in files:
        if number < file.num_rows:
            return f"row {number + 1} of {file.label}"
        number -= file.num_rows
    return f"row {number + 1} after the last file"
