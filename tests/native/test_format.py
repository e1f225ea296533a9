"""The .tloop file: what is written comes back; what is damaged is refused by name."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.native.format import FormatError, read_header, read_tensor, write_model
from tinyloop.native.weights import QuantWeight, decode_quantized, encode_tensor, pack_codes, unpack_codes

from .tiny_models import random_tensors, stored, tiny_descriptor, write_tiny


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("format") / "tiny.tloop"
    descriptor = tiny_descriptor("ouro", n_layers=1, hidden_size=16, ffn_size=32, head_dim=4, vocab_size=11)
    write_model(
        path, descriptor, stored(random_tensors(descriptor, 0), 4, 32), b'{"model":1}', {"name": "tiny"}
    )
    return path.read_bytes()


@pytest.mark.parametrize("family", ["llama", "ouro"])
@pytest.mark.parametrize("bits", [4, 8, 16, 32])
def test_model_comes_back_as_written(tmp_path: Path, family: str, bits: int) -> None:
    descriptor = tiny_descriptor(family, eos_ids=(2, 5), chat_template="{{ é }}")
    source = random_tensors(descriptor, 7)
    tensors = stored(source, bits, 32)
    written = write_model(tmp_path / "m.tloop", descriptor, tensors, b"{}", {"name": "n", "notes": "ü"})
    header = read_header(tmp_path / "m.tloop")
    assert header == written
    assert (header.descriptor, header.metadata) == (descriptor, {"name": "n", "notes": "ü"})
    assert header.tokenizer_json == b"{}"
    for name, tensor in tensors.items():
        read = read_tensor(tmp_path / "m.tloop", header, name)
        if isinstance(tensor, QuantWeight):
            expected = np.empty(tensor.dims, np.float32)
            for n, k in np.ndindex(*tensor.dims):
                expected[n, k] = (
                    np.float32(tensor.codes[n, k]) - np.float32(tensor.zeros[n, k // 32])
                ) * np.float32(tensor.scales[n, k // 32])
        else:
            expected = tensor.astype(np.float32)
        assert np.array_equal(read, expected), name


def test_layout_is_the_documented_one(sample: bytes) -> None:
    magic, version, crc, header_bytes, data_offset, file_bytes = struct.unpack_from("<8sIIQQQ", sample)
    assert (magic, version, file_bytes) == (b"TINYLOOP", 1, len(sample))
    assert crc == zlib.crc32(sample[64 : 64 + header_bytes])
    assert data_offset % 256 == 0
    assert not any(sample[64 + header_bytes : data_offset])
    assert sample.endswith(b'{"model":1}')


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([4, 8]),
    st.sampled_from([32, 64, 128]),
    st.randoms(),
)
@settings(max_examples=60, deadline=None)
def test_quantized_weight_survives_its_bytes(
    rows: int, half: int, bits: int, group: int, random: object
) -> None:
    rng = np.random.default_rng(abs(hash(str(random))) % 2**32)
    columns = 2 * half
    groups = (rows, -(-columns // group))
    codes = rng.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    halves = rng.standard_normal((2, *groups)).astype(np.float16)
    weight = QuantWeight(codes, halves[0], halves[1], bits, group)
    back = decode_quantized(f"q{bits}", weight.dims, group, encode_tensor("w", weight))
    for field in ("codes", "scales", "zeros"):
        assert np.array_equal(getattr(back, field), getattr(weight, field))


def test_even_column_is_the_low_nibble() -> None:
    codes = np.array([[1, 2, 3, 4]], np.uint8)
    assert pack_codes(codes, 4) == bytes([0x21, 0x43])
    assert np.array_equal(unpack_codes(bytes([0x21, 0x43]), 1, 4, 4), codes)


def _read(tmp_path: Path, data: bytes) -> None:
    """The whole file through the reader, every tensor included."""
    path = tmp_path / "damaged.tloop"
    path.write_bytes(data)
    header = read_header(path)
    for entry in header.tensors:
        read_tensor(path, header, entry.name)


def test_every_truncation_is_refused(sample: bytes, tmp_path: Path) -> None:
    for size in [*range(0, 2048, 7), *range(2048, len(sample), 331), len(sample) - 1]:
        with pytest.raises(FormatError):
            _read(tmp_path, sample[:size])


def test_padding_is_refused(sample: bytes, tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="file_bytes"):
        _read(tmp_path, sample + b"\0")


def test_every_bit_flip_is_refused(sample: bytes, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for at in [*range(64), *rng.integers(64, len(sample), 400).tolist()]:
        damaged = bytearray(sample)
        damaged[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(FormatError):
            _read(tmp_path, bytes(damaged))


def test_lies_under_a_right_checksum_are_refused(sample: bytes, tmp_path: Path) -> None:
    """A header whose checksum was made to fit still cannot crash the reader or make it allocate."""
    header_bytes = struct.unpack_from("<Q", sample, 16)[0]
    rng = np.random.default_rng(2)
    refused = 0
    for at in rng.permutation(header_bytes)[:1200].tolist():
        damaged = bytearray(sample)
        damaged[64 + at] = [0, 0x7F, 0xFF, damaged[64 + at] ^ 1][at % 4]
        struct.pack_into("<I", damaged, 12, zlib.crc32(bytes(damaged[64 : 64 + header_bytes])))
        try:
            _read(tmp_path, bytes(damaged))
        except FormatError:
            refused += 1
    assert refused > 700  # the rest are texts, flags and eps, which may hold another value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n_layers", 0),
        ("n_kv_heads", 3),
        ("head_dim", 15),
        ("norm_eps", float("nan")),
        ("loop_norm", False),
        ("bos_id", 61),
        ("eos_ids", (61,)),
        ("attn_bias", True),
        ("rope_style", "adjacent"),
        ("family", "gpt"),
        ("vocab_size", 2**40),
        ("hidden_size", 48.0),
    ],
)
def test_wrong_descriptor_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(FormatError, match=key):
        tiny_descriptor("ouro", **{key: value})  # type: ignore[arg-type]


def test_wrong_tensors_are_refused_by_name(tmp_path: Path) -> None:
    descriptor = tiny_descriptor("llama")
    tensors = random_tensors(descriptor, 0)

    def write(changed: dict[str, object]) -> None:
        kept = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        write_model(tmp_path / "m.tloop", descriptor, kept, b"", {})  # type: ignore[arg-type]

    for name, bad in {
        "embed": None,
        "surprise": np.zeros(3, np.float32),
        "layers.0.o": np.zeros((3, 3), np.float32),
        "final_norm": np.full(48, np.nan, np.float32),
        "layers.1.norm_ffn_in": np.ones(48, np.float16),
    }.items():
        with pytest.raises(FormatError, match=name):
            write({name: bad})
    assert not list(tmp_path.iterdir())


def test_existing_file_is_kept_unless_asked(tmp_path: Path) -> None:
    write_tiny(tmp_path / "m.tloop", "llama", bits=16)
    before = (tmp_path / "m.tloop").read_bytes()
    with pytest.raises(FileExistsError):
        write_tiny(tmp_path / "m.tloop", "llama", bits=8)
    assert (tmp_path / "m.tloop").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m.tloop"]
