"""The bf16 mode beside the fp16 mode: a mode with bits of its own, one class of sums for rows and steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_cases import random_ids, write_calm
from tinyloop.native import GenerateRequest, LoadError, load_model

pytestmark = pytest.mark.cpu

DEPTH = 4


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp("m") / "m.tloop", "ouro", bits=4, hidden_size=80, ffn_size=300)


def test_the_mode_has_a_name_and_bits_of_its_own(path: Path) -> None:
    ids = random_ids(100)
    with load_model(path, 128) as half, load_model(path, 128, numeric_mode="bf16") as split:
        assert split.numerics_id.startswith("cpu/any/")
        assert "/bf16/" in split.numerics_id
        assert half.numerics_id != split.numerics_id
        assert half.vram_usage_bytes == split.vram_usage_bytes
        assert not np.array_equal(half.score_tokens(ids), split.score_tokens(ids))


def test_steps_of_a_generation_have_the_bits_of_scoring(path: Path) -> None:
    prompts = [random_ids(n, seed=n) for n in (5, 70, 33)]
    requests = [GenerateRequest(prompt, 30, temperature=0.0, stop_ids=()) for prompt in prompts]
    with load_model(path, 256, numeric_mode="bf16", threads=2) as model:
        for prompt, result in zip(prompts, model.generate(requests), strict=True):
            ids = np.concatenate([prompt, np.array(result.token_ids, np.int32)])
            assert np.array_equal(result.logprobs, model.score_tokens(ids)[len(prompt) - 1 :])


def test_an_upgrade_has_the_bits_of_all_loops(path: Path) -> None:
    ids = random_ids(120)
    with load_model(path, 256, numeric_mode="bf16") as model:
        handle = model.start(ids, 1, max_depth=DEPTH)
        handle.upgrade(DEPTH)
        assert np.array_equal(handle.logprobs, model.score_tokens(ids, DEPTH))
        handle.close()


def test_the_tile_unit_is_refused_in_another_mode(path: Path) -> None:
    with pytest.raises(LoadError, match="'amx': it computes numeric_mode='bf16' alone"):
        load_model(path, 128, cpu_isa="amx")
