"""One item on its way through the engine, and what the engine's answer means for it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .model import Int32Array, Prefix, is_a
from .wire import ItemFailure, Result


@dataclass(slots=True)
class Piece:
    """One item ready for the engine, and its scores once it has them. depth: loops they took, if counted."""

    item: int
    token_ids: Int32Array
    n_scored: int
    prefix: Prefix | None
    logprobs: NDArray[np.float32] | None = None
    greedy: NDArray[np.bool_] | None = None
    depth: int = 0


def flat(pieces: Sequence[Piece]) -> tuple[Int32Array, NDArray[np.int64], Int32Array]:
    """Ids of all pieces, their offsets and how many of each are scored, as the engine takes them."""
    return (
        np.concatenate([piece.token_ids for piece in pieces]).astype(np.int32, copy=False),
        np.cumsum([0, *(len(piece.token_ids) for piece in pieces)], dtype=np.int64),
        np.array([piece.n_scored for piece in pieces], dtype=np.int32),
    )


def take_scores(
    pieces: Sequence[Piece],
    logprobs: NDArray[np.float32],
    greedy: NDArray[np.bool_],
    offsets: NDArray[np.int64],
) -> None:
    """Give each piece its scores. Raises RuntimeError if they are not as many as were asked for."""
    for index, piece in enumerate(pieces):
        begin, end = int(offsets[index]), int(offsets[index + 1])
        if end - begin != piece.n_scored:
            raise RuntimeError(
                f"engine returned {end - begin} scores for {piece.n_scored} ids of item {piece.item}"
            )
        piece.logprobs, piece.greedy = logprobs[begin:end], greedy[begin:end]


def item_error_class(error: Exception) -> str | None:
    """The class of errors.jsonl for what the engine says of an item; None if the engine is broken."""
    if is_a(error, "OutOfMemoryError") or isinstance(error, MemoryError):
        return "out_of_memory"
    if is_a(error, "RowBudgetError"):
        return "continuation_too_long"
    return "internal" if is_a(error, "InvalidInputError") else None


def finite(piece: Piece, failures: list[ItemFailure]) -> bool:
    """Whether the scores are numbers; a true zero probability (-inf) is one, NaN and +inf are not."""
    assert piece.logprobs is not None
    wrong = np.flatnonzero(np.isnan(piece.logprobs) | np.isposinf(piece.logprobs))
    if len(wrong):
        message = f"log-probability {int(wrong[0])} of {piece.n_scored} is {piece.logprobs[wrong[0]]}"
        failures.append(ItemFailure(piece.item, "non_finite", message))
    return not len(wrong)


def gather(scored: Sequence[Piece], failures: Sequence[ItemFailure]) -> Result:
    """The answer to a command at a fixed depth."""
    logprobs = [piece.logprobs for piece in scored if piece.logprobs is not None]
    greedy = [piece.greedy for piece in scored if piece.greedy is not None]
    return Result(
        items=np.array([piece.item for piece in scored], dtype=np.int32),
        logprobs=np.concatenate(logprobs) if logprobs else np.empty(0, dtype=np.float32),
        greedy=np.concatenate(greedy) if greedy else np.empty(0, dtype=np.bool_),
        offsets=np.cumsum([0, *(len(part) for part in logprobs)], dtype=np.int64),
        failures=tuple(failures),
    )
