"""Rows as Python programs hold them: mappings, a pandas DataFrame, a pyarrow Table. Neither is needed here.

A table has every column in every row, so a null in it is a field that the row does not have.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from .completion_rows import KINDS
from .completion_settings import ALIASES, READERS
from .errors import UsageError
from .sources.table import SCORE_COLUMNS

if TYPE_CHECKING:
    import pandas
    import pyarrow

# What a row's meaning hangs on; other columns of a table are not looked at.
COMMON_FIELDS = ("custom_id", "id", "prefix")
SCORE_FIELDS = tuple(sorted(SCORE_COLUMNS.text | SCORE_COLUMNS.values))
COMPLETION_FIELDS = (*COMMON_FIELDS, *KINDS, *READERS, *itertools.chain(*ALIASES.values()))

RowSource: TypeAlias = "Iterable[Mapping[str, Any]] | pandas.DataFrame | pyarrow.Table | pyarrow.RecordBatch"


def mappings_of(rows: RowSource, fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """One mapping a row, made as they are asked for. fields: the columns of a table that are looked at.

    Raises: UsageError for a table that cannot be read.
    """
    if (pandas := sys.modules.get("pandas")) is not None and isinstance(rows, pandas.DataFrame):
        rows = _of_frame(rows, fields)
    if (pyarrow := sys.modules.get("pyarrow")) is not None:
        if isinstance(rows, pyarrow.RecordBatch):
            rows = pyarrow.Table.from_batches([rows])
        if isinstance(rows, pyarrow.Table):
            return _of_table(rows, fields)
    if isinstance(rows, Mapping | str | bytes):
        raise UsageError(f"rows are one {type(rows).__name__}: give a list of mappings, or a table")
    return iter(cast("Iterable[Mapping[str, Any]]", rows))


def index_of(rows: RowSource) -> Any:
    """The index of a DataFrame, None for anything else."""
    pandas = sys.modules.get("pandas")
    return rows.index if pandas is not None and isinstance(rows, pandas.DataFrame) else None


def _of_frame(frame: pandas.DataFrame, fields: Sequence[str]) -> pyarrow.Table:
    import pyarrow

    chosen = frame[_chosen(frame.columns, fields)]
    if "gold" in chosen and chosen["gold"].dtype.kind == "f":
        # What pandas makes of whole numbers as soon as one is missing.
        whole = chosen["gold"].dropna()
        if (whole == whole.round()).all():
            chosen = chosen.assign(gold=chosen["gold"].astype("Int64"))
    try:
        return pyarrow.Table.from_pandas(chosen, preserve_index=False)
    except (pyarrow.ArrowException, TypeError) as error:
        raise UsageError(
            f"cannot read the DataFrame: {error}: give every column one type, or a list of mappings"
        ) from error


def _of_table(table: pyarrow.Table, fields: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    chosen = table.select(_chosen(table.column_names, fields))
    return (
        {name: value for name, value in row.items() if value is not None}
        for batch in chosen.to_batches(max_chunksize=1024)
        for row in batch.to_pylist()
    )


def _chosen(columns: Iterable[Any], fields: Sequence[str]) -> list[str]:
    found = [str(name) for name in columns]
    if chosen := [name for name in fields if name in found]:
        return chosen
    raise UsageError(
        f"no column of the table is a field of a row: found {', '.join(found)}: name them {', '.join(fields)}"
    )
