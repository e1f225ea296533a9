"""Whether the job in a folder is finished: its summary says so and its files bear it out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .closing import closing_lines
from .durable import readable
from .errors import ExitCode, InfrastructureError
from .folder import DamagedFileError, JobFolder
from .outputs.final import STEMS, final_name, read_final
from .sources.formats import Format

BLOCK_BYTES = 1 << 20


def finished_summary(folder: JobFolder, output_format: Format = "jsonl") -> dict[str, Any] | None:
    """The summary of a finished job, None if there is still something to do.

    Raises: InfrastructureError if the job was finished, but its files are no longer what it wrote.
    """
    try:
        summary = folder.read_summary()
    except DamagedFileError:
        # Of a job under way the parts and the journal say more than its summary.
        if folder.is_under_way:
            return None
        raise
    if summary is None or summary.get("state") != "complete":
        if folder.is_under_way:
            return None
        raise _changed(folder, "summary.json does not say so")
    if not _is_whole(summary):
        raise _changed(folder, "summary.json lacks figures")
    for stem in STEMS:
        path = folder.output / final_name(stem, output_format)
        found = _count_rows(path, stem, output_format)
        if found != summary[stem]:
            what = "lines" if output_format == "jsonl" else "rows"
            shown = "is missing" if found is None else f"has {found:,} {what}"
            raise _changed(folder, f"{path.name} {shown}, summary.json says {summary[stem]:,}")
    return summary


def _changed(folder: JobFolder, what: str) -> InfrastructureError:
    return InfrastructureError(
        f"the job in {str(folder.output)!r} was finished, but {what}: the folder was changed by something "
        "else: start again with --overwrite"
    )


def _is_whole(summary: dict[str, Any]) -> bool:
    """Everything is there that a finished job prints and returns."""
    counts = [summary.get(name) for name in ("rows", "results", "errors")]
    if any(type(count) is not int for count in counts):
        return False
    if summary.get("exit_code") != (ExitCode.ROW_ERRORS if summary["errors"] else ExitCode.SCORED):
        return False
    try:
        list(closing_lines(summary, Path()))
    except (LookupError, TypeError, ValueError, AttributeError):
        return False
    return True


def _count_rows(path: Path, stem: str, output_format: Format) -> int | None:
    if output_format == "jsonl":
        return _count_lines(path)
    return sum(1 for _ in read_final(path.parent, stem, output_format)) if path.exists() else None


def _count_lines(path: Path) -> int | None:
    """Line feeds in a file, None if there is no file. A last line without one counts too."""
    count, last = 0, b"\n"
    try:
        with readable(path), path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                count += block.count(b"\n")
                last = block[-1:]
    except InfrastructureError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    return count + (last != b"\n")
