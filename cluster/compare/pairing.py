"""Pairs the rows of two runs by id, whatever their order, with bounded memory.

Two runs of the same inputs are in the same order, so nearly every row finds its partner at once. A row that
does not waits; beyond 64 MB of waiting rows they wait in a temporary SQLite file instead.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from itertools import zip_longest
from tempfile import TemporaryDirectory
from types import TracebackType

MEMORY_BYTES = 64 << 20
# Of Python's own for an entry of a dictionary, beside the bytes of its line.
ENTRY_BYTES = 200

Pair = tuple[bytes | None, bytes | None]


class Waiting:
    """Lines of rows that have not found their partner, by side (0 or 1) and id."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._lines: tuple[dict[str, bytes], dict[str, bytes]] = ({}, {})
        self._size = 0
        self._folder: TemporaryDirectory[str] | None = None
        self._table: sqlite3.Connection | None = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._table is not None:
            self._table.close()
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def is_on_disk(self) -> bool:
        """Whether memory was not enough."""
        return self._table is not None

    def put(self, side: int, row_id: str, line: bytes) -> None:
        """Let a row wait. An id that waits already on that side keeps its first line."""
        if row_id in self._lines[side]:
            return
        self._lines[side][row_id] = line
        self._size += len(line) + len(row_id) + ENTRY_BYTES
        if self._size > self._memory_bytes:
            self._spill()

    def take(self, side: int, row_id: str) -> bytes | None:
        """The line of a row that waits, which waits no more; None if none does."""
        line = self._lines[side].pop(row_id, None)
        if line is not None:
            self._size -= len(line) + len(row_id) + ENTRY_BYTES
            return line
        if self._table is None:
            return None
        key = side, _stored(row_id)
        found = self._table.execute("SELECT line FROM waiting WHERE side = ? AND id = ?", key).fetchone()
        if found is None:
            return None
        self._table.execute("DELETE FROM waiting WHERE side = ? AND id = ?", key)
        return bytes(found[0])

    def left(self, side: int) -> Iterator[bytes]:
        """Every line that still waits on a side."""
        yield from self._lines[side].values()
        if self._table is not None:
            rows = self._table.execute("SELECT line FROM waiting WHERE side = ? ORDER BY rowid", (side,))
            yield from (bytes(line) for (line,) in rows)

    def _spill(self) -> None:
        if self._table is None:
            self._folder = TemporaryDirectory(prefix="tinyloop-compare-")
            # autocommit off, no journal: the file is thrown away whatever happens.
            self._table = sqlite3.connect(f"{self._folder.name}/waiting.sqlite")
            self._table.execute("PRAGMA journal_mode = OFF")
            self._table.execute("PRAGMA synchronous = OFF")
            self._table.execute("CREATE TABLE waiting (side INTEGER, id BLOB, line BLOB, UNIQUE (side, id))")
        for side, lines in enumerate(self._lines):
            rows = ((side, _stored(row_id), line) for row_id, line in lines.items())
            self._table.executemany("INSERT OR IGNORE INTO waiting VALUES (?, ?, ?)", rows)
            lines.clear()
        self._size = 0


def pairs(a: Iterator[bytes], b: Iterator[bytes], waiting: Waiting) -> Iterator[Pair]:
    """Lines of both runs, paired by id; at the end, those of which the other run has none, with None."""
    yield from _lockstep(a, b, waiting)
    yield from ((line, None) for line in waiting.left(0))
    yield from ((None, line) for line in waiting.left(1))


def _lockstep(a: Iterator[bytes], b: Iterator[bytes], waiting: Waiting) -> Iterator[Pair]:
    for line_a, line_b in zip_longest(a, b):
        id_a, id_b = _id(line_a), _id(line_b)
        if id_a is not None and id_a == id_b:
            yield line_a, line_b
            continue
        if id_a is not None and line_a is not None:
            partner = waiting.take(1, id_a)
            if partner is not None:
                yield line_a, partner
            else:
                waiting.put(0, id_a, line_a)
        if id_b is not None and line_b is not None:
            partner = waiting.take(0, id_b)
            if partner is not None:
                yield partner, line_b
            else:
                waiting.put(1, id_b, line_b)


def _id(line: bytes | None) -> str | None:
    if line is None:
        return None
    # Jobs write the id first: read alone it costs a tenth of the whole line.
    if line.startswith(b'{"id": "'):
        end = line.find(b'"', 8)
        if b"\\" not in line[8:end]:
            return line[8:end].decode("ascii", "replace")
    try:
        found = json.loads(line)["id"]
    except (ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _stored(row_id: str) -> bytes:
    # Lone surrogates are ids too, and no text of SQLite.
    return row_id.encode("utf-8", "surrogatepass")
