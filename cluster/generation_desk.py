"""The router's part in what replicas generate: tell them what nobody needs any more, see that they go on.

It runs on the router's event loop and sees no token: ids go from replicas to clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import ray

from ..workers.status import State, Status, decode_status
from ..workers.wire import WireError
from .placement import Placement

LOOK_S = 1.0  # between two looks at a replica that generates


@dataclass(frozen=True, slots=True)
class Generated:
    """What a replica has generated since it started: ids, and its engine's seconds for them."""

    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, status: Status) -> Generated:
        """As its status says."""
        return cls(status.generated_tokens, status.generating_s)


class Link(Protocol):
    """The way to one replica, as far as the desk needs it. probing: somebody looks at it already.

    generates: it did when it was last looked at, at looked_s.
    """

    slot: int
    generation: int
    actor: Any
    probing: bool
    seen: Generated
    generates: bool
    looked_s: float


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
        self._looks: set[asyncio.Task[None]] = set()

    def tell_cancels(self, links: dict[int, Any]) -> None:
        """Tell replicas what nobody needs any more. One that cannot be told is lost, or soon will be."""
        if not self._placement.cancels:
            return
        cancels, self._placement.cancels = self._placement.cancels, []
        for slot, link in links.items():
            if owners := [owner for at, owner in cancels if at == slot]:
                link.actor.cancel.remote(owners)

    def look(self, links: dict[int, Any]) -> None:
        """Look at replicas that generate: what they have done, and whether they go on.

        One that owes no answer to a command gives no other sign. It is looked at once more when it has ended.
        """
        now_s = time.monotonic()
        for slot, link in links.items():
            generates = bool(self._placement.replicas[slot].generating)
            if link.probing or not (generates or link.generates):
                continue
            if not link.generates:
                link.generates, link.looked_s = True, now_s
            if now_s - link.looked_s > LOOK_S:
                link.probing, link.looked_s, link.generates = True, now_s, generates
                task = self._start(self._look(link))
                self._looks.add(task)
                task.add_done_callback(self._looks.discard)

    async def _look(self, link: Link) -> None:
        answer_s = self._placement.rules.hang_floor_s
        try:
            status = decode_status(await asyncio.wait_for(link.actor.health.remote(), answer_s))
        except (TimeoutError, ray.exceptions.RayError, WireError) as error:
            self._lose(link, f"it generates and does not say how it is: {type(error).__name__}")
            return
        link.probing = False
        self._count(link, Generated.of(status))
        stands_s = max(status.step_age_s, status.beat_age_s)
        if status.state == State.UNFIT:
            self._lose(link, status.message)
        elif stands_s > self._placement.rules.first_ack_s:
            self._lose(link, f"it generates and its engine has stood still for {stands_s:.0f} s")

    def _count(self, link: Link, now: Generated) -> None:
        work = self._placement.replicas.get(link.slot)
        if work is not None and work.mirror.generation == link.generation:
            tokens, seconds = now.tokens - link.seen.tokens, now.seconds - link.seen.seconds
            self._placement.generated(link.slot, tokens, seconds)
            link.seen = now
