"""What is no regular file, refused before it is opened: a FIFO would wait for its writer for ever."""

from __future__ import annotations

import os
import stat

from .records import FormatError

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(path: str | bytes | os.PathLike[str]) -> None:
    """Raises: FormatError naming what is no regular file; OSError when there is nothing or no access."""
    kind = stat.S_IFMT(os.stat(path).st_mode)
    if kind != stat.S_IFREG:
        raise FormatError(
            f"{os.fsdecode(path)!r} is {_KINDS.get(kind, 'something else')}, not a regular file"
        )
