"""The final files of a job: results and errors, in one of three formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..durable import durable_file, readable, write_durably
from ..sources.formats import Format
from .rows import Fields
from .schema import Schema

STEMS = ("results", "errors")


def final_name(stem: str, output_format: Format) -> str:
    """Name of the file of results or errors."""
    return f"{stem}.{output_format}"


def write_final(
    output: Path, stem: str, output_format: Format, lines: Iterable[bytes], schema: Schema
) -> None:
    """Write one of the two files from its lines, by one rename. Raises: InfrastructureError."""
    path = output / final_name(stem, output_format)
    if output_format == "jsonl":
        write_durably(path, lines)
        return
    from . import table_files

    write = table_files.write_csv if output_format == "csv" else table_files.write_parquet
    with durable_file(path) as file:
        write(file, lines, schema)


def read_final(output: Path, stem: str, output_format: Format) -> Iterator[Fields]:
    """Fields of every line of one of the two files; of tables without those that are null.

    Raises: InfrastructureError if the file cannot be read or is not what a job wrote.
    """
    path = output / final_name(stem, output_format)
    if output_format == "jsonl":
        with readable(path), path.open("rb") as file:
            for line in file:
                yield json.loads(line)
        return
    from . import table_files

    read = table_files.read_csv if output_format == "csv" else table_files.read_parquet
    yield from read(path)
