"""What a router and a replica say to each other: msgpack behind one version byte, never unpickled.

Arrays travel as (dtype, bytes). Every decoder checks each field's type and raises WireError for anything
else, so hostile or torn bytes can be refused but never obeyed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import msgpack
import numpy as np
from numpy.typing import NDArray

# A message carries the version that its layout came with, so that those of old stay valid.
VERSION, OLDEST = 3, 2
DIGEST_BYTES = 16
MAX_BYTES = 1 << 30
SCORE, GENERATE = "score", "generate"
T = TypeVar("T")

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]


class WireError(ValueError):
    """Bytes that are not a message of this version."""


@dataclass(frozen=True, slots=True)
class Build:
    """One prefix to build: ids [begin, end) of item `source` after the prefix `parent`, if any."""

    digest: bytes
    parent: bytes
    source: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Command:
    """Drop, then build, then score `items` of one window or begin to generate for them, in that order.

    kind: SCORE or GENERATE, which is the window's. items: int32 [m] indices into the window; prefix_of: int32
    [m] index into prefixes, -1 for none.
    """

    epoch: int
    sequence: int
    window: str
    depth: int
    drops: tuple[bytes, ...]
    builds: tuple[Build, ...]
    prefixes: tuple[bytes, ...]
    items: Int32Array
    prefix_of: Int32Array
    kind: str = SCORE


@dataclass(frozen=True, slots=True)
class Ack:
    """What became of one command. A refused one changed nothing.

    table: exclusive or of the digests held after the command. rows: rows the engine computed. seconds: engine
    time.
    """

    epoch: int
    sequence: int
    refused: str
    built: tuple[tuple[bytes, int], ...]
    total_bytes: int
    table: bytes
    rows: int
    seconds: float
    failed: int


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """An item that this replica could not score."""

    item: int
    error_class: str
    message: str


@dataclass(frozen=True, slots=True)
class Result:
    """Scores of one command. Item i at offsets[i]:offsets[i + 1] of logprobs f32 and greedy bool.

    Where depth was left to a rule, depths: int32, loops that each item ran; row_loops: rows times the loops
    run for them, prefixes included; full_row_loops: the same at the last depth of the rule.
    """

    items: Int32Array
    logprobs: NDArray[np.float32]
    greedy: NDArray[np.bool_]
    offsets: Int64Array
    failures: tuple[ItemFailure, ...]
    depths: Int32Array | None = None
    row_loops: int = 0
    full_row_loops: int = 0


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """One prefix as a replica holds it: whole length in tokens, own bytes."""

    digest: bytes
    parent: bytes
    length: int
    depth: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything a replica holds, parents before children, and the epoch that starts with this answer."""

    epoch: int
    entries: tuple[HeldPrefix, ...]
    total_bytes: int


def pack(kind: str, fields: list[object], version: int = OLDEST) -> bytes:
    """One message: version byte, then msgpack of [kind, fields]."""
    return bytes([version]) + cast(bytes, msgpack.packb([kind, fields], use_bin_type=True))


def unpack(kind: str, message: bytes, num_fields: int, optional: int = 0) -> list[Any]:
    """Fields of a message of that kind. Raises WireError naming both versions or kinds when they differ.

    optional: fields that newer layouts have on top, all or none; None each where they are left out.
    """
    if not isinstance(message, bytes) or not 1 <= len(message) <= MAX_BYTES:
        raise WireError(f"expected 1 to {MAX_BYTES} bytes of a {kind} message, got {_shape(message)}")
    check_version(message[0])
    try:
        body = msgpack.unpackb(message[1:], raw=False, strict_map_key=True)
    except Exception as error:  # msgpack raises half a dozen unrelated types for damaged bytes
        raise WireError(f"a {kind} message is not valid msgpack: {error}") from None
    if not isinstance(body, list) or len(body) != 2 or body[0] != kind or not isinstance(body[1], list):
        raise WireError(f"expected a {kind} message, got {_shape(body)}")
    if len(body[1]) == num_fields:
        return [*body[1], *[None] * optional]
    if len(body[1]) != num_fields + optional:
        raise WireError(f"a {kind} message has {len(body[1])} fields, expected {num_fields + optional}")
    return body[1]


def check_version(theirs: int) -> None:
    """Raises WireError naming both versions when the peer speaks another one."""
    if not OLDEST <= theirs <= VERSION:
        raise WireError(
            f"peer speaks wire version {theirs}, this process {VERSION}: install one version everywhere"
        )


def array_fields(array: NDArray[Any]) -> list[object]:
    """An array as [dtype, bytes], little-endian."""
    flat = np.ascontiguousarray(array)
    return [flat.dtype.newbyteorder("<").str, flat.astype(flat.dtype.newbyteorder("<"), copy=False).tobytes()]


def array_from(value: object, dtype: str) -> NDArray[Any]:
    """A read-only array of that dtype. Raises WireError for another dtype or a torn length."""
    if not isinstance(value, list) or len(value) != 2 or value[0] != dtype or not isinstance(value[1], bytes):
        raise WireError(f"expected an array of {dtype}, got {_shape(value)}")
    if len(value[1]) % np.dtype(dtype).itemsize:
        raise WireError(f"array of {dtype} has {len(value[1])} bytes, not a whole number of elements")
    return np.frombuffer(value[1], dtype=dtype)


def typed(value: object, wanted: type[T]) -> T:
    """The value if it has exactly that type (a bool is no int). Raises WireError."""
    if type(value) is not wanted:
        raise WireError(f"expected {wanted.__name__}, got {_shape(value)}")
    return value


def counted(value: object) -> int:
    """A non-negative 63-bit integer. Raises WireError."""
    number = typed(value, int)
    if not 0 <= number < 1 << 63:
        raise WireError(f"expected a number from 0 to 2^63 - 1, got {number}")
    return number


def digest_from(value: object, *, or_empty: bool = False) -> bytes:
    """A digest of 16 bytes. Raises WireError."""
    digest = typed(value, bytes)
    if len(digest) != DIGEST_BYTES and not (or_empty and not digest):
        raise WireError(f"expected a digest of {DIGEST_BYTES} bytes, got {len(digest)}")
    return digest


def kind_of_work(value: object) -> str:
    """SCORE or GENERATE. Raises WireError naming any other."""
    kind = typed(value, str)
    if kind not in (SCORE, GENERATE):
        raise WireError(f"expected {SCORE!r} or {GENERATE!r} as the kind of work, got {kind[:80]!r}")
    return kind


def listed(value: object) -> list[Any]:
    """A list. Raises WireError."""
    return typed(value, list)


def record(value: object, num_fields: int) -> list[Any]:
    """A list of exactly that many fields. Raises WireError."""
    fields = typed(value, list)
    if len(fields) != num_fields:
        raise WireError(f"expected {num_fields} fields, got {len(fields)}")
    return fields


def _shape(value: object) -> str:
    text = (
        repr(value)
        if not isinstance(value, bytes | list | dict)
        else f"{type(value).__name__} of {len(value)}"
    )
    return text[:80]
