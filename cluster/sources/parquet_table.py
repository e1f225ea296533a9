"""Parquet: rows as JSON would say them, read in small batches whatever the size of file and row groups.

What JSON has no word for is carried as text that says the same, or refused; nothing is rounded.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import RowError
from .blocks import hash_blocks, open_checked
from .extras import need, parquet
from .formats import FileKind
from .places import Place
from .record import InputFile, Record, SourceError
from .table import Columns

# A batch of rows is held as Arrow and as Python values.
BATCH_ROWS, BATCH_BYTES = 1_024, 8 << 20
READ_BYTES = 1 << 20
MAX_NESTING = 50


def scan(place: Place, label: str, kind: FileKind) -> InputFile:
    """Read a file once: its hash, its schema and how many rows it has.

    Raises: SourceError if it is no Parquet file or has a column that cannot be carried; UsageError without
    pyarrow.
    """
    parquet(f"the Parquet file {place.spelled!r}")
    size, sha256, digests = hash_blocks(place)
    file = InputFile(place, label, size, sha256, 0, 0, kind, (), digests)
    with _opened(file) as table:
        notes = tuple(_notes(table.schema_arrow, place))
        num_rows = int(table.metadata.num_rows)
    return InputFile(place, label, size, sha256, num_rows, 0, kind, notes, digests)


def records(file: InputFile, columns: Columns) -> Iterator[Record]:
    """Every row. Raises: SourceError if the file is no longer what scan saw, or is damaged."""
    with _opened(file) as table:
        plan = {field.name: _Column(field.name, field.type) for field in table.schema_arrow}
        names = list(plan)
        line = 0
        for batch in table.iter_batches(batch_size=_batch_rows(table.metadata), use_threads=False):
            values = [plan[name].values(batch.column(i)) for i, name in enumerate(names)]
            for row in zip(*values, strict=True) if names else [()] * batch.num_rows:
                line += 1
                error = next((value for value in row if isinstance(value, RowError)), None)
                fields = columns.present(dict(zip(names, row, strict=True)))
                yield Record(line, repr(row).encode("utf-8", "replace") if error else b"", error or fields)
        if line != file.num_rows:
            raise SourceError(
                f"input {file.place.spelled!r} is damaged: it says {file.num_rows} rows and has {line}"
            )


@contextmanager
def _opened(file: InputFile) -> Iterator[Any]:
    arrow, tables = need("pyarrow", "files", "a Parquet file"), parquet("a Parquet file")
    with _arrow_errors(file.place), open_checked(file) as reader:
        python_file = arrow.PythonFile(reader, mode="r")
        # Neither a whole row group nor a whole column of one is read ahead.
        with tables.ParquetFile(python_file, pre_buffer=False, buffer_size=READ_BYTES) as table:
            yield table


@contextmanager
def _arrow_errors(place: Place) -> Iterator[None]:
    arrow = need("pyarrow", "files", "a Parquet file")
    try:
        yield
    except arrow.ArrowException as error:
        raise SourceError(f"input {place.spelled!r} cannot be read as Parquet: {error}") from error


def _batch_rows(metadata: Any) -> int:
    """Rows of a batch of BATCH_BYTES in the row group with the longest rows."""
    longest = 1.0
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        if group.num_rows:
            longest = max(longest, group.total_byte_size / group.num_rows)
    return max(1, min(BATCH_ROWS, int(BATCH_BYTES / longest)))


def _notes(schema: Any, place: Place) -> Iterator[str]:
    """What is done to columns that JSON has no type for. Raises: SourceError for one that is refused."""
    arrow = need("pyarrow", "files", "a Parquet file")
    names = list(schema.names)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise SourceError(f"input {place.spelled!r} has two columns {twice!r}: rename one of them")
    for field in schema:
        try:
            done = sorted(set(_conversions(field.type)))
            _Column(field.name, field.type).values(arrow.array([], field.type))
        except (TypeError, arrow.ArrowException) as error:
            raise SourceError(
                f"input {place.spelled!r}: column {field.name!r} has type {field.type}: {error}: cast it to "
                "text, or leave it out of the file"
            ) from None
        if done:
            yield f"column {field.name!r} ({field.type}) is carried as {', '.join(done)}"


def _conversions(kind: Any, depth: int = 0) -> Iterator[str]:
    """What is done to values of a type, nested ones included. Raises: TypeError if nothing can be."""
    types = need("pyarrow.types", "files", "a Parquet file")
    if depth > MAX_NESTING:
        raise TypeError(f"it is nested more than {MAX_NESTING} deep")
    if types.is_dictionary(kind) or _is_list(kind):
        yield from _conversions(kind.value_type, depth + 1)
    elif types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if len(set(names)) < len(names):
            raise TypeError("two of its fields have one name")
        for i in range(kind.num_fields):
            yield from _conversions(kind.field(i).type, depth + 1)
    elif types.is_map(kind):
        yield "a list of [key, value]"
        yield from _conversions(kind.key_type, depth + 1)
        yield from _conversions(kind.item_type, depth + 1)
    elif types.is_decimal(kind):
        yield "text of all its digits"
    elif types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        yield "text in the form of ISO 8601, as Arrow writes it"
    elif types.is_duration(kind):
        yield f"a whole number of {kind.unit}"
    elif types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        yield "base64 text"
    elif not (
        types.is_null(kind)
        or types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
    ):
        raise TypeError("JSON has no type for it, nor is there a text that says the same")


def _is_list(kind: Any) -> bool:
    types = need("pyarrow.types", "files", "a Parquet file")
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


class _Column:
    """How the cells of one column become values of JSON."""

    def __init__(self, name: str, kind: Any) -> None:
        self._name = name
        self._target = _castable(kind)
        self._needs_cast = self._target != kind
        self._walk = _walker(kind)

    def values(self, column: Any) -> list[Any]:
        """One value a row; a RowError where a cell has none."""
        if self._needs_cast:
            column = column.cast(self._target)
        try:
            cells = column.to_pylist()
        except UnicodeDecodeError:
            cells = [self._one(column[i]) for i in range(len(column))]
        return cells if self._walk is None else [self._walked(cell) for cell in cells]

    def _one(self, scalar: Any) -> Any:
        try:
            return scalar.as_py()
        except UnicodeDecodeError as error:
            return RowError("invalid_unicode", f"column {self._name!r} is not UTF-8: {error.reason}")

    def _walked(self, cell: Any) -> Any:
        if cell is None or isinstance(cell, RowError):
            return cell
        assert self._walk is not None
        try:
            return self._walk(cell)
        except ValueError as error:
            return RowError("wrong_type", f"column {self._name!r} holds {error}, which JSON cannot say")


def _castable(kind: Any) -> Any:
    """The type that Arrow itself turns values into, for what Python's types would round or not know."""
    arrow, types = (
        need("pyarrow", "files", "a Parquet file"),
        need("pyarrow.types", "files", "a Parquet file"),
    )
    if types.is_dictionary(kind):
        return _castable(kind.value_type)
    if types.is_decimal(kind) or types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        return arrow.string()
    if types.is_duration(kind):
        return arrow.int64()
    if types.is_fixed_size_list(kind):
        return arrow.list_(kind.value_field.with_type(_castable(kind.value_type)), kind.list_size)
    if types.is_large_list(kind):
        return arrow.large_list(kind.value_field.with_type(_castable(kind.value_type)))
    if types.is_list(kind):
        return arrow.list_(kind.value_field.with_type(_castable(kind.value_type)))
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return arrow.struct([field.with_type(_castable(field.type)) for field in fields])
    if types.is_map(kind):
        return arrow.map_(
            kind.key_field.with_type(_castable(kind.key_type)),
            kind.item_field.with_type(_castable(kind.item_type)),
        )
    return kind


def _walker(kind: Any) -> Callable[[Any], Any] | None:
    """What is left to do to a Python value of a type, None where nothing is. It raises ValueError."""
    types = need("pyarrow.types", "files", "a Parquet file")
    if types.is_dictionary(kind):
        return _walker(kind.value_type)
    if types.is_floating(kind):
        return _finite
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return _base64
    if _is_list(kind):
        inner = _walker(kind.value_type)
        return None if inner is None else lambda cell: [_or_none(inner, value) for value in cell]
    if types.is_struct(kind):
        by_name = {kind.field(i).name: _walker(kind.field(i).type) for i in range(kind.num_fields)}
        if not any(by_name.values()):
            return None
        return lambda cell: {name: _or_none(by_name[name], value) for name, value in cell.items()}
    if types.is_map(kind):
        key, item = _walker(kind.key_type), _walker(kind.item_type)
        return lambda cell: [[_or_none(key, k), _or_none(item, v)] for k, v in cell]
    return None


def _or_none(walk: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if walk is None or value is None else walk(value)


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(str(value))
    return value


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")
