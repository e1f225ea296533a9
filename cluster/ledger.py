"""What a client has submitted and not got back. Results are keyed by (window, item) and the first one wins.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..workers.messages import decode_result
from ..workers.wire import Result
from .items import BoolArray, Failed, Int32Array, Items, Scored
from .wire import Delivery


@dataclass(slots=True)
class _Open:
    items: Items
    done: BoolArray
    remaining: int


class Ledger:
    """Conserves items: submitted = returned + missing, and no item is returned twice.

    computed_rows: what replicas computed for what came back; total_rows: the same if nothing were shared;
    sent_rows: total_rows of all that was submitted; ideal_rows: of that too, if each shared prefix of a
    window were computed once.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self.known: set[int] = set()
        self.computed_rows = self.total_rows = self.sent_rows = self.ideal_rows = 0

    @property
    def windows_in_flight(self) -> int:
        """Windows with items that have not come back."""
        return len(self._open)

    def open(self, window: int, items: Items) -> None:
        """A window is submitted. One without items is finished at once."""
        self.known.add(window)
        if len(items):
            self.sent_rows += len(items.token_ids) - len(items)
            self._open[window] = _Open(items, np.zeros(len(items), dtype=np.bool_), len(items))

    def items(self, window: int) -> Items:
        """The items of an open window."""
        return self._open[window].items

    def open_windows(self) -> list[int]:
        """Windows with items that have not come back, first submitted first."""
        return list(self._open)

    def missing(self, window: int, among: Int32Array | None = None) -> Int32Array:
        """int32 indices of the items that have not come back."""
        entry = self._open.get(window)
        if entry is None:
            return np.empty(0, dtype=np.int32)
        candidates = np.arange(len(entry.items), dtype=np.int32) if among is None else among
        return candidates[~entry.done[candidates]]

    def missing_of(self, delivery: Delivery) -> Int32Array:
        """int32 indices of the items of a delivery, which names what was placed, that have not come back."""
        entry = self._open.get(delivery.window)
        return self.missing(delivery.window, entry.items.of_units(delivery.items) if entry else None)

    def accept(self, delivery: Delivery, message: bytes) -> list[Scored | Failed]:
        """Scores of one command, less what has come back before. Raises WireError for other bytes."""
        result = decode_result(message)
        collected: list[Scored | Failed] = []
        if delivery.window not in self._open:
            return collected
        self.computed_rows += delivery.rows
        scored = _only(result, self.missing(delivery.window, result.items))
        if len(scored.items):
            self._mark(delivery.window, scored.items)
            offsets = self._open[delivery.window].items.offsets
            self.total_rows += int((offsets[scored.items + 1] - offsets[scored.items] - 1).sum())
            parts = (scored.items, scored.logprobs, scored.greedy, scored.offsets, scored.depths)
            collected.append(Scored(delivery.window, *parts, scored.row_loops, scored.full_row_loops))
        for failure in result.failures:
            one = np.array([failure.item], dtype=np.int32)
            if len(self.missing(delivery.window, one)):
                self._mark(delivery.window, one)
                collected.append(
                    Failed(
                        delivery.window, failure.item, failure.error_class, failure.message, delivery.attempts
                    )
                )
        return collected

    def fail(self, delivery: Delivery, item: int) -> Failed:
        """One item was given up by the pool."""
        self._mark(delivery.window, np.array([item], dtype=np.int32))
        return Failed(delivery.window, item, delivery.error_class, delivery.message, delivery.attempts)

    def drop(self, window: int) -> Int32Array:
        """Forget a window. Returns int32 indices of its items that had not come back."""
        missing = self.missing(window)
        self._open.pop(window, None)
        return missing

    def close_finished(self) -> list[int]:
        """Windows of which everything has come back since the last call; they are forgotten."""
        finished = [window for window, entry in self._open.items() if not entry.remaining]
        for window in finished:
            del self._open[window]
        return finished

    def _mark(self, window: int, items: Int32Array) -> None:
        entry = self._open[window]
        entry.done[items] = True
        entry.remaining -= len(items)


def _only(result: Result, wanted: Int32Array) -> Result:
    """The scores of the wanted items, in the order of the result."""
    if len(wanted) == len(result.items):
        return result
    keep = np.isin(result.items, wanted)
    lengths = np.diff(result.offsets)
    flat = np.repeat(keep, lengths)
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths[keep], dtype=np.int64)])
    return replace(
        result,
        items=result.items[keep],
        logprobs=result.logprobs[flat],
        greedy=result.greedy[flat],
        offsets=offsets,
        depths=None if result.depths is None else result.depths[keep],
    )
