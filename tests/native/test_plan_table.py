"""The plan's table is what a loaded model then holds, to the byte, and its advice works."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import random_ids, write_calm
from tinyloop.native import LoadError, Model, OutOfMemoryError, PrefixCache, load_model
from tinyloop.native.format import FormatError
from tinyloop.native.plan_table import (
    MODES,
    POLICY_PAGE,
    ModeRow,
    PlanOptions,
    parse_bytes,
    plan_table,
    render,
)

# The engine warns where a mode loses memory: a tiny model has keys narrower than most real ones.
pytestmark = pytest.mark.filterwarnings("ignore:cache_mode:UserWarning")
SMALL = PlanOptions(max_seq_len=64, prefill_chunk=16, threads=1, prefix_tokens=40)


@pytest.fixture(scope="module", params=["ouro", "llama", "huginn", "hrm_text", "nanbeige"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return write_calm(tmp_path_factory.mktemp("m") / "m.tloop", request.param, bits=8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [None, 1, 3])
def test_a_loaded_model_holds_what_the_table_says(path: Path, mode: str, depth: int | None) -> None:
    table = plan_table(path, replace(SMALL, cache_mode=mode, depth=depth))
    with load_model(path, 64, 16, cache_mode=mode, threads=1) as model:
        assert model.memory_report() == table.owners
        assert model.vram_usage_bytes == table.model_bytes == table.chosen.model_bytes
        with model.prefix(random_ids(40), depth=depth) as prefix:
            assert prefix.bytes == table.chosen.prefix_bytes
        warning = model.cache_mode_warning
        assert table.chosen.warnings == ((warning,) if warning else ())


@pytest.mark.parametrize("mode", MODES)
def test_as_many_prefixes_fit_as_the_table_says(path: Path, mode: str) -> None:
    without = plan_table(path, SMALL)
    assert {row.prefixes for row in without.modes} == {None}
    budget = without.model_bytes + 100_000
    row = plan_table(path, replace(SMALL, cache_mode=mode, budget_bytes=budget)).chosen
    try:
        model = load_model(path, 64, 16, cache_mode=mode, threads=1, budget_bytes=budget)
    except OutOfMemoryError:
        assert row.prefixes == 0
        assert row.model_bytes > budget
        return
    with model:
        assert how_many_fit(model) == row.prefixes


def how_many_fit(model: Model) -> int:
    held: list[PrefixCache] = []
    with contextlib.suppress(OutOfMemoryError):
        while len(held) < 1000:
            held.append(model.prefix(random_ids(40)))
    return len(held)


def test_the_suggested_pool_loads_under_the_budget_and_builds_the_prefix(path: Path) -> None:
    options = replace(SMALL, max_seq_len=256, prefill_chunk=0, prefix_tokens=100)
    table = plan_table(path, options)
    tried = 0
    for share in (0.5, 0.7, 0.9, 0.999):
        budget = int((table.model_bytes + table.chosen.prefix_bytes) * share)
        advised = plan_table(path, replace(options, budget_bytes=budget))
        assert advised.chosen.prefixes == 0
        found = re.search(r"--max-seq-len (\d+) --prefill-chunk (\d+) takes ([\d,]+)", advised.suggestions[0])
        if not found:
            assert "raise --budget" in advised.suggestions[0]
            continue
        tried += 1
        rows, chunk = int(found[1]), int(found[2])
        with load_model(path, rows, chunk, threads=1, budget_bytes=budget) as model:
            assert model.vram_usage_bytes == int(found[3].replace(",", ""))
            model.prefix(random_ids(100)).close()
    assert tried, "no budget of the test leaves room for a smaller pool"


def test_another_mode_is_suggested_only_where_none_of_the_chosen_fits(path: Path) -> None:
    table = plan_table(path, SMALL)
    smallest = min(row.model_bytes + row.prefix_bytes for row in table.modes)
    fits = plan_table(path, replace(SMALL, budget_bytes=table.model_bytes + table.chosen.prefix_bytes))
    assert fits.chosen.prefixes == 1
    assert fits.suggestions == ()
    tight = plan_table(path, replace(SMALL, budget_bytes=smallest))
    others = [row.mode for row in tight.modes if row.prefixes]
    if "fp16" not in others:
        assert re.search(r"--kv (\w+) fits", tight.suggestions[-1])[1] in others  # type: ignore[index]


def test_text_and_json_say_the_same(path: Path) -> None:
    table = plan_table(path, replace(SMALL, cache_mode="int8", budget_bytes=10**6))
    text, record = render(table), json.loads(json.dumps(table.as_json()))
    assert record["modes"][1]["mode"] == "int8"
    assert record["options"]["budget_bytes"] == 10**6
    for row in record["modes"]:
        for key in ("model_bytes", "token_bytes", "prefix_bytes", "prefixes"):
            assert f"{row[key]:,}" in text
    for size in record["owners"].values():
        assert not size or f"{size:,}" in text
    assert "* int8" in text
    assert record["policy"] == POLICY_PAGE
    assert POLICY_PAGE in text
    assert (Path(__file__).parents[2] / POLICY_PAGE).is_file()


def test_columns_stay_apart_and_in_line_whatever_the_figures(path: Path) -> None:
    table = plan_table(path, replace(SMALL, budget_bytes=2**63 - 1))
    most = 2**63 - 1
    wide = replace(
        table,
        owners=dict.fromkeys(table.owners, most),
        model_bytes=most,
        modes=tuple(ModeRow(row.mode, most, most, most, most, ()) for row in table.modes),
    )
    for shown in (table, wide):
        lines = render(shown).splitlines()
        start = next(i for i, line in enumerate(lines) if line.startswith("  mode"))
        rows = lines[start : start + 1 + len(MODES)]
        assert len({len(line) for line in rows}) == 1
        for row, line in zip(shown.modes, rows[1:], strict=True):
            figures = (row.model_bytes, row.token_bytes, row.prefix_bytes, row.prefixes)
            assert re.split("  +", line[2:]) == [row.mode, *(f"{figure:,}" for figure in figures)]
    for owner in table.owners:
        if table.owners[owner]:
            assert re.search(rf"^  {owner}  +{most:,}$", render(wide), re.MULTILINE)


def test_a_mode_that_loses_memory_is_warned_of(tmp_path: Path) -> None:
    path = write_calm(tmp_path / "m.tloop", "llama", bits=8)  # two K/V heads for four query heads
    table = plan_table(path, SMALL)
    warned = {row.mode: row.warnings for row in table.modes}
    # Hidden states of 48 take 96 bytes, keys and values of 32 each 128: only codes of 8 bits cost less.
    assert not warned["fp16"]
    assert not warned["int8"]
    assert "loses memory" not in "".join(warned["h_fp16"])
    narrow = write_calm(tmp_path / "n.tloop", "llama", bits=8, n_kv_heads=1)
    table = plan_table(narrow, SMALL)
    assert "loses memory" in table.modes[2].warnings[0]
    assert "warning: cache_mode h_fp16 loses memory" in render(table)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_seq_len": 257}, LoadError, "max_seq_len=257"),
        ({"prefill_chunk": 65}, LoadError, "prefill_chunk=65"),
        ({"cache_mode": "int3"}, LoadError, "int3"),
        ({"threads": 0}, LoadError, "threads=0"),
        ({"depth": 0}, ValueError, "depth 0"),
        ({"depth": 5000}, ValueError, "depth 5000"),
        ({"prefix_tokens": 0}, ValueError, "prefixes of 0 tokens"),
        ({"prefix_tokens": 256}, ValueError, r"give 1\.\.255"),
        ({"budget_bytes": 0}, ValueError, "budget of 0"),
        ({"budget_bytes": 2**63}, ValueError, "more than 9,223,372,036,854,775,807 bytes"),
    ],
)
def test_unusable_options_are_named(
    path: Path, given: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_table(path, replace(SMALL, **given))  # type: ignore[arg-type]


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(200))
    with pytest.raises(FormatError, match="magic"):
        plan_table(tmp_path / "x", SMALL)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("0" * 30 + "8", 8),
        ("8000000", 8_000_000),
        ("8MB", 8_000_000),
        ("8GiB", 8 * 2**30),
        ("3kb", 3000),
        ("1KiB", 1024),
    ],
)
def test_byte_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-3", "1.5GB", "8 MB", "8X", "8MBMB", "٣"])
def test_other_byte_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="as bytes"):
        parse_bytes(text)


@pytest.mark.parametrize("text", [str(2**63), "8589934592GiB", "9" * 5000 + "GB"])
def test_byte_sizes_beyond_63_bits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is more than 9,223,372,036,854,775,807 bytes") as caught:
        parse_bytes(text)
    assert len(str(caught.value)) < 200
