"""Rows to scoring items and scores back to results: what each kind of row means.

Invariant: a row has a result only if every one of its parts was scored. Nothing here knows of pools,
windows or files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from ..workers.effort import Effort
from .encoding import Encoded, Encoder
from .errors import RowError
from .items import Int32Array
from .rolling import RollingPolicy, rolling_windows
from .rows import Choices, Continuation, Row, RowFailure, Text, TokenContinuation

NEGATIVE_INFINITY = -math.inf


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What is scored for each row beyond its own text.

    pmi: score each choice also after the empty context.
    token_logprobs: keep the log-probability of every token.
    effort: the rule that decides how deep each row goes; None: all go to one depth.
    """

    pmi: bool = False
    token_logprobs: bool = False
    rolling: RollingPolicy = field(default_factory=RollingPolicy)
    effort: Effort | None = None


@dataclass(frozen=True, slots=True)
class ItemScore:
    """One scored item. logprob: FP64 sum of FP32 values, exactly rounded; -inf is a true zero probability.

    depth: loops that were run, 0 where there was nothing to score.
    """

    logprob: float
    is_greedy: bool
    token_logprobs: tuple[float, ...] = ()
    depth: int = 0


NOTHING_SCORED = ItemScore(0.0, True)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """A row and its parts.

    Choices: one part a choice, then, with PMI, one a choice after the empty context.
    """

    row: Row
    parts: tuple[Encoded, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(part.ids) for part in self.parts)


@dataclass(frozen=True, slots=True)
class PairResult:
    """A continuation after its context."""

    row: Row
    encoded: Encoded
    score: ItemScore

    @property
    def depth(self) -> int:
        """Loops that were run."""
        return self.score.depth


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """One choice. Lengths are those of the choice as given, without delimiter or moved whitespace."""

    encoded: Encoded
    score: ItemScore
    n_characters: int
    n_bytes: int
    unconditional: ItemScore | None

    @property
    def by_metric(self) -> dict[str, float]:
        """What each accuracy takes the argmax of. NaN: a PMI of two zero probabilities."""
        total = self.score.logprob
        values = {
            "acc": total,
            "acc_norm": total / self.n_characters,
            "acc_bytes": total / self.n_bytes,
            "acc_token": total / self.encoded.n_continuation,
        }
        if self.unconditional is not None:
            values["acc_pmi"] = total - self.unconditional.logprob
        return values


@dataclass(frozen=True, slots=True)
class ChoicesResult:
    """A ranked question.

    pred: metric to index of the best choice (the first of equals), None where undefined.
    """

    row: Row
    choices: tuple[ChoiceResult, ...]
    gold: int | None
    pred: dict[str, int | None]
    tied: tuple[str, ...]
    has_duplicates: bool

    @property
    def depth(self) -> int:
        """Loops that were run, the same for every choice."""
        return self.choices[0].score.depth


@dataclass(frozen=True, slots=True)
class TextResult:
    """A document, every token scored once. depths: of each window the number of its tokens, and loops run."""

    row: Row
    logprob: float
    n_tokens: int
    n_bytes: int
    n_words: int
    n_windows: int
    token_logprobs: tuple[float, ...]
    depths: tuple[tuple[int, int], ...] = ()

    @property
    def depth(self) -> int:
        """The most loops that were run for one of its tokens."""
        return max((depth for _, depth in self.depths), default=0)

    @property
    def depth_mean(self) -> float:
        """Loops by token."""
        return sum(count * depth for count, depth in self.depths) / self.n_tokens if self.n_tokens else 0.0


RowResult = PairResult | ChoicesResult | TextResult


def encode_rows(encoder: Encoder, rows: Sequence[Row], options: TaskOptions) -> list[RowPlan | RowFailure]:
    """Encode a batch of rows in one go; one plan or failure a row, in order."""
    pairs: list[tuple[str, str]] = []
    texts: list[str] = []
    for row in rows:
        pairs += _text_pairs(row, options)
        texts += [row.task.text] if isinstance(row.task, Text) else []
    encoded_pairs = iter(encoder.encode_pairs(pairs))
    encoded_texts = iter(encoder.encode_texts(texts))
    plans: list[RowPlan | RowFailure] = []
    for row in rows:
        parts: list[Encoded | RowError]
        if isinstance(row.task, TokenContinuation):
            parts = [_joined(encoder, row.task)]
        elif isinstance(row.task, Text):
            parts = _document_parts(next(encoded_texts), encoder, options.rolling)
        else:
            parts = [next(encoded_pairs) for _ in _text_pairs(row, options)]
            parts = [_with_tokens(part) for part in parts] if isinstance(row.task, Choices) else parts
        error = next((part for part in parts if isinstance(part, RowError)), None)
        plans.append(
            RowFailure.of(row, error) if error else RowPlan(row, tuple(cast("list[Encoded]", parts)))
        )
    return plans


def _text_pairs(row: Row, options: TaskOptions) -> list[tuple[str, str]]:
    task = row.task
    if isinstance(task, Continuation):
        return [(task.context, task.continuation)]
    if isinstance(task, Choices):
        pairs = [(task.context, choice) for choice in task.choices]
        return pairs + [("", choice) for choice in task.choices] if options.pmi else pairs
    return []


def _with_tokens(part: Encoded | RowError) -> Encoded | RowError:
    """A choice needs a token to be divided by, whatever --empty-continuation says of continuations."""
    if isinstance(part, RowError) or part.n_continuation:
        return part
    return RowError("empty_continuation", "a choice has no token to score: it is the prefix token alone")


def _joined(encoder: Encoder, task: TokenContinuation) -> Encoded | RowError:
    try:
        return encoder.join_ids(task.context_ids, task.continuation_ids)
    except RowError as error:
        return error


def _document_parts(
    ids: Int32Array | RowError, encoder: Encoder, policy: RollingPolicy
) -> list[Encoded | RowError]:
    if isinstance(ids, RowError):
        return [ids]
    prefix = np.array([encoder.policy.prefix_id], dtype=np.int32)
    # A document that spells out the prefix token has it as its context; it is not scored, and never doubled.
    body = ids[1:] if len(ids) and ids[0] == prefix[0] else ids
    parts: list[Encoded | RowError] = []
    for window in rolling_windows(len(body), encoder.policy.max_rows, policy):
        own = body[window.begin : window.end]
        window_ids = np.concatenate([prefix, own]) if window.with_prefix else own
        parts.append(Encoded(window_ids, len(window_ids) - window.n_scored, window.n_scored))
    return parts


def finish_row(plan: RowPlan, scores: Sequence[ItemScore | RowError]) -> RowResult | RowFailure:
    """The result of a row whose parts all came back; one failed part fails the row."""
    row = plan.row
    error = next((score for score in scores if isinstance(score, RowError)), None)
    if error is not None:
        return RowFailure.of(row, error)
    scored = cast("Sequence[ItemScore]", scores)
    if isinstance(row.task, Choices):
        return _rank(row, row.task, plan.parts, scored)
    if isinstance(row.task, Text):
        return _document(row, row.task, plan.parts, scored)
    return PairResult(row, plan.parts[0], scored[0])


def _rank(row: Row, task: Choices, parts: Sequence[Encoded], scores: Sequence[ItemScore]) -> ChoicesResult:
    n = len(task.choices)
    unconditional: Sequence[ItemScore | None] = scores[n:] or [None] * n
    choices = tuple(
        ChoiceResult(part, score, len(text), len(text.encode("utf-8")), alone)
        for text, part, score, alone in zip(task.choices, parts[:n], scores[:n], unconditional, strict=True)
    )
    values = [choice.by_metric for choice in choices]
    pred: dict[str, int | None] = {}
    tied: list[str] = []
    for metric in values[0]:
        column = [value[metric] for value in values]
        # NaN would win an argmax; infinity would come from dividing by a zero probability. Neither ranks
        # anything.
        best = None if any(math.isnan(v) or v == math.inf for v in column) else column.index(max(column))
        pred[metric] = best
        if best is not None and column.count(column[best]) > 1:
            tied.append(metric)
    return ChoicesResult(row, choices, task.gold, pred, tuple(tied), len(set(task.choices)) < n)


def _document(row: Row, task: Text, parts: Sequence[Encoded], scores: Sequence[ItemScore]) -> TextResult:
    return TextResult(
        row=row,
        logprob=math.fsum(score.logprob for score in scores),
        n_tokens=sum(part.n_continuation for part in parts),
        n_bytes=len(task.text.encode("utf-8")),
        # Splitting on whitespace runs, ends included: the harness's word count, "" is 1 and " a b " is 4.
        n_words=len(re.split(r"\s+", task.text)),
        n_windows=len(parts),
        token_logprobs=tuple(value for score in scores for value in score.token_logprobs),
        depths=tuple((part.n_continuation, score.depth) for part, score in zip(parts, scores, strict=True)),
    )
