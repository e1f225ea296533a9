"""Completed prompts as a sequence and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .completion_window import CompletionOutcome, RowCompletion
from .outcomes import Outcomes
from .rows import RowFailure

if TYPE_CHECKING:
    import pyarrow


class CompletionResults(Outcomes[RowCompletion]):
    """Completed prompts; outcomes of a result has one completion, or as many as were asked for."""

    @property
    def texts(self) -> list[str | None]:
        """The text of each row's first completion, None where it failed."""
        return [None if isinstance(one, RowFailure) else one.outcomes[0].text for one in self]

    def table(self) -> pyarrow.Table:
        """The columns of `completion_schema`."""
        import pyarrow as pa

        return pa.Table.from_pylist([_fields(outcome) for outcome in self], schema=completion_schema())

    def _id(self, result: RowCompletion) -> str:
        return result.plan.row.id


def completion_schema() -> pyarrow.Schema:
    """The columns of a table of completions.

    error_class, error: why a row failed; all others are null then. n_prompt, n_truncated: ids that were fed
    and that were dropped before them. generated_text to token_depths: of the first completion; finish_reason:
    stop, eos or length. completions: all of them, where several were asked for.
    """
    import pyarrow as pa

    completion = {
        "generated_text": pa.string(),
        "finish_reason": pa.string(),
        "drawn_with_seed": pa.uint64(),
        "token_ids": pa.list_(pa.int32()),
        "token_logprobs": pa.list_(pa.float32()),
        "token_depths": pa.list_(pa.int32()),
    }
    columns = {"error_class": pa.string(), "error": pa.string(), "n_prompt": pa.int32()}
    columns |= {"n_truncated": pa.int32(), **completion, "completions": pa.list_(pa.struct(completion))}
    return pa.schema(columns)


def _fields(outcome: RowCompletion | RowFailure) -> dict[str, Any]:
    if isinstance(outcome, RowFailure):
        return {"error_class": outcome.error_class, "error": outcome.message}
    drawn = any(request.temperature > 0 for request in outcome.plan.requests)
    made = [_completion(one, drawn) for one in outcome.outcomes]
    fields = {"n_prompt": len(outcome.plan.ids), "n_truncated": outcome.plan.n_truncated, **made[0]}
    return fields | ({"completions": made} if len(made) > 1 else {})


def _completion(outcome: CompletionOutcome, drawn: bool) -> dict[str, Any]:
    return {
        "generated_text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "drawn_with_seed": outcome.seed if drawn else None,
        "token_ids": outcome.token_ids,
        "token_logprobs": outcome.logprobs,
        "token_depths": outcome.depths,
    }
