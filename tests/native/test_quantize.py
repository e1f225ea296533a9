"""Quantization: errors bounded by the step, never worse than plain ranges, awkward groups included."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinyloop.native.quantize import QuantizeError, import_q4_1, quantize, to_float16
from tinyloop.native.weights import dequantize


def _plain_ranges(weight: NDArray[np.float32], bits: int, group: int) -> NDArray[np.float64]:
    """Plain minimum-to-maximum quantization in exact arithmetic: what the search has to beat."""
    out = np.empty(weight.shape, np.float64)
    for begin in range(0, weight.shape[1], group):
        part = weight[:, begin : begin + group].astype(np.float64)
        low, high = part.min(1, keepdims=True), part.max(1, keepdims=True)
        step = np.maximum(high - low, 1e-30) / (2**bits - 1)
        out[:, begin : begin + group] = np.rint((part - low) / step) * step + low
    return out


@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([4, 8]),
    st.sampled_from([32, 64, 128]),
    st.sampled_from([32, 48, 64, 130, 256]),
)
@settings(max_examples=40, deadline=None)
def test_error_stays_within_a_step_of_each_group(seed: int, bits: int, group: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((5, columns)).astype(np.float32)
    quantized = quantize(weight, bits, group)
    assert quantized.codes.max() < 2**bits
    miss = np.abs(dequantize(quantized) - weight)
    for g in range(quantized.scales.shape[1]):
        part = weight[:, g * group : (g + 1) * group]
        span = np.maximum(part.max(1), 0) - np.minimum(part.min(1), 0)
        # Clipping is allowed at 4 bits: at most the share of the range that the smallest candidate gives up.
        limit = span * (0.25 if bits == 4 else 0.51 / 255 + 0.0005)
        assert (miss[:, g * group : (g + 1) * group].max(1) <= limit + 1e-6).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bit_search_beats_plain_ranges(group: int) -> None:
    rng = np.random.default_rng(3)
    weight = rng.standard_normal((64, 512)).astype(np.float32)
    weight[:, 7] *= 30
    searched = np.square(dequantize(quantize(weight, 4, group)) - weight).mean()
    assert searched < 0.88 * np.square(_plain_ranges(weight, 4, group) - weight).mean()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 65504.0, -65504.0, 9e4, 2.0**-14])
def test_constant_groups_survive(bits: int, value: float) -> None:
    found = dequantize(quantize(np.full((2, 96), value, np.float32), bits, 64))
    assert np.abs(found - value).max() <= abs(value) * 2**-9


def test_groups_far_from_zero_survive() -> None:
    weight = (1000 + np.random.default_rng(0).random((4, 64))).astype(np.float32)
    assert np.abs(dequantize(quantize(weight, 8, 64)) - weight).max() <= 1001 / 255 / 2 + 0.1


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_what_cannot_be_held_is_refused(bad: float) -> None:
    weight = np.zeros((2, 64), np.float32)
    weight[1, 3] = bad
    with pytest.raises(QuantizeError):
        quantize(weight, 4, 64)


def test_result_does_not_depend_on_the_rows_around() -> None:
    weight = np.random.default_rng(1).standard_normal((9, 128)).astype(np.float32)
    whole, alone = quantize(weight, 4, 64), quantize(weight[4:5], 4, 64)
    assert np.array_equal(whole.codes[4:5], alone.codes)
    assert np.array_equal(whole.scales[4:5], alone.scales)


def test_float16_overflow_names_tensor_and_value() -> None:
    with pytest.raises(QuantizeError, match=r"layers\.3\.o.*-70000"):
        to_float16("layers.3.o", np.array([[1, -70000.0]], np.float32))


def test_q4_1_blocks_keep_their_values_and_flat_ones_are_exact() -> None:
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (6, 64)).astype(np.uint8)
    steps = rng.random((6, 2)).astype(np.float16).astype(np.float32)
    minimums = -rng.random((6, 2)).astype(np.float16).astype(np.float32) * 8
    steps[0] = 0
    minimums[1], steps[1] = 0, 0
    minimums[2], steps[2] = 4, 2**-20
    expected = np.repeat(steps, 32, 1) * codes + np.repeat(minimums, 32, 1)
    found = dequantize(import_q4_1(codes, steps, minimums))
    assert np.array_equal(found[:2], expected[:2])
    assert (np.abs(found - expected) <= 2.0**-11 * np.repeat(np.abs(minimums), 32, 1) + 1e-6).all()
