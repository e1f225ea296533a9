"""The description states the file's own figures and verifies every byte."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinyloop.native.format import FormatError
from tinyloop.native.inspect import describe
from tinyloop.native.models import default_model_path

from .tiny_models import write_tiny


def test_shipped_model_is_described() -> None:
    text = describe(default_model_path())
    for fact in (
        "27,669,505",
        "24 = 6 layers x 4 loops",
        "48.0 KiB a token",
        "q4 group 64",
        "Apache-2.0",
        "exit gate",
    ):
        assert fact in text


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        # A plane of FP16 keys and values: 2 x 2 x K/V heads x head size bytes; 48 wide inputs otherwise.
        ("llama", ["2 = 2 layers x 1 loops", "pre norms", "256 bytes a token", "int8 144 bytes"]),
        ("huginn", ["10 = 2 layers x 4 loops + 2 layers once", "sum norms", "normal state of 0.632", "pair"]),
        ("huginn_zero", ["zero state, input injected"]),
        ("retrofit_olmo", ["branch norms", "full q and k norm"]),
        (
            "hrm_text",
            ["10 = (1 low layers x 3 cycles + 2 high layers) x 2 loops", "prefix-LM", "no norm weights"],
        ),
        ("qwen3", ["head q and k norm", "384 bytes a token"]),
        ("nanbeige", ["h_fp16 384 bytes, h_int8 200 bytes, h_int4 112 bytes"]),
    ],
)
def test_every_family_is_described_in_its_own_terms(tmp_path: Path, family: str, facts: list[str]) -> None:
    write_tiny(tmp_path / "m.tloop", family, bits=16)
    text = describe(tmp_path / "m.tloop")
    for fact in facts:
        assert fact in text


def test_damage_anywhere_in_the_weights_is_found(tmp_path: Path) -> None:
    path = tmp_path / "m.tloop"
    header = write_tiny(path, "llama", bits=8)
    for entry in header.tensors:
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[entry.offset + entry.n_bytes // 2] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(FormatError, match=entry.name):
            describe(path)
        path.write_bytes(whole)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(FormatError, match="magic"):
        describe(tmp_path / "x")
