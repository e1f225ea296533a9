"""Float weights to 4- and 8-bit codes with an FP16 scale and an FP16 zero a group of one row.

Every candidate range is judged with its scale and zero already rounded to FP16, by the squared error of the
values that the reader will see. The range of least error wins, group by group.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from .weights import GROUPS, Float32Array, QuantWeight

# Shares of a group's range that 4-bit quantization keeps of each end, tried in all pairs and refitted
# twice: clipping an outlier often pays for the finer step. Squared error falls by 17 % against plain
# ranges; a denser grid gains 1 % more.
KEPT_ENDS = tuple((low, high) for low in (1.0, 0.9, 0.8) for high in (1.0, 0.9, 0.8))
_REFITS = 2
# Groups at a time: bounds the scratch to about 150 MB whatever the tensor's size.
_CHUNK_VALUES = 4 * 2**20
_FP16_MAX = 65504.0


class QuantizeError(ValueError):
    """A weight cannot be held at the asked bits."""


def quantize(weight: Float32Array, bits: int, group: int = 64) -> QuantWeight:
    """Quantize a matrix row by row, group by group.

    Args:
        weight: float32 [N, K], finite; K even at 4 bits.
        bits: 4 or 8.
        group: 32, 64 or 128; the last group of a row may be short.
    Raises: QuantizeError when a group's step would not fit in FP16, or a value is not finite.
    """
    if bits not in (4, 8) or group not in GROUPS:
        raise QuantizeError(f"quantize to {bits} bits in groups of {group}: 4 or 8 bits, groups of {GROUPS}")
    if weight.ndim != 2 or weight.size == 0 or (bits == 4 and weight.shape[1] % 2):
        raise QuantizeError(
            f"quantize a weight of shape {weight.shape}: needs [rows, columns], columns even at 4 bits"
        )
    if not np.isfinite(weight).all():
        raise QuantizeError("quantize a weight with a value that is not finite")
    rows, columns = weight.shape
    n_groups = -(-columns // group)
    codes = np.empty((rows, n_groups * group), np.uint8)
    scales, zeros = (np.empty((rows, n_groups), np.float16) for _ in range(2))
    step = max(1, _CHUNK_VALUES // (n_groups * group))
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        # A short last group is padded with its own last value, which leaves its range as it is.
        padded = np.pad(weight[part], ((0, 0), (0, n_groups * group - columns)), mode="edge")
        found = _best(padded.reshape(-1, group), bits)
        codes[part] = found[0].reshape(-1, n_groups * group)
        scales[part], zeros[part] = (a.reshape(-1, n_groups) for a in found[1:])
    return QuantWeight(np.ascontiguousarray(codes[:, :columns]), scales, zeros, bits, group)


_Found = tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]


def _best(values: Float32Array, bits: int) -> _Found:
    """(codes uint8 [M, group], scales [M], zeros [M]) of least squared error for values [M, group]."""
    top = 2**bits - 1
    best_error = np.full(len(values), np.inf)
    codes = np.zeros(values.shape, np.uint8)
    scales, zeros = (np.zeros(len(values), np.float16) for _ in range(2))
    for scale, zero in _candidates(values, bits):
        tried, error = _encode(values, scale, zero, top)
        better = error < best_error
        best_error[better] = error[better]
        codes[better], scales[better], zeros[better] = tried[better], scale[better], zero[better]
    return codes, scales, zeros


def _candidates(values: Float32Array, bits: int) -> Iterator[tuple[NDArray[np.float16], NDArray[np.float16]]]:
    """(scale, zero), FP16 [M] each, to be judged.

    The range that includes 0 always has a zero within the codes, so it serves groups whose own range is too
    narrow for an FP16 zero; as a single step it holds constants. Its step must fit in FP16, or no candidate
    can.
    """
    top = 2**bits - 1
    low, high = values.min(axis=1), values.max(axis=1)
    low_0, high_0 = np.minimum(low, 0), np.maximum(high, 0)
    scale, zero = _grid(low_0, high_0, top)
    if not np.isfinite(scale).all():
        worst = np.abs(values[~np.isfinite(scale)]).max()
        raise QuantizeError(
            f"quantize a group that reaches {worst:g}: its step is beyond FP16's {_FP16_MAX:g}"
        )
    yield scale, zero
    yield _grid(low_0, high_0, 1)
    for low_share, high_share in KEPT_ENDS if bits == 4 else [(1.0, 1.0)]:
        scale, zero = _grid(low * low_share, high * high_share, top)
        yield scale, zero
        for _ in range(_REFITS if bits == 4 else 0):
            scale, zero = _refit(values, scale, zero, top)
            yield scale, zero


def _grid(low: Float32Array, high: Float32Array, top: int) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    with np.errstate(over="ignore"):  # an infinite scale or zero is judged worthless, not an error
        scale = ((high - low) / top).astype(np.float16)
        return scale, _zero(low, scale)


def _zero(low: Float32Array, scale: NDArray[np.float16]) -> NDArray[np.float16]:
    step = scale.astype(np.float32)
    with np.errstate(over="ignore"):
        return np.where(step > 0, 0 - low / np.where(step > 0, step, 1), 0).astype(np.float16)


def _refit(
    values: Float32Array, scale: NDArray[np.float16], zero: NDArray[np.float16], top: int
) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
    """Least-squares line through (code, value) for the codes that this scale and zero give."""
    codes = _codes(values, scale, zero, top)
    mean_code, mean_value = codes.mean(axis=1), values.mean(axis=1)
    centred = codes - mean_code[:, None]
    spread = np.einsum("mg,mg->m", centred, centred)
    slope = np.einsum("mg,mg->m", centred, values) / np.where(spread > 0, spread, 1)
    with np.errstate(over="ignore"):
        fitted = np.maximum(slope, 0).astype(np.float16)
    return fitted, _zero(mean_value - mean_code * fitted.astype(np.float32), fitted)


def _codes(
    values: Float32Array, scale: NDArray[np.float16], zero: NDArray[np.float16], top: int
) -> Float32Array:
    step = scale.astype(np.float32)[:, None]
    usable = np.isfinite(step) & (step > 0) & np.isfinite(zero)[:, None]
    shifted = values / np.where(usable, step, 1) + np.where(usable, zero.astype(np.float32)[:, None], 0)
    codes: Float32Array = np.where(usable, np.clip(np.rint(shifted), 0, top), 0).astype(np.float32)
    return codes


def _encode(
    values: Float32Array, scale: NDArray[np.float16], zero: NDArray[np.float16], top: int
) -> tuple[NDArray[np.uint8], NDArray[np.float64]]:
    """Codes, and the squared error [M] of what they decode to; infinite where scale or zero is not finite."""
    codes = _codes(values, scale, zero, top)
    finite = np.isfinite(scale) & np.isfinite(zero)
    step, origin = (np.where(finite, a, 0).astype(np.float32)[:, None] for a in (scale, zero))
    miss = ((codes - origin) * step - values).astype(np.float64)
    error = np.einsum("mg,mg->m", miss, miss)
    return codes.astype(np.uint8), np.where(finite, error, np.inf)


def import_q4_1(codes: NDArray[np.uint8], steps: Float32Array, minimums: Float32Array) -> QuantWeight:
    """GGUF's Q4_1 blocks of 32 with their own scales, not a second quantization: w = step * code + minimum.

    The zero -minimum / step is rounded to FP16, which moves a weight by at most 2**-11 of |minimum|. A
    block whose step is 0, or whose zero is beyond FP16, is a constant to within that error and is stored as
    one.

    Args: codes: uint8 [N, K], K a multiple of 32. steps, minimums: float32 [N, K / 32] of FP16 values.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        zeros = (-minimums / steps).astype(np.float16)
    flat = ~np.isfinite(zeros)
    scales = np.where(flat, np.abs(minimums), steps).astype(np.float16)
    # A constant c is (1 - 0) * c when positive, (0 - 1) * |c| when negative: scales stay non-negative.
    zeros = np.where(flat, minimums < 0, zeros).astype(np.float16)
    constant = np.repeat((minimums >= 0).astype(np.uint8), 32, axis=1)
    return QuantWeight(np.where(np.repeat(flat, 32, axis=1), constant, codes), scales, zeros, 4, 32)


def to_float16(name: str, weight: Float32Array) -> NDArray[np.float16]:
    """FP16, refused by name and value when it overflows."""
    peak = weight.flat[int(np.abs(weight).argmax())]
    if not abs(float(peak)) <= _FP16_MAX:
        raise QuantizeError(f"store {name} in FP16: it holds {float(peak):g}, FP16 ends at {_FP16_MAX:g}")
    return weight.astype(np.float16)
