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
