"""The router actor: a thin, asynchronous shell around placement that never sees a token.

It never waits for a choice and never fetches a payload. If it dies, Ray starts it again empty; clients attach
their replicas and submit what is missing, and each replica's inventory gives the mirror back exactly.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any
from uuid import uuid4

import msgpack
import ray

from ..workers.messages import decode_ack, decode_inventory, encode_command
from ..workers.status import decode_status
from ..workers.wire import VERSION, WireError, check_version
from .costs import PlacementRules, Sizes
from .generation_desk import GenerationDesk
from .placement import Placement
from .wire import Delivery, decode_window, encode_deliveries
from .work import Finished

HEARTBEAT_S = 0.25
PROBE_S = 2.0
INVENTORY_S = 20.0  # an inventory waits for the command that runs; a frozen process never answers

ROUTER_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 1000,
}


@dataclass(frozen=True, slots=True)
class _Sent:
    """A command on its way. result: a reference that only the client fetches."""

    acknowledgement: Any
    result: Any


@dataclass(slots=True)
class _Link:
    """The way to one replica."""

    slot: int
    generation: int
    actor: Any
    sent: asyncio.Queue[_Sent] = field(default_factory=asyncio.Queue)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    probing: bool = False


@dataclass(slots=True)
class _Client:
    """What one client has not fetched yet."""

    deliveries: deque[tuple[Delivery, Any]] = field(default_factory=deque)
    delivered: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """Owns placement for every replica of a pool. All methods are coroutines on one event loop: no locks."""

    def __init__(self, rules: PlacementRules) -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._cpu_at_start_s = time.process_time()
        self._incarnation = uuid4().hex
        self._placement = Placement(rules, Sizes({}))
        self._desk = GenerationDesk(self._placement, self._lose, self._start)
        self._links: dict[int, _Link] = {}
        self._endings: dict[int, tuple[int, bool, str]] = {}
        self._clients: dict[str, _Client] = {}
        self._windows: dict[str, tuple[str, int, list[Any]]] = {}
        self._submissions = 0
        self._broken = ""
        self._ticker: asyncio.Task[None] | None = None

    async def hello(self) -> tuple[int, str, int, str]:
        """Wire version, a name that changes whenever this actor starts anew, its process and host."""
        return VERSION, self._incarnation, os.getpid(), socket.gethostname()

    async def attach(self, slot: int, generation: int, actor: list[Any], status_bytes: bytes) -> None:
        """Give work to a ready replica; twice is harmless. Raises WireError for another wire version."""
        status = decode_status(status_bytes)
        known = self._links.get(slot)
        if known is not None and known.generation >= generation:
            return
        if known is not None:
            self._lose(known, "another generation came")
        link = _Link(slot, generation, actor[0])
        try:
            # Anew: what it generates was asked for by a router that is gone.
            answer = await asyncio.wait_for(link.actor.inventory.remote(True), INVENTORY_S)
        except (TimeoutError, ray.exceptions.RayError):
            # Its owner learns of it by the death, and starts another.
            ray.kill(link.actor)
            return
        if slot in self._links:
            return
        if status.facts is not None and not self._placement.replicas and not len(self._placement.tree):
            self._placement.sizes = Sizes(status.facts.descriptor)
        self._links[slot] = link
        self._placement.attach(slot, generation, status.prefix_budget_bytes, decode_inventory(answer))
        link.tasks = [self._start(self._watch(link)), self._start(self._acknowledgements(link))]
        if self._ticker is None:
            self._ticker = self._start(self._tick())
        self._pump()

    async def detach(self, slot: int, generation: int) -> tuple[bool, str]:
        """A replica is gone. Returns whether it got anything done, and why it was given up."""
        link = self._links.get(slot)
        if link is not None and link.generation == generation:
            self._lose(link, "")
        ended, progressed, reason = self._endings.get(slot, (0, False, ""))
        return (progressed, reason) if ended == generation else (False, "")

    async def submit(self, incarnation: str, head_bytes: bytes, tokens: list[Any]) -> bool:
        """Take a window, or a part of one. False if the client knows an earlier incarnation."""
        if incarnation != self._incarnation:
            return False
        head = decode_window(head_bytes)
        self._submissions += 1
        key = f"{head.client}/{head.window}/{self._submissions}"
        self._windows[key] = (head.client, head.window, tokens)
        self._clients.setdefault(head.client, _Client())
        self._placement.add_window(key, head)
        self._pump()
        return True

    async def settle(self, incarnation: str, message: bytes) -> bool:
        """A client needs nothing more of items that are generated for it: it has them, or gave them up.

        False if it knows an earlier incarnation. Raises WireError.
        """
        if incarnation != self._incarnation:
            return False
        self._desk.settle(message, self._windows)
        self._desk.tell_cancels(self._links)
        self._pump()
        return True

    async def collect(
        self, incarnation: str, client: str, after: int, timeout_s: float
    ) -> tuple[bytes, list[Any]] | None:
        """Deliveries numbered above `after` and a reference for each scored one; waits for the first.

        None if the client knows an earlier incarnation. Raises RuntimeError if this actor itself is broken.
        """
        if incarnation != self._incarnation:
            return None
        inbox = self._clients.setdefault(client, _Client())
        while inbox.deliveries and inbox.deliveries[0][0].number <= after:
            inbox.deliveries.popleft()
        if not inbox.deliveries and not self._broken:
            inbox.news.clear()
            try:
                await asyncio.wait_for(inbox.news.wait(), timeout_s)
            except TimeoutError:
                return encode_deliveries([]), []
        if self._broken:
            raise RuntimeError(self._broken)
        entries = list(inbox.deliveries)
        return encode_deliveries([d for d, _ in entries]), [ref for _, ref in entries if ref is not None]

    async def status(self) -> bytes:
        """Counters and the state of each replica's mirror, as a msgpack map."""
        placement = self._placement
        replicas = {
            str(slot): {
                "generation": work.mirror.generation,
                "in_flight": len(work.mirror.flights),
                "backlog_s": placement.backlog_s(work),
                "busy_s": work.busy_s,
                "prefixes": len(work.mirror.entries),
                "prefix_bytes": work.mirror.total_bytes,
            }
            for slot, work in placement.replicas.items()
        }
        body = {
            "counters": asdict(placement.counters),
            "replicas": replicas,
            "queued": placement.queued_items,
        }
        packed: bytes = msgpack.packb({**body, "cpu_s": time.process_time() - self._cpu_at_start_s})
        return packed

    def _pump(self) -> None:
        """Send every replica what it has room for. Synchronous: nothing changes between choice and count."""
        for slot, link in list(self._links.items()):
            while (command := self._placement.next_command(slot, time.monotonic())) is not None:
                tokens = self._windows[command.window][2]
                references = link.actor.run.options(num_returns=2).remote(encode_command(command), tokens)
                link.sent.put_nowait(_Sent(*references))

    async def _acknowledgements(self, link: _Link) -> None:
        """Take the answers of one replica in the order its commands were sent."""
        while True:
            sent = await link.sent.get()
            try:
                ack = decode_ack(await sent.acknowledgement)
                finished = self._placement.acknowledge(link.slot, ack, time.monotonic())
                if finished is not None:
                    self._deliver(finished, sent.result)
                self._desk.tell_cancels(self._links)
                if self._placement.replicas[link.slot].resyncing and ack.epoch == self._epoch(link):
                    self._placement.resync(link.slot, decode_inventory(await link.actor.inventory.remote()))
            except (ray.exceptions.RayError, WireError) as error:
                # Dead, unreachable, unfit or unreadable: nothing it may still do will be believed.
                self._lose(link, _reason(error))
                return
            if self._placement.is_unfit(link.slot):
                self._lose(link, f"it refused everything, the last time with: {ack.refused}")
                return
            self._pump()

    def _epoch(self, link: _Link) -> int:
        return self._placement.replicas[link.slot].mirror.epoch

    async def _watch(self, link: _Link) -> None:
        """The fastest sign of a death: the failure of a call that never returns."""
        try:
            await link.actor.until_death.remote()
        except ray.exceptions.RayError as error:
            self._lose(link, _reason(error))

    async def _tick(self) -> None:
        """Replicas that hang give no sign at all; only a deadline finds them."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for slot in self._placement.overdue(time.monotonic()):
                link = self._links[slot]
                if not link.probing:
                    link.probing = True
                    link.tasks.append(self._start(self._probe(link)))
            self._desk.look(self._links)

    async def _probe(self, link: _Link) -> None:
        """Ask a late replica for a sign of life: one that answers is given time, once; else it is lost."""
        try:
            await asyncio.wait_for(link.actor.health.remote(), PROBE_S)
        except (TimeoutError, ray.exceptions.RayError):
            self._lose(link, "a command took far longer than it should, and the process does not answer")
            return
        link.probing = False
        if link.slot in self._placement.overdue(time.monotonic()) and not self._placement.spare(link.slot):
            self._lose(link, "a command took far longer than it should, though the process answers")

    def _lose(self, link: _Link, reason: str) -> None:
        """Give a replica up: end it for certain, and give its work to the others."""
        if self._links.get(link.slot) is not link:
            return
        del self._links[link.slot]
        ray.kill(link.actor)
        acknowledged = self._placement.replicas[link.slot].mirror.acknowledged
        given_up = self._placement.detach(link.slot)
        self._endings[link.slot] = (link.generation, bool(acknowledged or given_up), reason)
        for finished in given_up:
            self._deliver(finished, None)
        current = asyncio.current_task()
        for task in link.tasks:
            if task is not current:
                task.cancel()
        self._pump()

    def _deliver(self, finished: Finished, result: Any) -> None:
        client, window, _ = self._windows[finished.window]
        inbox = self._clients[client]
        inbox.delivered += 1
        delivery = Delivery(
            number=inbox.delivered,
            window=window,
            items=finished.items,
            error_class=finished.error_class,
            message=finished.message,
            attempts=finished.attempts,
            rows=finished.rows,
        )
        inbox.deliveries.append((delivery, result))
        inbox.news.set()
        if finished.window not in self._placement.plans:
            del self._windows[finished.window]

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        # A defect in here must reach the client as an error and never as a job that waits for ever.
        if not task.cancelled() and (error := task.exception()) is not None:
            self._broken = f"router failed: {type(error).__name__}: {error}"
            for client in self._clients.values():
                client.news.set()


def _reason(error: Exception) -> str:
    """What a replica's own exception says, without Ray's stack trace; else the kind of death."""
    cause = error if isinstance(error, WireError) else getattr(error, "cause", None)
    return str(cause) if cause is not None else type(error).__name__


def check_hello(hello: tuple[int, str, int, str]) -> tuple[str, int, str]:
    """Incarnation, process and host of a router of this version. Raises WireError naming both versions."""
    version, incarnation, pid, host = hello
    check_version(version)
    return incarnation, pid, host
