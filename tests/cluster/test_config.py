"""Pool settings: an unknown key is named with the nearest known one."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError
from tinyloop.cluster.config import PoolConfig


def test_an_unknown_key_suggests_the_nearest() -> None:
    with pytest.raises(ValidationError, match="unknown key 'replica': did you mean 'replicas'"):
        PoolConfig.model_validate({"model": "m.tloop", "replica": 2})


def test_only_what_is_set_reaches_the_engine() -> None:
    config = PoolConfig.model_validate({"model": "m.tloop", "cache_mode": "fp16"})
    expected = {"max_seq_len": 2048, "prefill_chunk": 0, "device": "cpu", "cache_mode": "fp16"}
    assert config.load_options() == expected


@pytest.mark.parametrize(
    "wrong", [{"replicas": 0}, {"threads": 0}, {"factory": "os.system"}, {"chunk_seconds": 0}]
)
def test_a_setting_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PoolConfig.model_validate({"model": "m.tloop", **wrong})


NUMBERS = [
    name for name, field in PoolConfig.model_fields.items() if re.search("int|float", str(field.annotation))
]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_in_text_are_read_in_ascii_digits_alone(name: str) -> None:
    assert getattr(PoolConfig.model_validate({"model": "m.tloop", name: "3"}), name) == 3
    for text in ("٣", "\uff13", "1_0", " 3", "3\n", ""):
        with pytest.raises(ValidationError, match="digits 0-9"):
            PoolConfig.model_validate({"model": "m.tloop", name: text})
