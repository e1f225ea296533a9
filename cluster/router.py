"""The router actor: a thin, asynchronous shell around placement that never sees a token.

It never waits for a choice and never fetches a payload. If it dies, Ray starts it again empty; each replica's
inventory gives the mirror back exactly, and clients submit what is missing. The router of a job is told of
its replicas by the job; that of a named pool owns them and finds them again by their names.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgpack

from ..workers.status import decode_status
from ..workers.wire import VERSION, check_version
from .clients import MAX_QUEUED_ITEMS, Clients
from .costs import PlacementRules
from .dispatch import Dispatcher
from .wire import decode_window, encode_deliveries
from .work import Finished

if TYPE_CHECKING:
    from .keeper import Keeper

HEARTBEAT_S = 0.25
FACTS_POLL_S = 0.1

# Answers to a submitted window. An unknown client must introduce itself and submit what it misses.
TAKEN, FULL, UNKNOWN = "taken", "full", "unknown"

ROUTER_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_task_retries": 0,
    "max_concurrency": 1000,
}


class Router:
    """Owns placement for every replica of a pool. All methods are coroutines on one event loop: no locks.

    name: of a pool that this router owns, empty if a job owns it.
    """

    def __init__(self, rules: PlacementRules, name: str = "") -> None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._cpu_at_start_s = time.process_time()
        self._incarnation = uuid4().hex
        self._clients = Clients()
        self._dispatch = Dispatcher(
            rules, self._clients.tokens, self._deliver, self._break, self._give_up_window
        )
        self._broken = ""
        self._ticker: asyncio.Task[None] | None = None
        self._keeper = self._own(name) if name else None

    async def hello(self, client: str, label: str, lease_s: float) -> tuple[int, str, int, str]:
        """A client introduces itself. Returns wire version, a name that changes whenever this actor starts
        anew, its process and host.

        lease_s: silence after which the client's windows are dropped; 0 if it cannot outlive this actor.
        Raises TooManyClients.
        """
        self._tick_from_now_on()
        self._clients.meet(client, label, lease_s, time.monotonic())
        return VERSION, self._incarnation, os.getpid(), socket.gethostname()

    async def process(self) -> tuple[int, str]:
        """Number and host of this process."""
        return os.getpid(), socket.gethostname()

    async def beat(self, client: str) -> bool:
        """A client lives. False if it is not known."""
        return self._clients.seen(client, time.monotonic()) is not None

    async def leave(self, client: str) -> None:
        """A client is done; what it has in flight is dropped."""
        for key in self._clients.drop(client):
            self._dispatch.cancel(key)

    async def attach(self, slot: int, generation: int, actor: list[Any], status_bytes: bytes) -> None:
        """Give work to a ready replica; twice is harmless. Raises WireError for another wire version."""
        status = decode_status(status_bytes)
        self._tick_from_now_on()
        await self._dispatch.attach(slot, generation, actor[0], status)

    async def detach(self, slot: int, generation: int) -> tuple[bool, str]:
        """A replica is gone. Returns whether it got anything done, and why it was given up."""
        return self._dispatch.detach(slot, generation)

    async def drain(self, slot: int, generation: int) -> bool:
        """Send a replica nothing more. Returns whether it has nothing left to do."""
        return self._dispatch.drain(slot, generation)

    async def submit(self, incarnation: str, head_bytes: bytes, tokens: list[Any]) -> str:
        """Take a window, or a part of one: TAKEN, FULL (nothing was done: later), or UNKNOWN client."""
        head = decode_window(head_bytes)
        client = self._clients.seen(head.client, time.monotonic())
        if incarnation != self._incarnation or client is None:
            return UNKNOWN
        placement = self._dispatch.placement
        queued = placement.queued_items
        if not client.has_room(head.window) or (queued and queued + len(head.order) > MAX_QUEUED_ITEMS):
            return FULL
        placement.add_window(self._clients.open(head.client, head.window, tokens, head.order), head)
        self._dispatch.pump()
        return TAKEN

    async def cancel(self, client: str, window: int) -> None:
        """A client does not want a window any more. What runs of it is finished and ignored."""
        for key in self._clients.cancel(client, window):
            self._dispatch.cancel(key)

    async def collect(
        self, incarnation: str, client: str, after: int, timeout_s: float
    ) -> tuple[bytes, list[Any]] | None:
        """Deliveries numbered above `after` and a reference for each scored one; waits for the first.

        None if the client is not known here. Raises RuntimeError if nothing can go on.
        """
        inbox = self._clients.seen(client, time.monotonic())
        if incarnation != self._incarnation or inbox is None:
            return None
        inbox.forget(after)
        if not inbox.deliveries and not self._trouble():
            inbox.news.clear()
            try:
                await asyncio.wait_for(inbox.news.wait(), timeout_s)
            except TimeoutError:
                self._clients.seen(client, time.monotonic())
                return encode_deliveries([]), []
        if trouble := self._trouble():
            raise RuntimeError(trouble)
        entries = list(inbox.deliveries)
        return encode_deliveries([d for d, _ in entries]), [ref for _, ref in entries if ref is not None]

    async def status(self) -> bytes:
        """Counters, clients and the state of each replica's mirror, as a msgpack map."""
        placement = self._dispatch.placement
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
            "clients": self._clients.views(time.monotonic()),
            "cpu_s": time.process_time() - self._cpu_at_start_s,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        packed: bytes = msgpack.packb(body | (self._keeper.view() if self._keeper else {}))
        return packed

    async def facts(self, timeout_s: float) -> bytes:
        """The status of a replica that is ready, once one is. Raises RuntimeError if none comes in time."""
        assert self._keeper is not None, "only a named pool is asked"
        deadline_s = time.monotonic() + timeout_s
        while not (answer := self._keeper.ready_status()):
            if (trouble := self._trouble()) or time.monotonic() > deadline_s:
                raise RuntimeError(trouble or f"no replica was ready in {timeout_s} s")
            await asyncio.sleep(FACTS_POLL_S)
        return answer

    async def scale(self, num_replicas: int) -> None:
        """Have so many replicas from now on. Returns at once; status shows how far it is."""
        assert self._keeper is not None, "only a named pool is asked"
        await self._keeper.scale(num_replicas)

    def _own(self, name: str) -> Keeper:
        # Loaded by the router of a named pool alone: a router that starts anew should not take long.
        from .keeper import Keeper

        keeper = Keeper(name, self._dispatch, asyncio.get_running_loop())
        keeper.start()
        return keeper

    def _tick_from_now_on(self) -> None:
        if self._ticker is None:
            self._ticker = self._dispatch.start(self._tick())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._dispatch.probe_late()
            for client in self._clients.expired(time.monotonic()):
                await self.leave(client)
            if self._trouble():
                self._wake_all()

    def _trouble(self) -> str:
        return self._broken or (self._keeper.trouble() if self._keeper is not None else "")

    def _deliver(self, finished: Finished, result: Any) -> None:
        last = finished.window not in self._dispatch.placement.plans
        self._clients.deliver(finished, result, last=last)

    def _give_up_window(self, key: str, refused: str) -> None:
        """The ids of a window are gone, with the client that held them: no replica will ever have them."""
        remaining = self._clients.remaining(key)
        self._dispatch.cancel(key)
        if len(remaining):
            message = f"the token ids of the window could not be fetched: {refused}"
            self._deliver(Finished(key, remaining, "internal", message), None)

    def _break(self, reason: str) -> None:
        self._broken = reason
        self._wake_all()

    def _wake_all(self) -> None:
        for client in self._clients:
            client.news.set()


def check_hello(hello: tuple[int, str, int, str]) -> tuple[str, int, str]:
    """Incarnation, process and host of a router of this version. Raises WireError naming both versions."""
    version, incarnation, pid, host = hello
    check_version(version)
    return incarnation, pid, host
