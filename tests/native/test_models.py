"""The shipped model: small enough, whole, with a tokenizer that round-trips, better with more loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tinyloop.native.format import FormatError, read_header
from tinyloop.native.models import default_model_path
from tinyloop.native.reference import Reference
from tinyloop.native.tokenizer import load_tokenizer

from .tiny_models import write_tiny

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of "
    "foolishness, it was the epoch of belief, it was the epoch of incredulity."
)


def test_model_ships_within_its_size_with_licence_and_card() -> None:
    header = read_header(default_model_path())
    assert header.file_bytes <= 18_000_000
    assert header.metadata["license"] == "Apache-2.0"
    assert default_model_path().with_name("README.md").is_file()


def test_tokenizer_round_trips() -> None:
    header = read_header(default_model_path())
    tokenizer = load_tokenizer(header)
    assert tokenizer.decode(tokenizer.encode(TEXT).ids) == TEXT
    assert tokenizer.token_to_id("<eos>") in header.descriptor["eos_ids"]  # type: ignore[operator]


def test_text_gets_likelier_with_each_trained_loop() -> None:
    header = read_header(default_model_path())
    ids = np.array(load_tokenizer(header).encode(TEXT).ids, np.int32)
    by_depth = Reference.load(default_model_path(), torch.float32).logprobs_by_depth(ids, 3).sum(axis=1)
    assert by_depth[0] < by_depth[1] < by_depth[2]
    bits_per_byte = -by_depth / np.log(2) / len(TEXT)
    assert bits_per_byte[2] < 1.5


def test_file_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    header = write_tiny(tmp_path / "m.tloop", "llama", bits=16)
    with pytest.raises(FormatError, match="none"):
        load_tokenizer(header)
