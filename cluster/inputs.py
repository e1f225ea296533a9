"""JSONL files to rows, strictly and in order.

Invariant: every line that is not blank becomes exactly one Row or RowFailure, numbered from 0 over all
inputs. Lines end at line feed bytes only.
"""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .errors import InfrastructureError, RowError, UsageError
from .rows import Fields, Row, RowFailure, Task, parse_json, parse_task, take_id

BOM = b"\xef\xbb\xbf"
# One line is held in memory whole; beyond this it is read past and becomes a row error.
MAX_LINE_BYTES = 256 << 20
# Ids kept in a set, about 70 bytes each, before they are packed into 8.
RECENT_IDS = 65_536

ParseTask = Callable[[Fields], tuple[Task, Fields]]


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input as it was when the job began.

    label names it in results: its base name, or the path where two are alike.
    """

    path: Path
    label: str
    size_bytes: int
    sha256: str
    num_rows: int
    num_blank: int


def expand(patterns: Sequence[str]) -> list[str]:
    """Paths and globs to paths, in the order given, globs sorted.

    Raises: UsageError if nothing matches, a path is no file, or a file is named twice.
    """
    paths: list[str] = []
    for pattern in patterns:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UsageError(f"input {pattern!r} matches no file: check the path")
        paths += matches
    seen: dict[Path, str] = {}
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(
                f"input {path!r} is not a file: name JSONL files or a glob such as 'rows/*.jsonl'"
            )
        earlier = seen.setdefault(Path(path).resolve(), path)
        if earlier is not path:
            raise UsageError(f"input {path!r} is the same file as {earlier!r}: name it once")
    return paths


def scan(paths: Sequence[str]) -> list[InputFile]:
    """Read every input once: its hash and its number of rows. Raises: UsageError if a file cannot be read."""
    names = [Path(path).name for path in paths]
    return [
        _scan_one(Path(path), name if names.count(name) == 1 else path)
        for path, name in zip(paths, names, strict=True)
    ]


def _scan_one(path: Path, label: str) -> InputFile:
    digest, num_rows, num_blank = hashlib.sha256(), 0, 0
    try:
        with path.open("rb") as file:
            for number, line in _lines(file, digest):
                blank = _is_blank(line, number)
                num_blank += blank
                num_rows += not blank
            size = file.tell()
    except OSError as error:
        raise UsageError(f"input {str(path)!r} cannot be read: {error.strerror}") from error
    return InputFile(path, label, size, digest.hexdigest(), num_rows, num_blank)


def _lines(file: BinaryIO, digest: hashlib._Hash) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, bytes with their line feed).

    A line beyond the limit comes back cut, without a line feed.
    """
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        digest.update(line)
        yield number, line
        while len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)
            digest.update(line)


def _is_blank(line: bytes, number: int) -> bool:
    return not (line.removeprefix(BOM) if number == 1 else line).strip()


class IdIndex:
    """Which ids were seen, by 64-bit hash: 8 bytes a row, twice that while two runs are merged.

    Two different ids of one hash would make the second a duplicate; at 10 million rows the chance of any is
    3e-6.
    """

    def __init__(self, run_size: int | None = None) -> None:
        self._run_size = run_size or RECENT_IDS
        self._recent: set[int] = set()
        self._runs: list[np.ndarray[tuple[int], np.dtype[np.uint64]]] = []

    def add(self, row_id: str) -> bool:
        """Note the id. Returns whether it is new."""
        code = hashlib.blake2b(row_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        key = int.from_bytes(code, "little")
        if key in self._recent or any(self._holds(run, key) for run in self._runs):
            return False
        self._recent.add(key)
        if len(self._recent) >= self._run_size:
            self._runs.append(np.sort(np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))))
            self._recent.clear()
            while len(self._runs) > 1 and len(self._runs[-2]) <= len(self._runs[-1]):
                last = self._runs.pop()
                self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]))
        return True

    @staticmethod
    def _holds(run: np.ndarray[tuple[int], np.dtype[np.uint64]], key: int) -> bool:
        place = int(np.searchsorted(run, np.uint64(key)))
        return place < len(run) and int(run[place]) == key


def read_rows(
    files: Sequence[InputFile], *, limit: int | None = None, parse: ParseTask = parse_task
) -> Iterator[Row | RowFailure]:
    """Rows of all files in order, at most limit. Memory: one line and the index of ids.

    parse: a row's fields to its task, as parse_task does.
    Raises: InfrastructureError if a file is no longer what scan saw.
    """
    ids = IdIndex()
    number = 0
    for file in files:
        digest = hashlib.sha256()
        try:
            with file.path.open("rb") as handle:
                for line_number, line in _lines(handle, digest):
                    if limit is not None and number >= limit:
                        return
                    if _is_blank(line, line_number):
                        continue
                    yield _read_row(line, number, file.label, line_number, ids, parse)
                    number += 1
        except OSError as error:
            raise InfrastructureError(f"input {str(file.path)!r} cannot be read: {error.strerror}") from error
        if digest.hexdigest() != file.sha256:
            raise InfrastructureError(
                f"input {str(file.path)!r} changed while the job ran: its hash is "
                f"{digest.hexdigest()[:12]}, was "
                f"{file.sha256[:12]}: start again with --overwrite"
            )


def _read_row(
    line: bytes, number: int, label: str, line_number: int, ids: IdIndex, parse: ParseTask
) -> Row | RowFailure:
    body = (line.removeprefix(BOM) if line_number == 1 else line).rstrip(b"\r\n")
    content = hashlib.blake2b(body, digest_size=4).hexdigest()
    row_id = f"{label}:{line_number}:{content}"
    try:
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            raise RowError("invalid_json", f"line has {MAX_LINE_BYTES} bytes or more: split it")
        fields = parse_json(body)
        row_id = take_id(fields) or row_id
        if not ids.add(row_id):
            raise RowError("duplicate_id", f"id {row_id!r} was used by an earlier row: make ids unique")
        task, extra = parse(fields)
    except RowError as error:
        return RowFailure(number, row_id, label, line_number, error.error_class, error.message)
    return Row(number, row_id, label, line_number, task, extra)
