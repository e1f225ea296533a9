"""Held prefixes, run deeper for the groups that go deeper: kept from command to command while there is room.

Owned by the engine thread. The router does not know of them: they live on what its prefixes leave of the
budget, and give way to those at once.
Invariant: what a turn uses, and whatever that shares memory with, is closed in a later turn at the earliest.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..native.cache_size import state_bytes
from .model import Model, Prefix
from .prefix_table import Held, PrefixTable


class NoRoomError(Exception):
    """A prefix cannot be run deeper within its budget."""


@dataclass(slots=True)
class _Deep:
    """An upgrade: what it takes beside the prefix that it came from, and the turn that last used it."""

    handle: Prefix
    size_bytes: int
    turn: int


class DeepPrefixes:
    """Upgrades of the prefixes of one table, by (digest, depth). limit_bytes: of the present turn."""

    def __init__(self, model: Model, table: PrefixTable) -> None:
        self._model, self._table = model, table
        self._exactly = bool(model.descriptor.get("n_coda", 0))
        self._deep: dict[tuple[bytes, int], _Deep] = {}
        self._turn = 0
        self.limit_bytes = 0
        self.total_bytes = 0
        self.row_loops = 0  # rows of prefixes times the loops that upgrades added, so far

    def begin_turn(self, limit_bytes: int) -> None:
        """From now on nothing is in use, and so many bytes may be held."""
        self._turn += 1
        self.limit_bytes = limit_bytes
        if self.total_bytes > limit_bytes:
            self.drop_unused()

    def at(self, held: Held, depth: int) -> Prefix:
        """A held prefix run for `depth` loops, open until the next turn.

        Raises NoRoomError, and what the engine raises.
        """
        if held.depth == depth or (held.depth > depth and not self._exactly):
            return held.handle
        # Its parent first: an upgrade stands on one that is as deep.
        parent = self.at(self._table.held(held.parent), depth) if held.parent else None
        known = self._deep.get((held.digest, depth))
        if known is None:
            known = self._upgrade(held, depth, parent)
        for (digest, _), deep in self._deep.items():
            if digest == held.digest:
                deep.turn = self._turn
        return known.handle

    def most_bytes(self, held: Held, depths: Collection[int]) -> int:
        """The most that upgrades to all of these depths, each from the last, may take without parents."""
        total, planes = 0, self._plane_bytes(held)
        before = held.depth
        for depth in sorted(depths):
            if depth > before:
                total += self._step_bytes(held, planes, before, depth)
                before = depth
        return total

    def forget(self, digests: Collection[bytes]) -> None:
        """These prefixes are dropped: their upgrades, which share their memory, go first."""
        self._close([key for key in self._deep if key[0] in digests])

    def drop_unused(self) -> None:
        """Close what this turn does not use."""
        self._close([key for key, deep in self._deep.items() if deep.turn != self._turn])

    def clear(self) -> bool:
        """Close everything; nothing may be in use. Returns whether there was anything."""
        had = bool(self._deep)
        self._close(list(self._deep))
        return had

    def _upgrade(self, held: Held, depth: int, parent: Prefix | None) -> _Deep:
        best = max((d for digest, d in self._deep if digest == held.digest and d < depth), default=held.depth)
        start = held.handle if best == held.depth else self._deep[held.digest, best].handle
        self._require(held, self._step_bytes(held, self._plane_bytes(held), best, depth))
        # By the model's own books: what the two share is counted once there too.
        before = int(self._model.vram_usage_bytes)
        handle = start.upgrade(depth, parent=parent)
        deep = _Deep(handle, int(self._model.vram_usage_bytes) - before, self._turn)
        self._deep[held.digest, depth] = deep
        self.total_bytes += deep.size_bytes
        self.row_loops += start.own_length * (depth - best)
        return deep

    def _require(self, held: Held, need: int) -> None:
        if self.total_bytes + need > self.limit_bytes:
            self.drop_unused()
        if self.total_bytes + need > self.limit_bytes:
            raise NoRoomError(
                f"an upgrade of a prefix of {len(held.token_ids)} tokens takes up to {need} bytes, "
                f"{self.total_bytes} of {self.limit_bytes} are in use"
            )

    def _states(self, held: Held) -> int:
        return state_bytes(self._model.descriptor, held.handle.own_length, self._model.block_bytes)

    def _plane_bytes(self, held: Held) -> int:
        return max(held.size_bytes - self._states(held), 0)

    def _step_bytes(self, held: Held, planes: int, before: int, depth: int) -> int:
        """The most that one upgrade takes: states anew, planes of its loops and of layers after the loops."""
        loops = -(-planes * (depth - before) // held.depth)
        again = planes if self._exactly else 0
        return self._states(held) + loops + again + 2 * self._model.block_bytes

    def _close(self, keys: list[tuple[bytes, int]]) -> None:
        for key in keys:
            deep = self._deep.pop(key)
            deep.handle.close()
            self.total_bytes -= deep.size_bytes
