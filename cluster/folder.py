"""The output folder of a job: who may use it, what may be in it, what state it is in."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .durable import disk_errors, write_durably
from .errors import UsageError

LOCK = "lock"
OUTPUT_FILES = ("results.jsonl", "errors.jsonl", "summary.json", "run.json", "progress.json")
WORK_FILES = ("fingerprint.json", "parts", "journal")


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
        """Create, lock and check the folder. An empty one is fresh whatever the flags.

        Raises: UsageError if it cannot be created, another job holds it, or it is not empty and neither
        flag is given.
        """
        if resume and overwrite:
            raise UsageError(
                "--resume and --overwrite exclude each other: one keeps the folder, the other empties it"
            )
        folder = cls(output, work or output)
        try:
            folder.output.mkdir(parents=True, exist_ok=True)
            folder.work.mkdir(parents=True, exist_ok=True)
            for path in dict.fromkeys((folder.output.resolve(), folder.work.resolve())):
                folder._lock(path / LOCK)
            if overwrite:
                folder._clear()
            elif not resume:
                folder._refuse_contents()
        except OSError as error:
            folder.close()
            raise UsageError(
                f"output folder {str(output)!r} cannot be used: {error.strerror}: name another"
            ) from error
        except UsageError:
            folder.close()
            raise
        return folder

    def refuse_inputs(self, paths: Sequence[str]) -> None:
        """Raises: UsageError if an input is a file that this job writes."""
        own = {(self.output / name).resolve() for name in OUTPUT_FILES}
        own |= {(self.work / name).resolve() for name in WORK_FILES}
        for path in paths:
            resolved = Path(path).resolve()
            if resolved in own or any(parent in own for parent in resolved.parents):
                raise UsageError(f"input {path!r} is an output of this job: name another folder with -o")

    def read_fingerprint(self) -> dict[str, Any] | None:
        """The fingerprint of the job that began here, None if none did."""
        for path, key in ((self.work / "fingerprint.json", None), (self.output / "run.json", "fingerprint")):
            content = _read_json(path)
            if content is not None:
                return content if key is None else content.get(key)
        return None

    def read_summary(self) -> dict[str, Any] | None:
        """The summary that lies in the folder, None if there is none."""
        return _read_json(self.output / "summary.json")

    def write_fingerprint(self, fingerprint: dict[str, Any]) -> None:
        """Say whose folder this is, before anything else is written."""
        self._write_json(self.work / "fingerprint.json", fingerprint)

    def forget_summary(self) -> None:
        """Remove an earlier run's summary: its state would be taken for this one's."""
        with disk_errors(self.output):
            (self.output / "summary.json").unlink(missing_ok=True)

    def write_output(self, name: str, content: dict[str, Any]) -> None:
        """Write one of the JSON output files, by rename."""
        self._write_json(self.output / name, content)

    def remove_work(self) -> None:
        """Remove what is needed only while a job runs."""
        with disk_errors(self.work):
            for name in WORK_FILES:
                _remove(self.work / name)

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
                    f"folder {str(path.parent)!r} is in use by another job: wait for it or name anotherfolder"
                ) from None
            if _is_same_file(path, descriptor):
                break
            # Its last holder unlinked it between our open and our lock.
            os.close(descriptor)
        self._locks.append((path, descriptor))

    def _refuse_contents(self) -> None:
        for folder in (self.output, self.work):
            found = sorted(path.name for path in folder.iterdir() if path.name != LOCK)
            if found:
                raise UsageError(
                    f"output folder {str(folder)!r} is not empty, it has {', '.join(found[:4])}: use "
                    "--resume to go on with the job in it, --overwrite to replace it, or name another "
                    "folder"
                )

    def _clear(self) -> None:
        for name in OUTPUT_FILES:
            _remove(self.output / name)
        for name in WORK_FILES:
            _remove(self.work / name)

    @staticmethod
    def _write_json(path: Path, content: dict[str, Any]) -> None:
        write_durably(path, [json.dumps(content, indent=2, allow_nan=False).encode("ascii"), b"\n"])


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
