"""One JSON object to one typed row, or to the reason why not.

A row is one of: context + continuation; context + choices (+ gold); context_ids + continuation_ids; text.
All other fields are carried through untouched.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from .completion_task import Completion
from .errors import RowError

Fields = dict[str, Any]


MAX_NESTING = 200
TOO_DEEP = f"is nested more than {MAX_NESTING} deep: flatten it"


@dataclass(frozen=True, slots=True)
class Continuation:
    """Score continuation after context."""

    context: str
    continuation: str


@dataclass(frozen=True, slots=True)
class TokenContinuation:
    """The same, given as ids."""

    context_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choices:
    """Rank choices after context. gold, where given, is in [0, len(choices))."""

    context: str
    choices: tuple[str, ...]
    gold: int | None


@dataclass(frozen=True, slots=True)
class Text:
    """Score every token of a document once."""

    text: str


JSON_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
}
# What to give for a field that is missing.
WANTED = {
    "choices": "a list of at least one text",
    "context_ids": "a list of integers, which may be empty",
    "continuation_ids": "a list of integers",
    "continuation": "text",
}

Task = Continuation | TokenContinuation | Choices | Text | Completion
TASK_NAMES: dict[type, str] = {
    Continuation: "continuation",
    TokenContinuation: "continuation",
    Choices: "choices",
    Text: "text",
    Completion: "completion",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row that can be encoded. number counts from 0 over all inputs, line from 1 within the file."""

    number: int
    id: str
    file: str
    line: int
    task: Task
    extra: Fields


@dataclass(frozen=True, slots=True)
class RowFailure:
    """A row that was not scored: one line of errors.jsonl."""

    number: int
    id: str
    file: str
    line: int
    error_class: str
    message: str
    attempts: int = 0

    @classmethod
    def of(cls, row: Row | RowFailure, error: RowError) -> RowFailure:
        return cls(row.number, row.id, row.file, row.line, error.error_class, error.message, error.attempts)


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0.0:
        raise ValueError(f"number {text} is too large for a float")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> Fields:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice!r} appears twice")
    return fields


# Made once: json.loads makes one for every line.
_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def parse_json(line: bytes) -> Fields:
    """One line to one object, strictly.

    Raises: RowError invalid_unicode (not UTF-8), invalid_json (syntax, duplicate key, NaN or infinity,
    trailing data),
        wrong_type (not an object).
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            "invalid_unicode", f"line is not UTF-8: {error.reason} at byte {error.start}"
        ) from None
    value = parse_json_value(text, "line")
    if not isinstance(value, dict):
        raise RowError("wrong_type", f"line is a JSON {JSON_NAMES[type(value)]}: one object a line is read")
    return value


def parse_json_value(text: str, what: str) -> Any:
    """A text to what it says as JSON, strictly. what: how to call it. Raises: RowError invalid_json."""
    try:
        value = _DECODER.decode(text)
    except RecursionError:
        raise RowError("invalid_json", f"{what} {TOO_DEEP}") from None
    except ValueError as error:
        raise RowError("invalid_json", f"{what} is not strict JSON: {error}") from None
    # What is read must also be written again: the writer nests deeper than the reader, and both have a limit.
    if text.count("[") + text.count("{") > MAX_NESTING and _nesting(value) > MAX_NESTING:
        raise RowError("invalid_json", f"{what} {TOO_DEEP}")
    return value


def _nesting(value: object) -> int:
    """How many objects and lists lie in each other, without recursion."""
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


def take_id(fields: Fields) -> str | None:
    """Remove and return the row's own id: custom_id, else id; null counts as absent.

    Raises: RowError wrong_type or invalid_unicode.
    """
    name = "custom_id" if fields.get("custom_id") is not None else "id"
    value = fields.pop(name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowError(
            "wrong_type", f"{name} is {shown(value)}: a text that is not empty, or an integer, is taken"
        )
    try:
        return _checked_text(name, str(value))
    except ValueError as error:
        raise RowError("wrong_type", f"{name} cannot be read: {error}") from None


def parse_task(fields: Fields, *, replace_surrogates: bool = False) -> tuple[Task, Fields]:
    """The typed task of a row and the fields that are carried through.

    fields: as parse_json gave them, without the id; it is emptied.
    replace_surrogates: turn lone surrogates into U+FFFD instead of failing the row.
    Raises: RowError missing_field, wrong_type, invalid_unicode, empty_continuation or gold_out_of_range.
    """

    def text(name: str, value: object) -> str:
        return read_text(name, value, replace_surrogates=replace_surrogates)

    if "context_ids" in fields or "continuation_ids" in fields:
        return _token_continuation(fields), fields
    given = [name for name in ("continuation", "choices") if name in fields]
    if len(given) == 2:
        raise RowError("wrong_type", "row has continuation and choices: give one of them")
    if given:
        context = _context(fields, text)
        if given == ["continuation"]:
            return Continuation(context, text("continuation", _take(fields, "continuation"))), fields
        return _choices(context, fields, text), fields
    if "text" in fields:
        if "prefix" in fields or "context" in fields:
            raise RowError("wrong_type", "row has text and also prefix or context: a text row takes neither")
        return Text(text("text", _take(fields, "text"))), fields
    raise RowError("missing_field", "row has none of continuation, choices, text, continuation_ids: give one")


def _context(fields: Fields, text: Callable[[str, object], str]) -> str:
    given = fields.pop("prefix", None)
    prefix = "" if given is None else text("prefix", given)
    return prefix + text("context", _take(fields, "context"))


def _choices(context: str, fields: Fields, text: Callable[[str, object], str]) -> Choices:
    values = _take(fields, "choices")
    if not isinstance(values, list) or not values:
        raise RowError("wrong_type", f"choices is {shown(values)}: a list of at least one text is needed")
    choices = tuple(text(f"choices[{i}]", value) for i, value in enumerate(values))
    for i, choice in enumerate(choices):
        if not choice:
            raise RowError(
                "empty_continuation", f"choices[{i}] is empty: its length is 0 and cannot be divided by"
            )
    gold = fields.pop("gold", None)
    if gold is not None:
        if isinstance(gold, bool) or not isinstance(gold, int):
            raise RowError("wrong_type", f"gold is {shown(gold)}: the index of a choice is needed")
        if not 0 <= gold < len(choices):
            raise RowError("gold_out_of_range", f"gold is {gold}, choices are 0..{len(choices) - 1}")
    return Choices(context, choices, gold)


def _token_continuation(fields: Fields) -> TokenContinuation:
    clash = [name for name in ("context", "continuation", "choices", "text", "prefix") if name in fields]
    if clash:
        raise RowError(
            "wrong_type", f"row has ids and also {', '.join(clash)}: give both sides as ids or as text"
        )
    return TokenContinuation(take_ids(fields, "context_ids"), take_ids(fields, "continuation_ids"))


def read_text(name: str, value: object, *, replace_surrogates: bool = False) -> str:
    """A text that UTF-8 can hold. Raises: RowError wrong_type or invalid_unicode."""
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name} is {shown(value)}: text is needed")
    return _replaced(value) if replace_surrogates else _checked_text(name, value)


def take_ids(fields: Fields, name: str) -> tuple[int, ...]:
    """Remove and return a list of whole numbers. Raises: RowError missing_field or wrong_type."""
    values = _take(fields, name)
    if not isinstance(values, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise RowError("wrong_type", f"{name} is {shown(values)}: a list of integers is needed")
    return tuple(values)


def _take(fields: Fields, name: str) -> object:
    """Null and absent are both missing; empty text is not."""
    value = fields.pop(name, None)
    if value is None:
        raise RowError(
            "missing_field", f"{name} is missing or null: give {WANTED.get(name, 'text, which may be empty')}"
        )
    return value


def _checked_text(name: str, value: str) -> str:
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            "invalid_unicode",
            f"{name} has the lone surrogate U+{ord(value[error.start]):04X} at character {error.start}: "
            "repair it or use --invalid-unicode replace",
        ) from None
    return value


def _replaced(value: str) -> str:
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def shown(value: object) -> str:
    """A value as it stands in JSON, cut to what a message can hold."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
