"""Parts committed in input order, and the final files built from them once.

Invariant: parts cover rows 0..end without gap or overlap, one line a row; a part is there whole or not at
all. A part's name holds its first row, the row after its last, and the CRC32 of its bytes.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .durable import disk_errors, readable, sync_folder, write_durably
from .errors import InfrastructureError
from .records import FAILURE_START

PART_NAME = re.compile(r"([0-9]{12})-([0-9]{12})-([0-9a-f]{8})\.jsonl")


class Parts:
    """Committed parts of a job.

    end is the number of rows they cover, num_failures how many of those failed.
    """

    def __init__(self, folder: Path) -> None:
        """Find what earlier processes committed; temporary files of killed writes are removed.

        Raises: InfrastructureError if the parts have a gap, one is damaged, or something else lies there.
        """
        self._folder = folder
        self._paths: list[Path] = []
        self.end = 0
        self.num_failures = 0
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.glob("*.tmp"):
                if PART_NAME.fullmatch(path.name.removesuffix(".tmp")):
                    path.unlink()
            found = sorted(folder.iterdir())
        for path in found:
            self._adopt(path)

    def commit(self, lines: Sequence[bytes]) -> None:
        """Add the lines of the next len(lines) rows. After return they are never written again."""
        begin, end = self.end, self.end + len(lines)
        checksum = 0
        for line in lines:
            checksum = zlib.crc32(line, checksum)
        path = self._folder / f"{begin:012d}-{end:012d}-{checksum:08x}.jsonl"
        write_durably(path, lines)
        self._paths.append(path)
        self.end = end

    def results(self) -> Iterator[bytes]:
        """Lines of scored rows, in input order."""
        return (line for line in self._lines() if not line.startswith(FAILURE_START))

    def failures(self) -> Iterator[bytes]:
        """Lines of failed rows, in input order."""
        return (line for line in self._lines() if line.startswith(FAILURE_START))

    def remove(self) -> None:
        """Delete all parts, after publishing."""
        with disk_errors(self._folder):
            for path in self._paths:
                path.unlink(missing_ok=True)
            self._folder.rmdir()
        self._paths.clear()

    def _lines(self) -> Iterator[bytes]:
        for path in self._paths:
            yield from _checked_lines(path)

    def _adopt(self, path: Path) -> None:
        match = PART_NAME.fullmatch(path.name)
        if match is None:
            raise InfrastructureError(
                f"{str(path)!r} among the parts was not written by a job: move it away, then run again with "
                "--resume"
            )
        begin, end = int(match[1]), int(match[2])
        if begin != self.end or end <= begin:
            raise InfrastructureError(
                f"part {str(path)!r} does not follow row {self.end}: the folder was changed by something "
                "else: start again with --overwrite"
            )
        num_lines = 0
        for line in _checked_lines(path):
            num_lines += 1
            self.num_failures += line.startswith(FAILURE_START)
        if num_lines != end - begin:
            raise InfrastructureError(
                f"part {str(path)!r} has {num_lines} lines, its name says {end - begin}: start again with "
                "--overwrite"
            )
        self._paths.append(path)
        self.end = end


def _checked_lines(path: Path) -> Iterator[bytes]:
    """Lines of a part. Raises: InfrastructureError after the last one if they are not what was committed."""
    checksum = 0
    with readable(path), path.open("rb") as file:
        for line in file:
            checksum = zlib.crc32(line, checksum)
            yield line
    if f"-{checksum:08x}.jsonl" != path.name[-len("-00000000.jsonl") :]:
        raise InfrastructureError(
            f"part {str(path)!r} is damaged: its bytes do not match the checksum in its name: start again "
            "with --overwrite"
        )


def publish(parts: Parts, output: Path, error_line: Callable[[bytes], bytes] | None = None) -> None:
    """Write results.jsonl and errors.jsonl, each by one rename. error_line: a failure as it is published."""
    write_durably(output / "results.jsonl", parts.results())
    failures = parts.failures()
    write_durably(output / "errors.jsonl", map(error_line, failures) if error_line else failures)
    sync_folder(output)
