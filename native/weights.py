"""How one tensor lies in bytes: plain float16/float32, or 4- and 8-bit codes with a scale and a zero a group.

A quantized weight means w[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group] in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .records import FormatError

Float32Array = NDArray[np.float32]

KINDS = {"f32": 1, "f16": 2, "q4": 4, "q8": 8}
GROUPS = (32, 64, 128)
_MAX_DIM = 2**31 - 1


@dataclass(frozen=True, slots=True)
class QuantWeight:
    """A quantized matrix [N, K].

    codes:  uint8 [N, K], unpacked, each below 2**bits.
    scales: float16 [N, G], G = ceil(K / group); the last group may be short.
    zeros:  float16 [N, G], in code units, may be fractional.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zeros: NDArray[np.float16]
    bits: int
    group: int

    @property
    def dims(self) -> tuple[int, int]:
        return (self.codes.shape[0], self.codes.shape[1])

    def take_rows(self, rows: NDArray[np.int64]) -> QuantWeight:
        """The rows in the given order; exact, since no group spans rows."""
        return QuantWeight(self.codes[rows], self.scales[rows], self.zeros[rows], self.bits, self.group)


Tensor = NDArray[np.float32] | NDArray[np.float16] | QuantWeight


def concatenate_rows(parts: list[QuantWeight]) -> QuantWeight:
    """One weight of all rows, in order; all parts have the same bits, group and columns."""
    codes, scales, zeros = (
        np.concatenate([getattr(part, field) for part in parts]) for field in ("codes", "scales", "zeros")
    )
    return QuantWeight(codes, scales, zeros, parts[0].bits, parts[0].group)


def dequantize(weight: QuantWeight) -> Float32Array:
    """float32 [N, K]."""
    columns = weight.codes.shape[1]
    scales, zeros = (
        np.repeat(a.astype(np.float32), weight.group, axis=1)[:, :columns]
        for a in (weight.scales, weight.zeros)
    )
    values: Float32Array = (weight.codes.astype(np.float32) - zeros) * scales
    return values


def pack_codes(codes: NDArray[np.uint8], bits: int) -> bytes:
    """Rows of ceil(K * bits / 8) bytes; at 4 bits the even column is the low nibble."""
    if bits == 8:
        return codes.tobytes()
    return (
        np.bitwise_or(codes[:, 0::2], np.left_shift(codes[:, 1::2], 4)).astype(np.uint8, copy=False).tobytes()
    )


def unpack_codes(raw: bytes, rows: int, columns: int, bits: int) -> NDArray[np.uint8]:
    """The inverse of pack_codes: uint8 [rows, columns]."""
    if bits == 8:
        return np.frombuffer(raw, np.uint8).reshape(rows, columns)
    packed = np.frombuffer(raw, np.uint8).reshape(rows, columns // 2)
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(rows, columns)


def tensor_kind(tensor: Tensor) -> str:
    """The kind name; FormatError for a dtype the format does not hold."""
    if isinstance(tensor, QuantWeight):
        return f"q{tensor.bits}"
    if tensor.dtype == np.float32:
        return "f32"
    if tensor.dtype == np.float16:
        return "f16"
    raise FormatError(f"tensor dtype {tensor.dtype}: the format holds float32, float16 and quantized weights")


def stored_bytes(kind: str, dims: tuple[int, ...], group: int) -> int:
    """Bytes of a tensor of that kind in the file."""
    if kind in ("f32", "f16"):
        return int(np.prod(dims, dtype=object)) * (4 if kind == "f32" else 2)
    rows, columns = dims
    bits = KINDS[kind]
    return rows * (-(-columns * bits // 8)) + 4 * rows * -(-columns // group)


def check_table_entry(name: str, kind: str, dims: tuple[int, ...], group: int, n_bytes: int) -> None:
    """FormatError when kind, dims, group and byte count cannot belong together."""
    if not all(1 <= dim <= _MAX_DIM for dim in dims):
        raise FormatError(f"dims of {name!r}: {list(dims)} are outside 1 to {_MAX_DIM}")
    quantized = kind in ("q4", "q8")
    if quantized and (len(dims) != 2 or group not in GROUPS):
        raise FormatError(
            f"group of {name!r}: a quantized tensor has 2 dims and a group of {GROUPS}, found {group}"
        )
    if not quantized and group:
        raise FormatError(f"group of {name!r}: {group} on a tensor of kind {kind}")
    if kind == "q4" and dims[1] % 2:
        raise FormatError(f"dims of {name!r}: 4-bit rows need an even length, found {dims[1]}")
    if len(dims) == 1 and kind != "f32":
        raise FormatError(f"kind of {name!r}: vectors are f32, found {kind}")
    expected = stored_bytes(kind, dims, group)
    if n_bytes != expected:
        raise FormatError(f"bytes of {name!r}: {n_bytes}, its kind and dims give {expected}")


def encode_tensor(name: str, tensor: Tensor) -> bytes:
    """The bytes that the file stores. FormatError when the tensor is no valid one: shapes, codes, values."""
    kind = tensor_kind(tensor)
    if isinstance(tensor, QuantWeight):
        blob = _encode_quantized(name, tensor)
        check_table_entry(name, kind, tensor.dims, tensor.group, len(blob))
        return blob
    if tensor.ndim not in (1, 2):
        raise FormatError(f"rank of {name!r}: {tensor.ndim} is neither 1 nor 2")
    if not np.isfinite(tensor).all():
        raise FormatError(f"tensor {name!r}: holds a value that is not finite")
    blob = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes()
    check_table_entry(name, kind, tensor.shape, 0, len(blob))
    return blob


def _encode_quantized(name: str, weight: QuantWeight) -> bytes:
    if weight.bits not in (4, 8) or weight.group not in GROUPS:
        raise FormatError(
            f"tensor {name!r}: {weight.bits} bits in groups of {weight.group} are not in the format"
        )
    if (
        weight.codes.ndim != 2
        or weight.codes.dtype != np.uint8
        or (weight.bits == 4 and weight.codes.shape[1] % 2)
    ):
        raise FormatError(f"dims of {name!r}: codes must be uint8 [rows, columns], columns even at 4 bits")
    rows, columns = weight.dims
    groups = (rows, -(-columns // weight.group))
    for field, array in (("scales", weight.scales), ("zeros", weight.zeros)):
        if array.shape != groups or array.dtype != np.float16:
            raise FormatError(
                f"{field} of {name!r}: must be float16 {list(groups)}, found {array.dtype} {array.shape}"
            )
        if not np.isfinite(array).all():
            raise FormatError(f"{field} of {name!r}: hold a value that is not finite")
    if weight.bits == 4 and weight.codes.size and weight.codes.max() > 15:
        raise FormatError(f"codes of {name!r}: {weight.codes.max()} does not fit in 4 bits")
    half = [array.astype("<f2", copy=False).tobytes() for array in (weight.scales, weight.zeros)]
    return pack_codes(weight.codes, weight.bits) + half[0] + half[1]


def decode_tensor(kind: str, dims: tuple[int, ...], group: int, blob: bytes) -> Float32Array:
    """float32 [dims] of stored bytes whose entry was checked."""
    if kind == "f32":
        return np.frombuffer(blob, "<f4").astype(np.float32).reshape(dims)
    if kind == "f16":
        return np.frombuffer(blob, "<f2").astype(np.float32).reshape(dims)
    return dequantize(decode_quantized(kind, (dims[0], dims[1]), group, blob))


def decode_quantized(kind: str, dims: tuple[int, int], group: int, blob: bytes) -> QuantWeight:
    """The stored codes, scales and zeros."""
    (rows, columns), bits = dims, KINDS[kind]
    groups = -(-columns // group)
    code_bytes = rows * (-(-columns * bits // 8))
    halves = np.frombuffer(blob[code_bytes:], "<f2").reshape(2, rows, groups).astype(np.float16)
    codes = unpack_codes(blob[:code_bytes], rows, columns, bits)
    return QuantWeight(codes, halves[0], halves[1], bits, group)
