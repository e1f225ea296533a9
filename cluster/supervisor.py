"""The replicas of one pool as their owner sees them: started, watched, replaced by new generations.

Invariant: a slot is given up after `crash_limit` deaths in a row without any work done; nothing is retried
for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from ..workers.model import ReplicaSettings
from ..workers.replica import REPLICA_OPTIONS, Replica
from ..workers.status import ModelFacts, State, Status, decode_status
from ..workers.wire import WireError

LOG = logging.getLogger(__name__)

LONGEST_PAUSE_S = 60.0
POLL_S = 0.2


class PoolError(RuntimeError):
    """The pool cannot go on: the infrastructure failed, not an item."""


@dataclass(slots=True)
class Slot:
    """One place for a replica. state: starting, up, waiting (for its next start) or given up."""

    index: int
    generation: int = 0
    state: str = "waiting"
    actor: Any = None
    ready: Any = None
    watch: Any = None
    status: Status | None = None
    status_bytes: bytes = b""
    attached: bool = False
    barren: int = 0
    started_s: float = 0.0
    restart_s: float = 0.0
    trouble: str = ""


class Supervisor:
    """Owns the replica actors. `attach` and `detach` tell the router; both may fail while it restarts."""

    def __init__(
        self, settings: ReplicaSettings, options: dict[str, Any], slots: int, crash_limit: int
    ) -> None:
        self._settings = settings
        self._options = options
        self._crash_limit = crash_limit
        self._allow_mixed, self._start_timeout_s = False, 0.0
        self.slots = [Slot(index) for index in range(slots)]
        self.facts: ModelFacts | None = None
        self.deaths = 0
        self._actor_class = ray.remote(**REPLICA_OPTIONS)(Replica)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._attach: Callable[[Slot], bool] = lambda slot: False
        self._failure = ""
        self._detach: Callable[[Slot], tuple[bool, str]] = lambda slot: (False, "")

    def spawn_all(self) -> None:
        """Start every replica, without waiting."""
        for slot in self.slots:
            self._spawn(slot)

    def wait_ready(self, timeout_s: float, *, allow_mixed: bool) -> None:
        """Wait until every replica has loaded. Raises PoolError with the reason of one that did not."""
        self._allow_mixed, self._start_timeout_s = allow_mixed, timeout_s
        deadline = time.monotonic() + timeout_s
        for slot in self.slots:
            try:
                answer = ray.get(slot.ready, timeout=max(deadline - time.monotonic(), 0.001))
            except ray.exceptions.GetTimeoutError:
                raise PoolError(self._late(slot, timeout_s)) from None
            except ray.exceptions.RayError as death:
                raise PoolError(
                    f"replica {slot.index} died while it loaded {self._settings.model}: {death}"
                ) from None
            if trouble := self._welcome(slot, answer):
                raise PoolError(trouble)

    def watch(self, attach: Callable[[Slot], bool], detach: Callable[[Slot], tuple[bool, str]]) -> None:
        """Begin to replace dead replicas."""
        self._attach, self._detach = attach, detach
        self._thread = threading.Thread(target=self._watch, name="pool-supervisor", daemon=True)
        self._thread.start()

    def up(self) -> list[Slot]:
        """Slots whose replica takes work."""
        return [slot for slot in self.slots if slot.state == "up"]

    def trouble(self) -> str:
        """Why nothing can go on, if every slot was given up; else empty."""
        if self._failure:
            return self._failure
        if any(slot.state != "given up" for slot in self.slots):
            return ""
        return f"all {len(self.slots)} replicas were lost; the last: {self.slots[-1].trouble}"

    def close(self, timeout_s: float) -> list[Status]:
        """Drain every replica and end those that do not. Returns the last statuses, for their processes."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        alive = [slot for slot in self.slots if slot.actor is not None and slot.state in ("up", "starting")]
        drained = [slot.actor.drain.remote() for slot in alive if slot.state == "up"]
        if drained:
            ray.wait(drained, num_returns=len(drained), timeout=timeout_s)
        for slot in self.slots:
            if slot.actor is not None:
                ray.kill(slot.actor)
        return [slot.status for slot in self.slots if slot.status is not None]

    def _spawn(self, slot: Slot) -> None:
        slot.generation += 1
        hide_gpus = not self._options.get("num_gpus")
        slot.actor = self._actor_class.options(**self._options).remote(self._settings, hide_gpus)
        slot.ready, slot.watch = slot.actor.ready.remote(), slot.actor.until_death.remote()
        slot.state, slot.attached, slot.started_s = "starting", False, time.monotonic()

    def _welcome(self, slot: Slot, answer: bytes) -> str:
        """Check what a replica says of itself. Returns why it is of no use, or nothing and it is up."""
        status = decode_status(answer)
        if status.state != State.READY or status.facts is None:
            return (
                f"replica {slot.index} could not load {self._settings.model}: phase {status.phase}: "
                f"{status.message} (threads {self._settings.threads}, options {self._settings.load_options})"
            )
        if self.facts is None:
            self.facts = status.facts
        if trouble := self._unlike(status.facts, slot.index):
            return trouble
        slot.status, slot.status_bytes, slot.state = status, answer, "up"
        return ""

    def _unlike(self, facts: ModelFacts, index: int) -> str:
        assert self.facts is not None
        for name in ("digest", "numerics_id", "self_test"):
            ours, theirs = getattr(self.facts, name), getattr(facts, name)
            if ours != theirs and (name == "digest" or not self._allow_mixed):
                return (
                    f"replica {index} has {name} {theirs}, the pool has {ours}: "
                    "scores would depend on placement: use equal machines and builds, or allow_mixed"
                )
        return ""

    def _late(self, slot: Slot, timeout_s: float) -> str:
        have, free = ray.cluster_resources(), ray.available_resources()
        asked = {key: self._options.get(key) for key in ("num_cpus", "num_gpus")}
        return (
            f"replica {slot.index} was not ready in {timeout_s} s: it asked for {asked}, the cluster has "
            f"{have.get('CPU', 0)} CPU and {have.get('GPU', 0)} GPU, free are "
            f"{free.get('CPU', 0)} and {free.get('GPU', 0)}"
        )

    def _watch(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
        except BaseException as error:
            # Nobody would replace a replica from here on: an error, and not a job that waits for ever.
            self._failure = f"the supervisor of the replicas failed: {type(error).__name__}: {error}"
            raise

    def _turn(self) -> None:
        """Wait for one event of a replica, briefly, and do what is due."""
        waiting = {slot.watch: slot for slot in self.slots if slot.state in ("up", "starting")}
        waiting |= {slot.ready: slot for slot in self.slots if slot.state == "starting"}
        done, _ = ray.wait(list(waiting), num_returns=1, timeout=POLL_S) if waiting else ([], [])
        for reference in done:
            self._handle(waiting[reference], reference)
        for slot in self.slots:
            if slot.state == "waiting" and time.monotonic() >= slot.restart_s:
                self._spawn(slot)
            if slot.state == "starting" and time.monotonic() > slot.started_s + self._start_timeout_s:
                trouble = self._late(slot, self._start_timeout_s)
                ray.kill(slot.actor)
                self._lost(slot, trouble)
            if slot.state == "up" and not slot.attached:
                slot.attached = self._attach(slot)
        if not waiting:
            self._stop.wait(POLL_S)

    def _handle(self, slot: Slot, reference: Any) -> None:
        try:
            answer = ray.get(reference)
        except ray.exceptions.RayError as death:
            self._lost(slot, f"{type(death).__name__}: {death}".splitlines()[0])
            return
        try:
            trouble = self._welcome(slot, answer)
        except WireError as error:
            trouble = str(error)
        if trouble:
            ray.kill(slot.actor)
            self._lost(slot, trouble)

    def _lost(self, slot: Slot, trouble: str) -> None:
        """Plan the next generation: at once if this one did any work, else later and in the end never."""
        self.deaths += 1
        progressed, reason = self._detach(slot) if slot.state == "up" else (False, "")
        slot.barren = 0 if progressed else slot.barren + 1
        slot.trouble = reason or trouble
        given_up = slot.barren >= self._crash_limit
        LOG.warning(
            "replica %d was lost (%s): %s",
            slot.index,
            slot.trouble,
            "not replaced" if given_up else "another is started, its items are scored again",
        )
        if given_up:
            slot.state = "given up"
            return
        pause_s = min(2.0 ** (slot.barren - 2), LONGEST_PAUSE_S) if slot.barren > 1 else 0.0
        slot.restart_s = time.monotonic() + pause_s
        slot.state = "waiting"
