"""The output folder of a job: who may use it, what may be in it, what state it is in."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .durable import disk_errors, write_durably
from .errors import InfrastructureError, UsageError
from .journal import JOURNAL_NAME
from .outputs.final import STEMS, final_name
from .results import PART_NAME
from .sources.formats import Format
from .sources.places import Place

LOCK = "tinyloop.lock"
# In the order of their removal: what says whose folder it is goes last, so that a removal that is cut short
# leaves either the old job or nothing of one.
FORMATS: tuple[Format, ...] = ("jsonl", "csv", "parquet")
FINAL_FILES = tuple(final_name(stem, one) for one in FORMATS for stem in STEMS)
OUTPUT_FILES = ("summary.json", "report.html", "progress.json", "timeline.json", *FINAL_FILES, "run.json")
PARTS, EARLIER = "parts", "earlier"
WORK_FOLDERS = {PARTS: PART_NAME, "journal": JOURNAL_NAME, EARLIER: PART_NAME}
FINGERPRINT, WORK_PLACE = "fingerprint.json", "work.json"
RETRY, PUBLICATION = "retry.json", "publication.json"
WORK_FILES = (*WORK_FOLDERS, RETRY, PUBLICATION, FINGERPRINT, WORK_PLACE)
# What a job that was killed before it wrote its fingerprint may have left.
LEFTOVERS = {LOCK, WORK_PLACE, f"{WORK_PLACE}.tmp", f"{FINGERPRINT}.tmp", f"{RETRY}.tmp"}


class DamagedFileError(InfrastructureError):
    """A JSON file of a job cannot be read as what it should be."""


def refuse_inputs(places: Sequence[Place], output: Path, work: Path | None) -> None:
    """Look before anything is created. Raises: UsageError if an input is a file that the job would write."""
    names = {LOCK, *OUTPUT_FILES, *WORK_FILES}
    names |= {f"{name}.tmp" for name in names}
    own = {(folder / name).resolve() for folder in (output, work or output) for name in names}
    for place in places:
        if place.root is not None:
            continue
        resolved = Path(place.path).resolve()
        if resolved in own or any(parent in own for parent in resolved.parents):
            raise UsageError(f"input {place.spelled!r} is an output of this job: name another folder with -o")


class JobFolder:
    """An output folder and a work folder (often the same), locked for one job.

    output: final files; work: parts, journal and fingerprint while the job runs.
    """

    def __init__(self, output: Path, work: Path) -> None:
        self.output = output
        self.work = work
        self._locks: list[tuple[Path, int]] = []

    @classmethod
    def open(cls, output: Path, work: Path | None, *, resume: bool, overwrite: bool) -> JobFolder:
        """Create, lock and check the folder; nothing in it is changed. An empty one is fresh whatever the
        flags.

        Raises: UsageError if it cannot be created, another job holds it, or what is in it is not for this
        job; InfrastructureError if the job in it lost its fingerprint.
        """
        if resume and overwrite:
            raise UsageError(
                "--resume and --overwrite exclude each other: one keeps the folder, the other empties it"
            )
        folder = cls(output, work or output)
        try:
            folder.output.mkdir(parents=True, exist_ok=True)
            folder.work.mkdir(parents=True, exist_ok=True)
            for path in folder._places():
                folder._lock(path / LOCK)
            if overwrite:
                folder._refuse_strangers()
            else:
                folder._refuse_contents(resume)
        except OSError as error:
            folder.close()
            raise UsageError(
                f"output folder {str(output)!r} cannot be used: {error.strerror}: name another"
            ) from error
        except BaseException:
            folder.close()
            raise
        return folder

    def read_fingerprint(self) -> dict[str, Any] | None:
        """The fingerprint of the job that began here, None if none did.

        Raises: DamagedFileError if one did and it cannot be read.
        """
        path = self.work / FINGERPRINT
        content = _read_json(path)
        if content is None:
            path = self.output / "run.json"
            run = _read_json(path)
            if run is None:
                return None
            content = run.get("fingerprint")
        if not isinstance(content, dict) or "format_version" not in content:
            raise _damaged(path)
        return content

    @property
    def is_under_way(self) -> bool:
        """A job began here and has not cleaned up after its end."""
        return (self.work / FINGERPRINT).exists()

    def read_summary(self) -> dict[str, Any] | None:
        """The summary that lies in the folder, None if there is none. Raises: DamagedFileError."""
        return _read_json(self.output / "summary.json")

    def read_timeline(self) -> dict[str, Any] | None:
        """What earlier runs noted for the report; None if there is nothing, or nothing that can be read."""
        try:
            return _read_json(self.output / "timeline.json")
        except DamagedFileError:
            return None

    def write_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        """Say whose folder this is, and where its work lies, before anything else is written."""
        place = self.output / WORK_PLACE
        if self.work.resolve() == self.output.resolve():
            with disk_errors(place):
                place.unlink(missing_ok=True)
        else:
            self._write_json(place, {"work_dir": str(self.work.resolve())})
        self._write_json(self.work / FINGERPRINT, fingerprint)

    def forget_summary(self) -> None:
        """Remove an earlier run's summary: its state would be taken for this one's."""
        with disk_errors(self.output):
            (self.output / "summary.json").unlink(missing_ok=True)

    def write_output(self, name: str, content: dict[str, Any]) -> None:
        """Write one of the JSON output files, by rename."""
        self._write_json(self.output / name, content)

    def read_work(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the work folder, None if there is none. Raises: DamagedFileError."""
        return _read_json(self.work / name)

    def write_work(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file of the work folder, by rename."""
        self._write_json(self.work / name, content)

    def remove_work(self, *, keep_parts: bool = False) -> None:
        """Remove what is needed only while a job runs. keep_parts: rows may be tried again."""
        self._remove_work(self.work, keep_parts=keep_parts)
        with disk_errors(self.output):
            (self.output / WORK_PLACE).unlink(missing_ok=True)

    def clear(self) -> None:
        """Remove what a job wrote here, and nothing else."""
        with disk_errors(self.output):
            for name in OUTPUT_FILES[:-1]:
                (self.output / name).unlink(missing_ok=True)
        for folder in self._places():
            self._remove_work(folder)
        with disk_errors(self.output):
            (self.output / WORK_PLACE).unlink(missing_ok=True)
            (self.output / OUTPUT_FILES[-1]).unlink(missing_ok=True)

    def close(self) -> None:
        """Unlock."""
        for path, descriptor in self._locks:
            # Unlinked before it is released: who waits for it will see that its file is no longer the one
            # in the folder.
            path.unlink(missing_ok=True)
            os.close(descriptor)
        self._locks.clear()

    def _lock(self, path: Path) -> None:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise UsageError(
                    f"folder {str(path.parent)!r} is in use by another job: wait for it or name another "
                    "folder"
                ) from None
            if _is_same_file(path, descriptor):
                break
            # Its last holder unlinked it between our open and our lock.
            os.close(descriptor)
        self._locks.append((path, descriptor))

    def _places(self) -> list[Path]:
        return list(dict.fromkeys((self.output.resolve(), self.work.resolve())))

    def _remove_work(self, folder: Path, *, keep_parts: bool = False) -> None:
        with disk_errors(folder):
            (folder / RETRY).unlink(missing_ok=True)
            for name in WORK_FOLDERS:
                if name == PARTS and keep_parts:
                    continue
                # Last first: what is left of parts then still has no gap.
                for path in sorted(_own_files(folder / name), reverse=True):
                    path.unlink(missing_ok=True)
                with suppress(OSError):
                    # Not empty: something else put a file there, which stays.
                    (folder / name).rmdir()
            (folder / PUBLICATION).unlink(missing_ok=True)
            (folder / FINGERPRINT).unlink(missing_ok=True)

    def _refuse_contents(self, resume: bool) -> None:
        """Only a job's own folder can be resumed, only an empty one begun."""
        if resume:
            self._refuse_other_work()
            if self.read_fingerprint() is not None:
                return
            self._refuse_lost_fingerprint()
        for folder in self._places():
            found = sorted(
                path.name
                for path in folder.iterdir()
                if path.name != LOCK
                and path != self.output.resolve()  # within the work folder, where results go to a URL
                and not (resume and _is_leftover(path))
            )
            if found:
                what = ", ".join(found[:4])
                raise UsageError(
                    f"output folder {str(folder)!r} has {what}, but no job to resume: name another folder"
                    if resume
                    else f"output folder {str(folder)!r} is not empty, it has {what}: use --resume to go on "
                    "with the job in it, --overwrite to replace it, or name another folder"
                )

    def _refuse_other_work(self) -> None:
        """A job whose parts lie elsewhere would start again without a word."""
        place = _read_json(self.output / WORK_PLACE)
        if place is not None:
            began, advice = place.get("work_dir"), f"use --work-dir {place.get('work_dir')}"
        elif (self.output / FINGERPRINT).exists():
            began, advice = str(self.output.resolve()), "leave --work-dir out"
        else:
            return
        if began != str(self.work.resolve()) and not self.is_under_way:
            raise UsageError(
                f"cannot resume: the job in {str(self.output)!r} has its work in {began!r} and not in "
                f"{str(self.work)!r}: {advice}, or --overwrite"
            )

    def _refuse_lost_fingerprint(self) -> None:
        for name in WORK_FOLDERS:
            if next(_own_files(self.work / name), None) is not None:
                raise InfrastructureError(
                    f"{str(self.work / name)!r} holds rows, but {FINGERPRINT} is missing: nothing says for "
                    "which settings they hold: start again with --overwrite"
                )

    def _refuse_strangers(self) -> None:
        """--overwrite removes what a job wrote; anything else under its names is somebody's work."""
        for folder in self._places():
            for name in (*WORK_FILES, *OUTPUT_FILES):
                path = folder / name
                if path.is_dir() and not path.is_symlink() and name in WORK_FOLDERS:
                    own = set(_own_files(path))
                    strange = [entry for entry in sorted(path.iterdir()) if entry not in own]
                elif name in WORK_FOLDERS or path.is_dir():
                    strange = [path] if path.is_symlink() or path.exists() else []
                else:
                    strange = []
                if strange:
                    raise UsageError(
                        f"cannot overwrite: {str(strange[0])!r} was not written by a job: move it away or "
                        "name another folder"
                    )

    @staticmethod
    def _write_json(path: Path, content: dict[str, Any]) -> None:
        write_durably(path, [json.dumps(content, indent=2, allow_nan=False).encode("ascii"), b"\n"])


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _damaged(path: Path) -> DamagedFileError:
    return DamagedFileError(
        f"{str(path)!r} is damaged or was not written by a job: start again with --overwrite, or name "
        "another folder"
    )


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, None if there is no file. Raises: DamagedFileError."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        raise _damaged(path) from None
    if not isinstance(content, dict):
        raise _damaged(path)
    return content


def _own_files(folder: Path) -> Iterator[Path]:
    """Files in parts or journal that a job wrote, half-written ones included."""
    pattern = WORK_FOLDERS[folder.name]
    for path in folder.iterdir() if folder.is_dir() else ():
        if pattern.fullmatch(path.name.removesuffix(".tmp")) and path.is_file():
            yield path


def _is_leftover(path: Path) -> bool:
    is_empty_folder = path.name in WORK_FOLDERS and path.is_dir() and not any(path.iterdir())
    return path.name in LEFTOVERS or is_empty_folder
