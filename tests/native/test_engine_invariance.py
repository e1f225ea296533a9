"""A row's bits depend on its own tokens and depth only: bitwise, in every mode that serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engine_cases import parts, random_ids, score_items, write_calm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinyloop.native import Model, load_model

MAX_SEQ_LEN = 512
SHAPE = {"hidden_size": 80, "ffn_size": 300, "max_positions": 2048}


@pytest.fixture(scope="module", params=["llama", "ouro"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp("m") / "m.tloop", request.param, bits=4, **SHAPE)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with load_model(path, max_seq_len=MAX_SEQ_LEN, threads=2) as loaded:
        yield loaded


def whole(model: Model, ids: NDArray[np.int32], n_scored: int) -> NDArray[np.float32]:
    return model.score_tokens(ids)[len(ids) - 1 - n_scored :]


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 31, 32, 63, 64, 65, 128, 129, 256, 384, 385, 512])
def test_first_rows_do_not_depend_on_rows_behind_them(model: Model, rows: int) -> None:
    ids = random_ids(MAX_SEQ_LEN + 1)
    assert np.array_equal(model.score_tokens(ids[: rows + 1]), model.score_tokens(ids)[:rows])


def test_batch_order_and_neighbours_do_not_matter(model: Model) -> None:
    rng = np.random.default_rng(1)
    items = [
        (random_ids(int(n), seed=int(n)), int(s))
        for n in rng.integers(2, 90, 40)
        for s in [rng.integers(1, n)]
    ]
    alone = [whole(model, ids, n) for ids, n in items]
    together = parts(score_items(model, items))
    order = rng.permutation(len(items))
    shuffled = parts(score_items(model, [items[i] for i in order]))
    for i, at in enumerate(order):
        assert np.array_equal(alone[i], together[i])
        assert np.array_equal(alone[at], shuffled[i])


# Around the 64-position key tiles: inside one, at its border, several tiles long.
@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 100, 127, 128, 129, 200, 300])
def test_prefix_hit_has_the_bits_of_a_miss(model: Model, cut: int) -> None:
    prefix_ids = random_ids(cut)
    tails = [random_ids(n, seed=n) for n in (2, 3, 17, 64, 90)]
    expected = [whole(model, np.concatenate([prefix_ids, tail]), len(tail) - 1) for tail in tails]
    with model.prefix(prefix_ids) as prefix:
        hits = parts(score_items(model, [(t, len(t) - 1) for t in tails], prefixes=[prefix] * len(tails)))
        mixed = parts(
            score_items(
                model,
                [(tails[0], len(tails[0]) - 1), (np.concatenate([prefix_ids, tails[1]]), len(tails[1]) - 1)],
                prefixes=[prefix, None],
            )
        )
    for expect, hit in zip(expected, hits, strict=True):
        assert np.array_equal(expect, hit)
    assert np.array_equal(mixed[0], expected[0])
    assert np.array_equal(mixed[1], expected[1])


@pytest.mark.parametrize("cuts", [(10, 60, 70), (64, 128), (1, 2, 3, 64, 65), (100, 150, 151)])
def test_chained_prefixes_have_the_bits_of_one(model: Model, cuts: tuple[int, ...]) -> None:
    ids = random_ids(240)
    expected = whole(model, ids, 240 - cuts[-1] - 1)
    parent = None
    begin = 0
    handles = []
    for cut in cuts:
        parent = model.prefix(ids[begin:cut], parent=parent)
        handles.append(parent)
        begin = cut
    for handle in handles[:-1]:  # a child keeps its parents' memory
        handle.close()
    tail = ids[cuts[-1] :]
    assert np.array_equal(parts(score_items(model, [(tail, len(tail) - 1)], prefixes=[parent]))[0], expected)


def test_one_prefix_serves_64_requests(model: Model) -> None:
    prefix_ids = random_ids(130)
    tails = [random_ids(int(n), seed=i) for i, n in enumerate(np.random.default_rng(3).integers(2, 30, 64))]
    with model.prefix(prefix_ids) as prefix:
        rows = model.counters["rows"]
        hits = parts(score_items(model, [(t, len(t) - 1) for t in tails], prefixes=[prefix] * 64))
        assert model.counters["rows"] - rows == sum(len(t) - 1 for t in tails)
    for tail, hit in zip(tails, hits, strict=True):
        assert np.array_equal(hit, whole(model, np.concatenate([prefix_ids, tail]), len(tail) - 1))


@pytest.mark.parametrize("chunk", [1, 16, 64, 100, 512])
def test_prefill_chunk_changes_memory_and_not_bits(path: Path, model: Model, chunk: int) -> None:
    items = [(random_ids(n, seed=n), n - 1) for n in (200, 33, 150)]
    prefix_ids = random_ids(90)
    expected = parts(score_items(model, items))
    with load_model(path, max_seq_len=MAX_SEQ_LEN, prefill_chunk=chunk, threads=1) as chunked:
        for one, other in zip(expected, parts(score_items(chunked, items)), strict=True):
            assert np.array_equal(one, other)
        with model.prefix(prefix_ids) as a, chunked.prefix(prefix_ids) as b:
            tail = [(random_ids(40, seed=9), 39)]
            assert np.array_equal(
                score_items(model, tail, prefixes=[a]).logprobs,
                score_items(chunked, tail, prefixes=[b]).logprobs,
            )
        smaller = chunked.memory_report()["scratch"] < model.memory_report()["scratch"]
    assert smaller == (chunk < MAX_SEQ_LEN)


@pytest.mark.parametrize("max_seq_len", [100, 101, 257])
def test_row_budget_changes_passes_and_not_bits(path: Path, model: Model, max_seq_len: int) -> None:
    items = [(random_ids(n, seed=n), n - 1) for n in (100, 2, 57, 99, 30, 12)]
    with load_model(path, max_seq_len=max_seq_len) as small:
        for one, other in zip(
            parts(score_items(model, items)), parts(score_items(small, items)), strict=True
        ):
            assert np.array_equal(one, other)
        assert small.counters["passes"] > 1


def test_thread_count_does_not_matter(path: Path, model: Model) -> None:
    ids = random_ids(400)
    for threads in (1, 3):
        with load_model(path, max_seq_len=MAX_SEQ_LEN, threads=threads) as other:
            assert np.array_equal(model.score_tokens(ids), other.score_tokens(ids))


def test_every_instruction_set_here_gives_the_same_bits(path: Path, model: Model) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    sets = ["portable"] + [isa for isa, flag in (("avx2", "avx2"), ("avx512", "avx512bw")) if flag in flags]
    ids = random_ids(200)
    for isa in sets:
        with load_model(path, max_seq_len=MAX_SEQ_LEN, cpu_isa=isa) as other:
            assert isa in other.numerics_id
            assert np.array_equal(model.score_tokens(ids), other.score_tokens(ids))


def test_a_deeper_prefix_serves_a_shallower_request_exactly(tmp_path: Path) -> None:
    path = write_calm(tmp_path / "m.tloop", "ouro", bits=8)
    with load_model(path, max_seq_len=256) as model:
        prefix_ids, tail = random_ids(70), random_ids(20, seed=1)
        with model.prefix(prefix_ids, depth=4) as prefix:
            for depth in (1, 2, 3, 4):
                hit = score_items(model, [(tail, 19)], prefixes=[prefix], depth=depth).logprobs
                miss = model.score_tokens(np.concatenate([prefix_ids, tail]), depth=depth)[70:]
                assert np.array_equal(hit, miss)


@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_ragged_batch_equals_one_by_one(model: Model, data: st.DataObject) -> None:
    """Random items over random prefixes of one text, in random order, against each item alone and whole."""
    text = random_ids(300, seed=11)
    cuts = data.draw(st.lists(st.integers(1, 200), max_size=3, unique=True).map(sorted))
    n = data.draw(st.integers(1, 8))
    handles = [model.prefix(text[:cut]) for cut in cuts]
    choices: list[int | None] = [None, *range(len(cuts))]
    items, prefixes, expected = [], [], []
    for i in range(n):
        tail = random_ids(data.draw(st.integers(2, 80)), seed=100 + i)
        scored = data.draw(st.integers(1, len(tail) - 1))
        choice = data.draw(st.sampled_from(choices))
        items.append((tail, scored))
        prefixes.append(None if choice is None else handles[choice])
        context = text[:0] if choice is None else text[: cuts[choice]]
        expected.append(whole(model, np.concatenate([context, tail]), scored))
    for one, other in zip(expected, parts(score_items(model, items, prefixes=prefixes)), strict=True):
        assert np.array_equal(one, other)
