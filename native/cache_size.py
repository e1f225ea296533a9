"""What a token's keys and values take in memory, by the way they are stored, and its states.

The engine states the same sizes where it allocates (src/cache.cc), and plan() gives them for a file that
loads with the options of its call. Here they follow from a descriptor alone: inspect describes files without
the choices of a load, a cascade asks about a model whose file may be gone, each for its own number of rows.
A test holds the two statements against each other for every family and mode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .descriptor import integer
from .records import Value

_INT8_GROUP, _INT4_GROUP = 128, 64
_LINE = 64  # what the engine rounds every allocation on the CPU up to


def planes(descriptor: Mapping[str, Value]) -> int:
    """Planes of keys and values at the depth that the model was made for: one a layer and run of it."""
    n_layers, n_low, cycles, loops, prelude, coda = (
        integer(descriptor, key)
        for key in ("n_layers", "n_low", "low_cycles", "loops", "n_prelude", "n_coda")
    )
    once = prelude + coda
    looped = n_low * cycles + (n_layers - n_low) if n_low else n_layers - once
    return once + loops * looped


def cache_bytes(descriptor: Mapping[str, Value], mode: str) -> int:
    """Bytes a token in all planes; the first tokens of a sequence, which h_int4 keeps whole, not counted."""
    width, n_kv = integer(descriptor, "hidden_size"), integer(descriptor, "n_kv_heads")
    kv = 2 * n_kv * integer(descriptor, "head_dim")
    plane = {
        "fp16": 2 * kv,
        "int8": kv + 2 * 2 * n_kv,  # a scale for each head's keys and one for its values
        "h_fp16": 2 * width,
        "h_int8": width + 2 * -(-width // _INT8_GROUP),
        "h_int4": (width + 1) // 2 + 4 * -(-width // _INT4_GROUP),  # scale and least value
    }[mode]
    return planes(descriptor) * plane


def state_bytes(descriptor: Mapping[str, Any], rows: int, block_bytes: int = _LINE) -> int:
    """Bytes of the float32 states that an upgradable prefix or a resume handle keeps for its rows.

    block_bytes: what the device rounds an allocation up to (Model.block_bytes); the CPU's, if not given.
    """
    states = 2 if descriptor["n_low"] or descriptor["inject"] == "linear" else 1
    return -(-4 * states * rows * int(descriptor["hidden_size"]) // block_bytes) * block_bytes
