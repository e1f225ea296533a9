"""Bytes of a file from its first to its last, hashed as they lie and unpacked as they are read."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

from .extras import need
from .formats import Compression
from .places import Place, opened
from .record import InputFile, SourceError, changed

BUFFER_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
# One line is held in memory whole; beyond this it is read past and becomes a row error.
MAX_LINE_BYTES = 256 << 20


class RawReader(io.RawIOBase):
    """Reads another object's read(n), and notes size and hash of what passed."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._digest = hashlib.sha256()
        self.size_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._source.read(len(buffer))
        buffer[: len(data)] = data
        self._digest.update(data)
        self.size_bytes += len(data)
        return len(data)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


class Stream:
    """A file that is read once. stream gives its unpacked bytes."""

    def __init__(self, raw: RawReader, packed: BinaryIO, stream: BinaryIO) -> None:
        self._raw = raw
        self._packed = packed
        self.stream = stream

    def finish(self) -> tuple[int, str]:
        """Read what is left of the file as it lies. Returns its size and SHA-256."""
        while self._packed.read(BUFFER_BYTES):
            pass
        return self._raw.size_bytes, self._raw.sha256

    def check(self, file: InputFile) -> None:
        """Raises: SourceError if the file, read to its end, is not what it was."""
        _, sha256 = self.finish()
        if sha256 != file.sha256:
            raise changed(file, f"its hash is {sha256[:12]}, was {file.sha256[:12]}")


@contextmanager
def reading(place: Place) -> Iterator[None]:
    """Turn what can go wrong in reading a file into a SourceError that names it."""
    try:
        yield
    except OSError as error:
        raise SourceError(f"input {place.spelled!r} cannot be read: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise SourceError(f"input {place.spelled!r} cannot be unpacked: {error}: is it whole?") from error


@contextmanager
def open_stream(place: Place, compression: Compression | None) -> Iterator[Stream]:
    """Open a file for one pass. Raises: SourceError."""
    with reading(place), opened(place) as file:
        raw = RawReader(file)
        packed = cast("BinaryIO", io.BufferedReader(raw, BUFFER_BYTES))
        yield Stream(raw, packed, _unpacked(packed, compression))


def _unpacked(packed: BinaryIO, compression: Compression | None) -> BinaryIO:
    if compression is None:
        return packed
    if compression == "gz":
        return cast("BinaryIO", gzip.GzipFile(fileobj=packed, mode="rb"))
    arrow = need("pyarrow", "files", "a .zst file")
    unpacked = arrow.CompressedInputStream(arrow.PythonFile(packed, mode="r"), "zstd")
    return io.BufferedReader(RawReader(unpacked), BUFFER_BYTES)


@dataclass(frozen=True, slots=True)
class Line:
    """One line. number: from 1. content: with its line feed. is_cut: the rest of it was read past."""

    number: int
    content: bytes
    is_cut: bool = False


def numbered_lines(stream: BinaryIO) -> Iterator[Line]:
    """Every line; a byte-order mark is taken off the first. Lines end at line feed bytes only."""
    number = 0
    while content := stream.readline(MAX_LINE_BYTES):
        number += 1
        is_cut = False
        while len(content) == MAX_LINE_BYTES and not content.endswith(b"\n"):
            more = stream.readline(MAX_LINE_BYTES)
            is_cut = is_cut or bool(more)
            if len(more) < MAX_LINE_BYTES or more.endswith(b"\n"):
                break
        yield Line(number, content.removeprefix(BOM) if number == 1 else content, is_cut)
