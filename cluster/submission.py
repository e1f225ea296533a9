"""What is submitted: a command for the cluster, checked as far as can be here, its environment, its id."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .errors import UsageError

KINDS = ("score", "generate")
# What a job is given to stop in order; Ray itself kills after 3 s.
STOP_WAIT_S = 120
LARGE_BYTES = 50 << 20
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Command:
    """A job's command line and the paths in it."""

    kind: str
    arguments: tuple[str, ...]
    # Option and path, of what the job reads and of what it writes.
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]

    def entrypoint(self, runtime_env: Mapping[str, Any]) -> str:
        """The shell command for the cluster.

        A wheel among py_modules can be imported, but its programs are not on the path.
        """
        program = ["python", "-m", "tinyloop.cluster"] if runtime_env.get("py_modules") else ["tinyloop"]
        return shlex.join([*program, self.kind, *self.arguments])


def is_remote(path: str) -> bool:
    """Whether a path names a place and not a file of this or that machine."""
    return "://" in path


def refuse_paths(command: Command, working_folder: Path | None) -> None:
    """Raises: UsageError for a path that cannot mean on the cluster what it means here."""
    for option, path in command.outputs:
        if not (is_remote(path) or Path(path).is_absolute()):
            raise UsageError(
                f"{option} {path} is relative: on the cluster it would lie in Ray's copy of the working "
                "folder, which is removed: give an absolute path on storage that the cluster's node reaches"
            )
    for option, path in command.inputs:
        if is_remote(path) or Path(path).is_absolute():
            continue
        if working_folder is None:
            raise UsageError(
                f"{option} {path} is relative: give an absolute path on storage that the cluster's node "
                "reaches, or send small files along with --working-dir"
            )
        if not list(working_folder.glob(path)):
            raise UsageError(
                f"{option} {path} is not in the working folder {str(working_folder)!r} that is sent: name "
                "another --working-dir or an absolute path"
            )


def unchecked_paths(command: Command) -> str:
    """A line about the paths that only the cluster can check; empty if there are none."""
    there = [path for _, path in (*command.inputs, *command.outputs) if Path(path).is_absolute()]
    if not there:
        return ""
    return (
        f"not checked from here, they lie on the node that runs the job (the head node unless you chose "
        f"otherwise): {', '.join(dict.fromkeys(there))}"
    )


def read_runtime_env(text: str | None) -> dict[str, Any]:
    """--runtime-env: a JSON object, or a YAML or JSON file. Raises: UsageError."""
    if text is None:
        return {}
    try:
        content = (
            json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(Path(text).read_text())
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--runtime-env {text!r} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--runtime-env {text!r} is not an object of Ray's runtime environment")
    return content


def complete_runtime_env(given: Mapping[str, Any], working_folder: Path | None) -> dict[str, Any]:
    """Add the working folder, time to stop in, and that .git stays here. What is given wins."""
    complete = dict(given)
    if working_folder is not None:
        complete["working_dir"] = str(working_folder)
    if "working_dir" in complete:
        complete["excludes"] = list(dict.fromkeys([*complete.get("excludes", []), ".git"]))
    complete["env_vars"] = {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **complete.get("env_vars", {})}
    return complete


def refuse_size(folder: Path, files: Sequence[tuple[int, Path]], limit_bytes: int) -> str:
    """A line of warning about a large working folder, empty for a small one.

    files: size in bytes and path of what would be sent. Raises: UsageError beyond Ray's limit, naming the
    largest.
    """
    total = sum(size for size, _ in files)
    if total <= LARGE_BYTES:
        return ""
    largest = ", ".join(
        f"{path.relative_to(folder)} ({size / 2**20:,.1f} MiB)"
        for size, path in sorted(files, key=lambda file: -file[0])[:SHOWN]
    )
    todo = (
        "name models and data by paths that the cluster reaches, and keep them out with .rayignore, "
        ".gitignore or excludes in --runtime-env"
    )
    about = f"working folder {str(folder)!r} has {total / 2**20:,.1f} MiB in {len(files):,} files"
    if total > limit_bytes:
        raise UsageError(
            f"{about}, Ray sends at most {limit_bytes / 2**20:,.0f} MiB: the largest are {largest}: {todo}"
        )
    return f"{about}, of which the largest are {largest}: {todo}"


def id_of(entrypoint: str, runtime_env: Mapping[str, Any]) -> str:
    """The same for the same command and environment, so that a command that is repeated finds its job."""
    content = json.dumps([entrypoint, dict(runtime_env)], sort_keys=True, default=str).encode()
    return f"tinyloop-{hashlib.sha256(content).hexdigest()[:12]}"
