"""One window of a generation job: plans in, requests to the pool, completions back to rows.

Invariant: each row leaves a window exactly once, as a result or a failure. Equal requests are sent once and
fan out. A completion is the same whatever the events that it came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .completion_plans import CompletionPlan
from .completion_text import CompletionText, Vocabulary
from .errors import InfrastructureError, RowError
from .generate_items import NotGenerated, Prompt, Tokens
from .generate_ledger import Event
from .rows import RowFailure

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CompletionOutcome:
    """One completion: its text up to a stop, and the ids that count, the stopping one included.

    logprobs: natural, one an id; depths: loops that the row which predicted each id ran.
    """

    text: str
    finish_reason: str
    seed: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    depths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RowCompletion:
    """A row with all of its completions."""

    plan: CompletionPlan
    outcomes: tuple[CompletionOutcome, ...]


class _Running:
    """A request on its way: its ids so far, and their text."""

    def __init__(self, request: Prompt, stops: Sequence[str], vocabulary: Vocabulary) -> None:
        self._request = request
        self._stop_ids = frozenset(request.stop_ids or ())
        self._text = CompletionText(vocabulary, stops)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._depths: list[int] = []

    def add(self, event: Tokens) -> bool:
        """Take what came. Returns whether nothing more is needed."""
        ids = event.token_ids.tolist()
        self._ids += ids
        self._logprobs += event.logprobs.tolist()
        self._depths += event.depths.tolist()
        self._text.add(token_id for token_id in ids if token_id not in self._stop_ids)
        return self._text.is_cut

    def outcome(self, reason: str | None, eos_ids: frozenset[int]) -> CompletionOutcome:
        """What it came to. reason: the pool's, None if a stop string was found before."""
        self._text.finish()
        if self._text.is_cut:
            count, reason = self._text.num_ids, "stop"
        else:
            count = len(self._ids)
            if reason == "stop":
                reason = "eos" if self._ids[-1] in eos_ids else "stop"
        return CompletionOutcome(
            text=self._text.text,
            finish_reason=str(reason),
            seed=self._request.seed,
            token_ids=tuple(self._ids[:count]),
            logprobs=tuple(self._logprobs[:count]),
            depths=tuple(self._depths[:count]),
        )


@dataclass(slots=True)
class _RowState:
    """A row whose completions are not all there. One error fails it."""

    plan: CompletionPlan
    outcomes: list[CompletionOutcome | None]
    error: RowError | None = None
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.outcomes)


class CompletionWindow:
    """Rows that are planned and run together. requests: what is to be generated, each once."""

    def __init__(
        self, plans: Sequence[CompletionPlan], vocabulary: Vocabulary, eos_ids: Sequence[int]
    ) -> None:
        self.requests: list[Prompt] = []
        self.num_tokens = 0
        self.num_generated = 0
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(eos_ids)
        self._rows = [_RowState(plan, [None] * len(plan.requests)) for plan in plans]
        self._running: dict[int, _Running] = {}
        self._waiting: dict[int, list[tuple[_RowState, int]]] = {}
        self._finished: list[RowCompletion | RowFailure] = []
        self._pack()

    def take_finished(self) -> list[RowCompletion | RowFailure]:
        """Rows that are complete and were not taken before."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is awaited of the pool."""
        return not self._running

    def accept(self, event: Event) -> bool:
        """Note what the pool delivered. Returns whether the request is to be cancelled: its text is whole.

        Raises: InfrastructureError if the pool ended a request that nobody cancelled.
        """
        running = self._running.get(event.prompt)
        if running is None:
            return False
        if isinstance(event, NotGenerated):
            self._settle(event.prompt, RowError(event.error_class, event.message, event.attempts))
            return False
        self.num_generated += len(event.token_ids)
        if event.finish_reason == "cancelled":
            raise InfrastructureError(
                f"request {event.prompt} of a window was cancelled by the pool, and the job needs it: run "
                "again with --resume"
            )
        is_cut = running.add(event)
        if not is_cut and event.finish_reason is None:
            return False
        self._settle(event.prompt, self._checked(running.outcome(event.finish_reason, self._eos_ids)))
        return event.finish_reason is None

    def _checked(self, outcome: CompletionOutcome) -> CompletionOutcome | RowError:
        values = np.array(outcome.logprobs)
        if np.isnan(values).any() or (values == np.inf).any():
            place = int(np.flatnonzero(np.isnan(values) | (values == np.inf))[0])
            return RowError("non_finite", f"log-probability of token {place} is {values[place]}")
        return outcome

    def _settle(self, request: int, outcome: CompletionOutcome | RowError) -> None:
        del self._running[request]
        for row, number in self._waiting.pop(request):
            row.missing -= 1
            if isinstance(outcome, RowError):
                row.error = row.error or outcome
            else:
                row.outcomes[number] = outcome
            if row.missing == 0:
                self._finish(row)

    def _finish(self, row: _RowState) -> None:
        if row.error is not None:
            self._finished.append(RowFailure.of(row.plan.row, row.error))
            return
        outcomes = tuple(outcome for outcome in row.outcomes if outcome is not None)
        self._finished.append(RowCompletion(row.plan, outcomes))

    def _pack(self) -> None:
        number_of: dict[Key, int] = {}
        for row in self._rows:
            for place, request in enumerate(row.plan.requests):
                key = _key(row.plan, request)
                number = number_of.setdefault(key, len(self.requests))
                if number == len(self.requests):
                    self.requests.append(request)
                    self.num_tokens += len(row.plan.ids)
                    self._running[number] = _Running(request, row.plan.stops, self._vocabulary)
                    self._waiting[number] = []
                self._waiting[number].append((row, place))
        self._rows = []


def _key(plan: CompletionPlan, request: Prompt) -> Key:
    """Everything that a completion depends on; its seed is in it (R37)."""
    settings = tuple(getattr(request, name) for name in Prompt.__slots__ if name != "token_ids")
    return (plan.ids.tobytes(), frozenset(plan.stops), *settings)
