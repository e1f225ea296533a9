"""Tickets to windows and streams of a pool, and what comes back to tickets. No threads here.

What waits is gathered: one window scores the texts of many requests, one stream completes their prompts.
Invariant: every ticket is delivered to until it has ended, is cancelled, or the desk fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..items import Failed, Items, Scored
from .tickets import Pool, PoolStream, PromptTicket, Scores, ScoreTicket, Ticket, ends

# The router takes 64 streams and two windows of a client at a time.
MOST_STREAMS = 32
MOST_WINDOWS = 2
WINDOW_TOKENS = 1 << 20
STREAM_PROMPTS = 1024


@dataclass(slots=True)
class _Window:
    """owners: for each item its ticket and place there; a cancelled ticket's are None."""

    owners: list[tuple[ScoreTicket, int] | None]


@dataclass(slots=True)
class _Stream:
    """owners: for each prompt its ticket and place there; one that has ended is None."""

    stream: PoolStream
    owners: list[tuple[PromptTicket, int] | None]
    left: int


class Desk:
    """full: the exception that says that a pool has no room, which fails the tickets that asked for it."""

    def __init__(self, pool: Pool, full: type[Exception], busy: Callable[[str], Exception]) -> None:
        self._pool = pool
        self._full = full
        self._busy = busy
        self._scores: deque[ScoreTicket] = deque()
        self._prompts: deque[PromptTicket] = deque()
        self._windows: dict[int, _Window] = {}
        self._streams: list[_Stream] = []
        self._next_window = 0

    @property
    def is_idle(self) -> bool:
        return not (self._scores or self._prompts or self._windows or self._streams)

    def add(self, ticket: Ticket) -> None:
        """Let a ticket wait for the next step."""
        if isinstance(ticket, ScoreTicket):
            self._scores.append(ticket)
        else:
            self._prompts.append(ticket)

    def cancel(self, ticket: Ticket, place: int | None = None) -> None:
        """Deliver nothing more to a ticket, or of one of its prompts; the pool ends what only it wanted."""
        if isinstance(ticket, ScoreTicket):
            self._cancel_scores(ticket)
        elif place is None and ticket in self._prompts:
            self._prompts.remove(ticket)
        else:
            self._cancel_prompts(ticket, place)

    def step(self, timeout_s: float) -> None:
        """Submit what waits and hand on what has come, waiting up to timeout_s for it. Raises PoolError."""
        self._submit_scores()
        self._submit_prompts()
        for arrival in self._pool.pump(timeout_s):
            self._accept(arrival)
        for entry in list(self._streams):
            self._hand_on(entry)

    def fail(self, error: Exception) -> None:
        """The pool is gone: every ticket ends."""
        lost: dict[Ticket, None] = dict.fromkeys([*self._scores, *self._prompts])
        for window in self._windows.values():
            lost.update((owner[0], None) for owner in window.owners if owner is not None)
        for entry in self._streams:
            lost.update((owner[0], None) for owner in entry.owners if owner is not None)
        for ticket in lost:
            ticket.deliver(error)
        self._scores.clear()
        self._prompts.clear()
        self._windows.clear()
        self._streams.clear()

    # Scoring
    # ----------------------------------------------------------------------------------------------------

    def _submit_scores(self) -> None:
        while self._scores and self._pool.windows_in_flight < MOST_WINDOWS:
            tickets = self._gather_scores()
            owners = [(ticket, place) for ticket in tickets for place in range(len(ticket.texts))]
            texts = [text for ticket in tickets for text in ticket.texts]
            number, self._next_window = self._next_window, self._next_window + 1
            items = Items(
                token_ids=np.concatenate(texts),
                offsets=np.cumsum([0, *map(len, texts)], dtype=np.int64),
                n_scored=np.array([len(text) - 1 for text in texts], dtype=np.int32),
                depth=tickets[0].depth,
            )
            try:
                self._pool.offer(number, items)
            except self._full as error:
                for ticket in tickets:
                    ticket.deliver(self._busy(str(error)))
                continue
            self._windows[number] = _Window(list(owners))

    def _gather_scores(self) -> list[ScoreTicket]:
        """The ticket that has waited longest, and others of its depth: a window has one."""
        depth, room, taken = self._scores[0].depth, WINDOW_TOKENS, []
        for ticket in [one for one in self._scores if one.depth == depth]:
            tokens = sum(map(len, ticket.texts))
            if taken and tokens > room:
                break
            taken.append(ticket)
            room -= tokens
        self._scores = deque(one for one in self._scores if one not in taken)
        return taken

    def _accept(self, arrival: Scored | Failed) -> None:
        window = self._windows.get(arrival.window)
        if window is None:
            return
        if isinstance(arrival, Failed):
            self._settle(window, arrival.item, arrival)
        else:
            offsets = arrival.offsets.tolist()
            for k, item in enumerate(arrival.items.tolist()):
                span = slice(offsets[k], offsets[k + 1])
                self._settle(window, item, Scores(arrival.logprobs[span], arrival.greedy[span]))
        if not any(window.owners):
            del self._windows[arrival.window]

    def _settle(self, window: _Window, item: int, result: Scores | Failed) -> None:
        owner, window.owners[item] = window.owners[item], None
        if owner is None:
            return
        ticket, place = owner
        ticket.found[place] = result
        if len(ticket.found) == len(ticket.texts):
            ticket.deliver([ticket.found[i] for i in range(len(ticket.texts))])

    def _cancel_scores(self, ticket: ScoreTicket) -> None:
        if ticket in self._scores:
            self._scores.remove(ticket)
        for number, window in list(self._windows.items()):
            window.owners = [
                None if owner is not None and owner[0] is ticket else owner for owner in window.owners
            ]
            if not any(window.owners):
                self._pool.cancel(number)
                del self._windows[number]

    # Generation
    # ----------------------------------------------------------------------------------------------------

    def _submit_prompts(self) -> None:
        while self._prompts and len(self._streams) < MOST_STREAMS:
            tickets: list[PromptTicket] = []
            while self._prompts and (
                not tickets
                or sum(len(one.prompts) for one in tickets) + len(self._prompts[0].prompts) <= STREAM_PROMPTS
            ):
                tickets.append(self._prompts.popleft())
            owners = [(ticket, place) for ticket in tickets for place in range(len(ticket.prompts))]
            prompts = [prompt for ticket in tickets for prompt in ticket.prompts]
            try:
                stream = self._pool.stream(prompts, room_s=0)
            except self._full as error:
                for ticket in tickets:
                    ticket.deliver(self._busy(str(error)))
                continue
            self._streams.append(_Stream(stream, list(owners), len(owners)))

    def _hand_on(self, entry: _Stream) -> None:
        found: dict[PromptTicket, list[object]] = {}
        for event in entry.stream.take(0):
            owner = entry.owners[event.prompt]
            if ends(event):
                entry.left -= 1
                entry.owners[event.prompt] = None
            if owner is not None:
                ticket, place = owner
                found.setdefault(ticket, []).append(replace(event, prompt=place))
        for ticket, events in found.items():
            ticket.deliver(events)  # type: ignore[arg-type]
        if not entry.left:
            entry.stream.close()
            self._streams.remove(entry)

    def _cancel_prompts(self, ticket: PromptTicket, place: int | None) -> None:
        for entry in self._streams:
            for prompt, owner in enumerate(entry.owners):
                if owner is not None and owner[0] is ticket and place in (None, owner[1]):
                    entry.owners[prompt] = None
                    entry.stream.cancel(prompt)
