"""The router's part in what replicas generate: hear what clients settle, tell replicas, see that they go on.

It runs on the router's event loop and sees no token: ids go from replicas to clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import ray

from ..workers.status import State, decode_status
from ..workers.wire import WireError
from .generate_wire import decode_settled
from .placement import Placement

LOOK_S = 1.0  # between two looks at a replica that generates and owes no answer
ANSWER_S = 2.0


class Link(Protocol):
    """The way to one replica, as far as the desk needs it. probing: somebody looks at it already."""

    slot: int
    generation: int
    actor: Any
    probing: bool


class GenerationDesk:
    """lose: gives a replica up, with the reason. start: runs a coroutine and reports its failure."""

    def __init__(
        self,
        placement: Placement,
        lose: Callable[[Any, str], None],
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._placement = placement
        self._lose = lose
        self._start = start
        self._looked_s: dict[tuple[int, int], float] = {}
        self._looks: set[asyncio.Task[None]] = set()

    def settle(self, message: bytes, windows: dict[str, tuple[str, int, list[Any]]]) -> None:
        """A client needs nothing more of some items; windows that end by that go. Raises WireError."""
        settled = decode_settled(message)
        for key, (client, window, _) in list(windows.items()):
            if (client, window) == (settled.client, settled.window):
                self._placement.settle(key, settled.items)
                if key not in self._placement.plans:
                    del windows[key]

    def tell_cancels(self, links: dict[int, Any]) -> None:
        """Tell replicas what nobody needs any more. One that cannot be told is lost, or soon will be."""
        cancels, self._placement.cancels = self._placement.cancels, []
        for slot, link in links.items():
            if owners := [owner for at, owner in cancels if at == slot]:
                link.actor.cancel.remote(owners)

    def look(self, links: dict[int, Any]) -> None:
        """Look at replicas that generate and owe no answer to a command: nothing else would tell of them."""
        now_s = time.monotonic()
        for slot, link in links.items():
            work, name = self._placement.replicas[slot], (slot, link.generation)
            due = now_s - self._looked_s.setdefault(name, now_s) > LOOK_S
            if work.generating and not work.mirror.flights and not link.probing and due:
                link.probing, self._looked_s[name] = True, now_s
                task = self._start(self._look(link))
                self._looks.add(task)
                task.add_done_callback(self._looks.discard)

    async def _look(self, link: Link) -> None:
        try:
            status = decode_status(await asyncio.wait_for(link.actor.health.remote(), ANSWER_S))
        except (TimeoutError, ray.exceptions.RayError, WireError) as error:
            self._lose(link, f"it generates and does not say how it is: {type(error).__name__}")
            return
        link.probing = False
        stands_s = max(status.step_age_s, status.beat_age_s)
        if status.state == State.UNFIT:
            self._lose(link, status.message)
        elif stands_s > self._placement.rules.first_ack_s:
            self._lose(link, f"it generates and its engine has stood still for {stands_s:.0f} s")
