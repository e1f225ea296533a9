"""The order of commands of one replica: by (epoch, sequence), whatever order calls arrive in.

Pure, with the time passed in. A refusal ends the epoch for commands: what was sent after a refused command
was planned on top of it, so it is refused too, and the sender starts a new epoch with an inventory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
GAP_S = 5.0


@dataclass(frozen=True, slots=True)
class _Early(Generic[T]):
    entry: T
    arrived_s: float


class Inbox(Generic[T]):
    """Bounded. Every entry offered is either taken once or refused once, with a reason."""

    def __init__(self, limit: int, gap_s: float = GAP_S) -> None:
        self.epoch = 0
        self._next = 0
        self._ended = ""
        self._limit = limit
        self._gap_s = gap_s
        self._waiting: dict[int, _Early[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, epoch: int, sequence: int, entry: T, now_s: float) -> list[tuple[T, str]]:
        """Take an entry in. Returns the entries, old or this one, that are refused by it."""
        refused: list[tuple[T, str]] = []
        if epoch > self.epoch:
            refused = self.start_epoch(epoch)
        reason = self._reason_against(epoch, sequence)
        if reason:
            return [*refused, (entry, reason)]
        self._waiting[sequence] = _Early(entry, now_s)
        return refused

    def take(self) -> T | None:
        """The next entry in order, or None if it has not arrived."""
        early = self._waiting.pop(self._next, None)
        if early is None:
            return None
        self._next += 1
        return early.entry

    def start_epoch(self, epoch: int) -> list[tuple[T, str]]:
        """Begin a later epoch at sequence 0. Returns what still waited, refused."""
        refused = self._clear(f"old epoch: {self.epoch} ended when {epoch} began")
        self.epoch, self._next, self._ended = epoch, 0, ""
        return refused

    def end_epoch(self, reason: str) -> list[tuple[T, str]]:
        """Refuse what waits and whatever else comes in this epoch."""
        self._ended = reason
        return self._clear(reason)

    def overdue(self, now_s: float) -> list[tuple[T, str]]:
        """Entries that waited too long for a missing one before them, refused; their epoch is over."""
        if self.wait_s(now_s) != 0.0:
            return []
        first = min(self._waiting)
        return self.end_epoch(f"gap: {first} arrived and {self._next} did not in {self._gap_s} s")

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until overdue() has something to say; None if nothing waits for a missing entry."""
        if not self._waiting or self._next in self._waiting:
            return None
        oldest = min(early.arrived_s for early in self._waiting.values())
        return max(oldest + self._gap_s - now_s, 0.0)

    def _reason_against(self, epoch: int, sequence: int) -> str:
        if epoch < self.epoch:
            return f"old epoch: {epoch}, the present one is {self.epoch}"
        if self._ended:
            return f"after a refusal: {self._ended}"
        if sequence < self._next or sequence in self._waiting:
            return f"repeated: sequence {sequence} of epoch {epoch} came before"
        if len(self._waiting) >= self._limit:
            return f"overloaded: {self._limit} commands wait"
        return ""

    def _clear(self, reason: str) -> list[tuple[T, str]]:
        refused = [(early.entry, reason) for early in self._waiting.values()]
        self._waiting.clear()
        return refused
