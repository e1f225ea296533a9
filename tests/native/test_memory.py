"""Memory: the engine's books against a count from outside, the plan against the loaded model, to the byte."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import random_ids, rounded, write_calm
from stateful_cases import (
    KINDS,
    MODES,
    NO_STOP,
    assert_same_bits,
    family_path,
    flat,
    load_family,
)
from tiny_models import FAMILIES, write_tiny
from tinyloop.native import (
    GenerateRequest,
    InvalidInputError,
    LoadError,
    OutOfMemoryError,
    cache_size,
    load_model,
    plan,
)
from tinyloop.native.format import read_header

HERE = Path(__file__).parent


# ---- counted from outside ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that counts a process's aligned blocks."""
    compiler = shutil.which("cc")
    assert compiler, "a C compiler is needed, as for the engine itself"
    library = tmp_path_factory.mktemp("count") / "allocation_count.so"
    source = HERE / "cpp" / "allocation_count.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", source, "-o", library], check=True)
    return library


def count(counter: Path, command: str, family: str, mode: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, HERE / "memory_walk.py", command, family_path(family), mode, *arguments],
        env={**os.environ, "LD_PRELOAD": str(counter)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.cpu  # the outside count is of the process's own memory
@pytest.mark.parametrize(
    ("family", "mode", "seed"),
    [("ouro", "fp16", 1), ("huginn", "int8", 2), ("loop_range", "h_int4", 3), ("hrm_text", "h_int8", 4)],
)
def test_the_books_are_right_along_a_random_life(counter: Path, family: str, mode: str, seed: int) -> None:
    """500 steps of every kind, a fifth of them with an allocation that fails; 10,000 by hand."""
    count(counter, "walk", family, mode, "500", str(seed))


@pytest.mark.cpu  # the outside count is of the process's own memory
@pytest.mark.parametrize("mode", ["int8", "h_int4"])
@pytest.mark.parametrize("family", KINDS)
def test_a_load_that_fails_at_any_allocation_keeps_nothing(counter: Path, family: str, mode: str) -> None:
    failures = int(count(counter, "loads", family, mode).split()[-1])
    assert failures > 8 * int(FAMILIES[family]["n_layers"])  # type: ignore[call-overload]


@pytest.mark.cpu  # the outside count is of the process's own memory
def test_nothing_is_held_after_the_last_of_any_order(counter: Path) -> None:
    count(counter, "orders", "ouro", "h_int4")


@pytest.mark.cpu  # the outside count is of the process's own memory
@pytest.mark.parametrize("mode", ["fp16", "h_int8"])
def test_scoring_allocates_nothing_once_warm(counter: Path, mode: str) -> None:
    count(counter, "steady", "ouro", mode)


# ---- the plan ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_the_loaded_model(family: str, mode: str) -> None:
    for rows, chunk, threads in ((256, 0, 1), (256, 48, 2), (1, 1, 3), (100, 99, 1)):
        options = {"max_seq_len": rows, "prefill_chunk": chunk, "threads": threads}
        planned = plan(family_path(family), cache_mode=mode, **options)
        with load_family(family, mode, **options) as model:
            assert planned.owners == model.memory_report()
            assert planned.total == model.vram_usage_bytes


@pytest.mark.parametrize(
    ("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32), (8, 128), (16, 64), (32, 64)]
)
def test_the_plan_knows_every_kind_of_weight(tmp_path: Path, bits: int, group: int) -> None:
    path = write_calm(tmp_path / "m.tloop", "hrm_text", bits=bits, group=group, ffn_size=100, vocab_size=77)
    for mode in ("fp16", "h_fp16"):
        planned = plan(path, 64, cache_mode=mode, threads=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with load_model(path, 64, cache_mode=mode, threads=1) as model:
                assert planned.owners == model.memory_report()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_knows_what_a_prefix_takes(family: str, mode: str) -> None:
    """Around the tokens that are kept as they are, odd lengths, and each depth."""
    with load_family(family, mode) as model:
        for length in (1, 7, 8, 9, 65, 128):
            for depth in (1, 3):
                planned = plan(
                    family_path(family), 256, cache_mode=mode, depth=depth, prefix_length=length, threads=1
                )
                with model.prefix(random_ids(length), depth=depth, upgradable=True) as prefix:
                    assert planned.prefix_bytes == prefix.bytes
        planned = plan(family_path(family), 256, cache_mode=mode, prefix_length=3, threads=1)
        with model.prefix(random_ids(3), upgradable=True) as prefix:
            assert planned.prefix_bytes == prefix.bytes
        longer, shorter = (model.prefix(random_ids(n), upgradable=False) for n in (128, 64))
        assert planned.cache_token_bytes == (longer.bytes - shorter.bytes) // 64


def test_the_plan_knows_what_drawing_adds() -> None:
    with load_family("ouro") as model:
        planned = plan(family_path("ouro"), 256, threads=1)
        before = model.vram_usage_bytes
        for temperature in (0.0, 1.0, 1.0):
            model.generate([GenerateRequest(random_ids(3), 2, temperature=temperature, stop_ids=NO_STOP)])
            assert model.vram_usage_bytes - before == planned.logit_rows * (temperature > 0)
        assert model.memory_report()["logit_row"] == planned.logit_rows


@pytest.mark.parametrize(
    ("family", "named"),
    [
        # Of hidden size 48, keys and values 64 or 128 wide together, 2 bytes each; int8 halves that.
        ("llama", "int8 would need no more memory than h_fp16: .* takes 96 bytes in h_fp16, 128 in fp16"),
        ("ouro", ""),
    ],
)
def test_the_plan_warns_as_the_load_does(family: str, named: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(family_path(family), 64, cache_mode="h_fp16", threads=1).close()
    said = [str(warning.message) for warning in caught]
    assert plan(family_path(family), 64, cache_mode="h_fp16").warnings == said
    assert len(said) == bool(named)
    for message in said:
        assert re.search(named, message)
    assert plan(family_path(family), 64, cache_mode="int8").warnings == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_seq_len": 4096}, "max_seq_len=4096"),
        ({"prefill_chunk": 300, "max_seq_len": 256}, "prefill_chunk=300"),
        ({"cache_mode": "int2"}, "cache_mode='int2'"),
        ({"threads": -1}, "threads=-1"),
    ],
)
def test_what_does_not_load_has_no_plan(options: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        plan(family_path("ouro"), **options)
    with pytest.raises(LoadError, match="phase 'header'"):
        plan(HERE / "nothing.tloop")


# ---- the budget ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", KINDS)
def test_the_planned_budget_loads_and_a_byte_less_does_not(family: str, mode: str) -> None:
    planned = plan(family_path(family), 256, 48, cache_mode=mode, threads=1)
    with pytest.raises(OutOfMemoryError, match=f"the budget is {planned.total - 1} bytes"):
        load_family(family, mode, prefill_chunk=48, budget_bytes=planned.total - 1)
    with load_family(family, mode, prefill_chunk=48, budget_bytes=planned.total) as model:
        assert model.vram_usage_bytes == planned.total


@pytest.mark.parametrize("mode", MODES)
def test_scoring_needs_no_byte_more_than_is_held(mode: str) -> None:
    """A budget of exactly the present use: prefixes of all rows, items of all kinds, then a byte too much."""
    items = [(random_ids(n, seed=n), n - 1) for n in (60, 2, 150, 256, 31)]
    with load_family("ouro", mode) as model, model.prefix(random_ids(256)) as prefix:
        full = model.vram_usage_bytes
        prefixes = [prefix, None, prefix, prefix, None]
        expected = model.score(*flat(items), prefixes=prefixes, by_depth=True, gates=True)
        assert model.vram_usage_bytes == full
    with load_family("ouro", mode, budget_bytes=full) as model, model.prefix(random_ids(256)) as prefix:
        prefixes = [prefix, None, prefix, prefix, None]
        found = model.score(*flat(items), prefixes=prefixes, by_depth=True, gates=True)
        for name in ("logprobs", "greedy", "by_depth", "gates"):
            assert_same_bits(getattr(found, name), getattr(expected, name))
        assert model.vram_usage_bytes == full
        with pytest.raises(OutOfMemoryError, match=f"{full} bytes are live"):
            model.prefix(np.array([1], np.int32))
        with pytest.raises(OutOfMemoryError, match="states to go on from"):
            model.start(random_ids(2), 1, keep_cache=False)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", KINDS)
def test_bytes_of_handles_are_what_the_model_holds_for_them(family: str, mode: str) -> None:
    with load_family(family, mode) as model:
        start = model.vram_usage_bytes
        prefix = model.prefix(random_ids(37), depth=2, upgradable=True)
        handle = model.start(random_ids(50), 2, 5)
        plain = model.start(random_ids(50), 2, 5, keep_cache=False)
        report = model.memory_report()
        assert report["prefix"] == prefix.bytes
        assert report["resume"] == handle.bytes + plain.bytes
        assert model.vram_usage_bytes == start + prefix.bytes + handle.bytes + plain.bytes
        states = 2 if model.descriptor["n_low"] or model.descriptor["inject"] == "linear" else 1
        assert plain.bytes == rounded(states * 49 * 48 * 4)
        size, plain_size = handle.bytes, plain.bytes
        model.upgrade([handle, plain], 4)
        assert plain.bytes == plain_size
        # The room was there from the start; a coda's planes are new, and the old ones stay in it.
        assert (handle.bytes == size) == (model.descriptor["n_coda"] == 0)
        assert model.memory_report()["resume"] == handle.bytes + plain.bytes
        for thing in (prefix, handle, plain):
            thing.close()
        assert model.vram_usage_bytes == start


@pytest.mark.parametrize(
    ("depth", "prefix_length", "message"),
    [
        (-1, 0, "depth=-1"),
        (0, 0, "depth=0: it must be 1..4096, or None"),
        (5000, 0, "depth=5000"),
        (2**70, 0, f"depth={2**70}"),
        (1, -1, "prefix_length=-1"),
        (1, 2**40, "positions"),
        (1, 2**70, f"prefix_length={2**70}"),
    ],
)
def test_what_the_model_cannot_hold_is_not_planned(
    tmp_path: Path, depth: int, prefix_length: int, message: str
) -> None:
    path = tmp_path / "m.tloop"
    write_tiny(path, "ouro", bits=4)
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        plan(path, max_seq_len=64, depth=depth, prefix_length=prefix_length)


@pytest.mark.cpu  # sizes for planning pools, by the cache line
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_from_the_descriptor_are_those_of_the_plan(family: str, mode: str) -> None:
    """Python and C++ state them apart: neither may change alone."""
    path = family_path(family)
    planned = plan(path, 64, cache_mode=mode, threads=1)
    assert cache_size.cache_bytes(read_header(path).descriptor, mode) == planned.cache_token_bytes
    with load_family(family, mode) as model:
        for rows in (1, 7, 33):
            ids = random_ids(rows)
            with model.prefix(ids, upgradable=True) as whole, model.prefix(ids, upgradable=False) as bare:
                assert cache_size.state_bytes(model.descriptor, rows) == whole.bytes - bare.bytes
