"""The desk of the HTTP face between tickets and a pool: gathering, cancelling, a full pool, a lost one."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tinyloop.cluster.fleet import PoolFull
from tinyloop.cluster.generate_items import Prompt, Tokens
from tinyloop.cluster.http.bridge import busy, down
from tinyloop.cluster.http.desk import Desk
from tinyloop.cluster.http.faults import ApiFault
from tinyloop.cluster.http.tickets import PromptTicket, ScoreTicket
from tinyloop.cluster.items import Items, Scored


class FakeStream:
    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self.prompts = list(prompts)
        self.events: deque[Tokens] = deque()
        self.cancelled: list[int] = []
        self.closed = False

    def say(self, prompt: int, ids: list[int], reason: str | None = None) -> None:
        column = np.array(ids, np.int32)
        self.events.append(Tokens(prompt, 0, column, column.astype(np.float32), column, reason))

    def take(self, timeout_s: float) -> list[Tokens]:
        events, self.events = list(self.events), deque()
        return events

    def cancel(self, prompt: int) -> None:
        self.cancelled.append(prompt)
        self.say(prompt, [], "cancelled")

    def close(self) -> None:
        self.closed = True


class FakeClient:
    """Scores each id as itself, when told to."""

    def __init__(self) -> None:
        self.open: dict[int, Items] = {}
        self.arrivals: list[Scored] = []
        self.streams: list[FakeStream] = []
        self.cancelled: list[int] = []
        self.full = False

    @property
    def windows_in_flight(self) -> int:
        return len(self.open)

    def offer(self, window: int, items: Items) -> None:
        if self.full:
            raise PoolFull("full")
        self.open[window] = items

    def cancel(self, window: int) -> int:
        del self.open[window]
        self.cancelled.append(window)
        return 0

    def stream(self, prompts: Sequence[Prompt], *, room_s: float) -> Any:
        assert room_s == 0
        if self.full:
            raise PoolFull("full")
        self.streams.append(FakeStream(prompts))
        return self.streams[-1]

    def pump(self, timeout_s: float) -> list[Any]:
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def finish(self, window: int) -> None:
        items = self.open.pop(window)
        for item in reversed(range(len(items))):
            ids = items.token_ids[items.offsets[item] : items.offsets[item + 1]][-items.n_scored[item] :]
            found = np.array([item], np.int32), ids.astype(np.float32), ids > 5, np.array([0, len(ids)])
            self.arrivals.append(Scored(window, *found))


class Box:
    """What a ticket was delivered."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def score(self, *texts: list[int], depth: int = 2) -> ScoreTicket:
        return ScoreTicket([np.array(text, np.int32) for text in texts], depth, self.found.append)

    def prompts(self, *texts: list[int]) -> PromptTicket:
        return PromptTicket([Prompt(text) for text in texts], self.found.append)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def desk(client: FakeClient) -> Desk:
    return Desk(client, PoolFull, busy)


def test_texts_of_many_requests_are_one_window_and_each_gets_its_own(client: FakeClient, desk: Desk) -> None:
    boxes = [Box() for _ in range(3)]
    desk.add(boxes[0].score([1, 2, 3], [4, 5]))
    desk.add(boxes[1].score([1, 9], depth=4))
    desk.add(boxes[2].score([7, 8, 9]))
    desk.step(0)
    # A window has one depth.
    assert [(items.depth, len(items)) for items in client.open.values()] == [(2, 3), (4, 1)]
    desk.add(Box().score([1, 2]))
    desk.step(0)
    assert client.windows_in_flight == 2
    client.finish(0)
    client.finish(1)
    desk.step(0)
    values = [[score.logprobs.tolist() for score in box.found[0]] for box in boxes]
    assert values == [[[2, 3], [5]], [[9]], [[8, 9]]]
    assert boxes[2].found[0][0].greedy.tolist() == [True, True]
    # What waited for a window goes now.
    assert client.windows_in_flight == 1


def test_a_window_that_nobody_waits_for_is_cancelled_and_one_that_somebody_does_is_not(
    client: FakeClient, desk: Desk
) -> None:
    gone, stays = Box(), Box()
    tickets = gone.score([1, 2]), stays.score([3, 4])
    for ticket in tickets:
        desk.add(ticket)
    desk.step(0)
    desk.cancel(tickets[0])
    assert client.cancelled == []
    client.finish(0)
    desk.step(0)
    assert (gone.found, len(stays.found)) == ([], 1)
    late = Box().score([5, 6])
    desk.add(late)
    desk.step(0)
    desk.cancel(late)
    assert client.cancelled == [1]
    assert desk.is_idle


def test_prompts_of_many_requests_are_one_stream(client: FakeClient, desk: Desk) -> None:
    one, two = Box(), Box()
    tickets = one.prompts([1], [2]), two.prompts([3])
    for ticket in tickets:
        desk.add(ticket)
    desk.step(0)
    (stream,) = client.streams
    assert [prompt.token_ids for prompt in stream.prompts] == [[1], [2], [3]]
    stream.say(2, [7])
    stream.say(1, [8, 9], "stop")
    desk.step(0)
    assert [(event.prompt, event.token_ids.tolist()) for event in one.found[0]] == [(1, [8, 9])]
    assert [(event.prompt, event.finish_reason) for event in two.found[0]] == [(0, None)]
    # The first leaves: what it had on its way ends, and nothing more comes to it.
    desk.cancel(tickets[0])
    assert stream.cancelled == [0]
    stream.say(2, [6], "length")
    desk.step(0)
    assert (len(one.found), two.found[1][0].finish_reason) == (1, "length")
    assert stream.closed
    assert desk.is_idle


def test_one_prompt_of_a_request_can_end_alone(client: FakeClient, desk: Desk) -> None:
    box = Box()
    ticket = box.prompts([1], [2])
    desk.add(ticket)
    desk.step(0)
    desk.cancel(ticket, 1)
    client.streams[0].say(0, [5], "length")
    desk.step(0)
    assert client.streams[0].cancelled == [1]
    assert [[event.prompt for event in events] for events in box.found] == [[0]]
    assert desk.is_idle


def test_a_full_pool_is_told_at_once(client: FakeClient, desk: Desk) -> None:
    client.full = True
    boxes = [Box(), Box()]
    desk.add(boxes[0].score([1, 2]))
    desk.add(boxes[1].prompts([1]))
    desk.step(0)
    for box in boxes:
        (fault,) = box.found
        assert isinstance(fault, ApiFault)
        assert (fault.status, fault.headers) == (429, {"retry-after": "1"})
    assert desk.is_idle


def test_every_ticket_ends_once_when_the_pool_is_lost(client: FakeClient, desk: Desk) -> None:
    boxes = [Box() for _ in range(4)]
    desk.add(boxes[0].score([1, 2], [3, 4]))
    desk.add(boxes[1].prompts([1], [2]))
    desk.step(0)
    desk.add(boxes[2].score([1, 2]))
    desk.add(boxes[3].prompts([1]))
    desk.fail(down("gone"))
    assert [[fault.status for fault in box.found] for box in boxes] == [[503]] * 4
    assert desk.is_idle
