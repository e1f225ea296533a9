"""A caller's view of what is generated: events as they come, or whole completions."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Protocol

import numpy as np

from .generate_items import Generated, NotGenerated, Tokens
from .generate_ledger import Event


class EventSource(Protocol):
    """Where events come from, by window."""

    def next_event(self, window: int) -> Event: ...
    def take_events(self, window: int, timeout_s: float) -> list[Event]: ...
    def cancel(self, window: int, item: int) -> None: ...
    def close(self, window: int) -> None: ...


class TokenStream:
    """Events of one submission, as they come: the ids of each completion in order, each once.

    Iterate it, inside `with` or to its end; leaving early cancels the rest. Several streams of one pool may
    be read in turn.
    """

    def __init__(self, source: EventSource, window: int, num_prompts: int) -> None:
        self._source = source
        self._window = window
        self._left = num_prompts

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        """Blocks until ids of some completion have come. Raises PoolError."""
        if self._left == 0:
            self.close()
            raise StopIteration
        event = self._source.next_event(self._window)
        if isinstance(event, NotGenerated) or event.finish_reason is not None:
            self._left -= 1
        return event

    def take(self, timeout_s: float) -> list[Event]:
        """Events that came and were not read; waits up to timeout_s seconds while the pool has none at all.

        Empty for ever after the last one. Raises PoolError.
        """
        if self._left == 0:
            return []
        events = self._source.take_events(self._window, timeout_s)
        self._left -= sum(isinstance(e, NotGenerated) or e.finish_reason is not None for e in events)
        return events

    def cancel(self, prompt: int) -> None:
        """Need no more of one completion: its last event says "cancelled", unless it has ended before."""
        if self._left:
            self._source.cancel(self._window, prompt)

    def close(self) -> None:
        """Cancel what is on its way. Twice is harmless."""
        self._left = 0
        self._source.close(self._window)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def gather(stream: TokenStream, num_prompts: int) -> list[Generated | NotGenerated]:
    """Every completion of a stream, in the order of the prompts."""
    parts: list[list[Tokens]] = [[] for _ in range(num_prompts)]
    failures: dict[int, NotGenerated] = {}
    with stream:
        for event in stream:
            if isinstance(event, NotGenerated):
                failures[event.prompt] = event
            else:
                parts[event.prompt].append(event)
    return [failures[i] if i in failures else _joined(i, parts[i]) for i in range(num_prompts)]


def _joined(prompt: int, parts: list[Tokens]) -> Generated:
    reason = parts[-1].finish_reason
    assert reason is not None
    return Generated(
        prompt,
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.depths for part in parts]),
        reason,
    )
