"""The .tloop file: what is written comes back; what is damaged is refused by name."""

from __future__ import annotations

import itertools
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyloop.native import LoadError, load_model, plan
from tinyloop.native.descriptor import DEFAULTS, KEYS, check_descriptor, expected_tensors, tensor_count
from tinyloop.native.engine import header_digest
from tinyloop.native.format import FormatError, read_header, read_tensor, write_model
from tinyloop.native.layout import align, pack_prefix
from tinyloop.native.models import default_model_path
from tinyloop.native.records import Value, pack_section
from tinyloop.native.weights import QuantWeight, decode_quantized, encode_tensor, pack_codes, unpack_codes

from .tiny_models import FAMILIES, random_tensors, stored, tiny_descriptor, write_tiny


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("format") / "tiny.tloop"
    descriptor = tiny_descriptor("ouro", n_layers=1, hidden_size=16, ffn_size=32, head_dim=4, vocab_size=11)
    write_model(
        path, descriptor, stored(random_tensors(descriptor, 0), 4, 32), b'{"model":1}', {"name": "tiny"}
    )
    return path.read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [4, 32])
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


# Written before a key existed, and what such a file has always meant.
OLD_KEYS = [key for key in KEYS if key not in DEFAULTS]


def test_the_shipped_file_lacks_the_newer_keys_and_keeps_its_identity() -> None:
    header = read_header(default_model_path())
    assert header.digest == "6377bd3fc7e78594fb3a982e0c8be10b15aaa31f00c44d010a0bc61a421e835b"
    assert {key: header.descriptor[key] for key in DEFAULTS} == DEFAULTS


def test_writer_writes_every_key(tmp_path: Path) -> None:
    written = write_model(
        tmp_path / "m.tloop",
        {key: tiny_descriptor("ouro")[key] for key in OLD_KEYS},
        random_tensors(tiny_descriptor("ouro"), 0),
        b"",
        {},
    )
    assert written.descriptor == tiny_descriptor("ouro")
    for key in KEYS:
        assert f"{chr(len(key))}\0{key}".encode() in (tmp_path / "m.tloop").read_bytes()


# (family, key, value): each breaks one rule, and the message names the key.
BROKEN: list[tuple[str, str, Value]] = [
    ("ouro", "n_layers", 0),
    ("ouro", "n_kv_heads", 3),
    ("ouro", "head_dim", 15),
    ("ouro", "norm_eps", float("nan")),
    ("ouro", "bos_id", 61),
    ("ouro", "eos_ids", (61,)),
    ("ouro", "rope_style", "adjacent"),
    ("ouro", "family", ""),
    ("ouro", "family", "a\tb"),
    ("ouro", "family", "ö"),
    ("ouro", "family", "x" * 65),
    ("ouro", "vocab_size", 2**40),
    ("ouro", "hidden_size", 48.0),
    ("ouro", "norm_placement", "post"),
    ("ouro", "norm_weight", 1),
    ("ouro", "qk_norm", True),
    ("ouro", "surprise", 1),
    ("ouro", "n_prelude", -1),
    ("ouro", "n_prelude", 2),
    ("ouro", "n_prelude", 5000),
    ("ouro", "n_low", 2),
    ("ouro", "low_cycles", 1),
    ("ouro", "loop_norm", False),  # its gate reads the normed state
    ("ouro", "exit_norm", True),
    ("ouro", "state_init", "zero"),
    ("ouro", "state_std", 0.5),
    ("ouro", "embed_scale", 0.0),
    ("ouro", "embed_scale", -1.0),
    ("ouro", "embed_scale", float("inf")),
    ("ouro", "embed_scale", 1e39),
    ("llama", "n_coda", 1),
    ("loop_range", "n_coda", 3),
    ("loop_range", "loop_norm", True),
    ("loop_range", "exit_gate", True),
    ("huginn", "state_std", 0.0),
    ("huginn", "state_std", float("nan")),
    ("huginn", "state_init", "vector"),
    ("huginn", "state_init", "zero"),  # a standard deviation that nothing would use
    ("huginn", "inject", "none"),
    ("huginn", "inject", "add"),
    ("huginn_zero", "state_std", float("nan")),
    ("hrm_text", "n_low", 3),
    ("hrm_text", "low_cycles", 0),
    ("hrm_text", "n_prelude", 1),
    ("hrm_text", "n_coda", 1),
    ("hrm_text", "inject", "linear"),
    ("hrm_text", "norm_weight", True),
    ("hrm_text", "loop_norm", False),
    ("hrm_text", "exit_norm", True),
    ("hrm_text", "exit_gate", True),
]
NAMED_OTHERWISE = {
    ("huginn", "inject", "none"): "state_init",
    ("huginn", "state_init", "zero"): "state_std",
    ("loop_range", "loop_norm", True): "exit_norm|loop_norm",
    ("llama", "n_coda", 1): "loop_norm",
    ("loop_range", "n_coda", 3): "n_prelude",
    ("ouro", "loop_norm", False): "exit_gate",
}
ALLOWED: list[tuple[str, str, Value]] = [
    ("ouro", "family", "!~ " + 61 * "x"),
    ("ouro", "n_prelude", 1),
    ("ouro", "norm_weight", False),
    ("ouro", "rope_style", "pair"),
    ("ouro", "attn_gate", True),
    ("ouro", "prefix_lm", True),
    ("ouro", "inject", "linear"),
    ("llama", "loop_norm", False),
    ("loop_range", "exit_norm", True),
    ("huginn", "exit_norm", False),
    ("huginn", "norm_placement", "pre"),
    ("huginn", "embed_scale", 3e38),
    ("hrm_text", "norm_placement", "sum"),
    ("hrm_text", "qk_norm", "full"),
]


def _bare_file(path: Path, descriptor: dict[str, Value]) -> Path:
    """Nothing but a descriptor, under a right checksum: no reader comes to miss the rest of a broken one."""
    head = pack_section(descriptor, "descriptor")
    size = align(64 + len(head))
    path.write_bytes((pack_prefix(zlib.crc32(head), len(head), size, size) + head).ljust(size, b"\0"))
    return path


@pytest.mark.parametrize(("family", "key", "value"), BROKEN)
def test_both_readers_refuse_what_breaks_a_rule(tmp_path: Path, family: str, key: str, value: Value) -> None:
    path = _bare_file(tmp_path / "m.tloop", {**tiny_descriptor(family), key: value})
    named = NAMED_OTHERWISE.get((family, key, value), key)
    with pytest.raises(FormatError, match=f"descriptor '{named}'"):
        read_header(path)
    with pytest.raises(LoadError, match=rf"descriptor\.{named}"):
        load_model(path)


@pytest.mark.parametrize(("family", "key", "value"), ALLOWED)
def test_both_readers_take_what_breaks_none(tmp_path: Path, family: str, key: str, value: Value) -> None:
    header = write_tiny(tmp_path / "m.tloop", family, bits=16, **{key: value})
    assert header.descriptor[key] == value
    assert len(header.tensors) == tensor_count(header.descriptor)
    load_model(tmp_path / "m.tloop", max_seq_len=8).close()


@pytest.mark.parametrize("key", KEYS)
def test_both_readers_know_which_keys_may_be_absent(tmp_path: Path, key: str) -> None:
    """A file of this model without the key: the default where there is one, refused by name elsewhere."""
    without = {name: value for name, value in tiny_descriptor("ouro").items() if name != key}
    if key in DEFAULTS:
        assert check_descriptor(without) == tiny_descriptor("ouro")
    path = _bare_file(tmp_path / "m.tloop", without)
    # What follows a descriptor that was taken is missing.
    python, engine = ("metadata count", r"metadata \(count\)") if key in DEFAULTS else (f"'{key}'", key)
    with pytest.raises(FormatError, match=python):
        read_header(path)
    with pytest.raises(LoadError, match=engine):
        load_model(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_count_of_tensors_is_that_of_their_names(family: str) -> None:
    for placement, weight, bias in itertools.product(
        ("pre", "sandwich", "branch", "sum"), (True, False), (True, False)
    ):
        if weight and FAMILIES[family].get("n_low"):
            continue
        descriptor = tiny_descriptor(
            family, norm_placement=placement, norm_weight=weight, attn_bias=bias, attn_gate=bias
        )
        assert tensor_count(descriptor) == len(expected_tensors(descriptor))


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


def test_a_destination_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "m.tloop"
    with pytest.raises(
        FileNotFoundError, match=f"write {missing}: the folder {missing.parent} does not exist"
    ):
        write_tiny(missing, "llama", bits=16)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file is not a folder"):
        write_tiny(tmp_path / "file" / "m.tloop", "llama", bits=16)
    long = tmp_path / f"{'m' * 250}.tloop"
    with pytest.raises(OSError, match="too long") as caught:
        write_tiny(long, "llama", bits=16)
    assert str(long) in str(caught.value)
    assert ".part" not in str(caught.value)


@pytest.mark.timeout(20)
def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, kind in (
        (tmp_path / "fifo", "a FIFO"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "a folder"),
    ):
        for read in (read_header, header_digest):
            with pytest.raises(FormatError, match=f"'{path}' is {kind}, not a regular file"):
                read(path)
        with pytest.raises(LoadError, match="not a regular file"):
            load_model(path)
        with pytest.raises(LoadError, match="not a regular file"):
            plan(path)
    with pytest.raises(FormatError, match="a FIFO"):
        header_digest(bytes(tmp_path / "fifo"))
