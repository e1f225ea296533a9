"""A file read at random places, every byte of it held against what it was when the job began."""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .places import Place, opened
from .record import InputFile, changed
from .streams import open_stream, reading

BLOCK_BYTES = 1 << 20
DIGEST_BYTES = 8
# One block a column that is being read, for tables of up to so many columns.
CACHED_BLOCKS = 32


def digest_of(block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES).digest()


def hash_blocks(place: Place) -> tuple[int, str, bytes]:
    """One pass over a file: its size, its SHA-256, and the digests of its blocks. Raises: SourceError."""
    digests: list[bytes] = []
    with open_stream(place, None) as source:
        while block := source.stream.read(BLOCK_BYTES):
            digests.append(digest_of(block))
        size, sha256 = source.finish()
    return size, sha256, b"".join(digests)


class CheckedReader(io.RawIOBase):
    """Reads blocks whole, and gives out only bytes of those that are what they were."""

    def __init__(self, file: InputFile, handle: Any) -> None:
        self._file = file
        self._handle = handle
        self._cache: OrderedDict[int, bytes] = OrderedDict()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size_bytes}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._block(self._at // BLOCK_BYTES)[self._at % BLOCK_BYTES :][: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def read(self, size: int = -1) -> bytes:
        """As many bytes as were asked for, or what is left: who reads tables takes less for the end."""
        end = self._file.size_bytes if size < 0 else min(self._at + size, self._file.size_bytes)
        pieces: list[bytes] = []
        while self._at < end:
            block = self._block(self._at // BLOCK_BYTES)
            begin = self._at % BLOCK_BYTES
            pieces.append(block[begin : begin + end - self._at])
            self._at += len(pieces[-1])
        return b"".join(pieces)

    def _block(self, index: int) -> bytes:
        if index * BLOCK_BYTES >= self._file.size_bytes:
            return b""
        found = self._cache.get(index)
        if found is None:
            found = self._checked(index)
            self._cache[index] = found
            if len(self._cache) > CACHED_BLOCKS:
                self._cache.popitem(last=False)
        else:
            self._cache.move_to_end(index)
        return found

    def _checked(self, index: int) -> bytes:
        begin = index * BLOCK_BYTES
        size = min(BLOCK_BYTES, self._file.size_bytes - begin)
        block = self._read_at(begin, size)
        expected = self._file.block_digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
        if len(block) != size or digest_of(block) != expected:
            raise changed(self._file, f"bytes {begin}..{begin + size - 1} are not what they were")
        return block

    def _read_at(self, begin: int, size: int) -> bytes:
        if self._file.place.root is not None:
            return bytes(self._handle.read_at(size, begin))
        pieces: list[bytes] = []
        while size > 0 and (piece := os.pread(self._handle.fileno(), size, begin)):
            pieces.append(piece)
            begin, size = begin + len(piece), size - len(piece)
        return b"".join(pieces)


@contextmanager
def open_checked(file: InputFile) -> Iterator[CheckedReader]:
    """Open a file that hash_blocks saw. Raises: SourceError, also from its reads."""
    with reading(file.place), opened(file.place, random_access=True) as handle:
        yield CheckedReader(file, handle)
