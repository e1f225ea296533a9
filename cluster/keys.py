"""The key of a prefix: what it is made of, and how the same ids are named at another depth. Pure."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from ..workers.wire import DIGEST_BYTES, Int32Array

# The last two bytes are the depth in the clear, so that whoever has a key can ask for a deeper one. The other
# 14 tell prefixes apart: among 10^9 the chance that any two are equal is below 10^-15, and a replica compares
# token ids on every hit anyway.
DEPTH_BYTES = 2
IDS_BYTES = DIGEST_BYTES - DEPTH_BYTES


def prefix_digest(token_ids: Int32Array, depth: int, model_digest: str) -> bytes:
    """Key of one prefix: 16 bytes over its whole int32 ids, the model and the depth it was run at.

    model_digest names all that decides what a prefix stores beside ids and depth: weights and cache mode.
    """
    key = blake2b(model_digest.encode(), digest_size=IDS_BYTES)
    key.update(np.ascontiguousarray(token_ids, dtype="<i4").tobytes())
    return key.digest() + depth.to_bytes(DEPTH_BYTES, "little")


def depth_of(digest: bytes) -> int:
    """Loops that a prefix with this key was run for."""
    return int.from_bytes(digest[IDS_BYTES:], "little")


def at_depth(digest: bytes, depth: int) -> bytes:
    """The key of the same ids run for `depth` loops."""
    return digest[:IDS_BYTES] + depth.to_bytes(DEPTH_BYTES, "little")
