"""What the pictures need of a line of results.jsonl, whichever version and kind of job wrote it. Pure.

The only reader of such lines in this package: a field that is missing is None or empty, never an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Fields = Mapping[str, Any]


def number(value: Any) -> float | None:
    """A finite number, else None. True and False are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def task_of(row: Fields) -> str:
    """continuation, choices, text or what later kinds call theirs."""
    return str(row.get("task", "unknown"))


def parts_of(row: Fields) -> list[Fields]:
    """What was scored after a context: each choice, or the row itself."""
    choices = row.get("choices")
    if isinstance(choices, list):
        return [choice for choice in choices if isinstance(choice, Mapping)]
    return [row] if "n_continuation" in row else []


def logprobs_per_token(row: Fields) -> Iterator[float]:
    """ln p per scored token of each part of a row, or of its document."""
    if task_of(row) == "text":
        yield from _ratio(row.get("logprob"), row.get("n_tokens"))
    for part in parts_of(row):
        yield from _ratio(part.get("logprob"), part.get("n_continuation"))


def bits_per_byte(row: Fields) -> float | None:
    """Of a document; None for other rows and for those without a finite one."""
    if task_of(row) != "text":
        return None
    nats = next(_ratio(row.get("logprob"), row.get("n_bytes")), None)
    return None if nats is None else -nats / math.log(2)


def margin(row: Fields) -> float | None:
    """ln p of the best choice less that of the second best, in nats; None with fewer than two."""
    values = [number(part.get("logprob")) for part in parts_of(row)]
    known = sorted((value for value in values if value is not None), reverse=True)
    return known[0] - known[1] if task_of(row) == "choices" and len(known) > 1 else None


def choice_of(row: Fields, metric: str = "acc") -> int | None:
    """The index that was chosen by a metric."""
    pred = row.get("pred")
    chosen = pred.get(metric) if isinstance(pred, Mapping) else None
    return chosen if type(chosen) is int else None


def is_correct(row: Fields, metric: str = "acc") -> bool | None:
    """Whether that is the gold one; None if there is no gold or no choice."""
    correct = row.get("correct")
    right = correct.get(metric) if isinstance(correct, Mapping) else None
    return right if isinstance(right, bool) else None


def depth_of(row: Fields) -> float | None:
    """Loops that the row was given."""
    return number(row.get("depth"))


def tokens_of(row: Fields) -> int:
    """Token ids that were submitted for a row, prefixes that are shared included."""
    counted = [
        number(part.get(name)) or 0.0 for part in parts_of(row) for name in ("n_context", "n_continuation")
    ]
    counted += [number(row.get(name)) or 0.0 for name in ("n_tokens", "n_prompt", "n_generated")]
    return int(sum(counted))


def completions_of(row: Fields) -> list[Fields]:
    """What was generated for a row, once or several times."""
    several = row.get("completions")
    if isinstance(several, list):
        return [one for one in several if isinstance(one, Mapping)]
    return [row] if task_of(row) == "completion" else []


def _ratio(total: Any, count: Any) -> Iterator[float]:
    known_total, known_count = number(total), number(count)
    if known_total is not None and known_count:
        yield known_total / known_count
