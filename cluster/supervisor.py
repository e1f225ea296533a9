"""The replica actors of one pool: started, watched, replaced, drained, by one thread of the pool's owner.

A job owns its pool itself; a named pool is owned by its router, which may find replicas that an earlier
router started. What is to be done is decided in fleet.py, the same for both; this does it on Ray.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import ray

from ..workers.model import ReplicaSettings
from ..workers.replica import REPLICA_OPTIONS, Replica
from ..workers.status import ModelFacts, Status
from ..workers.wire import WireError
from .fleet import Fleet, PoolError, Slot

LOG = logging.getLogger(__name__)

POLL_S = 0.2
DRAIN_S = 60.0
CLOSE_S = 5.0

Naming = Callable[[int, int], dict[str, Any]]


class RouterLink(Protocol):
    """How the owner of replicas tells the router of them. Any call may fail while the router restarts."""

    def attach(self, slot: Slot) -> bool:
        """A replica is ready for work. Returns whether the router knows it now."""

    def detach(self, slot: Slot) -> tuple[bool, str]:
        """A replica is gone. Returns whether it got anything done, and why the router gave it up."""

    def drain(self, slot: Slot) -> bool:
        """A replica gets nothing new. Returns whether it has nothing left to do."""


class Supervisor:
    """Owns the replica actors. naming: options by slot and generation of actors that outlive it."""

    def __init__(
        self,
        settings: ReplicaSettings,
        options: Mapping[str, Any],
        fleet: Fleet,
        naming: Naming = lambda slot, generation: {},
    ) -> None:
        self._settings = settings
        self._options = dict(options)
        self._naming = naming
        self._start_timeout_s = 0.0
        self.fleet = fleet
        self._actor_class = ray.remote(**REPLICA_OPTIONS)(Replica)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._router: RouterLink | None = None
        self._begin: Callable[[], None] = lambda: None
        self._failure = ""

    @property
    def slots(self) -> list[Slot]:
        """A snapshot of the slots."""
        return list(self.fleet.slots)

    @property
    def facts(self) -> ModelFacts | None:
        """What the replicas have loaded, once one has."""
        return self.fleet.facts

    def spawn_all(self) -> None:
        """Start every replica, without waiting."""
        for slot in self.fleet.due(time.monotonic()):
            self._spawn(slot)

    def adopt(self, slot: Slot, generation: int, actor: Any) -> None:
        """Own a replica that an earlier owner started."""
        slot.actor, slot.ready, slot.watch = actor, actor.ready.remote(), actor.until_death.remote()
        self.fleet.adopt(slot, generation, time.monotonic())

    def wait_ready(self, timeout_s: float, *, allow_mixed: bool) -> None:
        """Wait until every replica has loaded. Raises PoolError with the reason of one that did not."""
        self.limit(timeout_s, allow_mixed=allow_mixed)
        deadline = time.monotonic() + timeout_s
        for slot in self.slots:
            try:
                answer = ray.get(slot.ready, timeout=max(deadline - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError:
                raise PoolError(self._late(slot)) from None
            except ray.exceptions.RayError as death:
                raise PoolError(
                    f"replica {slot.index} died while it loaded {self._settings.model}: {death}"
                ) from None
            if trouble := self.fleet.welcome(slot, answer):
                raise PoolError(trouble)

    def limit(self, start_timeout_s: float, *, allow_mixed: bool) -> None:
        """How long a replica may take to get ready, and whether replicas may compute differently."""
        self._start_timeout_s, self.fleet.allow_mixed = start_timeout_s, allow_mixed

    def watch(self, router: RouterLink, begin: Callable[[], None] = lambda: None) -> None:
        """Begin to replace dead replicas. begin: what the thread does first."""
        self._router, self._begin = router, begin
        self._thread = threading.Thread(target=self._watch, name="pool-supervisor", daemon=True)
        self._thread.start()

    def scale(self, num_replicas: int, settings: ReplicaSettings, options: Mapping[str, Any]) -> None:
        """Have so many replicas from now on; returns at once. Those that leave finish what they have.

        settings, options: of the replicas that are started from now on.
        """
        with self._lock:
            self._settings, self._options = settings, dict(options)
            removed = self.fleet.resize(num_replicas, time.monotonic() + DRAIN_S)
        for slot in removed:
            if slot.actor is not None:
                ray.kill(slot.actor)

    def up(self) -> list[Slot]:
        """Slots whose replica takes work."""
        return [slot for slot in self.slots if slot.state == "up"]

    def trouble(self) -> str:
        """Why nothing can go on, if every slot was given up; else empty."""
        return self._failure or self.fleet.trouble()

    def close(self, timeout_s: float) -> list[Status]:
        """Drain every replica and end those that do not. Returns the last statuses, for their processes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        up = [slot for slot in self.slots if slot.actor is not None and slot.state == "up"]
        drained = [slot.actor.drain.remote() for slot in up]
        if drained:
            ray.wait(drained, num_returns=len(drained), timeout=timeout_s)
        for slot in self.slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        return [slot.status for slot in self.slots if slot.status is not None]

    def _spawn(self, slot: Slot) -> None:
        self.fleet.begin(slot, time.monotonic())
        hide_gpus = not self._options.get("num_gpus")
        options = {**self._options, **self._naming(slot.index, slot.generation)}
        slot.actor = self._actor_class.options(**options).remote(self._settings, hide_gpus)
        slot.ready, slot.watch = slot.actor.ready.remote(), slot.actor.until_death.remote()

    def _late(self, slot: Slot) -> str:
        have, free = ray.cluster_resources(), ray.available_resources()
        asked = {key: self._options.get(key) for key in ("num_cpus", "num_gpus")}
        return (
            f"replica {slot.index} was not ready in {self._start_timeout_s} s: it asked for {asked}, the "
            f"cluster has {have.get('CPU', 0)} CPU and {have.get('GPU', 0)} GPU, free are "
            f"{free.get('CPU', 0)} and {free.get('GPU', 0)}"
        )

    def _watch(self) -> None:
        try:
            self._begin()
            while not self._stop.is_set():
                self._turn()
        except BaseException as error:
            # Nobody would replace a replica from here on: an error, and not a job that waits for ever.
            self._failure = f"the supervisor of the replicas failed: {type(error).__name__}: {error}"
            raise

    def _turn(self) -> None:
        """Wait for one event of a replica, briefly, and do what is due."""
        waiting = {slot.watch: slot for slot in self.slots if slot.state in ("up", "starting", "draining")}
        waiting |= {slot.ready: slot for slot in self.slots if slot.state == "starting"}
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_S) if waiting else ([], [])
        with self._lock:
            for reference in done:
                # A slot that scale() removed during the wait is nobody's business any more.
                if waiting[reference] in self.fleet.slots:
                    self._handle(waiting[reference], reference)
            self._do_what_is_due(time.monotonic())
        if not waiting:
            self._stop.wait(POLL_S)

    def _do_what_is_due(self, now_s: float) -> None:
        for slot in self.fleet.due(now_s):
            self._spawn(slot)
        for slot in self.fleet.late(now_s, self._start_timeout_s):
            trouble = self._late(slot)
            ray.kill(slot.actor)
            self._lost(slot, trouble)
        assert self._router is not None
        for slot in self.slots:
            if slot.state == "up" and not slot.attached:
                slot.attached = self._router.attach(slot)
            elif slot.state == "draining" and (self._router.drain(slot) or now_s > slot.drain_until_s):
                self._end(slot)

    def _handle(self, slot: Slot, reference: Any) -> None:
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayError as death:
            self._lost(slot, f"{type(death).__name__}: {death}".splitlines()[0])
            return
        try:
            trouble = self.fleet.welcome(slot, answer)
        except WireError as error:
            trouble = str(error)
        if trouble:
            ray.kill(slot.actor)
            self._lost(slot, trouble)

    def _lost(self, slot: Slot, trouble: str) -> None:
        assert self._router is not None
        took_work = slot.state in ("up", "draining")
        progressed, reason = self._router.detach(slot) if took_work else (False, "")
        leaving = slot.state == "draining"
        replaced = self.fleet.lost(slot, reason or trouble, progressed=progressed, now_s=time.monotonic())
        if not leaving:
            LOG.warning(
                "replica %d was lost (%s): %s",
                slot.index,
                slot.trouble,
                "another is started, its items are scored again" if replaced else "not replaced",
            )

    def _end(self, slot: Slot) -> None:
        """A replica leaves: what it may still have goes to others, its model is closed, its process ended."""
        assert self._router is not None
        self._router.detach(slot)
        ray.wait([slot.actor.drain.remote()], timeout=CLOSE_S)
        ray.kill(slot.actor)
        self.fleet.left(slot)
