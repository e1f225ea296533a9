"""Scoring as a kind of job: log-likelihood, multiple choice and rolling perplexity of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..workers.effort import Effort
from .agreement import measure
from .completion_task import Completion
from .depth_rule import refuse_ungated
from .kinds import Backend, ModelChoice, OpenBackend
from .outputs.schema import SCORES, Schema
from .policies import POLICIES
from .progress import Display
from .records import failure_line, result_line
from .rows import Choices, Fields, Row, RowFailure, Task, Text, TokenContinuation, parse_task
from .running import run_job
from .scoring import Scorer
from .settings import ScoreSettings
from .sources.table import SCORE_COLUMNS, Columns
from .tasks import TaskOptions
from .window import Window


@dataclass(frozen=True, slots=True)
class ScoreKind:
    """What a score job makes of its rows."""

    settings: ScoreSettings
    effort: Effort | None = None

    @classmethod
    def of_model(cls, settings: ScoreSettings, descriptor: Mapping[str, Any]) -> ScoreKind:
        """For one model. Raises: UsageError if what is asked of depth does not fit it."""
        return cls(settings, settings.depths.effort(settings.depth, descriptor))

    @property
    def policies(self) -> Mapping[str, str]:
        return POLICIES

    @property
    def options(self) -> TaskOptions:
        return replace(self.settings.task_options, effort=self.effort)

    @property
    def columns(self) -> Columns:
        return SCORE_COLUMNS

    @property
    def schema(self) -> Schema:
        return SCORES

    def parse(self, fields: Fields) -> tuple[Task, Fields]:
        return parse_task(fields, replace_surrogates=self.settings.replace_surrogates)

    def characters(self, task: Task) -> int:
        assert not isinstance(task, Completion)
        if isinstance(task, Text):
            return len(task.text)
        if isinstance(task, TokenContinuation):
            return 8 * (len(task.context_ids) + len(task.continuation_ids))
        continuations = task.choices if isinstance(task, Choices) else (task.continuation,)
        return len(task.context) + sum(len(text) for text in continuations)

    @property
    def error_line(self) -> None:
        return None

    def check(self, rows: Callable[[], Iterable[Row | RowFailure]]) -> None:
        """Rows that have no margin need a gate."""
        if self.effort is not None and self.effort.exit_threshold is None:
            refuse_ungated(rows(), self.effort)

    def begin(self, backend: Backend) -> ScoreWork:
        return ScoreWork(backend, self.options)

    def conclude(
        self,
        backend: Backend,
        results: Iterable[bytes],
        rows: Callable[[], Iterable[Row | RowFailure]],
        after_step: Callable[[], None],
    ) -> dict[str, Any]:
        """Where a rule decided on depth: what that cost in agreement with full depth."""
        count = self.settings.depths.agreement_rows
        if self.effort is None or not count:
            return {}
        plain = replace(self.settings.task_options, token_logprobs=False, pmi=False)
        scorer = Scorer(backend.pool, backend.encoder, self.effort.depths[-1], plain)
        return {"agreement": measure(scorer, results, rows(), count, after_step)}


class ScoreWork(Scorer):
    """Scoring on an open pool, with results as lines."""

    def __init__(self, backend: Backend, options: TaskOptions) -> None:
        super().__init__(backend.pool, backend.encoder, backend.depth, options)

    def take_lines(self, sent: Window) -> list[tuple[int, bytes]]:
        """Rows that left the window since the last call: number and line."""
        lines: list[tuple[int, bytes]] = []
        depth = self.depth if self.options.effort is None else None
        for outcome in sent.take_finished():
            if isinstance(outcome, RowFailure):
                lines.append((outcome.number, failure_line(outcome)))
            else:
                line = result_line(outcome, depth, token_logprobs=self.options.token_logprobs)
                lines.append((outcome.row.number, line))
        return lines

    def figures(self, elapsed_s: float) -> dict[str, Any]:
        """Loops that this run saved, prefixes included, where a rule decides on depth."""
        if self.options.effort is None:
            return {}
        full = self.full_row_loops
        return {
            "loops": {
                "row_loops": self.row_loops,
                "row_loops_at_full_depth": full,
                "saved": round(1 - self.row_loops / full, 6) if full else None,
            }
        }

    def close(self) -> None:
        """The pool itself ends what it was sent."""


def run_score(
    settings: ScoreSettings,
    model: ModelChoice,
    open_backend: OpenBackend,
    display: Display,
    effort: Effort | None = None,
) -> dict[str, Any]:
    """Run or resume a score job, as run_job does. Returns its summary.

    effort: the rule that decides on depth, if any, as ScoreKind.of_model finds it.
    """
    return run_job(settings, ScoreKind(settings, effort), model, open_backend, display)
