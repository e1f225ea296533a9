"""What is to be generated, as columns of one window, and their way over the wire.

Ids and lengths are the engine's to refuse, request by request; what no model could take is refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from .wire import Int32Array, Int64Array, WireError, array_fields, array_from, counted, pack, typed, unpack

Float64Array = NDArray[np.float64]
MOST_DEPTH = 4096


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests of one client's window; item i has token_ids[offsets[i]:offsets[i + 1]].

    token_ids int32 [total], offsets int64 [n + 1]; stop_ids int32, those of item i at stop_offsets[i] to
    [i + 1]. Each of the others has n values: max_new_tokens, depth and min_depth int32, exit_threshold
    (infinity: never), temperature (0: the likeliest id), top_p, min_p and repetition_penalty float64, top_k
    int64 (0: all), seed uint64.
    """

    client: str
    window: int
    token_ids: Int32Array
    offsets: Int64Array
    stop_ids: Int32Array
    stop_offsets: Int64Array
    max_new_tokens: Int32Array
    depth: Int32Array
    min_depth: Int32Array
    exit_threshold: Float64Array
    temperature: Float64Array
    top_k: Int64Array
    top_p: Float64Array
    min_p: Float64Array
    repetition_penalty: Float64Array
    seed: NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.max_new_tokens)

    def ids(self, item: int) -> Int32Array:
        """The prompt of one item, a view."""
        return self.token_ids[self.offsets[item] : self.offsets[item + 1]]

    def stops(self, item: int) -> list[int]:
        """The ids that end one item."""
        stops: list[int] = self.stop_ids[self.stop_offsets[item] : self.stop_offsets[item + 1]].tolist()
        return stops


DTYPES = {
    "token_ids": "<i4",
    "offsets": "<i8",
    "stop_ids": "<i4",
    "stop_offsets": "<i8",
    "max_new_tokens": "<i4",
    "depth": "<i4",
    "min_depth": "<i4",
    "exit_threshold": "<f8",
    "temperature": "<f8",
    "top_k": "<i8",
    "top_p": "<f8",
    "min_p": "<f8",
    "repetition_penalty": "<f8",
    "seed": "<u8",
}
RAGGED = {"token_ids": "offsets", "stop_ids": "stop_offsets"}
SETTINGS = [name for name in DTYPES if name not in RAGGED and name not in RAGGED.values()]
# The rules of the engine's own check, so that a request is refused where it is made.
_RANGES: dict[str, tuple[Callable[[NDArray[np.float64]], NDArray[np.bool_]], str]] = {
    "max_new_tokens": (lambda v: v >= 1, "at least 1"),
    "depth": (lambda v: (v >= 1) & (v <= MOST_DEPTH), f"1 to {MOST_DEPTH}"),
    "min_depth": (lambda v: v >= 1, "1 to the depth"),
    "exit_threshold": (lambda v: v > 0, "above 0"),
    "temperature": (lambda v: np.isfinite(v) & (v >= 0), "0 (the likeliest id) or a positive number"),
    "top_k": (lambda v: v >= 0, "0 (all ids) or positive"),
    "top_p": (lambda v: (v > 0) & (v <= 1), "above 0 and at most 1 (all ids)"),
    "min_p": (lambda v: (v >= 0) & (v <= 1), "within 0 (all ids) and 1"),
    "repetition_penalty": (lambda v: np.isfinite(v) & (v > 0), "a positive number, 1 for none"),
}


def fault_of(prompts: Prompts) -> str:
    """The first value that no model could take: its name, item and range. Empty if there is none."""
    for ids, offsets in RAGGED.items():
        if fault := _fault_of_ragged(getattr(prompts, ids), getattr(prompts, offsets), ids, len(prompts)):
            return fault
    for name in SETTINGS:
        column = getattr(prompts, name)
        if len(column) != len(prompts):
            return f"{name} has {len(column)} values for {len(prompts)} prompts"
        if name in _RANGES:
            allowed, words = _RANGES[name]
            wrong = np.flatnonzero(~allowed(column))
            if len(wrong):
                return f"{name} of prompt {wrong[0]} is {column[wrong[0]]}: it must be {words}"
    deep = np.flatnonzero(prompts.min_depth > prompts.depth)
    if len(deep):
        item = deep[0]
        return f"min_depth of prompt {item} is {prompts.min_depth[item]}: it must be 1 to its depth, " + str(
            prompts.depth[item]
        )
    return ""


def _fault_of_ragged(ids: Int32Array, offsets: Int64Array, name: str, num_prompts: int) -> str:
    if len(offsets) != num_prompts + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
        return f"the offsets of {name} do not cover {len(ids)} ids of {num_prompts} prompts"
    return f"the offsets of {name} fall" if (offsets[1:] < offsets[:-1]).any() else ""


def encode_prompts(prompts: Prompts) -> bytes:
    """A window of requests as bytes."""
    columns = [array_fields(getattr(prompts, name)) for name in DTYPES]
    return pack("prompts", [prompts.client, prompts.window, *columns])


def decode_prompts(message: bytes) -> Prompts:
    """A window of requests from bytes. Raises WireError that names what is wrong with which prompt."""
    client, window, *columns = unpack("prompts", message, len(fields(Prompts)))
    arrays = {
        name: array_from(value, dtype) for (name, dtype), value in zip(DTYPES.items(), columns, strict=True)
    }
    prompts = Prompts(client=typed(client, str), window=counted(window), **arrays)
    if fault := fault_of(prompts):
        raise WireError(fault)
    return prompts
