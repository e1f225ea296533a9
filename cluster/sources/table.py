"""Tables: what a column's name says of its cells, and what a table cannot say."""

from __future__ import annotations

from dataclasses import dataclass

from .record import Fields


@dataclass(frozen=True, slots=True)
class Columns:
    """The fields of a row that a kind of work takes for itself; all others are carried through.

    text: text as it stands. values: anything else, which a CSV cell holds as JSON.
    """

    text: frozenset[str]
    values: frozenset[str]

    def present(self, fields: Fields) -> Fields:
        """A table has each column in each row: a null in one of these says that the row has no such field."""
        return {
            name: value
            for name, value in fields.items()
            if value is not None or not (name in self.text or name in self.values)
        }


ID_COLUMNS = frozenset({"id", "custom_id"})
SCORE_COLUMNS = Columns(
    text=ID_COLUMNS | {"prefix", "context", "continuation", "text"},
    values=frozenset({"choices", "gold", "context_ids", "continuation_ids"}),
)
