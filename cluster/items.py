"""What a job hands to a pool and gets back: ragged arrays, one item a text whose tail is scored.

No Ray and no text here: token ids in, log-probabilities out. An item is the unit of retry and exactly-once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Items:
    """Scoring items of one window.

    token_ids: int32 [total], all items one after the other, each at most max_seq_len + 1 ids long.
    offsets:   int64 [n + 1], item i is token_ids[offsets[i]:offsets[i + 1]].
    n_scored:  int32 [n], how many ids at the end of item i are scored; 1 <= n_scored[i] <= len(item i) - 1.
    depth:     loops to run, 1 <= depth.
    """

    token_ids: Int32Array
    offsets: Int64Array
    n_scored: Int32Array
    depth: int

    def __len__(self) -> int:
        return len(self.n_scored)


@dataclass(frozen=True, slots=True)
class Scored:
    """Items of one window that were scored.

    items:    int32 [m], indices into the window.
    logprobs: float32 [S], ln p of each scored id; S = offsets[-1]; -inf and NaN are passed on.
    greedy:   bool [S], whether the id is the argmax (lowest id on ties).
    offsets:  int64 [m + 1] into logprobs and greedy.
    """

    window: int
    items: Int32Array
    logprobs: Float32Array
    greedy: BoolArray
    offsets: Int64Array


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
