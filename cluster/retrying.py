"""Trying failed rows again: which classes, and the lines of all other rows, which stay as they are.

The lines of before lie in `earlier` (the parts of before, renamed) or in the final JSONL files, until the new
parts cover them. Invariant: retry.json is there from before anything changes until the job is finished, so
that a killed retry goes on as one.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from .durable import disk_errors, readable, sync_folder
from .errors import OUR_FAULTS, InfrastructureError, UsageError
from .folder import EARLIER, PARTS, RETRY, JobFolder
from .inputs import InputFile
from .outputs.final import STEMS, final_name
from .records import FAILURE_START
from .results import Parts
from .sources.formats import Format


def starts_of(classes: frozenset[str]) -> tuple[bytes, ...]:
    """How lines of these classes begin."""
    return tuple(FAILURE_START + f' "{name}"'.encode() for name in sorted(classes))


def announce_retry(
    folder: JobFolder, classes: frozenset[str], output_format: Format, *, is_finished: bool
) -> None:
    """Say in the folder that rows are tried again, before anything changes in it.

    Raises: UsageError if other classes are being tried again there.
    """
    under_way = folder.read_work(RETRY)
    if under_way is not None:
        if frozenset(under_way["classes"]) == classes:
            return
        raise UsageError(
            f"rows of {', '.join(under_way['classes'])} are being tried again in {str(folder.work)!r}: end "
            "that with --resume first"
        )
    from_files = is_finished and output_format == "jsonl"
    if is_finished and not from_files and not (folder.work / PARTS).is_dir():
        raise UsageError(
            f"the lines of the job in {str(folder.work)!r} are no longer there: a finished job with "
            f"--output-format {output_format} keeps them in {PARTS} while it has errors: use --overwrite"
        )
    folder.write_work(RETRY, {"classes": sorted(classes), "from_files": from_files})


def count_of(summary: dict[str, Any], classes: frozenset[str]) -> int:
    """How many rows of a finished job failed with one of these classes."""
    return sum(count for name, count in summary["errors_by_class"].items() if name in classes)


class Kept:
    """Lines that need not be made again: of this job's journal, and from before a retry.

    Asked for row by row in input order, from first_row on. count and num_failures: of all of them.
    """

    def __init__(
        self, folder: JobFolder, files: Sequence[InputFile], first_row: int, recovered: dict[int, bytes]
    ) -> None:
        """recovered: the journal's, by row number. Raises: InfrastructureError if lines are not whole."""
        self._first_row = first_row
        retry = folder.read_work(RETRY)
        classes = OUR_FAULTS if retry is None else OUR_FAULTS | frozenset(retry["classes"])
        self._again = starts_of(classes)
        self._recovered = {n: line for n, line in recovered.items() if not line.startswith(self._again)}
        self._earlier: Iterator[bytes] = iter(())
        self.count = len(self._recovered)
        self.num_failures = sum(line.startswith(FAILURE_START) for line in self._recovered.values())
        if retry is not None:
            # Rows of the retry alone are tried again: failures of ours that are not asked for stay.
            self._again = starts_of(frozenset(retry["classes"]))
            self._count_earlier(_earlier_lines(folder, files, retry, first_row))
            self._earlier = _earlier_lines(folder, files, retry, first_row)

    def pop(self, number: int) -> bytes | None:
        """The line of the next row."""
        before = next(self._earlier, None)
        found = self._recovered.pop(number, None)
        if found is not None:
            return found
        return None if before is None or before.startswith(self._again) else before

    def _count_earlier(self, lines: Iterator[bytes]) -> None:
        for number, line in enumerate(lines, start=self._first_row):
            if number not in self._recovered and not line.startswith(self._again):
                self.count += 1
                self.num_failures += line.startswith(FAILURE_START)


def prepare(folder: JobFolder) -> None:
    """Move the parts of before aside, if a retry was announced and did not get so far."""
    retry = folder.read_work(RETRY)
    if retry is None or retry["from_files"]:
        return
    parts, earlier = folder.work / PARTS, folder.work / EARLIER
    if not earlier.exists():
        with disk_errors(folder.work):
            parts.mkdir(exist_ok=True)
            parts.rename(earlier)
            sync_folder(folder.work)


def _earlier_lines(
    folder: JobFolder, files: Sequence[InputFile], retry: dict[str, Any], first_row: int
) -> Iterator[bytes]:
    """One line a row from first_row on, in input order."""
    if retry["from_files"]:
        return islice(_merged(folder.output, [file.label for file in files]), first_row, None)
    return islice(Parts(folder.work / EARLIER).lines(), first_row, None)


def _merged(output: Path, labels: list[str]) -> Iterator[bytes]:
    """The lines of results.jsonl and errors.jsonl in input order."""
    rank = {label: i for i, label in enumerate(labels)}

    def place(line: bytes) -> tuple[int, int]:
        fields = json.loads(line)
        return rank[fields["file"]], fields["line"]

    def lines(path: Path) -> Iterator[bytes]:
        with readable(path), path.open("rb") as file:
            yield from file

    paths = [output / final_name(stem, "jsonl") for stem in STEMS]
    try:
        yield from heapq.merge(*map(lines, paths), key=place)
    except (ValueError, KeyError, TypeError) as error:
        raise InfrastructureError(
            f"the results in {str(output)!r} are not what a job wrote there: start again with --overwrite"
        ) from error
