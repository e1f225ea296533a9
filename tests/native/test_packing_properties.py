"""Packed weights over random shapes, kinds and values: nothing is lost between memory and file."""

from __future__ import annotations

import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from tiny_models import random_tensors, tiny_descriptor
from tinyloop.native.format import read_blob, read_header, read_tensor, write_model
from tinyloop.native.quantize import quantize
from tinyloop.native.weights import (
    GROUPS,
    QuantWeight,
    Tensor,
    concatenate_rows,
    decode_quantized,
    dequantize,
    encode_tensor,
    pack_codes,
    stored_bytes,
    unpack_codes,
)

BITS = st.sampled_from([4, 8])
GROUP = st.sampled_from(GROUPS)
SEED = st.integers(0, 2**32 - 1)


def same(a: QuantWeight, b: QuantWeight) -> bool:
    """Equal to the bit, NaN payloads and signed zeros included."""
    parts = ((getattr(a, field), getattr(b, field)) for field in ("codes", "scales", "zeros"))
    return (a.bits, a.group) == (b.bits, b.group) and all(
        x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in parts
    )


def random_weight(rng: np.random.Generator, rows: int, columns: int) -> NDArray[np.float32]:
    """Values of very different sizes, with groups that are constant, zero, or of one sign."""
    weight = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-4, 3, (rows, 1))
    for row in range(rows):
        begin = int(rng.integers(columns))
        weight[row, begin : begin + 40] = rng.choice([0.0, 1.5, -2.25])
        if rng.random() < 0.3:
            weight[row] = np.abs(weight[row])
    return weight.astype(np.float32)


@given(BITS, st.data())
@settings(max_examples=150, deadline=None)
def test_codes_survive_packing_and_take_the_stated_bytes(bits: int, data: st.DataObject) -> None:
    rows, pairs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 80))
    shape = (rows, 2 * pairs)
    codes = data.draw(arrays.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))
    raw = pack_codes(codes, bits)
    assert len(raw) == codes.size * bits // 8
    assert np.array_equal(unpack_codes(raw, *shape, bits), codes)
    # Each row stands alone: what lies beside it changes none of its bytes.
    assert raw == b"".join(pack_codes(codes[i : i + 1], bits) for i in range(rows))


@given(BITS, st.data())
@settings(max_examples=100, deadline=None)
def test_every_byte_string_of_the_right_length_is_a_packing(bits: int, data: st.DataObject) -> None:
    """Packing is a bijection: no two codes share bytes, and no bytes are without codes."""
    rows, columns = data.draw(st.integers(1, 5)), 2 * data.draw(st.integers(1, 40))
    size = rows * columns * bits // 8
    raw = data.draw(st.binary(min_size=size, max_size=size))
    assert pack_codes(unpack_codes(raw, rows, columns, bits), bits) == raw


@given(SEED, st.integers(1, 5), st.integers(1, 150), BITS, GROUP)
@settings(max_examples=60, deadline=None)
def test_quantized_weight_is_the_same_after_its_bytes(
    seed: int, rows: int, pairs: int, bits: int, group: int
) -> None:
    weight = quantize(random_weight(np.random.default_rng(seed), rows, 2 * pairs), bits, group)
    blob = encode_tensor("w", weight)
    assert len(blob) == stored_bytes(f"q{bits}", weight.dims, group)
    back = decode_quantized(f"q{bits}", weight.dims, group, blob)
    assert same(back, weight)
    assert encode_tensor("w", back) == blob
    assert dequantize(back).tobytes() == dequantize(weight).tobytes()


@given(SEED, st.integers(1, 4), st.integers(1, 100), BITS, GROUP)
@settings(max_examples=60, deadline=None)
def test_dequantized_value_is_code_minus_zero_times_scale(
    seed: int, rows: int, pairs: int, bits: int, group: int
) -> None:
    """Value by value in float32, each group found by division: no vectorised shape can hide a shift."""
    weight = quantize(random_weight(np.random.default_rng(seed), rows, 2 * pairs), bits, group)
    found = dequantize(weight)
    for n, k in np.ndindex(*weight.dims):
        code, zero, scale = weight.codes[n, k], weight.zeros[n, k // group], weight.scales[n, k // group]
        assert found[n, k] == (np.float32(code) - np.float32(zero)) * np.float32(scale)


@given(SEED, st.integers(2, 8), st.integers(1, 100), BITS, GROUP)
@settings(max_examples=60, deadline=None)
def test_rows_quantized_apart_are_the_rows_of_the_whole(
    seed: int, rows: int, pairs: int, bits: int, group: int
) -> None:
    rng = np.random.default_rng(seed)
    values = random_weight(rng, rows, 2 * pairs)
    cut = int(rng.integers(1, rows))
    whole = quantize(values, bits, group)
    parts = [quantize(part, bits, group) for part in (values[:cut], values[cut:])]
    assert same(concatenate_rows(parts), whole)
    order = rng.permutation(rows)
    assert same(whole.take_rows(order), quantize(values[order], bits, group))
    assert same(whole.take_rows(order).take_rows(np.argsort(order)), whole)


@given(SEED, st.integers(1, 100), BITS, GROUP, st.integers(-3, 3))
@settings(max_examples=60, deadline=None)
def test_a_power_of_two_moves_the_scales_alone(
    seed: int, pairs: int, bits: int, group: int, power: int
) -> None:
    """Exact in binary as long as no scale that is tried is subnormal in FP16: also one that does not win, as
    that of a short last group of nearly equal values. A fitted scale may be a quarter of the range's."""
    values = np.random.default_rng(seed).uniform(-1, 1, (3, 2 * pairs)).astype(np.float32)
    plain, scaled = quantize(values, bits, group), quantize(values * np.float32(2.0**power), bits, group)
    starts = np.arange(0, values.shape[1], group)
    spread = np.maximum.reduceat(values, starts, axis=1) - np.minimum.reduceat(values, starts, axis=1)
    wide = (spread / (2**bits - 1) >= 4 * 2.0**-14 * 2 ** max(0, -power)).all(axis=1)
    assert np.array_equal(scaled.codes[wide], plain.codes[wide])
    assert np.array_equal(scaled.zeros[wide], plain.zeros[wide])
    assert np.array_equal(scaled.scales[wide], plain.scales[wide] * np.float16(2.0**power))


def random_tensor(rng: np.random.Generator, values: NDArray[np.float32]) -> Tensor:
    """A matrix in one of the kinds that a file may hold; a vector as it is."""
    kind = rng.choice(["f32", "f16", "q4", "q8"])
    if values.ndim == 1 or kind == "f32":
        return values
    if kind == "f16":
        return values.astype(np.float16)
    return quantize(values, int(kind[1:]), int(rng.choice(GROUPS)))


@given(
    SEED,
    st.sampled_from(["llama", "ouro"]),
    st.binary(max_size=600),
    st.dictionaries(st.text(min_size=1, max_size=12), st.text(max_size=30), max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_a_file_of_mixed_kinds_gives_back_every_bit(
    seed: int, family: str, tokenizer: bytes, metadata: dict[str, str]
) -> None:
    rng = np.random.default_rng(seed)
    shape = {key: 2 * int(rng.integers(1, 45)) for key in ("hidden_size", "ffn_size")}
    descriptor = tiny_descriptor(family, **shape, vocab_size=int(rng.integers(3, 70)), head_dim=4)
    tensors = {name: random_tensor(rng, values) for name, values in random_tensors(descriptor, seed).items()}
    with TemporaryDirectory() as folder:
        first, second = Path(folder, "first.tloop"), Path(folder, "second.tloop")
        header = write_model(first, descriptor, tensors, tokenizer, metadata)
        assert header == read_header(first)
        assert (header.descriptor, header.metadata, header.tokenizer_json) == (
            descriptor,
            metadata,
            tokenizer,
        )
        assert [entry.name for entry in header.tensors] == list(tensors)
        for entry in header.tensors:
            written = tensors[entry.name]
            blob = read_blob(first, entry)
            assert blob == encode_tensor(entry.name, written)
            assert (entry.offset % 256, entry.crc32) == (0, zlib.crc32(blob))
            values = dequantize(written) if isinstance(written, QuantWeight) else written.astype(np.float32)
            assert read_tensor(first, header, entry.name).tobytes() == values.tobytes()
        # The same content is the same file: no clock, no path, no order of a dictionary.
        write_model(second, descriptor, dict(reversed(tensors.items())), tokenizer, metadata)
        assert first.read_bytes() == second.read_bytes()
