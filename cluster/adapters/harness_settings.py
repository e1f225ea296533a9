"""--model_args of the harness as a pool."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from ..errors import JobError
from ..text_pool import TextPool, open_pool
from .harness_errors import HarnessError

# The harness's spelling to a keyword of open_pool.
RENAMED = {
    "pool": "name",
    "max_length": "max_seq_len",
    "add_bos_token": "add_bos",
    "prefix_token_id": "prefix_token",
}
TAKEN = ("model", "replicas", "depth", "max_seq_len", "kv", "numeric", "device", "threads", "ray_address")
KNOWN = (*TAKEN, *RENAMED, "seed")
WHOLE = ("replicas", "depth", "max_seq_len", "threads", "prefix_token")
NAMES = ("name", "model", "kv", "numeric", "device", "ray_address")
DEVICES = ("cpu", "cuda")


def open_for_harness(settings: Mapping[str, Any]) -> TextPool:
    """The pool that is asked for. Raises: HarnessError that names the wrong setting, or says what failed."""
    keywords: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in KNOWN:
            near = get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean {near[0]}" if near else f"known are {', '.join(KNOWN)}"
            raise HarnessError(f"--model_args has the unknown key {name!r}: {hint}")
        keyword = RENAMED.get(name, name)
        if keyword in keywords:
            raise HarnessError(f"--model_args gives {keyword} twice: give {name!r} once")
        if value is not None:
            keywords[keyword] = _checked(name, keyword, value)
    try:
        return open_pool(**keywords)
    except JobError as error:
        raise HarnessError(str(error)) from error


def _checked(name: str, keyword: str, value: Any) -> Any:
    """The harness has read numbers and booleans out of text; a pool's name may look like one."""
    if keyword in NAMES:
        value = str(value)
    if keyword in WHOLE and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise HarnessError(f"--model_args {name}={value}: give a whole number")
    if keyword == "add_bos" and not isinstance(value, bool):
        raise HarnessError(f"--model_args {name}={value}: give true or false")
    if keyword == "device" and value not in DEVICES:
        raise HarnessError(f"device {value!r}: give cpu, or cuda, where each replica has a GPU of its own")
    return value
