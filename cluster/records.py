"""Results and failures as lines of JSON.

ASCII with escapes, no NaN, no infinity, no clock and no rate: a line depends on the row and its scores
alone, so that two runs of one job are the same bytes.
"""

from __future__ import annotations

import json
import math
from typing import Any

from .encoding import Encoded
from .rows import TASK_NAMES, Row, RowFailure
from .tasks import ChoiceResult, ChoicesResult, ItemScore, PairResult, RowResult

# A failure's line begins with this and a result's never does: parts hold both, in input order.
FAILURE_START = b'{"class":'

# Made once: json.dumps makes one for every line.
_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(", ", ": "))


def result_line(result: RowResult, depth: int | None, *, token_logprobs: bool = False) -> bytes:
    """One line of results.jsonl, with its line feed. depth: of the job; None where each row has its own."""
    row = result.row
    fields: dict[str, Any] = {
        "id": row.id,
        "file": row.file,
        "line": row.line,
        "task": TASK_NAMES[type(row.task)],
        "depth": result.depth if depth is None else depth,
    }
    if isinstance(result, PairResult):
        fields |= _pair_fields(result.encoded, result.score, token_logprobs)
    elif isinstance(result, ChoicesResult):
        fields |= _choices_fields(result, token_logprobs)
    else:
        fields |= _number("logprob", result.logprob)
        fields |= {
            "n_tokens": result.n_tokens,
            "n_bytes": result.n_bytes,
            "n_words": result.n_words,
            "n_windows": result.n_windows,
        }
        if depth is None:
            fields["depth_mean"] = result.depth_mean
        if token_logprobs:
            fields["token_logprobs"] = [finite_or_none(value) for value in result.token_logprobs]
            if depth is None:
                fields["token_depths"] = [reached for count, reached in result.depths for _ in range(count)]
    return dump(fields | _extra(row))


def failure_line(failure: RowFailure) -> bytes:
    """One line of errors.jsonl, with its line feed."""
    return dump(
        {
            "class": failure.error_class,
            "id": failure.id,
            "file": failure.file,
            "line": failure.line,
            "message": failure.message,
            "attempts": failure.attempts,
        }
    )


def id_of(line: bytes) -> str:
    """The id in a line of results.jsonl or errors.jsonl."""
    row_id: str = json.loads(line)["id"]
    return row_id


def _pair_fields(encoded: Encoded, score: ItemScore, token_logprobs: bool) -> dict[str, Any]:
    fields = _number("logprob", score.logprob)
    fields |= {
        "is_greedy": score.is_greedy,
        "n_context": encoded.n_context,
        "n_continuation": encoded.n_continuation,
        "n_truncated": encoded.n_truncated,
        "boundary": encoded.boundary,
    }
    if encoded.bos_truncated:
        fields["bos_truncated"] = True
    if token_logprobs:
        fields["token_logprobs"] = [finite_or_none(value) for value in score.token_logprobs]
    return fields


def _choices_fields(result: ChoicesResult, token_logprobs: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"pred": result.pred}
    if result.gold is not None:
        fields["gold"] = result.gold
        fields["correct"] = {
            metric: None if pred is None else pred == result.gold for metric, pred in result.pred.items()
        }
    fields["tie"] = "acc" in result.tied
    if result.tied:
        fields["tied"] = list(result.tied)
    if result.has_duplicates:
        fields["duplicate_choices"] = True
    fields["choices"] = [_choice_fields(choice, token_logprobs) for choice in result.choices]
    return fields


def _choice_fields(choice: ChoiceResult, token_logprobs: bool) -> dict[str, Any]:
    fields = _pair_fields(choice.encoded, choice.score, token_logprobs)
    values = choice.by_metric
    fields |= {
        "n_characters": choice.n_characters,
        "n_bytes": choice.n_bytes,
        "logprob_per_character": finite_or_none(values["acc_norm"]),
        "logprob_per_byte": finite_or_none(values["acc_bytes"]),
        "logprob_per_token": finite_or_none(values["acc_token"]),
    }
    if choice.unconditional is not None:
        fields["logprob_unconditional"] = finite_or_none(choice.unconditional.logprob)
        fields["pmi"] = finite_or_none(values["acc_pmi"])
    return fields


def _number(name: str, value: float) -> dict[str, Any]:
    if math.isfinite(value):
        return {name: value}
    return {name: None, f"{name}_reason": "neg_inf"}


def finite_or_none(value: float) -> float | None:
    """A number that JSON has."""
    return value if math.isfinite(value) else None


def _extra(row: Row) -> dict[str, Any]:
    return {"extra": row.extra} if row.extra else {}


def dump(fields: dict[str, Any]) -> bytes:
    """A line of ASCII JSON with its line feed."""
    return _ENCODER.encode(fields).encode("ascii") + b"\n"
