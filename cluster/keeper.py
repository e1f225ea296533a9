"""The owner of a named pool's replicas, inside its router: the same supervisor that a job has, on its thread.

What it must know lies in Ray's own store and in the names of the actors, so a router that starts anew goes on
where the last one died.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from functools import partial
from typing import Any

from ..workers.status import decode_status
from . import registry
from .dispatch import Dispatcher
from .fleet import Fleet, PoolError, Slot
from .supervisor import Supervisor

REPLY_S = 30.0


class Keeper:
    """Starts, finds, replaces and drains the replicas of one named pool."""

    def __init__(self, name: str, dispatch: Dispatcher, loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        spec = registry.read_spec(name)
        if spec is None:
            raise PoolError(f"pool {name!r} has no spec: it was taken down")
        registry.note_router(name)
        self._spec = spec
        settings = spec.settings()
        fleet = Fleet(spec.replicas, spec.config["crash_limit"], settings, registry.generations(name))
        self._supervisor = Supervisor(settings, spec.actor_options(), fleet, partial(registry.naming, name))
        self._router = _InsideLink(dispatch, loop)

    def start(self) -> None:
        """Own the replicas that there are, start those that are missing, watch over all."""
        config = self._spec.config
        self._supervisor.limit(config["start_timeout_s"], allow_mixed=config["allow_mixed"])
        self._supervisor.watch(self._router, begin=self._adopt)

    async def scale(self, num_replicas: int) -> None:
        """Have so many replicas from now on, also after a restart of the router."""
        self._spec = self._spec.resized(num_replicas)
        await asyncio.to_thread(registry.write_spec, self._name, self._spec)
        settings, options = self._spec.settings(), self._spec.actor_options()
        await asyncio.to_thread(self._supervisor.scale, num_replicas, settings, options)

    def ready_status(self) -> bytes:
        """What a replica that is up says of itself; empty while none is."""
        return next((slot.status_bytes for slot in self._supervisor.up()), b"")

    def trouble(self) -> str:
        """Why nothing can go on; else empty."""
        return self._supervisor.trouble()

    def view(self) -> dict[str, Any]:
        """The slots, for the pool's status."""
        fleet = self._supervisor.fleet
        return {
            "slots": [slot.view() for slot in self._supervisor.slots],
            "deaths": fleet.deaths,
            "deaths_by_reason": dict(fleet.deaths_by_reason),
            "wanted": fleet.wanted,
        }

    def _adopt(self) -> None:
        """Take over what an earlier router started; a slot beyond the number wanted leaves at once."""
        found = registry.find_replicas(self._name)
        for slot in self._supervisor.slots:
            if slot.index in found:
                self._supervisor.adopt(slot, *found.pop(slot.index))
        for _, actor in found.values():
            registry.end(actor)
        self._supervisor.spawn_all()


class _InsideLink:
    """The router as its own supervisor's thread sees it: calls go to the event loop."""

    def __init__(self, dispatch: Dispatcher, loop: asyncio.AbstractEventLoop) -> None:
        self._dispatch = dispatch
        self._loop = loop
        self._attaching: dict[tuple[int, int], Future[None]] = {}

    def attach(self, slot: Slot) -> bool:
        """Begin, and say on a later call whether that is done: replicas do not wait for each other."""
        key = slot.index, slot.generation
        call = self._attaching.get(key)
        if call is None:
            status = decode_status(slot.status_bytes)
            work = self._dispatch.attach(slot.index, slot.generation, slot.actor, status)
            self._attaching[key] = asyncio.run_coroutine_threadsafe(work, self._loop)
            return False
        if not call.done():
            return False
        del self._attaching[key]
        call.result()
        return True

    def detach(self, slot: Slot) -> tuple[bool, str]:
        """As the router's."""
        self._attaching.pop((slot.index, slot.generation), None)
        answer: tuple[bool, str] = self._call(self._dispatch.detach, slot)
        return answer

    def drain(self, slot: Slot) -> bool:
        """As the router's."""
        return bool(self._call(self._dispatch.drain, slot))

    def _call(self, method: Any, slot: Slot) -> Any:
        async def call() -> Any:
            return method(slot.index, slot.generation)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(REPLY_S)
