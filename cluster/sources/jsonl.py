"""JSONL: one strict JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import RowError
from ..rows import parse_json
from . import streams
from .formats import FileKind
from .places import Place
from .record import Fields, InputFile, Record
from .streams import Line, numbered_lines, open_stream


def scan(place: Place, label: str, kind: FileKind) -> InputFile:
    """Read a file once: its hash and how many rows it has. Raises: SourceError."""
    num_rows = num_blank = 0
    with open_stream(place, kind.compression) as source:
        for line in numbered_lines(source.stream):
            if line.content.strip():
                num_rows += 1
            else:
                num_blank += 1
        size, sha256 = source.finish()
    return InputFile(place, label, size, sha256, num_rows, num_blank, kind)


def records(file: InputFile) -> Iterator[Record]:
    """Every line that is not blank. Raises: SourceError if the file is no longer what scan saw."""
    with open_stream(file.place, file.kind.compression) as source:
        for line in numbered_lines(source.stream):
            if line.content.strip():
                body = line.content.rstrip(b"\r\n")
                yield Record(line.number, body, _fields(line, body))
        source.check(file)


def _fields(line: Line, body: bytes) -> Fields | RowError:
    if line.is_cut:
        return RowError("invalid_json", f"line has more than {streams.MAX_LINE_BYTES} bytes: split it")
    try:
        return parse_json(body)
    except RowError as error:
        return error
