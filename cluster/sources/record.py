"""What every format gives: an input file as it was when the job began, and its records in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import JobError, RowError
from .formats import JSONL, FileKind
from .places import Place

Fields = dict[str, Any]


class SourceError(JobError):
    """A file cannot be read, or is no longer what it was. The message names the file."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input as it was when the job began.

    label: names it in results: its base name, or as it was spelled where two are alike.
    num_blank: lines that were passed over.
    notes: what is done to its columns beyond reading them as JSON would.
    block_digests: 8 bytes for each block of a file that is read at random places.
    """

    place: Place
    label: str
    size_bytes: int
    sha256: str
    num_rows: int
    num_blank: int
    kind: FileKind = JSONL
    notes: tuple[str, ...] = ()
    block_digests: bytes = b""

    @property
    def about(self) -> dict[str, Any]:
        """What run.json says of it."""
        return {
            "input": self.place.spelled,
            "label": self.label,
            "format": self.kind.format,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "rows": self.num_rows,
            "blank_lines": self.num_blank,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Record:
    """One row before it is typed.

    line: from 1; of a JSON file the line, of a table the row without its header. content: what was read, for
    a row whose fields cannot be. fields: by name, or the row's error.
    """

    line: int
    content: bytes
    fields: Fields | RowError


def changed(file: InputFile, found: str) -> SourceError:
    """The error for a file that is not what it was."""
    return SourceError(
        f"input {file.place.spelled!r} changed while the job ran: {found}: start again with --overwrite"
    )
