"""Scoring as a kind of job: log-likelihood, multiple choice and rolling perplexity of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .completion_task import Completion
from .encoding import POLICIES
from .kinds import Backend, ModelChoice, OpenBackend
from .progress import Display
from .records import failure_line, result_line
from .rows import Choices, Fields, RowFailure, Task, Text, TokenContinuation, parse_task
from .running import run_job
from .scoring import Scorer
from .settings import ScoreSettings
from .tasks import TaskOptions
from .window import Window


@dataclass(frozen=True, slots=True)
class ScoreKind:
    """What a score job makes of its rows."""

    settings: ScoreSettings

    @property
    def policies(self) -> Mapping[str, str]:
        return POLICIES

    @property
    def options(self) -> TaskOptions:
        return self.settings.task_options

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

    def begin(self, backend: Backend) -> ScoreWork:
        return ScoreWork(backend, self.settings)


class ScoreWork(Scorer):
    """Scoring on an open pool, with results as lines."""

    def __init__(self, backend: Backend, settings: ScoreSettings) -> None:
        super().__init__(backend.pool, backend.encoder, backend.depth, settings.task_options)

    def take_lines(self, sent: Window) -> list[tuple[int, bytes]]:
        """Rows that left the window since the last call: number and line."""
        lines: list[tuple[int, bytes]] = []
        for outcome in sent.take_finished():
            if isinstance(outcome, RowFailure):
                lines.append((outcome.number, failure_line(outcome)))
            else:
                line = result_line(outcome, self.depth, token_logprobs=self.options.token_logprobs)
                lines.append((outcome.row.number, line))
        return lines

    def figures(self, elapsed_s: float) -> dict[str, Any]:
        """Nothing beside what every job says."""
        return {}

    def close(self) -> None:
        """The pool itself ends what it was sent."""


def run_score(
    settings: ScoreSettings, model: ModelChoice, open_backend: OpenBackend, display: Display
) -> dict[str, Any]:
    """Run or resume a score job, as run_job does. Returns its summary."""
    return run_job(settings, ScoreKind(settings), model, open_backend, display)
