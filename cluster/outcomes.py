"""What came of rows: one sequence in their order, and a table of pandas or Arrow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from .errors import RowError
from .rows import RowFailure

if TYPE_CHECKING:
    import pandas
    import pyarrow

Result = TypeVar("Result")


class Outcomes(Sequence["Result | RowFailure"], ABC, Generic[Result]):
    """One outcome a row, in the order of the rows."""

    def __init__(self, outcomes: Iterable[Result | RowFailure], index: Any = None) -> None:
        """index: of the DataFrame that the rows came in."""
        self._outcomes = list(outcomes)
        self._index = index

    @overload
    def __getitem__(self, key: int) -> Result | RowFailure: ...
    @overload
    def __getitem__(self, key: slice) -> list[Result | RowFailure]: ...
    def __getitem__(self, key: int | slice) -> Result | RowFailure | list[Result | RowFailure]:
        return self._outcomes[key]

    def __len__(self) -> int:
        return len(self._outcomes)

    def __iter__(self) -> Iterator[Result | RowFailure]:
        return iter(self._outcomes)

    @property
    def failures(self) -> list[RowFailure]:
        """Rows without a result, each with a class and a reason."""
        return [outcome for outcome in self._outcomes if isinstance(outcome, RowFailure)]

    def raise_failures(self) -> None:
        """Raises: RowError with the first failure's class and reason, if any row has no result."""
        failures = self.failures
        if failures:
            first = failures[0]
            message = f"{len(failures)} of {len(self)} rows failed; row {first.id}: {first.message}"
            raise RowError(first.error_class, message, first.attempts)

    def to_arrow(self) -> pyarrow.Table:
        """One row an outcome: row_id, then the columns of this kind of results. Needs pyarrow."""
        ids = [one.id if isinstance(one, RowFailure) else self._id(one) for one in self._outcomes]
        return self.table().add_column(0, "row_id", [ids])

    def to_pandas(self) -> pandas.DataFrame:
        """The same as a DataFrame, with the index of the DataFrame that the rows came in. Needs pandas."""
        frame = self.to_arrow().to_pandas()
        return frame if self._index is None else frame.set_axis(self._index, axis=0)

    @abstractmethod
    def table(self) -> pyarrow.Table:
        """The columns of this kind of results. None is named like a field that a row is read from."""

    @abstractmethod
    def _id(self, result: Result) -> str: ...
