"""Settings of a completion out of a row's fields or a command's options: the same names and ranges."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..workers.prompts import MOST_DEPTH
from .completion_task import CompletionSettings
from .errors import RowError
from .rows import Fields, read_text, shown

MOST_COMPLETIONS = 128
# Other names under which a setting may be given.
ALIASES = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens"),
    "stop": ("until",),
    "stop_ids": ("stop_token_ids",),
}


def _whole(least: int, most: int) -> Callable[[str, object], int]:
    def read(name: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RowError("wrong_type", f"{name} is {shown(value)}: a whole number is needed")
        if not least <= value <= most:
            raise RowError("invalid_setting", f"{name} is {value}: it must be {least} to {most}")
        return value

    return read


def _real(allowed: Callable[[float], bool], words: str) -> Callable[[str, object], float]:
    def read(name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RowError("wrong_type", f"{name} is {shown(value)}: a number is needed")
        if not (math.isfinite(value) and allowed(value)):
            raise RowError("invalid_setting", f"{name} is {value}: it must be {words}")
        return float(value)

    return read


def _stops(name: str, value: object) -> tuple[str, ...]:
    given = value if isinstance(value, list) else [value]
    stops = tuple(read_text(name, one) for one in given)
    if not all(stops):
        raise RowError("invalid_setting", f"{name} holds an empty text, which would end every completion")
    return stops


def _ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise RowError("wrong_type", f"{name} is {shown(value)}: a list of integers is needed")
    return tuple(value)


READERS: dict[str, Callable[[str, object], Any]] = {
    "max_new_tokens": _whole(1, 2**31 - 1),
    "temperature": _real(lambda v: v >= 0, "0 (the likeliest token) or a positive number"),
    "top_k": _whole(0, 2**31 - 1),
    "top_p": _real(lambda v: 0 < v <= 1, "above 0 and at most 1 (all tokens)"),
    "min_p": _real(lambda v: 0 <= v <= 1, "0 (all tokens) to 1"),
    "repetition_penalty": _real(lambda v: v > 0, "a positive number, 1 for none"),
    "stop": _stops,
    "stop_ids": _ids,
    "seed": _whole(0, 2**64 - 1),
    "depth": _whole(1, MOST_DEPTH),
    "exit_threshold": _real(lambda v: v > 0, "above 0"),
    "min_depth": _whole(1, MOST_DEPTH),
    "n": _whole(1, MOST_COMPLETIONS),
}


def take_settings(fields: Fields, defaults: CompletionSettings) -> CompletionSettings:
    """Remove settings from a row's fields; what is absent or null is as in defaults.

    Raises: RowError wrong_type, invalid_unicode, or invalid_setting that says which values are taken.
    """
    found: dict[str, Any] = {}
    for name, read in READERS.items():
        given = [alias for alias in (name, *ALIASES.get(name, ())) if alias in fields]
        values = {alias: fields.pop(alias) for alias in given}
        values = {alias: value for alias, value in values.items() if value is not None}
        if len(values) > 1:
            raise RowError("wrong_type", f"row has {' and '.join(values)}, which are the same: give one")
        for alias, value in values.items():
            found[name] = read(alias, value)
    return replace(defaults, **found)
