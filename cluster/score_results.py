"""Scored rows as a sequence and as a table.

A table has the same columns whatever kinds of rows were scored, with the names that results.jsonl has for
them; what a row does not have is null. None is named like a field of a row, so that results can stand beside
the rows that they came from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .outcomes import Outcomes
from .rows import TASK_NAMES, RowFailure
from .tasks import ChoiceResult, ChoicesResult, PairResult, RowResult, TextResult

if TYPE_CHECKING:
    import pyarrow

METRICS = ("acc", "acc_norm", "acc_bytes", "acc_token", "acc_pmi")


class ScoreResults(Outcomes[RowResult]):
    """Scored rows. depth: loops that they were scored at."""

    def __init__(self, outcomes: Iterable[RowResult | RowFailure], depth: int, index: Any = None) -> None:
        """index: of the DataFrame that the rows came in."""
        super().__init__(outcomes, index)
        self.depth = depth

    def table(self) -> pyarrow.Table:
        """The columns of `result_schema`."""
        return result_table(self, self.depth)

    def _id(self, result: RowResult) -> str:
        return result.row.id


def result_schema() -> pyarrow.Schema:
    """The columns of a table of results.

    error_class, error: why a row was not scored; all others are null then. logprob: of a continuation or a
    whole text, natural; -inf is a true zero probability. pred: index of the best choice by each measure;
    correct: whether that is the row's gold. choice_scores: one entry a choice.
    """
    import pyarrow as pa

    scored = {
        "logprob": pa.float64(),
        "is_greedy": pa.bool_(),
        "n_context": pa.int32(),
        "n_continuation": pa.int32(),
        "n_truncated": pa.int32(),
        "boundary": pa.string(),
        "token_logprobs": pa.list_(pa.float32()),
    }
    choice = scored | {
        "n_characters": pa.int32(),
        "n_bytes": pa.int32(),
        "logprob_per_character": pa.float64(),
        "logprob_per_byte": pa.float64(),
        "logprob_per_token": pa.float64(),
        "logprob_unconditional": pa.float64(),
        "pmi": pa.float64(),
    }
    columns = {"error_class": pa.string(), "error": pa.string(), "task": pa.string(), "depth": pa.int32()}
    columns |= scored
    columns |= {"pred": pa.struct({name: pa.int32() for name in METRICS})}
    columns |= {"correct": pa.struct({name: pa.bool_() for name in METRICS})}
    columns |= {"tie": pa.bool_(), "choice_scores": pa.list_(pa.struct(choice))}
    columns |= {name: pa.int64() for name in ("n_tokens", "n_bytes", "n_words", "n_windows")}
    return pa.schema(columns)


def result_table(outcomes: Iterable[RowResult | RowFailure], depth: int) -> pyarrow.Table:
    """Outcomes as a table of `result_schema`."""
    import pyarrow as pa

    return pa.Table.from_pylist([_fields(outcome, depth) for outcome in outcomes], schema=result_schema())


def _fields(outcome: RowResult | RowFailure, depth: int) -> dict[str, Any]:
    if isinstance(outcome, RowFailure):
        return {"id": outcome.id, "error_class": outcome.error_class, "error": outcome.message}
    fields: dict[str, Any] = {
        "id": outcome.row.id,
        "task": TASK_NAMES[type(outcome.row.task)],
        "depth": depth,
    }
    if isinstance(outcome, PairResult):
        return fields | _scored(outcome)
    if isinstance(outcome, TextResult):
        names = ("logprob", "n_tokens", "n_bytes", "n_words", "n_windows")
        fields |= {name: getattr(outcome, name) for name in names}
        return fields | {"token_logprobs": outcome.token_logprobs or None}
    return fields | _ranked(outcome)


def _scored(result: PairResult | ChoiceResult) -> dict[str, Any]:
    encoded, score = result.encoded, result.score
    names = ("n_context", "n_continuation", "n_truncated", "boundary")
    fields = {name: getattr(encoded, name) for name in names}
    return fields | asdict(score) | {"token_logprobs": score.token_logprobs or None}


def _ranked(result: ChoicesResult) -> dict[str, Any]:
    choices = []
    for choice in result.choices:
        values = choice.by_metric
        fields = _scored(choice) | {"n_characters": choice.n_characters, "n_bytes": choice.n_bytes}
        fields |= {
            "logprob_per_character": values["acc_norm"],
            "logprob_per_byte": values["acc_bytes"],
            "logprob_per_token": values["acc_token"],
        }
        if choice.unconditional is not None:
            fields |= {"logprob_unconditional": choice.unconditional.logprob, "pmi": values["acc_pmi"]}
        choices.append(fields)
    correct = None
    if result.gold is not None:
        correct = {name: None if best is None else best == result.gold for name, best in result.pred.items()}
    return {"pred": result.pred, "correct": correct, "tie": "acc" in result.tied, "choice_scores": choices}
