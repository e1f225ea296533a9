"""A client's side of generation: requests to the router, ids straight from the replicas.

Every replica is asked by one call that waits on it for ids; it answers with all that came within some 50 ms,
for all of this client's completions together. Nothing is fetched while the caller does not ask for events,
and what the caller has not taken is not settled, so no more is sent to the replicas than they may hold.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray

from ..workers.prompts import Prompts, encode_prompts
from ..workers.tokens import decode_tokens
from ..workers.wire import GENERATE, WireError
from .fleet import PoolError, PoolFull
from .generate_items import Defaults, NotGenerated, Prompt, columns_of, cost_rows
from .generate_ledger import Event, GenerateLedger
from .generate_wire import Settled, encode_settled
from .homes import Home
from .items import Int32Array, Items
from .router import FULL, TAKEN
from .segments import CutRules, cut_window
from .wire import FIRST_STREAM, Delivery, WindowHead, encode_window

POLL_S = 5.0
REPLY_S = 30.0
RETRY_S = 0.25
FULL_WAIT_S = 60.0
NEVER_BUILT = 1 << 40


@dataclass(frozen=True, slots=True)
class Reach:
    """What generation uses of the client that it is part of.

    submit: a window's head and requests to the router, whose answer it returns. poll: ask for deliveries;
    hear: take them in. recover: meet the router anew, which then resubmits. restart: end a silent router.
    """

    home: Home
    client: str
    router: Any
    incarnation: Callable[[], str]
    submit: Callable[[bytes, list[Any]], str | None]
    poll: Callable[[float], Any]
    hear: Callable[[tuple[bytes, list[Any]]], None]
    recover: Callable[[], None]
    restart: Callable[[], None]


@dataclass(slots=True)
class _Window:
    """One stream's completions. reference: its requests in the object store, in a list for Ray."""

    reference: list[Any]
    events: deque[Event] = field(default_factory=deque)


class GenerationClient:
    """Requests of one process. Not thread-safe."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._ledger = GenerateLedger()
        self._windows: dict[int, _Window] = {}
        self._next_window = FIRST_STREAM
        self._settled: dict[int, list[int]] = {}
        self._polls: dict[Any, tuple[int, int]] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self._rests: dict[tuple[int, int], float] = {}
        self._router_poll: Any = None
        self._router_asked_s = 0.0

    def submit(self, prompts: Sequence[Prompt], *, room_s: float = FULL_WAIT_S) -> int:
        """Take requests in; returns their window. Raises ValueError if no model could take one, PoolError.

        room_s: seconds to wait while the pool is full; PoolFull then.
        """
        window, self._next_window = self._next_window, self._next_window + 1
        facts = self._reach.home.facts
        eos = tuple(int(i) for i in facts.descriptor.get("eos_ids", ()))
        defaults = Defaults(int(facts.descriptor["loops"]), eos)
        columns = columns_of(prompts, defaults, client=self._reach.client, window=window)
        self._ledger.open(columns)
        self._windows[window] = _Window([ray.put(encode_prompts(columns))])
        if len(columns):
            try:
                self._send(window, room_s=room_s)
            except PoolError:
                self._forget(window)
                raise
        return window

    def resubmit(self) -> None:
        """The router started anew and knows nothing: tell it what has not ended.

        Replicas are asked anew too, for the bundle that may not have come.
        """
        self._router_poll = None
        self._polls.clear()
        self._numbers.clear()
        for window in self._ledger.open_windows():
            self._send(window, recovering=True)

    def next_event(self, window: int) -> Event:
        """The next event of a window that has completions on their way or events left. Raises PoolError."""
        events = self._windows[window].events
        while not events:
            self.receive()
        event = events.popleft()
        self._note_end(window, event)
        return event

    def take_events(self, window: int, timeout_s: float) -> list[Event]:
        """What has come of a window and was not taken. Raises PoolError.

        Waits up to timeout_s seconds while no window has anything.
        """
        deadline_s = time.monotonic() + timeout_s
        while not any(waiting.events for waiting in self._windows.values()):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            self.receive(min(left_s, RETRY_S))
        events = list(self._windows[window].events)
        self._windows[window].events.clear()
        for event in events:
            self._note_end(window, event)
        return events

    def cancel(self, window: int, item: int) -> None:
        """End one completion where it is; what came of it and was not taken is still handed on."""
        event = self._ledger.cancel(window, item)
        if event is not None:
            self._windows[window].events.append(event)
            self._settled.setdefault(window, []).append(item)
            self._settle()

    def close(self, window: int) -> None:
        """Forget a window and whatever of it is on its way."""
        if window not in self._windows:
            return
        self._settle()
        if self._windows[window].events or len(self._ledger.missing(window)):
            # A router that does not hear this has died, and its successor never knew of the window.
            self._reach.router.cancel.remote(self._reach.client, window)
        self._forget(window)

    def _note_end(self, window: int, event: Event) -> None:
        if isinstance(event, NotGenerated) or event.finish_reason is not None:
            self._settled.setdefault(window, []).append(event.prompt)

    def _forget(self, window: int) -> None:
        self._ledger.close(window)
        del self._windows[window]

    def give_up(self, delivery: Delivery) -> None:
        """Completions that the pool gave up; ids never come this way."""
        if delivery.window not in self._windows:
            return
        items, attempts = delivery.items, delivery.attempts
        failed = self._ledger.fail(delivery.window, items, delivery.error_class, delivery.message, attempts)
        self._windows[delivery.window].events.extend(failed)

    def _send(self, window: int, *, recovering: bool = False, room_s: float = FULL_WAIT_S) -> None:
        prompts = self._ledger.prompts(window)
        head = head_of(prompts, self._ledger.missing(window), self._rules(prompts))
        message, reference = encode_window(head), self._windows[window].reference
        deadline_s = time.monotonic() + room_s
        while (answer := self._reach.submit(message, reference)) == FULL:
            if time.monotonic() >= deadline_s:
                raise PoolFull(
                    f"{len(head.order)} prompts found no room in the pool in {room_s:.0f} s: read the "
                    "streams that are open, or generate fewer prompts at a time"
                )
            time.sleep(RETRY_S)
        if answer != TAKEN and not recovering:
            # Recovery submits what is open, this window too.
            self._reach.recover()

    def _rules(self, prompts: Prompts) -> CutRules:
        """How prompts are cut. Nothing is shared where a prompt sees itself both ways, or where layers follow
        the loops, so that a prefix serves one depth, and the prompts ask for several.
        """
        facts = self._reach.home.facts
        model = facts.descriptor
        one_depth = bool((prompts.depth == prompts.depth[0]).all())
        shares = not model.get("prefix_lm", False) and (one_depth or not model.get("n_coda", 0))
        overhead_rows = self._reach.home.build_overhead_rows if shares else NEVER_BUILT
        return CutRules(facts.digest, int(model["vocab_size"]), overhead_rows)

    def _settle(self) -> None:
        """Tell the router what nothing more is needed of."""
        settled, self._settled = self._settled, {}
        for window, items in settled.items():
            if items:
                # Not waited for: the successor of a router that dies over it learns what is missing alone.
                message = encode_settled(Settled(self._reach.client, window, np.array(items, dtype=np.int32)))
                self._reach.router.settle.remote(self._reach.incarnation(), message)

    # What comes
    # ----------------------------------------------------------------------------------------------------

    def receive(self, timeout_s: float = RETRY_S) -> None:
        """Wait for something to come from a replica or the router, and take it in. Raises PoolError."""
        if trouble := self._reach.home.trouble():
            raise PoolError(trouble)
        self._settle()
        self._ask()
        waiting = [*self._polls, self._router_poll]
        done, _ = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        more, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for reference in dict.fromkeys([*done, *more]):
            if reference == self._router_poll:
                self._hear_router()
            elif reference in self._polls:
                self._hear_replica(self._polls.pop(reference), reference)
        if self._router_poll is not None and time.monotonic() > self._router_asked_s + POLL_S + REPLY_S:
            # It runs and does not answer: a process in that state cannot be trusted to start answering.
            self._reach.restart()
            self._reach.recover()

    def _ask(self) -> None:
        """Have one call waiting at each replica and at the router."""
        asked, now_s = set(self._polls.values()), time.monotonic()
        for slot in self._reach.home.up() if self._windows else ():
            name = (slot.index, slot.generation)
            if name not in asked and self._rests.get(name, 0.0) <= now_s:
                after = self._numbers.get(name, 0)
                self._polls[slot.actor.tokens.remote(self._reach.client, after, POLL_S)] = name
        if self._router_poll is None:
            self._router_asked_s = now_s
            self._router_poll = self._reach.poll(POLL_S)

    def _hear_replica(self, name: tuple[int, int], reference: Any) -> None:
        try:
            message = ray.get(reference)
            bundle = None if message is None else decode_tokens(message)
        except (ray.exceptions.RayError, WireError):
            # Dead or unfit, which the router finds out for itself; or out of reach, and is asked again.
            self._rests[name] = time.monotonic() + RETRY_S
            return
        if bundle is not None:
            self._numbers[name] = bundle.number
            try:
                accepted = self._ledger.accept(bundle)
            except RuntimeError as error:
                raise PoolError(str(error)) from error
            for window, event in accepted:
                self._windows[window].events.append(event)

    def _hear_router(self) -> None:
        """What the router delivers: completions that it gave up, and whatever its client is owed beside."""
        reference, self._router_poll = self._router_poll, None
        try:
            answer: tuple[bytes, list[Any]] | None = ray.get(reference)
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            answer = None
        except ray.exceptions.RayError as error:
            raise PoolError(str(error)) from error
        if answer is None:
            self._reach.recover()
            return
        self._reach.hear(answer)


def head_of(prompts: Prompts, chosen: Int32Array, rules: CutRules) -> WindowHead:
    """The shape of a window to the router: its shared prefixes, and what each item will cost.

    Prefixes are built at the depth of the deepest request, which serves the shallower ones exactly.
    """
    depth = int(prompts.depth[chosen].max())
    scored = np.zeros(len(prompts), dtype=np.int32)
    items = Items(prompts.token_ids, prompts.offsets, scored, depth)
    head = cut_window(items, rules, client=prompts.client, window=prompts.window, chosen=chosen)
    rows = cost_rows(prompts, depth)[head.order]
    # An item costs no less than the prefix that it stands on, which is built at the greatest depth.
    standing = head.node_of >= 0
    rows[standing] = np.maximum(rows[standing], head.node_lengths[head.node_of[standing]] + 1)
    return WindowHead(
        **{name: getattr(head, name) for name in WindowHead.__slots__}
        | {"rows": rows, "ideal_rows": 0, "kind": GENERATE}
    )
