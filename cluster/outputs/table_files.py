"""Final files as CSV and Parquet: written from lines of JSON in input order, read back row by row."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ..durable import readable
from ..errors import InfrastructureError, RowError
from ..sources.csv_table import Cells, cell_of, split_records
from ..sources.extras import need, parquet
from ..sources.streams import numbered_lines
from .rows import Fields, of_row, to_row
from .schema import Schema, Type, schema_of

# Rows that are turned at a time, and bytes of Arrow after which a row group is written.
BATCH_ROWS, GROUP_BYTES, GROUP_ROWS = 1_024, 32 << 20, 65_536


def write_csv(file: BinaryIO, lines: Iterable[bytes], schema: Schema) -> None:
    """A header, then a record a line. Lists and structs are JSON in their cells, what is null is nothing."""
    file.write((",".join(schema) + "\n").encode("ascii"))
    for line in lines:
        row = to_row(line, schema)
        file.write((",".join(cell_of(row[name]) for name in schema) + "\n").encode("utf-8"))


def read_csv(path: Path) -> Iterator[Fields]:
    """Fields of every record. Raises: InfrastructureError if it is not what write_csv wrote."""
    with readable(path), path.open("rb") as file:
        records = split_records(numbered_lines(file))
        schema = schema_of([text or "" for text in _texts(next(records, (b"", []))[1], path)])
        if schema is None:
            raise _not_ours(path)
        for _, cells in records:
            texts = _texts(cells, path)
            if len(texts) != len(schema):
                raise _not_ours(path)
            columns = zip(schema.items(), texts, strict=True)
            yield of_row({name: _value(text, kind) for (name, kind), text in columns}, schema)


def _texts(cells: Cells | RowError, path: Path) -> list[str | None]:
    if isinstance(cells, RowError):
        raise _not_ours(path)
    return [None if cell is None else cell.decode("utf-8") for cell in cells]


def _value(text: str | None, kind: Type) -> Any:
    return text if text is None or kind in ("text", "json") else json.loads(text)


def write_parquet(file: BinaryIO, lines: Iterable[bytes], schema: Schema) -> None:
    """Row groups of up to GROUP_ROWS rows. Raises: UsageError without pyarrow."""
    arrow = need("pyarrow", "files", "--output-format parquet")
    tables = parquet("--output-format parquet")
    arrow_schema = arrow.schema([(name, _arrow_type(kind)) for name, kind in schema.items()])
    with tables.ParquetWriter(file, arrow_schema, compression="zstd") as writer:
        for group in _groups(lines, schema, arrow, arrow_schema):
            writer.write_table(arrow.Table.from_batches(group, arrow_schema))


def _groups(lines: Iterable[bytes], schema: Schema, arrow: Any, arrow_schema: Any) -> Iterator[list[Any]]:
    group: list[Any] = []
    remaining = iter(lines)
    while rows := [to_row(line, schema) for line in islice(remaining, BATCH_ROWS)]:
        group.append(arrow.RecordBatch.from_pylist(rows, arrow_schema))
        if sum(one.nbytes for one in group) >= GROUP_BYTES or len(group) * BATCH_ROWS >= GROUP_ROWS:
            yield group
            group = []
    if group:
        yield group


def read_parquet(path: Path) -> Iterator[Fields]:
    """Fields of every row. Raises: InfrastructureError if it is not what write_parquet wrote."""
    arrow, tables = need("pyarrow", "files", f"{str(path)!r}"), parquet(f"{str(path)!r}")
    try:
        with readable(path), path.open("rb") as file, tables.ParquetFile(file, pre_buffer=False) as table:
            schema = schema_of(table.schema_arrow.names)
            if schema is None:
                raise _not_ours(path)
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                for row in batch.to_pylist():
                    yield of_row(row, schema)
    except arrow.ArrowException as error:
        raise _not_ours(path) from error


def _arrow_type(kind: Type) -> Any:
    arrow = need("pyarrow", "files", "--output-format parquet")
    if isinstance(kind, list):
        return arrow.list_(_arrow_type(kind[0]))
    if isinstance(kind, dict):
        return arrow.struct([(name, _arrow_type(one)) for name, one in kind.items()])
    make: Callable[[], Any] = {
        "text": arrow.string,
        "json": arrow.string,
        "int": arrow.int64,
        "float": arrow.float64,
        "bool": arrow.bool_,
    }[kind]
    return make()


def _not_ours(path: Path) -> InfrastructureError:
    return InfrastructureError(
        f"{str(path)!r} is not what a job wrote there: the folder was changed by something else: start again "
        "with --overwrite"
    )
