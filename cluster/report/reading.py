"""Reads the folder of a job, finished, stopped, running or written by an older version, and changes nothing
in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..folder import FINGERPRINT, WORK_PLACE
from ..journal import JOURNAL_NAME, read_records
from ..outputs.final import final_name, read_final
from ..records import FAILURE_START
from ..results import PART_NAME
from ..sources.formats import Format

# Beyond so many bytes of lines, evenly spaced blocks are read instead of all; a job that is asked to stop has
# seconds, not minutes.
FULL_BYTES = 64 << 20
QUICK_BYTES = 4 << 20
BLOCK_BYTES = 32 << 10
TABLES: tuple[Format, ...] = ("csv", "parquet")
MARKS = ("summary.json", "progress.json", "run.json", "timeline.json", FINGERPRINT)


@dataclass(slots=True)
class Lines:
    """Where rows are read from, and how much of that.

    source: in words. is_sampled: after reading, whether blocks alone were read.
    """

    source: str
    read: Callable[[], Iterator[bytes]]
    size_bytes: int
    is_sampled: bool


@dataclass(slots=True)
class JobFiles:
    """What lies in a folder; what does not, or cannot be read, is empty. damaged: names of the latter."""

    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    timeline: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, Any] = field(default_factory=dict)
    damaged: list[str] = field(default_factory=list)


def is_job_folder(folder: Path) -> bool:
    """Whether a job began in a folder."""
    return folder.is_dir() and any((folder / name).exists() for name in MARKS)


def read_folder(folder: Path) -> JobFiles:
    """The small files of a job. Raises: UsageError if no job began there."""
    if not is_job_folder(folder):
        found = "is no folder" if not folder.is_dir() else "holds no job"
        raise UsageError(f"{str(folder)!r} {found}: name the output folder of a job, as given to it with -o")
    files = JobFiles(folder)
    for name in ("summary", "progress", "timeline", "run"):
        setattr(files, name, _read(folder / f"{name}.json", files.damaged))
    kept = files.run.get("fingerprint")
    files.fingerprint = (
        dict(kept) if isinstance(kept, Mapping) else _read(work_of(folder) / FINGERPRINT, files.damaged)
    )
    return files


def work_of(folder: Path) -> Path:
    """Where parts and journal of a job lie while it is not finished."""
    place = _read(folder / WORK_PLACE, [])
    named = place.get("work_dir")
    return Path(named) if isinstance(named, str) else folder


def result_lines(folder: Path, limit: int = FULL_BYTES) -> Lines:
    """Lines of scored rows: results.jsonl of a finished job, else parts and journal as they are now.

    limit: beyond so many bytes evenly spaced blocks of about so many are read.
    """
    finished = folder / "results.jsonl"
    if finished.is_file():
        return _of_files("results.jsonl", [finished], limit)
    if (table := _table(folder, "results")) is not None:
        return table
    lines = _of_files("parts and journal", _parts(work_of(folder)), limit)
    read_parts = lines.read
    lines.read = lambda: _scored(_with_journal(read_parts(), work_of(folder), limit))
    return lines


def failure_lines(folder: Path, limit: int = FULL_BYTES) -> Iterator[bytes]:
    """Lines of failed rows from the start of the input, at most so many bytes of lines."""
    finished = folder / "errors.jsonl"
    if finished.is_file():
        yield from _whole([finished], limit)
        return
    if (table := _table(folder, "errors")) is not None:
        yield from table.read()
        return
    work = work_of(folder)
    lines = _with_journal(_whole(_parts(work), limit), work, limit)
    yield from (line for line in lines if line.startswith(FAILURE_START))


def _table(folder: Path, stem: str) -> Lines | None:
    """Lines of a finished job's CSV or Parquet file, None while its parts are there or if it has none."""
    if _parts(work_of(folder)):
        return None
    found = next((one for one in TABLES if (folder / final_name(stem, one)).is_file()), None)
    if found is None:
        return None
    path = folder / final_name(stem, found)
    return Lines(path.name, lambda: _json_lines(folder, stem, found), _size(path), False)


def _json_lines(folder: Path, stem: str, one: Format) -> Iterator[bytes]:
    yield from (json.dumps(fields).encode("ascii") for fields in read_final(folder, stem, one))


def _of_files(source: str, paths: list[Path], limit: int) -> Lines:
    size = sum(_size(path) for path in paths)
    if size <= limit:
        return Lines(source, lambda: _whole(paths, limit), size, False)
    return Lines(source, lambda: _blocks(paths, limit / size), size, True)


def _whole(paths: list[Path], limit: int) -> Iterator[bytes]:
    left = limit
    for path in paths:
        try:
            with path.open("rb") as file:
                for line in file:
                    left -= len(line)
                    if left < 0:
                        return
                    yield line
        except OSError:
            # A running job renames and removes parts; what is there now is what is shown.
            continue


def _blocks(paths: list[Path], share: float) -> Iterator[bytes]:
    """Whole lines from evenly spaced blocks of about this share of all bytes."""
    stride = int(BLOCK_BYTES / share)
    for path in paths:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for begin in range(0, size, stride):
                    file.seek(begin)
                    if begin:
                        file.readline()
                    while file.tell() < begin + BLOCK_BYTES and (line := file.readline()):
                        yield line
        except OSError:
            continue


def _parts(work: Path) -> list[Path]:
    folder = work / "parts"
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    return [path for path in found if PART_NAME.fullmatch(path.name)]


def _with_journal(parts: Iterator[bytes], work: Path, limit: int) -> Iterator[bytes]:
    """Committed lines, then those of the journal that are not committed yet, each row once."""
    committed = max((int(path.name.split("-")[1]) for path in _parts(work)), default=0)
    yield from parts
    seen: set[int] = set()
    folder, left = work / "journal", limit
    found = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in found:
        if not JOURNAL_NAME.fullmatch(path.name):
            continue
        try:
            for record in read_records(path):
                for number, line in record:
                    if number >= committed and number not in seen and left > 0:
                        seen.add(number)
                        left -= len(line)
                        yield line
        except OSError:
            continue


def _scored(lines: Iterator[bytes]) -> Iterator[bytes]:
    return (line for line in lines if not line.startswith(FAILURE_START))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, damaged: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        damaged.append(path.name)
        return {}
    return content
