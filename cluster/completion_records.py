"""Completions as lines of JSON, without clock or rate: the same bytes at every run."""

from __future__ import annotations

from typing import Any

from .completion_task import Completion
from .completion_window import CompletionOutcome, RowCompletion
from .records import dump, finite_or_none
from .rows import TASK_NAMES


def completion_line(result: RowCompletion, *, token_logprobs: bool = False) -> bytes:
    """One line of results.jsonl, with its line feed. A row of several completions has them in a list."""
    task = result.plan.row.task
    assert isinstance(task, Completion)
    return dump(completion_fields(result, token_logprobs=token_logprobs or task.logprobs))


def completion_fields(
    result: RowCompletion, *, token_logprobs: bool = False, with_text: bool = True
) -> dict[str, Any]:
    """What a line says of a row. with_text: its texts too, else only whether they are empty."""
    row, plan = result.plan.row, result.plan
    assert isinstance(row.task, Completion)
    fields: dict[str, Any] = {
        "id": row.id,
        "file": row.file,
        "line": row.line,
        "task": TASK_NAMES[Completion],
        "depth": plan.requests[0].depth,
        "n_prompt": len(plan.ids),
        "n_truncated": plan.n_truncated,
    }
    if plan.bos_truncated:
        fields["bos_truncated"] = True
    drawn = row.task.settings.temperature > 0
    made = [_fields(outcome, token_logprobs, drawn) for outcome in result.outcomes]
    if not with_text:
        for one in made:
            one["n_characters"] = len(one.pop("text"))
    if row.task.settings.n == 1:
        fields |= made[0]
    else:
        fields["completions"] = made
    return fields | ({"extra": row.extra} if row.extra else {})


def _fields(outcome: CompletionOutcome, token_logprobs: bool, drawn: bool) -> dict[str, Any]:
    count = len(outcome.token_ids)
    fields: dict[str, Any] = {
        "text": outcome.text,
        "finish_reason": outcome.finish_reason,
        "n_tokens": count,
        "depth_sum": sum(outcome.depths),
        "depth_mean": sum(outcome.depths) / count,
    }
    if drawn:
        fields["seed"] = outcome.seed
    if token_logprobs:
        fields["token_ids"] = list(outcome.token_ids)
        fields["token_logprobs"] = [finite_or_none(value) for value in outcome.logprobs]
        fields["token_depths"] = list(outcome.depths)
    return fields
