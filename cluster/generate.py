"""Generation as a kind of job: prompts to completions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .chat_template import ChatTemplateError
from .completion_plans import CompletionPlan, CompletionPlanner, GenerationModel, LongPrompt
from .completion_policies import POLICIES
from .completion_records import completion_line
from .completion_rows import parse_completion
from .completion_task import Completion, CompletionSettings, Conversation, PromptText
from .completion_window import CompletionWindow, RowCompletion
from .encoding import Encoder
from .errors import RowError, UsageError
from .generate_settings import GenerateSettings
from .kinds import Backend
from .openai_records import batch_error_line, batch_line
from .openai_rows import is_batch_line, parse_batch_line
from .prompt_streams import GeneratingPool, PromptStream
from .records import failure_line
from .rows import Fields, Row, RowFailure, Task

# About what a message takes beside its text.
MESSAGE_CHARACTERS = 64


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """What in a job's settings decides a byte of its results. template: the hash of one that was given."""

    kind: str
    defaults: CompletionSettings
    seed: int
    long_prompt: LongPrompt
    token_logprobs: bool
    template: str
    result_style: str


@dataclass(frozen=True, slots=True)
class GenerateKind:
    """What a generation job makes of its rows. name: what a response calls the model."""

    settings: GenerateSettings
    planner: CompletionPlanner
    model: GenerationModel
    name: str = "tinyloop"

    @classmethod
    def of_model(
        cls,
        settings: GenerateSettings,
        descriptor: Mapping[str, Any],
        encoder: Encoder,
        depth: int,
        name: str = "tinyloop",
    ) -> GenerateKind:
        """For one model. depth: loops of rows that do not say.

        Raises: UsageError if settings of the job do not fit the model, so that no row could be completed.
        """
        try:
            model = GenerationModel.of(descriptor, depth, encoder, settings.chat_template)
            planner = CompletionPlanner(
                encoder,
                model,
                seed=settings.seed,
                long_prompt=settings.long_prompt,
                replace_surrogates=settings.replace_surrogates,
            )
            planner.refuse(settings.defaults)
        except ChatTemplateError as error:
            raise UsageError(f"--chat-template: {error}") from error
        except RowError as error:
            raise UsageError(f"cannot generate as asked: {error.message}") from error
        return cls(settings, planner, model, name)

    @property
    def policies(self) -> Mapping[str, str]:
        return POLICIES

    @property
    def options(self) -> CompletionOptions:
        settings = self.settings
        template = settings.chat_template
        return CompletionOptions(
            "generate",
            # The job's depth is in the model's identity.
            replace(settings.defaults, depth=None),
            settings.seed,
            settings.long_prompt,
            settings.token_logprobs,
            hashlib.sha256(template.encode()).hexdigest() if template else "",
            settings.result_style,
        )

    def parse(self, fields: Fields) -> tuple[Task, Fields]:
        parse = parse_batch_line if is_batch_line(fields) else parse_completion
        return parse(fields, self.settings.defaults, replace_surrogates=self.settings.replace_surrogates)

    def characters(self, task: Task) -> int:
        assert isinstance(task, Completion)
        prompt = task.prompt
        if isinstance(prompt, PromptText):
            return len(prompt.text)
        if isinstance(prompt, Conversation):
            return sum(MESSAGE_CHARACTERS + len(str(one.get("content", ""))) for one in prompt.messages)
        return 8 * len(prompt.ids)

    @property
    def error_line(self) -> Callable[[bytes], bytes] | None:
        return batch_error_line if self.settings.result_style == "openai" else None

    def result_line(self, result: RowCompletion) -> bytes:
        """A row's line in the style that was asked for."""
        token_logprobs = self.settings.token_logprobs
        if self.settings.result_style == "native":
            return completion_line(result, token_logprobs=token_logprobs)
        return batch_line(result, self.planner.vocabulary, self.name, token_logprobs=token_logprobs)

    def begin(self, backend: Backend) -> GenerateWork:
        return GenerateWork(backend.pool, self)


@dataclass(slots=True)
class _Flight:
    """A window on its way. num_tokens: of its prompts."""

    window: CompletionWindow
    stream: PromptStream | None
    num_tokens: int


class GenerateWork:
    """Generation on an open pool, one stream a window."""

    def __init__(self, pool: GeneratingPool, kind: GenerateKind) -> None:
        self._pool = pool
        self._kind = kind
        self._flights: list[_Flight] = []
        self._generated = 0

    def plan(self, rows: Sequence[Row]) -> list[CompletionPlan | RowFailure]:
        """Encode rows; one plan or failure a row, in order."""
        return self._kind.planner.plan(rows)

    def submit(self, plans: Sequence[CompletionPlan]) -> _Flight:
        """Send one window to the pool. Blocks while the pool holds too many."""
        window = CompletionWindow(plans, self._kind.planner.vocabulary, self._kind.model.eos_ids)
        stream = self._pool.stream(window.requests) if window.requests else None
        flight = _Flight(window, stream, window.num_tokens)
        self._flights.append(flight)
        return flight

    def collect(self, timeout_s: float) -> None:
        """Hand what the pool has generated to its windows; waits up to timeout_s seconds for something."""
        for flight in self._flights:
            if flight.stream is None or flight.window.is_complete:
                continue
            for event in flight.stream.take(timeout_s):
                if flight.window.accept(event):
                    flight.stream.cancel(event.prompt)
            # One wait is for the events of all streams.
            timeout_s = 0.0

    def take_lines(self, sent: _Flight) -> list[tuple[int, bytes]]:
        """Rows that left the window since the last call: number and line."""
        lines: list[tuple[int, bytes]] = []
        for outcome in sent.window.take_finished():
            if isinstance(outcome, RowFailure):
                lines.append((outcome.number, failure_line(outcome)))
            else:
                lines.append((outcome.plan.row.number, self._kind.result_line(outcome)))
        return lines

    def release(self, sent: _Flight) -> None:
        """Forget a window whose rows have all left."""
        self._flights.remove(sent)
        self._generated += sent.window.num_generated
        if sent.stream is not None:
            sent.stream.close()

    def figures(self, elapsed_s: float) -> dict[str, Any]:
        """For summary.json: what this run generated, also for rows whose text was cut at a stop string."""
        total = self._generated + sum(flight.window.num_generated for flight in self._flights)
        rate = round(total / elapsed_s, 3) if elapsed_s > 0 else None
        return {"tokens_generated": total, "tokens_generated_per_s": rate}

    def close(self) -> None:
        """Nothing more is wanted: the pool generates no further."""
        for flight in self._flights:
            if flight.stream is not None:
                flight.stream.close()
        self._flights.clear()
