"""What requests hand to the pool's thread, and how it hands results back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..generate_items import NotGenerated, Prompt
from ..generate_ledger import Event
from ..items import BoolArray, Failed, Float32Array, Int32Array, Items, Scored


@dataclass(frozen=True, slots=True)
class Scores:
    """One text, scored from its second id on: float32 and bool [n - 1]."""

    logprobs: Float32Array
    greedy: BoolArray


@dataclass(eq=False, slots=True)
class ScoreTicket:
    """Texts to score, int32 [n] each, n at least 2. deliver: called once, with all results or a failure."""

    texts: Sequence[Int32Array]
    depth: int
    deliver: Callable[[list[Scores | Failed] | Exception], None]
    found: dict[int, Scores | Failed] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class PromptTicket:
    """Prompts to complete. deliver: called with events as they come, prompts counted from 0 in this ticket,
    or once with a failure.
    """

    prompts: Sequence[Prompt]
    deliver: Callable[[list[Event] | Exception], None]


Ticket = ScoreTicket | PromptTicket


class PoolStream(Protocol):
    """Completions of one submission."""

    def take(self, timeout_s: float) -> list[Event]: ...
    def cancel(self, prompt: int) -> None: ...
    def close(self) -> None: ...


class Pool(Protocol):
    """The face of a pool's client that the desk needs. Nothing here waits for room."""

    @property
    def windows_in_flight(self) -> int: ...
    def offer(self, window: int, items: Items) -> None: ...
    def cancel(self, window: int) -> int: ...
    def stream(self, prompts: Sequence[Prompt], *, room_s: float) -> PoolStream: ...
    def pump(self, timeout_s: float) -> list[Scored | Failed]: ...


def ends(event: Event) -> bool:
    """Whether nothing more comes of an event's prompt."""
    return isinstance(event, NotGenerated) or event.finish_reason is not None
