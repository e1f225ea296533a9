"""One client of a router: windows in, scores or generated ids out, whatever dies in between.

Invariant: every submitted item comes back exactly once, unless its window was cancelled; what cannot go on
raises PoolError.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray

from ..workers.effort import GroupedTokens, fault_of_groups, grouped_payload
from ..workers.wire import OLDEST
from .fleet import PoolError, PoolFull
from .generate_items import Generated, NotGenerated, Prompt
from .generation import FULL_WAIT_S, GenerationClient, Reach
from .homes import Home
from .items import Failed, Int32Array, Items, Scored
from .ledger import Ledger
from .processes import end_processes
from .router import FULL, TAKEN, check_hello
from .segments import CutRules, cut_window
from .token_stream import TokenStream, gather
from .wire import FIRST_STREAM, Delivery, decode_deliveries, encode_window

WINDOWS_IN_FLIGHT = 2
LONGEST_POLL_S = 5.0
FULL_PAUSE_S = 0.2
REPLY_S = 30.0
# The router's loop never waits, so silence for so long means that it is frozen; a machine with ten times the
# work that it has cores for keeps a process waiting for some seconds.
ROUTER_ANSWER_S = 20.0
ROUTER_START_S = 30.0
ROUTER_BACK_S = 90.0
HELLO_EVERY_S = 0.1
GROUPS_SINCE = 3  # the wire version that brought windows of groups


class PoolClient:
    """Submits to a router and collects from it. Not thread-safe. home: who owns router and replicas."""

    def __init__(self, home: Home, client: str) -> None:
        self._home = home
        self._router = home.router
        self._client = client
        self._incarnation, self._router_pid, self._router_host = "", 0, ""
        self._router_version = OLDEST
        self._ledger = Ledger()
        self._tokens: dict[int, list[Any]] = {}
        self._deadlines: dict[int, tuple[float, float]] = {}
        self._collected: deque[Scored | Failed] = deque()
        self._after = 0
        self._closed = False
        self._generation = GenerationClient(self._reach())

    def submit(self, window: int, items: Items, deadline_s: float | None = None) -> None:
        """Hand one window in. Blocks while two are in flight or the pool is full.

        deadline_s: seconds from now after which items that are not finished come back as failed: timeout.
        Raises PoolError; ValueError if it is bad.
        """
        self._check(window, items)
        until_s = None if deadline_s is None else time.monotonic() + deadline_s
        while self._ledger.windows_in_flight >= WINDOWS_IN_FLIGHT:
            self._receive(LONGEST_POLL_S)
        self._ledger.open(window, items)
        if not len(items):
            return
        if until_s is not None and deadline_s is not None:
            self._deadlines[window] = until_s, deadline_s
        # Put by this process, so that the ids outlive the router and every replica.
        self._tokens[window] = [ray.put(_payload(items))]
        if not self._send(window, np.arange(len(items), dtype=np.int32), first=True):
            self._recover_router()

    def offer(self, window: int, items: Items) -> None:
        """Hand one window in without waiting for room. Raises as submit(); PoolFull if there is none."""
        self._check(window, items)
        if self._ledger.windows_in_flight >= WINDOWS_IN_FLIGHT:
            raise PoolFull(f"window {window} was not taken: {WINDOWS_IN_FLIGHT} are in flight")
        self._ledger.open(window, items)
        if not len(items):
            return
        self._tokens[window] = [ray.put(_payload(items))]
        message = self._message(window, np.arange(len(items), dtype=np.int32), first=True)
        answer = self._submitted(message, self._tokens[window])
        if answer == FULL:
            self._ledger.drop(window)
            del self._tokens[window]
            raise PoolFull(f"window {window} was not taken: the pool holds all the items that it can")
        if answer != TAKEN:
            self._recover_router()

    @property
    def windows_in_flight(self) -> int:
        """Submitted windows with items that have not come back."""
        return self._ledger.windows_in_flight

    def pump(self, timeout_s: float) -> list[Scored | Failed]:
        """One wait for windows and streams alike, of timeout_s seconds at most. Raises PoolError.

        Returns what has finished of windows; events of a stream are then there for its take(0).
        """
        self._generation.receive(self._until_next_deadline(timeout_s))
        self._time_out()
        self._close_finished()
        collected = list(self._collected)
        self._collected.clear()
        return collected

    def cancel(self, window: int) -> int:
        """Give a window up. Returns how many of its items had not been collected; they never will be."""
        waiting = [part for part in self._collected if part.window == window]
        self._collected = deque(part for part in self._collected if part.window != window)
        dropped = sum(1 if isinstance(part, Failed) else len(part.items) for part in waiting)
        return dropped + len(self._drop(window))

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        """What has finished since the last call; waits up to timeout_s seconds. Raises PoolError."""
        deadline = time.monotonic() + timeout_s
        while not self._collected and self._ledger.windows_in_flight:
            left_s = deadline - time.monotonic()
            if left_s <= 0 and timeout_s > 0:
                break
            self._receive(max(min(left_s, LONGEST_POLL_S), 0.0))
            if timeout_s <= 0:
                break
        collected = list(self._collected)
        self._collected.clear()
        return collected

    def generate(self, prompts: Sequence[Prompt]) -> list[Generated | NotGenerated]:
        """Completions in the order of the prompts; a prompt that fails does so alone.

        Raises ValueError for a prompt that no model could take, before anything is sent; PoolError.
        """
        return gather(self.stream(prompts), len(prompts))

    def stream(self, prompts: Sequence[Prompt], *, room_s: float = FULL_WAIT_S) -> TokenStream:
        """Begin to generate; the stream's events bring ids as they come. Raises as generate().

        room_s: seconds to wait while the pool is full; PoolFull then.
        """
        if self._closed:
            raise PoolError("the pool is closed")
        window = self._generation.submit(prompts, room_s=room_s)
        return TokenStream(self._generation, window, len(prompts))

    def _reach(self) -> Reach:
        return Reach(
            home=self._home,
            client=self._client,
            router=self._router,
            incarnation=lambda: self._incarnation,
            submit=self._submitted,
            poll=self._begin_poll,
            hear=self._hear,
            recover=self._recover_router,
            restart=self._restart_router,
        )

    def _meet_router(self) -> None:
        """Wait for the router, and for its knowing the replicas. Raises PoolError if it does not come."""
        now_s = time.monotonic()
        deadline_s, frozen_s = now_s + ROUTER_BACK_S, now_s + ROUTER_START_S
        calls: list[Any] = []
        error: Exception | None = None
        while time.monotonic() < deadline_s:
            # A call that meets a router on its way back may fail seconds later than a fresh one succeeds.
            calls.append(self._router.hello.remote(self._client, _label(), self._home.lease_s))
            done, calls = ray.wait(calls, num_returns=1, timeout=HELLO_EVERY_S)
            try:
                if done:
                    self._met(done[0])
                    return
            except (ray.exceptions.RayError, TimeoutError) as failed:
                error = failed
                time.sleep(0.05)
            if time.monotonic() > frozen_s:
                self._restart_router()
                frozen_s = time.monotonic() + ROUTER_START_S
        raise PoolError(f"the router did not come back in {ROUTER_BACK_S} s: {error}")

    def _met(self, hello: Any) -> None:
        """Take the router's answer. Raises PoolError if it will never be of use, RayError if not now."""
        try:
            answer = ray.get(hello)
            self._incarnation, self._router_pid, self._router_host = check_hello(answer)
            self._router_version = answer[0]
            self._home.settle()
        except (ray.exceptions.RayTaskError, ray.exceptions.ActorDiedError) as error:
            raise PoolError(f"the router cannot be used: {error}") from error

    def _restart_router(self) -> None:
        """It runs and does not answer: a process in that state cannot be trusted to start answering."""
        ray.kill(self._router, no_restart=False)
        # A frozen process does not hear that, and Ray insists only later; this is for one on this host.
        end_processes([(self._router_pid, self._router_host), self._home.router_process()])

    def _recover_router(self) -> None:
        """The router started anew and knows nothing: give it the replicas and whatever is not finished."""
        self._meet_router()
        self._after = 0
        for window in self._ledger.open_windows():
            if window in self._tokens:
                self._send(window, self._ledger.missing(window))
        self._generation.resubmit()

    def _send(self, window: int, chosen: Int32Array, *, first: bool = False) -> bool:
        """Submit items of a window. False if the router does not know this client, or died."""
        message, incarnation = self._message(window, chosen, first=first), self._incarnation
        while (answer := self._submitted(message, self._tokens[window], self._left_s(window))) == FULL:
            # The pool has all it can hold: what comes back meanwhile makes room here too.
            self._receive(FULL_PAUSE_S)
            if window not in self._tokens or incarnation != self._incarnation:
                return True  # its time is over, or it went to a new router with everything else
        return answer == TAKEN

    def _message(self, window: int, chosen: Int32Array, *, first: bool) -> bytes:
        facts = self._home.facts
        rules = CutRules(facts.digest, int(facts.descriptor["vocab_size"]), self._home.build_overhead_rows)
        items = self._ledger.items(window)
        head = cut_window(items, rules, client=self._client, window=window, chosen=items.units_of(chosen))
        self._ledger.ideal_rows += head.ideal_rows if first else 0
        return encode_window(head)

    def _submitted(self, message: bytes, payload: list[Any], within_s: float | None = None) -> str | None:
        """The router's answer to a window, None if it died. payload: a reference in a list."""
        call = self._router.submit.remote(self._incarnation, message, payload, within_s)
        try:
            return str(ray.get(call, timeout=REPLY_S))
        except ray.exceptions.GetTimeoutError:
            self._restart_router()
            return None
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return None
        except ray.exceptions.RayError as error:
            raise PoolError(f"a window was not taken: {error}") from error

    def _receive(self, timeout_s: float) -> None:
        """One long poll. Raises PoolError when every replica was given up."""
        if trouble := self._home.trouble():
            raise PoolError(trouble)
        answer = self._poll(self._until_next_deadline(timeout_s))
        if answer is None:
            self._recover_router()
            return
        self._hear(answer)

    def _hear(self, answer: tuple[bytes, list[Any]]) -> None:
        """Take in what the router has delivered; what came before by another poll is passed over."""
        deliveries, references = decode_deliveries(answer[0]), deque(answer[1])
        for delivery in deliveries:
            reference = None if delivery.error_class else references.popleft()
            if delivery.number <= self._after:
                continue
            self._after = delivery.number
            if delivery.window >= FIRST_STREAM:
                self._generation.give_up(delivery)
            elif delivery.error_class:
                self._give_up(delivery)
            else:
                self._take(delivery, reference)
        self._time_out()
        self._close_finished()

    def _close_finished(self) -> None:
        for window in self._ledger.close_finished():
            self._tokens.pop(window, None)
            self._deadlines.pop(window, None)

    def _poll(self, timeout_s: float) -> tuple[bytes, list[Any]] | None:
        try:
            answer: tuple[bytes, list[Any]] | None = ray.get(
                self._begin_poll(timeout_s), timeout=timeout_s + ROUTER_ANSWER_S
            )
        except ray.exceptions.GetTimeoutError:
            self._restart_router()
            return None
        except (ray.exceptions.ActorUnavailableError, ray.exceptions.ActorDiedError):
            return None
        except ray.exceptions.RayError as error:
            raise PoolError(str(error)) from error
        return answer

    def _begin_poll(self, timeout_s: float) -> Any:
        return self._router.collect.remote(self._incarnation, self._client, self._after, timeout_s)

    def _take(self, delivery: Delivery, reference: Any) -> None:
        if not len(self._ledger.missing_of(delivery)):
            return
        try:
            message = ray.get(reference, timeout=REPLY_S)
        except (ray.exceptions.RayError, TimeoutError):
            # The scores died with whoever held them. They are computed again, bit for bit.
            missing = self._ledger.missing_of(delivery)
            if len(missing) and not self._send(delivery.window, missing):
                self._recover_router()
            return
        self._collected.extend(self._ledger.accept(delivery, message))

    def _give_up(self, delivery: Delivery) -> None:
        for item in self._ledger.missing_of(delivery).tolist():
            self._collected.append(self._ledger.fail(delivery, item))

    def _until_next_deadline(self, timeout_s: float) -> float:
        nearest_s = min((until_s for until_s, _ in self._deadlines.values()), default=float("inf"))
        return max(min(timeout_s, nearest_s - time.monotonic()), 0.0)

    def _left_s(self, window: int) -> float | None:
        """What is left of the time that a window was given."""
        if window not in self._deadlines:
            return None
        return max(self._deadlines[window][0] - time.monotonic(), 0.0)

    def _time_out(self) -> None:
        """Windows whose time is over: what has not come back comes back as failed, and is not scored.

        The router knows the time too, so that it sends nothing more even if nobody looks here.
        """
        now_s = time.monotonic()
        late = [window for window, (until_s, _) in self._deadlines.items() if now_s >= until_s]
        for window in late:
            deadline_s = self._deadlines[window][1]
            message = f"not finished within the {deadline_s:g} s that the window was given"
            for item in self._drop(window, late=True).tolist():
                self._collected.append(Failed(window, item, "timeout", message, 0))

    def _drop(self, window: int, *, late: bool = False) -> Int32Array:
        """Forget a window here and in the router. Returns its items that had not come back."""
        missing = self._ledger.drop(window)
        self._tokens.pop(window, None)
        self._deadlines.pop(window, None)
        if len(missing):
            # A router that does not hear this has died, and its successor never knew of the window.
            self._router.cancel.remote(self._client, window, late)
        return missing

    def _ask(self, call: Any) -> Any:
        for _ in range(3):
            try:
                return ray.get(call(), timeout=REPLY_S)
            except (ray.exceptions.RayError, TimeoutError):
                self._recover_router()
        raise PoolError("the router does not answer")

    def _check(self, window: int, items: Items) -> None:
        if self._closed:
            raise PoolError("the pool is closed")
        if not 0 <= window < FIRST_STREAM:
            raise ValueError(f"window {window} must be numbered from 0 to {FIRST_STREAM - 1}")
        if window in self._ledger.known:
            raise ValueError(f"window {window} was submitted before")
        lengths = np.diff(items.offsets)
        if len(lengths) != len(items) or (len(items) and items.offsets[-1] != len(items.token_ids)):
            raise ValueError(
                f"window {window}: offsets cover {len(lengths)} items, n_scored has {len(items)}"
            )
        if len(items) and ((items.n_scored < 1) | (items.n_scored >= lengths)).any():
            raise ValueError(f"window {window}: n_scored must be from 1 to the length of the item less 1")
        if items.depth < 1:
            raise ValueError(f"window {window}: depth {items.depth} is less than 1")
        if items.groups is None:
            return
        groups = items.groups
        if fault := groups.effort.fault() or fault_of_groups(groups.offsets, groups.compared, len(items)):
            raise ValueError(f"window {window}: {fault}")
        if self._router_version < GROUPS_SINCE:
            raise PoolError(
                f"the pool speaks wire version {self._router_version}, which knows fixed depths alone: take "
                "it down and start it with this version"
            )


def _payload(items: Items) -> tuple[Any, ...]:
    """A window's token ids as replicas take them."""
    arrays = items.token_ids, items.offsets, items.n_scored
    groups = items.groups
    if groups is None:
        return arrays
    return grouped_payload(GroupedTokens(*arrays, groups.offsets, groups.compared, groups.effort))


def _label() -> str:
    """Who this client is, for those who look at the pool's status."""
    command = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python"
    return f"{command} {os.getpid()}@{socket.gethostname()}"
