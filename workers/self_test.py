"""What a replica proves before it takes work: every id scored, the same bits packed, plain and by prefix."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from .model import Int32Array, Model

LENGTH = 24


class SelfTestError(RuntimeError):
    """The model does not agree with itself; it must not score anything."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """digest: of the bits of the scores, equal on replicas that compute alike. total: their sum in nats."""

    digest: str
    total: float


def self_test(model: Model) -> SelfTest:
    """Score a fixed text in three ways. Raises SelfTestError if a count, a sum or a bit differs.

    A prefix hit must give the same bits as a miss, and a packed call the same bits as a plain one: everything
    the pool promises about retries and placement rests on it.
    """
    length = min(LENGTH, model.max_seq_len)
    if length < 2:
        raise SelfTestError(f"max_seq_len is {length}: nothing can be scored in less than 2 tokens")
    ids = (np.arange(1, length + 1, dtype=np.int64) * 7919 % int(model.descriptor["vocab_size"])).astype(
        np.int32
    )
    direct = np.asarray(model.score_tokens(ids))
    if len(direct) != length - 1 or not np.isfinite(direct).all():
        raise SelfTestError(
            f"scoring {length} ids gave {len(direct)} values, expected {length - 1} finite ones: {direct}"
        )
    # An item of 2 ids has no place for a prefix: its first id must be computed with the second.
    results = _packed(model, ids, length // 2) if length > 2 else _twice(model, ids)
    for name, values in results.items():
        expected = direct[-len(values) :]
        if not np.array_equal(values, expected):
            worst = float(np.abs(values - expected).max())
            raise SelfTestError(f"{name} differs from the plain scores of the same ids by up to {worst}")
    total = float(direct.sum(dtype=np.float64))
    return SelfTest(blake2b(direct.astype("<f4").tobytes(), digest_size=8).hexdigest(), total)


def _twice(model: Model, ids: Int32Array) -> dict[str, NDArray[np.float32]]:
    """The same ids two times in one packed call."""
    offsets = np.array([0, len(ids), 2 * len(ids)], dtype=np.int64)
    n_scored = np.full(2, len(ids) - 1, dtype=np.int32)
    scores = model.score(np.concatenate([ids, ids]), offsets, n_scored)
    middle = int(scores.offsets[1])
    return {"a packed call": scores.logprobs[:middle], "its second item": scores.logprobs[middle:]}


def _packed(model: Model, ids: Int32Array, half: int) -> dict[str, NDArray[np.float32]]:
    prefix = model.prefix(ids[:half])
    try:
        packed = np.concatenate([ids, ids[half:]])
        offsets = np.array([0, len(ids), len(packed)], dtype=np.int64)
        n_scored = np.array([len(ids) - 1, len(ids) - half - 1], dtype=np.int32)
        scores = model.score(packed, offsets, n_scored, prefixes=[None, prefix])
    finally:
        prefix.close()
    middle = int(scores.offsets[1])
    return {"a packed call": scores.logprobs[:middle], "a prefix hit": scores.logprobs[middle:]}
