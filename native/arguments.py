"""Arguments of the wrong type, refused by name before they reach the extension."""

from __future__ import annotations

import operator
from typing import SupportsIndex, overload


@overload
def whole_number(name: str, value: SupportsIndex) -> int: ...
@overload
def whole_number(name: str, value: SupportsIndex | None, none_means: str) -> int | None: ...
def whole_number(name: str, value: SupportsIndex | None, none_means: str = "") -> int | None:
    """The value as an int, NumPy's integers too. none_means: what None stands for, where it may be given.

    Raises: TypeError for anything else, bools among it.
    """
    if value is None and none_means:
        return None
    try:
        if not isinstance(value, bool):
            return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise _wrong_type(name, value, "an integer" + (f", or None for {none_means}" if none_means else ""))


def text(name: str, value: str | None, *, optional: bool = True) -> str:
    """The value, empty for None where that may be given. Raises: TypeError for what is no text."""
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise _wrong_type(name, value, "a string" + (", or None for the default" if optional else ""))
    return value


def _wrong_type(name: str, value: object, wanted: str) -> TypeError:
    return TypeError(f"{name}={value!r}: it must be {wanted}, not {type(value).__name__}")
