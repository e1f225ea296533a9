"""A row's bits depend on its own tokens and depth only: bitwise, in every schedule and cache mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import NUMERIC_MODES, parts, random_ids, score_items, write_calm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinyloop.native import Model, load_model

# Hidden states take more room than keys and values on models this small.
pytestmark = pytest.mark.filterwarnings("ignore:cache_mode:UserWarning")

MAX_SEQ_LEN = 512
SHAPE = {"hidden_size": 80, "ffn_size": 300, "max_positions": 4096}
# Every schedule, every cache mode, and every place of the norms that rebuilt keys depend on.
CAUSAL = [
    ("llama", "fp16"),
    ("ouro", "fp16"),
    ("ouro", "h_int4"),
    ("olmo2", "h_int8"),
    ("loop_range", "int8"),
    ("huginn", "h_fp16"),
    ("retrofit_olmo", "h_int4"),
    *[("ouro", "fp16", numbers) for numbers in NUMERIC_MODES[1:]],
]
PREFIX_LM = [("hrm_text", "int8"), ("hrm_text", "h_int8")]


def cases(*models: tuple[str, ...]) -> pytest.MarkDecorator:
    """The models that a test runs on, each loaded once: family, cache mode, and numeric mode if not fp16."""
    return pytest.mark.parametrize("case", models, indirect=True, ids="-".join, scope="module")


everywhere = cases(*CAUSAL, *PREFIX_LM)
# A prefix of a prefix-LM is one whole prompt: its rows differ from those of a text that goes on.
with_prefixes = cases(*CAUSAL)


@dataclass(frozen=True)
class Case:
    path: Path
    cache_mode: str
    numeric_mode: str

    def load(self, **options: Any) -> Model:
        modes = {"cache_mode": self.cache_mode, "numeric_mode": self.numeric_mode}
        given: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN, **modes, **options}
        return load_model(self.path, **given)


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, mode, *numbers = request.param
    path = write_calm(tmp_path_factory.mktemp("m") / "m.tloop", family, bits=4, **SHAPE)
    return Case(path, mode, *(numbers or ["fp16"]))


@pytest.fixture(scope="module")
def model(case: Case) -> Iterator[Model]:
    with case.load(threads=2) as loaded:
        yield loaded


def whole(
    model: Model, ids: NDArray[np.int32], n_scored: int, depth: int | None = None
) -> NDArray[np.float32]:
    return model.score_tokens(ids, depth)[len(ids) - 1 - n_scored :]


def ragged_items(n: int, longest: int = 90) -> list[tuple[NDArray[np.int32], int]]:
    rng = np.random.default_rng(1)
    lengths = rng.integers(2, longest, n)
    return [(random_ids(int(k), seed=i), int(rng.integers(1, k))) for i, k in enumerate(lengths)]


# ---- rows and their neighbours -------------------------------------------------------------------


@everywhere
def test_first_rows_do_not_depend_on_rows_behind_them(model: Model) -> None:
    ids = random_ids(MAX_SEQ_LEN + 1)
    full = model.score_tokens(ids)
    for rows in (1, 2, 5, 6, 7, 8, 31, 32, 63, 64, 65, 128, 129, 256, 384, 385):
        assert np.array_equal(model.score_tokens(ids[: rows + 1]), full[:rows]), rows


@cases(("ouro", "fp16"), ("retrofit_olmo", "h_int4"), ("hrm_text", "int8"))
def test_rows_of_a_large_pass(case: Case) -> None:
    ids = random_ids(2049)
    with case.load(max_seq_len=2048) as large:
        full = large.score_tokens(ids, depth=2)
        for rows in (1, 513, 1024, 1537, 2047):
            assert np.array_equal(large.score_tokens(ids[: rows + 1], depth=2), full[:rows]), rows


@everywhere
def test_batch_order_and_neighbours_do_not_matter(model: Model) -> None:
    items = ragged_items(40)
    alone = [whole(model, ids, n) for ids, n in items]
    together = parts(score_items(model, items))
    order = np.random.default_rng(2).permutation(len(items))
    shuffled = parts(score_items(model, [items[i] for i in order]))
    for i, at in enumerate(order):
        assert np.array_equal(alone[i], together[i])
        assert np.array_equal(alone[at], shuffled[i])


@everywhere
def test_mixed_depths_in_one_call_are_each_as_alone(model: Model) -> None:
    items = ragged_items(16)
    depths = np.random.default_rng(4).integers(1, 6, len(items)).astype(np.int32)
    result = score_items(model, items, depth=depths)
    assert np.array_equal(result.depths, depths)
    for (ids, n), depth, found in zip(items, depths, parts(result), strict=True):
        assert np.array_equal(found, whole(model, ids, n, int(depth)))


@everywhere
def test_prefill_chunk_changes_memory_and_not_bits(case: Case, model: Model) -> None:
    items = [(random_ids(n, seed=n), n - 1) for n in (200, 33, 150)]
    expected = score_items(model, items).logprobs
    for chunk in (1, 16, 64, 100, MAX_SEQ_LEN):
        with case.load(prefill_chunk=chunk, threads=1) as chunked:
            assert np.array_equal(score_items(chunked, items).logprobs, expected), chunk
            smaller = chunked.memory_report()["scratch"] < model.memory_report()["scratch"]
            assert smaller == (chunk < MAX_SEQ_LEN)


@everywhere
def test_row_budget_changes_passes_and_not_bits(case: Case, model: Model) -> None:
    items = [(random_ids(n, seed=n), n - 1) for n in (100, 2, 57, 99, 30, 12)]
    expected = score_items(model, items).logprobs
    for max_seq_len in (100, 101, 257):
        with case.load(max_seq_len=max_seq_len) as small:
            assert np.array_equal(score_items(small, items).logprobs, expected)
            assert small.counters["passes"] > 1


# ---- machines ------------------------------------------------------------------------------------


@pytest.mark.cpu
@everywhere
def test_thread_count_does_not_matter(case: Case, model: Model) -> None:
    ids = random_ids(400)
    for threads in (1, 3):
        with case.load(threads=threads) as other:
            assert np.array_equal(model.score_tokens(ids), other.score_tokens(ids))


@pytest.mark.cpu
@everywhere
def test_every_instruction_set_here_gives_the_same_bits(case: Case, model: Model) -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    sets = ["portable"] + [isa for isa, flag in (("avx2", "avx2"), ("avx512", "avx512bw")) if flag in flags]
    split = case.numeric_mode == "bf16"
    if split and "amx_bf16" in flags:
        sets.append("amx")
    ids = random_ids(200)
    for isa in sets:
        with case.load(cpu_isa=isa) as other:
            # The mode is there to be computed by the unit that a machine has: its name does not tell which.
            assert other.numerics_id == model.numerics_id if split else isa in other.numerics_id
            assert np.array_equal(model.score_tokens(ids), other.score_tokens(ids))


@everywhere
def test_run_to_run(case: Case, model: Model) -> None:
    items = ragged_items(10)
    first = score_items(model, items)
    model.score_tokens(random_ids(300, seed=9))  # leaves other rows in the buffers
    with case.load() as again:
        for other in (score_items(model, items), score_items(again, items)):
            assert np.array_equal(first.logprobs, other.logprobs)
            assert np.array_equal(first.greedy, other.greedy)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "olmo2", "ouro", "huginn", "hrm_text"])
def test_hidden_states_kept_whole_give_the_bits_of_keys_and_values(tmp_path: Path, family: str) -> None:
    path = write_calm(tmp_path / "m.tloop", family, bits=8, **SHAPE)
    ids, tail = random_ids(100), (random_ids(30, seed=1), 29)
    found = []
    for mode in ("fp16", "h_fp16"):
        with load_model(path, 256, prefill_chunk=48, cache_mode=mode) as model, model.prefix(ids) as prefix:
            hit = score_items(model, [tail], prefixes=[prefix]).logprobs
            found.append(np.concatenate([model.score_tokens(ids, depth=3), hit]))
    assert np.array_equal(found[0], found[1])


# ---- prefixes ------------------------------------------------------------------------------------


@with_prefixes
def test_prefix_hit_has_the_bits_of_a_miss(model: Model) -> None:
    """Cut around the 64-position key tiles: inside one, at its border, several tiles long."""
    tails = [random_ids(n, seed=n) for n in (2, 3, 17, 64, 90)]
    for cut in (1, 2, 7, 8, 9, 63, 64, 65, 100, 127, 128, 129, 200, 300):
        ids = random_ids(cut)
        expected = [whole(model, np.concatenate([ids, tail]), len(tail) - 1) for tail in tails]
        with model.prefix(ids) as prefix:
            hits = score_items(model, [(t, len(t) - 1) for t in tails], prefixes=[prefix] * len(tails))
            miss = np.concatenate([ids, tails[1]])
            items = [(tails[0], len(tails[0]) - 1), (miss, len(tails[1]) - 1)]
            mixed = parts(score_items(model, items, prefixes=[prefix, None]))
        assert np.array_equal(hits.logprobs, np.concatenate(expected)), cut
        assert np.array_equal(mixed[0], expected[0]), cut
        assert np.array_equal(mixed[1], expected[1]), cut


@with_prefixes
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


@with_prefixes
def test_one_prefix_serves_64_requests(model: Model) -> None:
    prefix_ids = random_ids(130)
    tails = [random_ids(int(n), seed=i) for i, n in enumerate(np.random.default_rng(3).integers(2, 30, 64))]
    with model.prefix(prefix_ids) as prefix:
        rows = model.counters["rows"]
        hits = parts(score_items(model, [(t, len(t) - 1) for t in tails], prefixes=[prefix] * 64))
        assert model.counters["rows"] - rows == sum(len(t) - 1 for t in tails)
    for tail, hit in zip(tails, hits, strict=True):
        assert np.array_equal(hit, whole(model, np.concatenate([prefix_ids, tail]), len(tail) - 1))


@with_prefixes
def test_a_prefix_built_in_chunks_has_the_same_bits(case: Case, model: Model) -> None:
    ids, tail = random_ids(90), (random_ids(40, seed=9), 39)
    expected = whole(model, np.concatenate([ids, tail[0]]), 39)
    for chunk in (1, 50):
        with case.load(prefill_chunk=chunk) as chunked, chunked.prefix(ids) as prefix:
            assert np.array_equal(score_items(chunked, [tail], prefixes=[prefix]).logprobs, expected)


@cases(("llama", "fp16"), ("ouro", "h_int4"), ("olmo2", "h_int8"))
def test_a_deeper_prefix_serves_a_shallower_request_exactly(model: Model) -> None:
    prefix_ids, tail = random_ids(70), random_ids(20, seed=1)
    with model.prefix(prefix_ids, depth=4) as prefix:
        depths = np.array([1, 4, 2, 3], np.int32)
        together = score_items(model, [(tail, 19)] * 4, prefixes=[prefix] * 4, depth=depths)
        for depth, hit in zip(depths, parts(together), strict=True):
            miss = whole(model, np.concatenate([prefix_ids, tail]), 19, int(depth))
            assert np.array_equal(hit, miss)


@with_prefixes
@given(data=st.data())
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


# ---- prompts that see themselves both ways -------------------------------------------------------


@cases(*PREFIX_LM)
def test_prompts_do_not_depend_on_neighbours_chunks_or_threads(case: Case, model: Model) -> None:
    items = [(random_ids(n, seed=n), n - 1) for n in (100, 40, 130, 20)]
    prompts = np.array([70, 0, 129, 1], np.int32)
    alone = [
        model.score_tokens(ids, prompt_len=int(prompt))
        for (ids, _), prompt in zip(items, prompts, strict=True)
    ]
    for options in ({}, {"prefill_chunk": 1}, {"prefill_chunk": 33, "threads": 1}, {"cpu_isa": "portable"}):
        with case.load(**options) as other:
            together = score_items(other, items, prompt_lens=prompts)
            assert np.array_equal(together.logprobs, np.concatenate(alone)), options


@cases(*PREFIX_LM)
def test_rows_after_a_prompt_do_not_change_it(model: Model) -> None:
    ids = random_ids(150)
    full = model.score_tokens(ids, prompt_len=80)
    for n in (81, 82, 100, 129):
        assert np.array_equal(model.score_tokens(ids[:n], prompt_len=80), full[: n - 1])


@cases(*PREFIX_LM)
def test_a_prompt_as_a_prefix_has_the_bits_of_a_prompt(model: Model) -> None:
    for cut in (1, 7, 64, 90):
        prompt, tail = random_ids(cut), random_ids(40, seed=cut)
        expected = model.score_tokens(np.concatenate([prompt, tail]), prompt_len=cut)[cut:]
        with model.prefix(prompt) as prefix:
            assert np.array_equal(score_items(model, [(tail, 39)], prefixes=[prefix]).logprobs, expected)
