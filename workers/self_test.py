"""What a replica proves before it takes work: every id scored, the same bits packed, plain and by prefix."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from .model import Model

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
    ids = (np.arange(1, length + 1, dtype=np.int64) * 7919 % int(model.descriptor["vocab_size"])).astype(
        np.int32
    )
    direct = np.asarray(model.score_tokens(ids))
    if len(direct) != length - 1 or not np.isfinite(direct).all():
        raise SelfTestError(
            f"scoring {length} ids gave {len(direct)} values, expected {length - 1} finite ones: {direct}"
        )
    half = length // 2
    with_prefix = _packed(model, ids, half)
    for name, values in with_prefix.items():
        expected = direct[-len(values) :]
        if not np.array_equal(values, expected):
            worst = float(np.abs(values - expected).max())
            raise SelfTestError(f"{name} differs from the plain scores of the same ids by up to {worst}")
    total = float(direct.sum(dtype=np.float64))
    return SelfTest(blake2b(direct.astype("<f4").tobytes(), digest_size=8).hexdigest(), total)


def _packed(
    model: Model, ids: np.ndarray[tuple[int, ...], np.dtype[np.int32]], half: int
) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
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
