"""The router's side of every replica: commands out, acknowledgements in, deaths and deadlines noticed.

All on one event loop: no locks, and nothing waits between a choice and its being counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import ray

from ..workers.messages import decode_ack, decode_inventory, encode_command
from ..workers.status import Status
from ..workers.wire import WireError
from .costs import PlacementRules, Sizes
from .placement import Placement
from .seams import leave, release_run
from .work import Finished

PROBE_S = 2.0
INVENTORY_S = 20.0  # an inventory waits for the command that runs; a frozen process never answers
TOKENS_LOST = "unknown item"  # how a replica refuses a command whose token ids it could not fetch


@dataclass(frozen=True, slots=True)
class _Sent:
    """A command on its way. result: a reference that only the client fetches."""

    window: str
    acknowledgement: Any
    result: Any


@dataclass(slots=True)
class Link:
    """The way to one replica. leaving: it finishes what it has and gets nothing more."""

    slot: int
    generation: int
    actor: Any
    sent: asyncio.Queue[_Sent] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    probing: bool = False
    leaving: bool = False


class Dispatcher:
    """Owns placement and the links.

    tokens_of: the reference of a window's ids. deliver: takes what is finished, with the reference of its
    scores. broken: hears of a defect in here. tokens_lost: hears of a window whose ids no replica can fetch,
    and why.
    """

    def __init__(
        self,
        rules: PlacementRules,
        tokens_of: Callable[[str], list[Any]],
        deliver: Callable[[Finished, Any], None],
        broken: Callable[[str], None],
        tokens_lost: Callable[[str, str], None],
    ) -> None:
        self.placement = Placement(rules, Sizes({}))
        self.links: dict[int, Link] = {}
        self._endings: dict[int, tuple[int, bool, str]] = {}
        self._tokens_of, self._deliver, self._broken = tokens_of, deliver, broken
        self._tokens_lost = tokens_lost
        self._sized = False

    async def attach(self, slot: int, generation: int, actor: Any, status: Status) -> None:
        """Give work to a ready replica; twice is harmless."""
        known = self.links.get(slot)
        if known is not None and known.generation >= generation:
            return
        if known is not None:
            self.lose(known, "another generation came")
        link = Link(slot, generation, actor)
        try:
            answer = await asyncio.wait_for(actor.inventory.remote(), INVENTORY_S)
        except (TimeoutError, ray.exceptions.RayError):
            # Its owner learns of it by the death, and starts another.
            ray.kill(actor)
            return
        if slot in self.links:
            return
        if status.facts is not None and not self._sized:
            self.placement.sizes, self._sized = Sizes(status.facts.descriptor), True
        self.links[slot] = link
        self.placement.attach(slot, generation, status.prefix_budget_bytes, decode_inventory(answer))
        link.tasks = [self.start(self._watch(link)), self.start(self._acknowledgements(link))]
        self.pump()

    def detach(self, slot: int, generation: int) -> tuple[bool, str]:
        """A replica is gone. Returns whether it got anything done, and why it was given up."""
        link = self.links.get(slot)
        if link is not None and link.generation == generation:
            self.lose(link, "")
        ended, progressed, reason = self._endings.get(slot, (0, False, ""))
        return (progressed, reason) if ended == generation else (False, "")

    def drain(self, slot: int, generation: int) -> bool:
        """Send a replica nothing more. Returns whether it has nothing left to do; it is forgotten then."""
        link = self.links.get(slot)
        if link is None or link.generation != generation:
            return True
        link.leaving = True
        release_run(self.placement, slot)
        self.pump()
        if self.placement.replicas[slot].mirror.flights:
            return False
        del self.links[slot]
        leave(self.placement, slot)
        self._endings[slot] = (generation, True, "")
        _cancel(link)
        return True

    def cancel(self, window: str) -> None:
        """Nobody waits for a window any more. What runs of it is finished and ignored."""
        self.placement.drop_window(window)
        self.pump()

    def pump(self) -> None:
        """Send every replica what it has room for. Synchronous: nothing changes between choice and count."""
        for slot, link in list(self.links.items()):
            while (
                not link.leaving
                and (command := self.placement.next_command(slot, time.monotonic())) is not None
            ):
                tokens = self._tokens_of(command.window)
                references = link.actor.run.options(num_returns=2).remote(encode_command(command), tokens)
                link.sent.put_nowait(_Sent(command.window, *references))

    def probe_late(self) -> None:
        """Replicas that hang give no sign at all; only a deadline finds them."""
        for slot in self.placement.overdue(time.monotonic()):
            link = self.links[slot]
            if not link.probing:
                link.probing = True
                link.tasks.append(self.start(self._probe(link)))

    def lose(self, link: Link, reason: str) -> None:
        """Give a replica up: end it for certain, and give its work to the others."""
        if self.links.get(link.slot) is not link:
            return
        del self.links[link.slot]
        ray.kill(link.actor)
        acknowledged = self.placement.replicas[link.slot].mirror.acknowledged
        given_up = self.placement.detach(link.slot)
        self._endings[link.slot] = (link.generation, bool(acknowledged or given_up), reason)
        for finished in given_up:
            self._deliver(finished, None)
        _cancel(link)
        self.pump()

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside; a defect in it reaches every client."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    async def _acknowledgements(self, link: Link) -> None:
        """Take the answers of one replica in the order its commands were sent."""
        while True:
            sent = await link.sent.get()
            try:
                ack = decode_ack(await sent.acknowledgement)
                finished = self.placement.acknowledge(link.slot, ack, time.monotonic())
                if finished is not None:
                    self._deliver(finished, sent.result)
                if ack.refused.startswith(TOKENS_LOST):
                    self._tokens_lost(sent.window, ack.refused)
                if self.placement.replicas[link.slot].resyncing and ack.epoch == self._epoch(link):
                    self.placement.resync(link.slot, decode_inventory(await link.actor.inventory.remote()))
            except (ray.exceptions.RayError, WireError) as error:
                # Dead, unreachable, unfit or unreadable: nothing it may still do will be believed.
                self.lose(link, _reason(error))
                return
            if self.placement.is_unfit(link.slot):
                self.lose(link, f"it refused everything, the last time with: {ack.refused}")
                return
            self.pump()

    def _epoch(self, link: Link) -> int:
        return self.placement.replicas[link.slot].mirror.epoch

    async def _watch(self, link: Link) -> None:
        """The fastest sign of a death: the failure of a call that never returns."""
        try:
            await link.actor.until_death.remote()
        except ray.exceptions.RayError as error:
            self.lose(link, _reason(error))

    async def _probe(self, link: Link) -> None:
        """Ask a late replica for a sign of life: one that answers is given time, once; else it is lost."""
        try:
            await asyncio.wait_for(link.actor.health.remote(), PROBE_S)
        except (TimeoutError, ray.exceptions.RayError):
            self.lose(link, "a command took far longer than it should, and the process does not answer")
            return
        link.probing = False
        if link.slot in self.placement.overdue(time.monotonic()) and not self.placement.spare(link.slot):
            self.lose(link, "a command took far longer than it should, though the process answers")

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A defect in here must reach the client as an error and never as a job that waits for ever.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken(f"router failed: {type(error).__name__}: {error}")


def _cancel(link: Link) -> None:
    current = asyncio.current_task()
    for task in link.tasks:
        if task is not current:
            task.cancel()


def _reason(error: Exception) -> str:
    """What a replica's own exception says, without Ray's stack trace; else the kind of death."""
    cause = error if isinstance(error, WireError) else getattr(error, "cause", None)
    return str(cause) if cause is not None else type(error).__name__
