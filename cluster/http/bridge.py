"""The one thread that owns the pool's client, and how asyncio asks it for work.

Everything that touches the pool happens on that thread, in steps of a few milliseconds; requests reach it by
an inbox, results go back to the event loop. What is admitted is counted, so every queue is bounded: a
completion by its max_tokens, their number by `limit`.

A pool that cannot go on fails what is on its way; the thread then looks for it again, once a second.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

from ..generate_items import Prompt
from ..generate_ledger import Event
from ..items import Failed, Int32Array
from .desk import Desk
from .faults import ApiFault
from .tickets import Pool, PromptTicket, Scores, ScoreTicket

GATHER_S = 0.003
STEP_S = 0.01
LOOK_S = 5.0
RETRY_S = 1.0
LEAVE_S = 15.0

Value = TypeVar("Value")


class Client(Pool, Protocol):
    """A pool's client with its end."""

    def status(self) -> Any: ...
    def close(self) -> None: ...


class Failures(Protocol):
    """Exceptions of the pool: gone, and full."""

    gone: type[Exception]
    full: type[Exception]


def busy(message: str) -> Exception:
    """The pool or this server has all the work that it takes."""
    return ApiFault(429, f"{message}: try again", code="pool_full")


def down(message: str) -> Exception:
    """The pool cannot go on."""
    return ApiFault(503, f"the pool is not there: {message}", code="pool_down")


class Bridge:
    """connect: makes a client of the same pool and model; called on the thread, again whenever one is lost.

    limit: most completions and texts that are on their way at once.
    """

    def __init__(self, connect: Callable[[], Client], failures: Failures, limit: int) -> None:
        self._connect = connect
        self._failures = failures
        self._limit = limit
        self._admitted = 0
        self._inbox: queue.SimpleQueue[Callable[[Desk], None] | None] = queue.SimpleQueue()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.trouble = "the server is starting"

    def start(self) -> None:
        """Connect and begin. Raises what connect raises."""
        client = self._connect()
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, args=(client,), name="pool-bridge", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Leave the pool; what is on its way ends."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs, with a pool or looking for one."""
        return self._thread is not None and self._thread.is_alive()

    # On the event loop
    # ----------------------------------------------------------------------------------------------------

    async def score(self, texts: Sequence[Int32Array], depth: int) -> list[Scores | Failed]:
        """Score texts of at least two ids each. Cancelling the task cancels the work. Raises ApiFault."""
        if not texts:
            return []
        loop, answer = asyncio.get_running_loop(), asyncio.Queue[Any]()
        ticket = ScoreTicket(texts, depth, _delivery(loop, answer))
        with self._admission(len(texts)):
            self._put(lambda desk: desk.add(ticket))
            try:
                result = await answer.get()
            except asyncio.CancelledError:
                self._put(lambda desk: desk.cancel(ticket))
                raise
        if isinstance(result, Exception):
            raise result
        return list(result)

    @asynccontextmanager
    async def generating(self, prompts: Sequence[Prompt]) -> AsyncIterator[Completions]:
        """Complete prompts inside `async with`; leaving it early cancels the rest. Raises ApiFault."""
        loop, answers = asyncio.get_running_loop(), asyncio.Queue[Any]()
        ticket = PromptTicket(prompts, _delivery(loop, answers))
        with self._admission(len(prompts)):
            self._put(lambda desk: desk.add(ticket))
            try:
                yield Completions(ticket, answers, self._put)
            finally:
                self._put(lambda desk: desk.cancel(ticket))

    def _admission(self, count: int) -> _Admission:
        return _Admission(self, count)

    def _put(self, message: Callable[[Desk], None]) -> None:
        self._inbox.put(message)

    # On the thread
    # ----------------------------------------------------------------------------------------------------

    def _run(self, client: Client) -> None:
        found: Client | None = client
        while found is not None:
            desk = Desk(found, self._failures.full, busy)
            try:
                self._serve(desk, found)
                error: Exception = down("the server is stopping")
            except self._failures.gone as lost:
                error, self.trouble = down(str(lost)), str(lost)
            except Exception as defect:
                # A defect must not leave requests waiting for ever.
                error, self.trouble = down(f"{type(defect).__name__}: {defect}"), repr(defect)
            desk.fail(error)
            with suppress(self._failures.gone):
                found.close()
            found = None if self._stopping else self._again()

    def _serve(self, desk: Desk, client: Client) -> None:
        while not self._stopping:
            if desk.is_idle:
                if self._take_one(desk, LOOK_S):
                    self._gather(desk)
                else:
                    client.status()
                continue
            self._take_all(desk)
            desk.step(STEP_S)

    def _gather(self, desk: Desk) -> None:
        """What comes within a few milliseconds of the first goes with it."""
        until_s = time.monotonic() + GATHER_S
        while (left_s := until_s - time.monotonic()) > 0 and self._take_one(desk, left_s):
            pass

    def _take_all(self, desk: Desk) -> None:
        while self._take_one(desk, 0):
            pass

    def _take_one(self, desk: Desk, wait_s: float) -> bool:
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return False
        if message is not None:
            message(desk)
        return True

    def _again(self) -> Client | None:
        """Look for the pool until it is there; who asks meanwhile is told what is wrong. None to stop."""
        next_s = time.monotonic() + RETRY_S
        while not self._stopping:
            waiting = Desk(_Nowhere(), self._failures.full, busy)
            if self._take_one(waiting, max(next_s - time.monotonic(), 0)):
                waiting.fail(down(self.trouble))
            if time.monotonic() < next_s:
                continue
            try:
                client = self._connect()
            except Exception as error:
                self.trouble, next_s = str(error), time.monotonic() + RETRY_S
                continue
            self.trouble = ""
            return client
        return None


class Completions:
    """Events of one request's prompts, as they come."""

    def __init__(
        self,
        ticket: PromptTicket,
        answers: asyncio.Queue[Any],
        put: Callable[[Callable[[Desk], None]], None],
    ) -> None:
        self._ticket = ticket
        self._answers = answers
        self._put = put

    async def take(self) -> list[Event]:
        """Waits for the next events. Raises ApiFault when the pool is gone."""
        found = await self._answers.get()
        if isinstance(found, Exception):
            raise found
        events: list[Event] = found
        return events

    def cancel(self, prompt: int) -> None:
        """Need no more of one prompt: nothing more of it comes, not even an end."""
        self._put(lambda desk: desk.cancel(self._ticket, prompt))


class _Admission:
    """Counts what is on its way. Used on the event loop alone."""

    def __init__(self, bridge: Bridge, count: int) -> None:
        self._bridge = bridge
        self._count = count

    def __enter__(self) -> None:
        bridge = self._bridge
        if self._count > bridge._limit:
            raise ApiFault(
                400,
                f"the request asks for {self._count} completions and texts at once, {bridge._limit} are the "
                "most: send fewer prompts or choices, or raise --max-queue",
            )
        if bridge.trouble:
            raise down(bridge.trouble)
        if bridge._admitted + self._count > bridge._limit:
            raise busy(f"{bridge._admitted} of {bridge._limit} completions and texts are on their way")
        bridge._admitted += self._count

    def __exit__(self, *_: object) -> None:
        self._bridge._admitted -= self._count


class _Nowhere:
    """Stands for a pool that is gone, for the tickets that came too late."""

    windows_in_flight = 0

    def offer(self, window: int, items: Any) -> None: ...

    def cancel(self, window: int) -> int:
        return 0

    def stream(self, prompts: Sequence[Prompt], *, room_s: float) -> Any: ...

    def pump(self, timeout_s: float) -> list[Any]:
        return []


def _delivery(loop: asyncio.AbstractEventLoop, answers: asyncio.Queue[Any]) -> Callable[[Any], None]:
    def deliver(value: Any) -> None:
        # A loop that has ended needs no answers.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(answers.put_nowait, value)

    return deliver
