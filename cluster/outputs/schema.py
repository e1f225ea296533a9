"""The columns of results and errors in tables: fixed, whatever is in a job, so that files fit together.

Every field of a JSON line that has no column of its own is in `more`, as JSON; `extra` is JSON, too. A field
that a line does not have is null, as one is that it has as null.
"""

from __future__ import annotations

from typing import Literal

from ..summary import METRICS

# Text that holds JSON; other columns as their names say. A list type is a list of one type, a dict a struct.
Type = Literal["text", "int", "float", "bool", "json"] | list["Type"] | dict[str, "Type"]
Schema = dict[str, Type]

MORE = "more"
PAIR: Schema = {
    "logprob": "float",
    "logprob_reason": "text",
    "is_greedy": "bool",
    "n_context": "int",
    "n_continuation": "int",
    "n_truncated": "int",
    "boundary": "text",
    "bos_truncated": "bool",
    "token_logprobs": ["float"],
}
CHOICE: Schema = PAIR | {
    "n_characters": "int",
    "n_bytes": "int",
    "logprob_per_character": "float",
    "logprob_per_byte": "float",
    "logprob_per_token": "float",
    "logprob_unconditional": "float",
    "pmi": "float",
}
ROW: Schema = {"id": "text", "file": "text", "line": "int", "task": "text", "depth": "int"}
SCORES: Schema = {
    **ROW,
    **PAIR,
    "n_tokens": "int",
    "n_bytes": "int",
    "n_words": "int",
    "n_windows": "int",
    "pred": dict.fromkeys(METRICS, "int"),
    "gold": "int",
    "correct": dict.fromkeys(METRICS, "bool"),
    "tie": "bool",
    "tied": ["text"],
    "duplicate_choices": "bool",
    "choices": [CHOICE],
    "extra": "json",
    MORE: "json",
}
ERRORS: Schema = {
    "class": "text",
    "id": "text",
    "file": "text",
    "line": "int",
    "message": "text",
    "attempts": "int",
    MORE: "json",
}
COMPLETION: Schema = {
    "text": "text",
    "finish_reason": "text",
    "n_tokens": "int",
    "depth_sum": "int",
    "depth_mean": "float",
    "seed": "int",
    "token_ids": ["int"],
    "token_logprobs": ["float"],
    "token_depths": ["int"],
}
COMPLETIONS: Schema = {
    **ROW,
    "n_prompt": "int",
    "n_truncated": "int",
    "bos_truncated": "bool",
    **COMPLETION,
    "completions": [COMPLETION],
    "extra": "json",
    MORE: "json",
}


def schema_of(names: list[str]) -> Schema | None:
    """The schema with these columns, None if there is none."""
    return next((one for one in (SCORES, COMPLETIONS, ERRORS) if list(one) == names), None)


def fits(value: object, kind: Type) -> bool:
    """Whether a value of JSON can stand in a column of this type without losing anything."""
    if value is None or kind == "json":
        return True
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(one, kind[0]) for one in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(
            name in kind and fits(one, kind[name]) for name, one in value.items()
        )
    if kind == "int":
        return type(value) is int and -(2**63) <= value < 2**63
    return type(value) is {"text": str, "float": float, "bool": bool}[kind]
