"""Where a file lies: a local path, or a URL of any store that Arrow or fsspec knows.

A Place is two strings and can be sent to another process; the store behind it is opened where it is used.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from ..errors import UsageError
from .extras import need

URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class Place:
    """A file. spelled: as people know it. root: URL of its store, None for a local one. path: in that."""

    spelled: str
    root: str | None
    path: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for two spellings of one file."""
        if self.root is None:
            return "", str(Path(self.path).resolve())
        scheme = urlsplit(self.root).scheme.lower()
        return {"gcs": "gs", "s3a": "s3"}.get(scheme, scheme), self.path.strip("/")


def local(path: str | Path) -> Place:
    """The place of a local path."""
    return Place(str(path), None, str(path))


def is_remote(text: str) -> bool:
    """Whether this is the URL of something that is not a local file."""
    return URL.match(text) is not None and urlsplit(text).scheme.lower() != "file"


def local_path(text: str) -> str:
    """A local path from a path or a file:// URL. Raises: UsageError for one of another machine."""
    if URL.match(text) is None:
        return text
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{text!r} names the machine {parts.netloc!r}: write file:///PATH for a local file")
    return unquote(parts.path)


@lru_cache(maxsize=64)
def store(url: str) -> tuple[Any, str]:
    """The pyarrow file system of a URL and the path within it: Arrow's own, else fsspec's.

    Raises: UsageError if neither knows the scheme, a package is missing, or the store cannot be reached.
    """
    fs = need("pyarrow.fs", "cloud", f"{url!r}")
    try:
        return fs.FileSystem.from_uri(url)  # type: ignore[no-any-return]
    except OSError as error:
        raise UsageError(f"cannot open {url!r}: {error}") from error
    except ValueError:
        # Not one of Arrow's own schemes, or spelled in a way that it does not take.
        core = need("fsspec.core", "cloud", f"{url!r}")
    try:
        found, path = core.url_to_fs(url)
    except (OSError, ValueError, ImportError) as error:
        raise UsageError(
            f"cannot open {url!r}: {error}: give a local path or a URL that pyarrow or fsspec knows, and "
            "install the package that fsspec names"
        ) from error
    return fs.PyFileSystem(fs.FSSpecHandler(found)), path


def remote(url: str) -> Place:
    """The place of one file at a URL. Raises: UsageError if its store cannot be opened."""
    _, path = store(url)
    return Place(url, url, path)


@contextmanager
def opened(place: Place, *, random_access: bool = False) -> Iterator[BinaryIO]:
    """The bytes of a file as they lie there, compressed or not. Raises: OSError."""
    if place.root is None:
        with Path(place.path).open("rb", buffering=0) as file:
            yield file
        return
    filesystem, _ = store(place.root)
    handle = (
        filesystem.open_input_file(place.path)
        if random_access
        else filesystem.open_input_stream(place.path, compression=None)
    )
    with handle:
        yield handle


def expand(patterns: Sequence[str]) -> list[Place]:
    """Paths, URLs and globs to files, in the order given, what a glob finds sorted.

    Raises: UsageError if nothing matches, something is no file, or a file is named twice.
    """
    places: list[Place] = []
    for pattern in patterns:
        found = _remote_matches(pattern) if is_remote(pattern) else _local_matches(local_path(pattern))
        if not found:
            raise UsageError(f"input {pattern!r} matches no file: check the path")
        places += found
    seen: dict[tuple[str, str], Place] = {}
    for place in places:
        earlier = seen.setdefault(place.identity, place)
        if earlier is not place:
            raise UsageError(f"input {place.spelled!r} is the same file as {earlier.spelled!r}: name it once")
    return places


def _local_matches(pattern: str) -> list[Place]:
    paths = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
    for path in paths:
        if not Path(path).is_file():
            raise UsageError(
                f"input {path!r} is not a file: name files of rows or a glob such as 'rows/*.jsonl'"
            )
    return [local(path) for path in paths]


def _remote_matches(url: str) -> list[Place]:
    scheme, rest = url.split("://", 1)
    wild = WILD.search(rest)
    try:
        if wild is None:
            place = remote(url)
            filesystem, _ = store(url)
            return [place] if filesystem.get_file_info(place.path).is_file else []
        base = rest[: rest.rindex("/", 0, wild.start()) + 1] if "/" in rest[: wild.start()] else ""
        root = f"{scheme}://{base}"
        filesystem, folder = store(root)
        selector = need("pyarrow.fs", "cloud", f"{url!r}").FileSelector(
            folder, recursive=True, allow_not_found=True
        )
        matches = re.compile(_glob_pattern(rest[len(base) :])).fullmatch
        start = folder.rstrip("/") + "/"
        found = [
            info.path
            for info in filesystem.get_file_info(selector)
            if info.is_file and matches(info.path.removeprefix(start))
        ]
    except OSError as error:
        raise UsageError(f"input {url!r} cannot be looked up: {error}") from error
    return [Place(f"{root}{path.removeprefix(start)}", root, path) for path in sorted(found)]


def _glob_pattern(pattern: str) -> str:
    """A glob as a regular expression: * and ? stay within one folder, **/ spans any number."""
    out, i = "", 0
    while i < len(pattern):
        if pattern.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
            continue
        character = pattern[i]
        end = pattern.find("]", i + 2) if character == "[" else -1
        if end > 0:
            inside = pattern[i + 1 : end]
            negated = inside.startswith("!")
            out += (
                f"[{'^' if negated else ''}{re.escape(inside.removeprefix('!')).replace(chr(92) + '-', '-')}]"
            )
            i = end + 1
            continue
        out += {"*": "[^/]*", "?": "[^/]"}.get(character) or re.escape(character)
        i += 1
    return out
