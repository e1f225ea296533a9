"""Which replicas a pool should have and what becomes of each: decisions alone, with the time passed in. Pure.

Invariant: a slot is given up after `crash_limit` deaths in a row without any work done, so nothing is retried
for ever; a generation of a slot is never used twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..workers.model import ReplicaSettings
from ..workers.status import ModelFacts, State, Status, decode_status
from .verdicts import verdict, verdict_of_loss

LONGEST_PAUSE_S = 60.0


class PoolError(RuntimeError):
    """The pool cannot go on: the infrastructure failed, not an item."""


class PoolFull(PoolError):
    """The pool has no room for what was to be submitted, and took none of it; it goes on."""


@dataclass(slots=True)
class Slot:
    """One place for a replica. state: starting, up, draining, waiting (for its next start) or given up.

    actor, ready, watch: references of the owner, meaningless here. loss: the verdict on the last death.
    """

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
    drain_until_s: float = 0.0
    trouble: str = ""
    loss: str = ""

    def view(self, in_flight: int = 0) -> dict[str, Any]:
        """What is shown of it, as values that msgpack takes."""
        return {
            "slot": self.index,
            "generation": self.generation,
            "state": self.state,
            "verdict": verdict(self.state, in_flight, self.loss),
            "pid": self.status.pid if self.status is not None else 0,
            "host": self.status.host if self.status is not None else "",
            "notice": self.status.message if self.status is not None else "",
            "trouble": self.trouble,
        }


class Fleet:
    """The slots of one pool. generations: the last ones of slots that an earlier owner had."""

    def __init__(
        self,
        num_slots: int,
        crash_limit: int,
        settings: ReplicaSettings,
        generations: Mapping[int, int] | None = None,
    ) -> None:
        self._crash_limit = crash_limit
        self._settings = settings
        self._generations = dict(generations or {})
        self.allow_mixed = False
        self.facts: ModelFacts | None = None
        self.deaths = 0
        self.deaths_by_reason: Counter[str] = Counter()
        self.slots = [self._slot(index) for index in range(num_slots)]

    @property
    def wanted(self) -> int:
        """Replicas that the pool should have."""
        return sum(slot.state != "draining" for slot in self.slots)

    def begin(self, slot: Slot, now_s: float) -> None:
        """A new generation of a slot is started."""
        slot.generation += 1
        self._generations[slot.index] = slot.generation
        slot.state, slot.attached, slot.started_s = "starting", False, now_s

    def adopt(self, slot: Slot, generation: int, now_s: float) -> None:
        """A replica that an earlier owner started goes on in its slot once it says that it is ready."""
        slot.generation = generation
        self._generations[slot.index] = max(generation, self._generations.get(slot.index, 0))
        slot.state, slot.attached, slot.started_s = "starting", False, now_s

    def due(self, now_s: float) -> list[Slot]:
        """Slots whose next generation is to be started now."""
        return [slot for slot in self.slots if slot.state == "waiting" and now_s >= slot.restart_s]

    def late(self, now_s: float, start_timeout_s: float) -> list[Slot]:
        """Slots whose replica should have been ready by now."""
        return [s for s in self.slots if s.state == "starting" and now_s > s.started_s + start_timeout_s]

    def welcome(self, slot: Slot, answer: bytes) -> str:
        """Check what a replica says of itself. Returns why it is of no use, or nothing and it is up.

        Raises WireError for what is no status.
        """
        status = decode_status(answer)
        slot.status = status
        if status.state != State.READY or status.facts is None:
            return (
                f"replica {slot.index} could not load {self._settings.model}: phase {status.phase}: "
                f"{status.message} (threads {self._settings.threads}, options {self._settings.load_options})"
            )
        if self.facts is None:
            self.facts = status.facts
        if trouble := self._unlike(status.facts, slot.index):
            return trouble
        slot.status_bytes, slot.state = answer, "up"
        return ""

    def lost(self, slot: Slot, trouble: str, *, progressed: bool, now_s: float) -> bool:
        """A replica is gone. Plan the next: at once if it did any work, else later, in the end never.

        Returns whether there will be one. A slot that was leaving has left.
        """
        if slot.state == "draining":
            self.slots.remove(slot)
            return False
        self.deaths += 1
        slot.barren = 0 if progressed else slot.barren + 1
        slot.trouble, slot.loss = trouble, verdict_of_loss(trouble)
        self.deaths_by_reason[slot.loss] += 1
        if slot.barren >= self._crash_limit:
            slot.state = "given up"
            return False
        pause_s = min(2.0 ** (slot.barren - 2), LONGEST_PAUSE_S) if slot.barren > 1 else 0.0
        slot.restart_s, slot.state = now_s + pause_s, "waiting"
        return True

    def resize(self, num_replicas: int, drain_until_s: float) -> list[Slot]:
        """Have so many replicas from now on. Returns slots without use that were removed at once.

        Slots beyond the number finish what they have and then leave; slots that were given up try again.
        """
        for slot in self.slots:
            if slot.state == "given up":
                slot.state, slot.barren, slot.restart_s = "waiting", 0, 0.0
        staying = [slot for slot in self.slots if slot.state != "draining"]
        removed = []
        for slot in staying[num_replicas:]:
            if slot.state == "up":
                slot.state, slot.drain_until_s = "draining", drain_until_s
            else:
                self.slots.remove(slot)
                removed.append(slot)
        used = {slot.index for slot in self.slots}
        free = (index for index in range(len(used) + num_replicas) if index not in used)
        self.slots += [self._slot(next(free)) for _ in range(num_replicas - len(staying))]
        self.slots.sort(key=lambda slot: slot.index)
        return removed

    def left(self, slot: Slot) -> None:
        """A draining replica has finished and its process is ended."""
        self.slots.remove(slot)

    def trouble(self) -> str:
        """Why nothing can go on, if every slot was given up; else empty."""
        if any(slot.state != "given up" for slot in self.slots):
            return ""
        return f"all {len(self.slots)} replicas were lost; the last: {self.slots[-1].trouble}"

    def _slot(self, index: int) -> Slot:
        return Slot(index, generation=self._generations.get(index, 0))

    def _unlike(self, facts: ModelFacts, index: int) -> str:
        assert self.facts is not None
        for name in ("digest", "numerics_id", "self_test"):
            ours, theirs = getattr(self.facts, name), getattr(facts, name)
            if ours != theirs and (name == "digest" or not self.allow_mixed):
                return (
                    f"replica {index} has {name} {theirs}, the pool has {ours}: "
                    "scores would depend on placement: use equal machines and builds, or allow_mixed"
                )
        return ""
