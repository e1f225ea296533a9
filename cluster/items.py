"""What a job hands to a pool and gets back: ragged arrays, one item a text whose tail is scored.

No Ray and no text here: token ids in, log-probabilities out. An item is the unit of retry and exactly-once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..workers.effort import Effort

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Groups:
    """Which items go to one depth together, and the rule that says to which.

    offsets: int64 [g + 1], items of group k are [offsets[k], offsets[k + 1]). compared: bool [n], whether an
    item takes part in the decision; some at the beginning of each group, at least the first.
    """

    offsets: Int64Array
    compared: BoolArray
    effort: Effort


@dataclass(frozen=True, slots=True)
class Items:
    """Scoring items of one window.

    token_ids: int32 [total], all items one after the other, each at most max_seq_len + 1 ids long.
    offsets:   int64 [n + 1], item i is token_ids[offsets[i]:offsets[i + 1]].
    n_scored:  int32 [n], how many ids at the end of item i are scored; 1 <= n_scored[i] <= len(item i) - 1.
    depth:     loops to run, 1 <= depth; where groups have a rule, those that shared prefixes are built with.
    groups:    of items that are placed, run and retried together; None: each is on its own.
    """

    token_ids: Int32Array
    offsets: Int64Array
    n_scored: Int32Array
    depth: int
    groups: Groups | None = None

    def __len__(self) -> int:
        return len(self.n_scored)

    @property
    def num_units(self) -> int:
        """How many there are of what is placed: groups, or items on their own."""
        return len(self) if self.groups is None else len(self.groups.offsets) - 1

    def of_units(self, units: Int32Array) -> Int32Array:
        """int32: the items of some groups; of items on their own, themselves."""
        if self.groups is None:
            return units
        begins, ends = self.groups.offsets[units], self.groups.offsets[units + 1]
        counts = ends - begins
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        items: Int32Array = (np.repeat(begins, counts) + within).astype(np.int32)
        return items

    def units_of(self, items: Int32Array) -> Int32Array:
        """int32, rising: the groups of some items; of items on their own, themselves."""
        if self.groups is None:
            return items
        return np.unique(np.searchsorted(self.groups.offsets, items, side="right") - 1).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Scored:
    """Items of one window that were scored.

    items:    int32 [m], indices into the window.
    logprobs: float32 [S], ln p of each scored id; S = offsets[-1]; -inf and NaN are passed on.
    greedy:   bool [S], whether the id is the argmax (lowest id on ties).
    offsets:  int64 [m + 1] into logprobs and greedy.
    depths:   int32 [m], loops that each item ran; None: those that its window asked for.
    row_loops: rows times loops run for them, prefixes included. full_row_loops: the same at the last depth.
    """

    window: int
    items: Int32Array
    logprobs: Float32Array
    greedy: BoolArray
    offsets: Int64Array
    depths: Int32Array | None = None
    row_loops: int = 0
    full_row_loops: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """One item that will not be scored. error_class is one of the classes of errors.jsonl."""

    window: int
    item: int
    error_class: str
    message: str
    attempts: int


class ScoringPool(Protocol):
    """The face of a pool that a job needs. Every submitted item comes back exactly once, in any order."""

    def submit(self, window: int, items: Items) -> None:
        """Take one window. Blocks while more than two windows are in flight."""

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        """What has finished since the last call; waits up to timeout_s seconds for something."""


@runtime_checkable
class CancellingPool(Protocol):
    """A pool that can drop a window that is on its way."""

    def cancel(self, window: int) -> int:
        """Give a window up. Returns how many of its items had not been collected; they never will be."""
