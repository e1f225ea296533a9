"""The completions that one replica works on: requests in, ids out to the outbox, slice by slice.

Owned by the engine thread. A completion is known by its owner (client, window, item); a second request of the
same owner takes the place of the first and comes to the same ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .model import Batch, Int32Array, Model, Prefix, is_a
from .outbox import Outbox, Owner
from .prompts import Prompts
from .tokens import End
from .wire import ItemFailure

_ENDS = {"stop": End.STOP, "length": End.LENGTH}


@dataclass(slots=True)
class _Run:
    """A completion in the batch. length: ids that came so far."""

    owner: Owner
    length: int = 0


class Generating:
    """One batch of the engine that requests join at any command and leave at any slice."""

    def __init__(self, model: Model, outbox: Outbox, max_batch: int | None = None) -> None:
        self._model = model
        self._max_batch = max_batch
        self._outbox = outbox
        self._batch: Batch | None = None
        self._runs: dict[int, _Run] = {}
        self._keys: dict[Owner, int] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def add(self, prompts: Prompts, item: int, own_ids: Int32Array, prefix: Prefix | None) -> str:
        """Let one request join. own_ids: its ids after the prefix.

        Returns the class of its error if the engine refuses it, which its client is told, else nothing.
        Raises what says that the engine is broken.
        """
        owner = (prompts.client, prompts.window, item)
        self._end(owner)
        self._outbox.begin(owner)
        try:
            key = self._open_batch().add(
                own_ids, int(prompts.max_new_tokens[item]), **_settings(prompts, item, prefix)
            )
        except Exception as error:
            kind = request_error_class(error)
            if kind is None:
                raise
            self.refuse(owner, kind, str(error))
            return kind
        self._runs[key], self._keys[owner] = _Run(owner), key
        return ""

    def refuse(self, owner: Owner, error_class: str, message: str) -> None:
        """Tell a client that a request of it gets no ids."""
        self._outbox.begin(owner)
        self._outbox.end(owner, 0, End.FAILED, ItemFailure(owner[2], error_class, message))
        self._outbox.tell({owner[0]})

    def step(self, seconds: float) -> None:
        """Generate for that long, one step at least, and hand on what came."""
        if not self._runs:
            return
        step = self._open_batch().step(seconds)
        told = self._hand_on(step.keys, step.token_ids, step.logprobs, step.depths)
        for key, reason in step.finished:
            run = self._forget(key)
            self._outbox.end(run.owner, run.length, _ENDS[reason])
            told.add(run.owner[0])
        for key, error in step.failed:
            run = self._forget(key)
            kind = "out_of_memory" if is_a(error, "OutOfMemoryError") else "non_finite"
            self._outbox.end(run.owner, run.length, End.FAILED, ItemFailure(run.owner[2], kind, str(error)))
            told.add(run.owner[0])
        self._outbox.tell(told)

    def cancel(self, owners: Iterable[Owner]) -> None:
        """Forget requests; those that have ended are passed over."""
        for owner in owners:
            self._end(owner)

    def cancel_all(self) -> None:
        """Forget every request: whoever asked for them asks again, or is gone."""
        self.cancel(list(self._keys))

    def make_room(self) -> bool:
        """Give up the memory of the sequences, which are computed again later. False if there were none."""
        if self._batch is None or not self._batch.running:
            return False
        self._batch.put_back()
        return True

    def close(self) -> None:
        """Forget every request and free the batch."""
        self._runs.clear()
        self._keys.clear()
        if self._batch is not None:
            self._batch.close()

    def _open_batch(self) -> Batch:
        if self._batch is None:
            self._batch = self._model.generation(self._max_batch)
        return self._batch

    def _hand_on(self, *columns: NDArray[Any]) -> set[str]:
        keys = columns[0]
        told = set()
        for key in np.unique(keys).tolist():
            run, mine = self._runs[key], np.flatnonzero(keys == key)
            token_ids, logprobs, depths = (column[mine].tolist() for column in columns[1:])
            self._outbox.put(run.owner, run.length, token_ids, logprobs, depths)
            run.length += len(mine)
            told.add(run.owner[0])
        return told

    def _end(self, owner: Owner) -> None:
        key = self._keys.get(owner)
        if key is not None:
            self._open_batch().cancel(key)
            self._forget(key)

    def _forget(self, key: int) -> _Run:
        run = self._runs.pop(key)
        del self._keys[run.owner]
        return run


def _settings(prompts: Prompts, item: int, prefix: Prefix | None) -> dict[str, object]:
    """The keywords of the engine's call for one item."""
    return {
        "prefix": prefix,
        "depth": int(prompts.depth[item]),
        "temperature": float(prompts.temperature[item]),
        "top_k": int(prompts.top_k[item]),
        "top_p": float(prompts.top_p[item]),
        "min_p": float(prompts.min_p[item]),
        "repetition_penalty": float(prompts.repetition_penalty[item]),
        "stop_ids": prompts.stops(item),
        "seed": int(prompts.seed[item]),
        "exit_threshold": float(prompts.exit_threshold[item]),
        "min_depth": int(prompts.min_depth[item]),
    }


def request_error_class(error: Exception) -> str | None:
    """The class of what the engine says against one request; None if the engine is broken."""
    if is_a(error, "OutOfMemoryError") or isinstance(error, MemoryError):
        return "out_of_memory"
    if is_a(error, "RowBudgetError"):
        return "continuation_too_long"
    return "invalid_request" if is_a(error, "InvalidInputError") or is_a(error, "MismatchError") else None
