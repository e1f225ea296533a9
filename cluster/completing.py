"""Completions of prompts from Python: the generation job without files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .completion_plans import LongPrompt
from .completion_settings import take_settings
from .completion_task import CompletionSettings
from .completion_window import RowCompletion
from .encoding import Encoder
from .errors import RowError, UsageError
from .generate import GenerateKind, GenerateWork
from .generate_settings import GenerateSettings
from .prompt_streams import GeneratingPool
from .rows import Fields, RowFailure, Task


class Completer(GenerateWork):
    """Generation on an open pool, with results as they are."""

    def __init__(self, pool: GeneratingPool, kind: GenerateKind, flights: list[Any]) -> None:
        """flights: shared by the completers of one pool, so that whichever collects serves them all."""
        super().__init__(pool, kind)
        self._flights = flights

    def parse(self, fields: Fields) -> tuple[Task, Fields]:
        """The typed task of a row without its id, and its other fields. Raises RowError."""
        return self._kind.parse(fields)

    def take(self, sent: Any) -> list[tuple[int, RowCompletion | RowFailure]]:
        """Rows that left the window since the last call, by number."""
        finished = sent.window.take_finished()
        return [(one.number if isinstance(one, RowFailure) else one.plan.row.number, one) for one in finished]

    def give_up(self, sent: Any) -> None:
        """Forget a window that is on its way; what of it is not generated yet never is."""
        self.release(sent)


def completion_kind(
    encoder: Encoder,
    descriptor: Mapping[str, Any],
    depth: int,
    *,
    settings: Mapping[str, Any],
    seed: int,
    long_prompt: LongPrompt,
    chat_template: str,
) -> GenerateKind:
    """What is made of prompts. settings: of rows that do not say, by the names that a row has for them.

    Raises: UsageError for settings that are unknown, out of range or do not fit the model.
    """
    left = dict(settings)
    try:
        defaults = take_settings(left, CompletionSettings())
    except RowError as error:
        raise UsageError(f"cannot generate as asked: {error.message}") from error
    if left:
        raise UsageError(f"cannot generate as asked: unknown settings {', '.join(sorted(left))}")
    job = GenerateSettings(
        inputs=(),
        output=Path(),
        defaults=defaults,
        seed=seed,
        long_prompt=long_prompt,
        chat_template=chat_template,
    )
    return GenerateKind.of_model(job, descriptor, encoder, depth)
