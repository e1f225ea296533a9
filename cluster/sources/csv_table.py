"""CSV (RFC 4180): a header and rows of cells, all of them text; no text stands for a missing value.

A cell of nothing at all is absent, a quoted empty one is empty text: that is how a table says both. Records
end at line feeds outside quotes; a carriage return before one belongs to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from ..errors import RowError
from ..rows import parse_json_value
from . import streams
from .formats import FileKind
from .places import Place
from .record import Fields, InputFile, Record, SourceError
from .streams import Line, numbered_lines, open_stream
from .table import Columns

INSIDE_QUOTES = re.compile(rb'[^"]*(?:""[^"]*)*')
# None: a cell of nothing at all.
Cells = list[bytes | None]


def scan(place: Place, label: str, kind: FileKind) -> InputFile:
    """Read a file once: its hash, its header and how many rows it has. Raises: SourceError."""
    num_rows = num_blank = 0
    with open_stream(place, kind.compression) as source:
        parts = split_records(numbered_lines(source.stream))
        _header(next(parts, None), place)
        for content, _ in parts:
            if content.strip(b"\r\n"):
                num_rows += 1
            else:
                num_blank += 1
        size, sha256 = source.finish()
    return InputFile(place, label, size, sha256, num_rows, num_blank, kind)


def records(file: InputFile, columns: Columns) -> Iterator[Record]:
    """Every record after the header. Raises: SourceError if the file is no longer what scan saw."""
    with open_stream(file.place, file.kind.compression) as source:
        parts = split_records(numbered_lines(source.stream))
        header = _header(next(parts, None), file.place)
        for number, (content, cells) in enumerate(parts, start=1):
            body = content.rstrip(b"\r\n")
            if body:
                fields = cells if isinstance(cells, RowError) else _fields(header, cells, columns)
                yield Record(number, body, fields)
        source.check(file)


def split_records(lines: Iterator[Line]) -> Iterator[tuple[bytes, Cells | RowError]]:
    """Every record: its bytes, of one that is too long the first; its cells, or what is wrong with it."""
    for line in lines:
        if b'"' in line.content:
            record = _Quoted(line, lines)
            cells = record.read()
            yield b"".join(record.contents), _too_long() if record.is_cut else cells
        elif line.is_cut:
            yield line.content, _too_long()
        else:
            body = line.content.removesuffix(b"\n").removesuffix(b"\r")
            yield line.content, [cell or None for cell in body.split(b",")]


class _Quoted:
    """A record with quotes, which may span lines. Lines that end inside quotes are taken from the stream."""

    def __init__(self, first: Line, lines: Iterator[Line]) -> None:
        self.contents = [first.content]
        self.is_cut = first.is_cut
        self._size = len(first.content)
        self._first = first.number
        self._lines = lines
        self._line = first.content
        self._at = 0

    def read(self) -> Cells | RowError:
        cells: Cells = []
        is_last = False
        while not is_last:
            is_quoted = self._line[self._at : self._at + 1] == b'"'
            cell = self._quoted_cell() if is_quoted else self._bare_cell()
            if isinstance(cell, str):
                return RowError(
                    "invalid_csv",
                    f"cell {len(cells) + 1}: {cell}: quote a cell that has quotes, and double those inside",
                )
            cells.append(cell)
            is_last = self._line[self._at : self._at + 1] != b","
            self._at += 1
        return cells

    def _bare_cell(self) -> bytes | str | None:
        """The cell at the place, or what is wrong with it. The place is then after the cell."""
        end = self._line.find(b",", self._at)
        cell = self._line[self._at :] if end < 0 else self._line[self._at : end]
        if b'"' in cell:
            return "a quote stands in a bare cell"
        self._at += len(cell)
        return (cell if end >= 0 else cell.removesuffix(b"\n").removesuffix(b"\r")) or None

    def _quoted_cell(self) -> bytes | str:
        pieces: list[bytes] = []
        at = self._at + 1
        while True:
            match = INSIDE_QUOTES.match(self._line, at)
            assert match is not None  # it matches nothing at all, too
            pieces.append(match[0])
            if match.end() < len(self._line):
                break
            if not self._next_line():
                return f"the quote that is opened in line {self._first} is never closed"
            at = 0
            if self.is_cut:
                pieces.clear()
        self._at = match.end() + 1
        if self._line[self._at :] not in (b"", b"\n", b"\r\n") and self._line[self._at] != ord(","):
            return "something stands after the closing quote"
        return b"".join(pieces).replace(b'""', b'"')

    def _next_line(self) -> bool:
        """Go to the next line, if there is one. Of a record that is too long nothing more is kept."""
        following = next(self._lines, None)
        if following is None:
            return False
        self._line = following.content
        self._size += len(following.content)
        self.is_cut = self.is_cut or following.is_cut or self._size > streams.MAX_LINE_BYTES
        if not self.is_cut:
            self.contents.append(following.content)
        return True


def _too_long() -> RowError:
    return RowError("invalid_csv", f"record has more than {streams.MAX_LINE_BYTES} bytes: split it")


def _header(first: tuple[bytes, Cells | RowError] | None, place: Place) -> list[str]:
    """Names of the columns; none of a file that is empty."""
    if first is None:
        return []
    _, cells = first
    what = ""
    names: list[str] = []
    if isinstance(cells, RowError):
        what = str(cells)
    else:
        try:
            names = [(cell or b"").decode("utf-8") for cell in cells]
        except UnicodeDecodeError:
            what = "it is not UTF-8"
        if "" in names:
            what = f"column {names.index('') + 1} has no name"
        elif len(set(names)) < len(names):
            what = f"column {next(name for name in names if names.count(name) > 1)!r} stands there twice"
    if what:
        raise SourceError(
            f"input {place.spelled!r} has no usable header: {what}: its first record has to name every column"
        )
    return names


def _fields(header: list[str], cells: Cells, columns: Columns) -> Fields | RowError:
    if len(cells) != len(header):
        return RowError(
            "invalid_csv",
            f"record has {len(cells)} cells, the header {len(header)}: quote cells with commas or line feeds",
        )
    fields: Fields = {}
    for name, cell in zip(header, cells, strict=True):
        if cell is None:
            continue
        try:
            text = cell.decode("utf-8")
        except UnicodeDecodeError as error:
            return RowError(
                "invalid_unicode", f"column {name!r} is not UTF-8: {error.reason} at byte {error.start}"
            )
        if name in columns.values:
            try:
                fields[name] = parse_json_value(text, f"column {name!r}")
            except RowError as error:
                return error
        else:
            fields[name] = text
    return fields


def cell_of(value: object) -> str:
    """What split_records reads as this value: text, JSON for what is no text, nothing for None."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=True, allow_nan=False)
    bare = text and not (set('",\r\n') & set(text))
    return text if bare else '"' + text.replace('"', '""') + '"'
