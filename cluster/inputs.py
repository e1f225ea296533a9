"""Files of rows to rows, strictly and in order, whatever their formats and wherever they lie.

Invariant: every record that is not blank becomes exactly one Row or RowFailure, numbered from 0 over all
inputs. The same rows get the same lines and, but for the file's name, the same ids in every format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from .errors import InfrastructureError, RowError, UsageError
from .rows import Fields, Row, RowFailure, Task, parse_task, take_id
from .sources import csv_table, jsonl
from .sources.formats import Format, kind_of
from .sources.places import Place, expand
from .sources.record import InputFile, Record, SourceError
from .sources.table import SCORE_COLUMNS, Columns

__all__ = ["IdIndex", "InputFile", "expand", "read_rows", "scan"]

# Ids kept in a set, about 70 bytes each, before they are packed into 8.
RECENT_IDS = 65_536

ParseTask = Callable[[Fields], tuple[Task, Fields]]


def scan(places: Sequence[Place], input_format: Format | None = None) -> list[InputFile]:
    """Read every input once: its hash and its number of rows.

    input_format: of all of them; None: by the endings of their names.
    Raises: UsageError if a file cannot be read, or does not say what it is.
    """
    names = [place.name for place in places]
    return [
        _scan_one(place, name if names.count(name) == 1 else place.spelled, input_format)
        for place, name in zip(places, names, strict=True)
    ]


def _scan_one(place: Place, label: str, input_format: Format | None) -> InputFile:
    kind = kind_of(place.name, input_format)
    try:
        if kind.format == "jsonl":
            return jsonl.scan(place, label, kind)
        if kind.format == "csv":
            return csv_table.scan(place, label, kind)
        from .sources import parquet_table  # what it imports comes with an extra

        return parquet_table.scan(place, label, kind)
    except SourceError as error:
        raise UsageError(str(error)) from error


class IdIndex:
    """Which ids were seen, by 64-bit hash: 8 bytes a row, twice that while two runs are merged.

    Two different ids of one hash would make the second a duplicate; at 10 million rows the chance of any is
    3e-6.
    """

    def __init__(self, run_size: int | None = None) -> None:
        self._run_size = run_size or RECENT_IDS
        self._recent: set[int] = set()
        self._runs: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []

    def add(self, row_id: str) -> bool:
        """Note the id. Returns whether it is new."""
        code = hashlib.blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        key = int.from_bytes(code, "little")
        if key in self._recent or any(self._holds(run, key) for run in self._runs):
            return False
        self._recent.add(key)
        if len(self._recent) >= self._run_size:
            self._runs.append(np.sort(np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))))
            self._recent.clear()
            while len(self._runs) > 1 and len(self._runs[-2]) <= len(self._runs[-1]):
                last = self._runs.pop()
                self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]))
        return True

    @staticmethod
    def _holds(run: np.ndarray[tuple[int], np.dtype[np.uint64]], key: int) -> bool:
        place = int(np.searchsorted(run, np.uint64(key)))
        return place < len(run) and int(run[place]) == key


def read_rows(
    files: Sequence[InputFile],
    *,
    limit: int | None = None,
    parse: ParseTask = parse_task,
    columns: Columns = SCORE_COLUMNS,
) -> Iterator[Row | RowFailure]:
    """Rows of all files in order, at most limit. Memory: one batch of records and the index of ids.

    parse: a row's fields to its task, as parse_task does. columns: the fields it looks for.
    Raises: InfrastructureError if a file is no longer what scan saw.
    """
    ids = IdIndex()
    number = 0
    for file in files:
        try:
            for record in _records(file, columns):
                if limit is not None and number >= limit:
                    return
                yield _read_row(record, number, file.label, ids, parse)
                number += 1
        except SourceError as error:
            raise InfrastructureError(str(error)) from error


def _records(file: InputFile, columns: Columns) -> Iterator[Record]:
    if file.kind.format == "jsonl":
        return jsonl.records(file)
    if file.kind.format == "csv":
        return csv_table.records(file, columns)
    from .sources import parquet_table

    return parquet_table.records(file, columns)


def _read_row(record: Record, number: int, label: str, ids: IdIndex, parse: ParseTask) -> Row | RowFailure:
    fields = record.fields
    row_id = _made_id(label, record)
    try:
        if isinstance(fields, RowError):
            raise fields
        row_id = take_id(fields) or row_id
        if not ids.add(row_id):
            raise RowError("duplicate_id", f"id {row_id!r} was used by an earlier row: make ids unique")
        task, extra = parse(fields)
    except RowError as error:
        return RowFailure(number, row_id, label, record.line, error.error_class, error.message)
    return Row(number, row_id, label, record.line, task, extra)


def _made_id(label: str, record: Record) -> str:
    """The id of a row that brings none: file, line and content, as JSON says it in any format."""
    content = record.content
    if not isinstance(record.fields, RowError):
        if _has_id(record.fields):
            return ""
        said = {name: value for name, value in record.fields.items() if value is not None}
        content = json.dumps(said, sort_keys=True).encode("ascii")
    return f"{label}:{record.line}:{hashlib.blake2b(content, digest_size=4).hexdigest()}"


def _has_id(fields: Fields) -> bool:
    """Whether take_id will find one, or nearly: what it refuses has an id made as well."""
    value = fields.get("custom_id")
    value = fields.get("id") if value is None else value
    return isinstance(value, str) and value != "" and value.isascii()
