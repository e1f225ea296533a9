"""Writing so that a kill at any moment leaves the old file or the new one, and a full disk is named."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from .errors import InfrastructureError


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of a write into an InfrastructureError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(
            f"cannot write {str(path)!r}: {error.strerror}: make room or repair the disk, then run again "
            "with --resume"
        ) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an OSError of a read into an InfrastructureError that names the file and what to do."""
    try:
        yield
    except OSError as error:
        raise InfrastructureError(
            f"cannot read {str(path)!r}: {error.strerror}: repair the disk or the file's permissions, then "
            "run again with --resume"
        ) from error


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Write path: temporary file beside it, fsync, rename, fsync of the folder.

    Raises: InfrastructureError; path is then as it was, as it is if the block raises anything.
    """
    temporary = path.with_name(path.name + ".tmp")
    with disk_errors(path):
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def write_durably(path: Path, chunks: Iterable[bytes]) -> None:
    """Write all chunks to path, as durable_file does."""
    with durable_file(path) as file:
        file.writelines(chunks)


def sync_folder(folder: Path) -> None:
    """Make renames and removals in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
