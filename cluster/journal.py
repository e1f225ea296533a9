"""Append-only record of finished rows that are not in a committed part yet.

A record is: u32 length, u32 crc32, then msgpack [[row number, line], ...]. What a kill tore off the end is
ignored; nothing is ever appended after a torn record, since every process writes to files of its own.
"""

from __future__ import annotations

import os
import re
import struct
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgpack

from .durable import disk_errors, readable
from .errors import InfrastructureError

JOURNAL_NAME = re.compile(r"([0-9]{6,18})\.journal")
FRAME = struct.Struct("<II")
# A power cut, unlike a kill, loses what was not synced: at most this much work.
SYNC_INTERVAL_S = 1.0


def read_records(path: Path) -> Iterator[list[tuple[int, bytes]]]:
    """Whole records from the start of a file up to its first torn or damaged one."""
    with path.open("rb") as file:
        while len(frame := file.read(FRAME.size)) == FRAME.size:
            length, checksum = FRAME.unpack(frame)
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != checksum:
                return
            record = _record(payload)
            if record is None:
                return
            yield record


def _record(payload: bytes) -> list[tuple[int, bytes]] | None:
    """Rows of a payload whose checksum holds; None if no job wrote it, such as the zeros of a power cut."""
    try:
        rows = [(number, line) for number, line in msgpack.unpackb(payload)]
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    whole = all(type(number) is int and isinstance(line, bytes) for number, line in rows)
    return rows if rows and whole else None


class Journal:
    """The journal files of one job folder.

    Rotated at every commit, so that its size stays that of the open windows.
    """

    def __init__(self, folder: Path) -> None:
        """Open for appending; files of earlier processes stay until their rows are committed.

        Raises: InfrastructureError if something else put a file there.
        """
        self._folder = folder
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            found = sorted(folder.iterdir())
        for path in found:
            if not (JOURNAL_NAME.fullmatch(path.name) and path.is_file()):
                raise InfrastructureError(
                    f"{str(path)!r} in the journal was not written by a job: move it away, then run again "
                    "with --resume"
                )
        self._last_row_by_path = dict.fromkeys(found, -1)
        self._next = 1 + max((int(path.stem) for path in found), default=-1)
        self._path: Path | None = None
        self._file: BinaryIO | None = None
        self._synced_at = time.monotonic()

    def recover(self, first_row: int) -> dict[int, bytes]:
        """Lines of rows from first_row on that earlier processes finished.

        The first record of a row holds. Raises: InfrastructureError if a file cannot be read.
        """
        recovered: dict[int, bytes] = {}
        for path in self._last_row_by_path:
            with readable(path):
                for record in read_records(path):
                    for number, line in record:
                        self._last_row_by_path[path] = max(self._last_row_by_path[path], number)
                        if number >= first_row:
                            recovered.setdefault(number, line)
        return recovered

    def append(self, lines: Sequence[tuple[int, bytes]]) -> None:
        """Add one record.

        After return it outlasts the process; it outlasts the machine after the next sync.
        """
        payload = msgpack.packb(lines)
        with disk_errors(self._folder):
            if self._file is None:
                self._path = self._folder / f"{self._next:06d}.journal"
                self._next += 1
                self._file = self._path.open("xb", buffering=0)
                self._last_row_by_path[self._path] = -1
            self._file.write(FRAME.pack(len(payload), zlib.crc32(payload)) + payload)
            if time.monotonic() - self._synced_at > SYNC_INTERVAL_S:
                self.sync()
        assert self._path is not None
        last = max(number for number, _ in lines)
        self._last_row_by_path[self._path] = max(self._last_row_by_path[self._path], last)

    def sync(self) -> None:
        """Make all records outlast a power cut."""
        if self._file is not None:
            with disk_errors(self._folder):
                os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def forget(self, end_row: int) -> None:
        """Start a new file and remove those that hold only rows before end_row."""
        self.close()
        done = [path for path, last in self._last_row_by_path.items() if last < end_row]
        with disk_errors(self._folder):
            for path in done:
                path.unlink(missing_ok=True)
                del self._last_row_by_path[path]

    def close(self) -> None:
        """Close the file that is being written."""
        if self._file is not None:
            self._file.close()
        self._file = None
