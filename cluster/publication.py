"""Final files at a URL: a job makes them in its work folder, and they are put there once, summary.json last.

A file at the URL is whole or not there where the store renames or puts objects at once (local, HDFS, S3, GCS,
Azure). What tells readers that all are there is summary.json, which is removed first and put last.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import InfrastructureError, UsageError
from .folder import FINAL_FILES, LOCK, PUBLICATION, WORK_PLACE, JobFolder
from .sources.extras import need
from .sources.places import Place, remote, store

SUMMARY, PROBE = "summary.json", "tinyloop.probe"
# Of this process or this run alone.
NOT_PUBLISHED = {LOCK, WORK_PLACE, "progress.json", SUMMARY}
# Stores that put an object whole when its writer closes, and whose renames are copies.
OBJECT_STORES = ("s3", "gcs", "gs", "abfs", "abfss", "az", "adl", "oss", "r2")
COPY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Publication:
    """A folder at a URL that final files go to."""

    url: str

    def refuse(self, folder: JobFolder, places: list[Place], *, resume: bool, overwrite: bool) -> None:
        """Look before a pool is started: is what lies there this job's, and can one write there?

        Raises: UsageError.
        """
        filesystem, path = store(self.url)
        own = remote(self.url).identity
        for place in places:
            scheme, there = place.identity
            if place.root is not None and (scheme, there.rpartition("/")[0]) == own:
                raise UsageError(f"input {place.spelled!r} lies in the output folder {self.url!r}")
        selector = need("pyarrow.fs", "cloud", f"{self.url!r}").FileSelector(path, allow_not_found=True)
        try:
            found = sorted(info.base_name for info in filesystem.get_file_info(selector))
            is_own = resume and (self._is_marked(folder) or self.holds(folder.output))
            if found and not overwrite and not is_own:
                raise UsageError(
                    f"output folder {self.url!r} is not empty, it has {', '.join(found[:4])}: use "
                    "--overwrite to replace what a job put there, or name another folder"
                )
            self._probe(filesystem, path)
        except OSError as error:
            raise UsageError(f"output folder {self.url!r} cannot be written: {error}") from error

    def mark(self, folder: JobFolder) -> None:
        """Note in the work folder that what lies at the URL is this job's."""
        folder.write_work(PUBLICATION, {"url": self.url})

    def holds(self, output: Path) -> bool:
        """Whether the files at the URL are those of a finished job's folder, as far as sizes say."""
        filesystem, path = store(self.url)
        summary = output / SUMMARY
        if not summary.is_file():
            return False
        names = [*_published(output), SUMMARY]
        infos = filesystem.get_file_info([f"{path}/{name}" for name in names])
        sizes = [(output / name).stat().st_size for name in names]
        if [info.size for info in infos] != sizes:
            return False
        with filesystem.open_input_stream(f"{path}/{SUMMARY}", compression=None) as file:
            return bool(file.read() == summary.read_bytes())

    def put_results(self, output: Path) -> None:
        """Put all files of a finished job but its summary. Raises: InfrastructureError."""
        filesystem, path = store(self.url)
        names = _published(output)
        with self._errors():
            if not _is_object_store(filesystem):
                filesystem.create_dir(path, recursive=True)
            # Earlier results are no longer whole from here on.
            for name in (SUMMARY, *(name for name in FINAL_FILES if name not in names)):
                _remove(filesystem, f"{path}/{name}")
            for name in names:
                _put(filesystem, output / name, f"{path}/{name}")

    def put_summary(self, output: Path) -> None:
        """Put the summary, which says that everything is there. Raises: InfrastructureError."""
        filesystem, path = store(self.url)
        with self._errors():
            _put(filesystem, output / SUMMARY, f"{path}/{SUMMARY}")

    def _is_marked(self, folder: JobFolder) -> bool:
        marker = folder.read_work(PUBLICATION)
        return marker is not None and marker.get("url") == self.url

    @staticmethod
    def _probe(filesystem: Any, path: str) -> None:
        if not _is_object_store(filesystem):
            filesystem.create_dir(path, recursive=True)
        with filesystem.open_output_stream(f"{path}/{PROBE}", compression=None) as file:
            file.write(b"Whether a job can write here.\n")
        filesystem.delete_file(f"{path}/{PROBE}")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InfrastructureError(
                f"cannot put the results into {self.url!r}: {error}: they are whole in the work folder: run "
                "again with --resume"
            ) from error


def _published(output: Path) -> list[str]:
    """Files of a folder that go to the URL before the summary."""
    found = sorted(path.name for path in output.iterdir() if path.is_file())
    return [name for name in found if name not in NOT_PUBLISHED and not name.endswith(".tmp")]


def _is_object_store(filesystem: Any) -> bool:
    # One of fsspec is called "py::fsspec+" and then one of its protocols or a tuple of them.
    name = str(filesystem.type_name).removeprefix("py::fsspec+")
    return any(one in OBJECT_STORES for one in name.strip("()").replace("'", "").split(", "))


def _remove(filesystem: Any, path: str) -> None:
    if filesystem.get_file_info(path).is_file:
        filesystem.delete_file(path)


def _put(filesystem: Any, source: Path, path: str) -> None:
    written = path if _is_object_store(filesystem) else f"{path}.tmp"
    with source.open("rb") as file, filesystem.open_output_stream(written, compression=None) as target:
        shutil.copyfileobj(file, target, COPY_BYTES)
    size = filesystem.get_file_info(written).size
    if size != source.stat().st_size:
        raise OSError(f"{written} has {size} bytes there and {source.stat().st_size} here")
    if written != path:
        _remove(filesystem, path)
        filesystem.move(written, path)
