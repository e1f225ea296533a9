"""What format a file of rows has: by its name's ending, or as the user says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError

Format = Literal["jsonl", "csv", "parquet"]
Compression = Literal["gz", "zst"]
ENDINGS: dict[str, Format] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "csv": "csv",
    "parquet": "parquet",
    "pq": "parquet",
}
COMPRESSIONS: dict[str, Compression] = {"gz": "gz", "zst": "zst"}


@dataclass(frozen=True, slots=True)
class FileKind:
    """How the bytes of a file become rows."""

    format: Format
    compression: Compression | None = None


JSONL = FileKind("jsonl")


def kind_of(name: str, asked: Format | None = None) -> FileKind:
    """The kind of a file by its name. asked: --input-format, which leaves only the compression to the name.

    Raises: UsageError for an ending that says nothing, or a compressed Parquet file.
    """
    stem, _, ending = name.lower().rpartition(".")
    compression = COMPRESSIONS.get(ending)
    if compression is not None:
        ending = stem.rpartition(".")[2]
    found = asked or ENDINGS.get(ending)
    if found is None:
        known = ", ".join(f".{one}" for one in ENDINGS)
        raise UsageError(
            f"input {name!r} does not say what it is by its name: endings are {known}, with .gz or .zst "
            "after all but Parquet's: rename it or use --input-format"
        )
    if found == "parquet" and compression is not None:
        raise UsageError(
            f"input {name!r} is a compressed Parquet file, which cannot be read in parts: unpack it; Parquet "
            "compresses its columns itself"
        )
    return FileKind(found, compression)
