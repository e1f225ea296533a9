"""A cascade's numbers are those of plain runs at the depths it reached, and the depths follow the rule."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import VOCAB, random_ids, write_calm
from numpy.typing import NDArray
from tinyloop.native import (
    InvalidInputError,
    MismatchError,
    Model,
    OutOfMemoryError,
    PrefixCache,
    cascade,
    load_model,
)
from tinyloop.native.cache_size import state_bytes
from tinyloop.native.cascade import CascadeResult, group_margins

DEPTHS = (2, 3, 4)
Flat = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_calm(tmp_path_factory.mktemp("m") / "m.tloop", "ouro", bits=4)


@pytest.fixture(params=["fp16", "int8", "h_int4"])
def model(path: Path, request: pytest.FixtureRequest) -> Iterator[Model]:
    with load_model(path, max_seq_len=64, prefill_chunk=16, cache_mode=request.param) as loaded:
        start = loaded.vram_usage_bytes
        yield loaded
        assert loaded.vram_usage_bytes == start, "a handle or a prefix was left open"


def items(n: int, seed: int = 0, longest: int = 20) -> Flat:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest, n)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    n_scored = rng.integers(1, lengths).astype(np.int32)
    return rng.integers(0, VOCAB, offsets[-1]).astype(np.int32), offsets, n_scored


def rows_of_choices(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Groups of 2 to 4, shuffled, under numbers that are neither small nor in order."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    while n - sum(sizes) >= 6:
        sizes.append(int(rng.integers(2, 5)))
    sizes += [n - sum(sizes) - 2, 2] if n - sum(sizes) > 3 else [n - sum(sizes)]
    names = rng.permutation(1000)[: len(sizes)] - 500
    return rng.permutation(np.repeat(names, sizes)).astype(np.int32)


def one(flat: Flat, i: int) -> Flat:
    ids, offsets, n_scored = flat
    some = ids[offsets[i] : offsets[i + 1]]
    return some, np.array([0, len(some)], np.int64), n_scored[i : i + 1]


def plain(model: Model, flat: Flat, depth: int, prefixes: Any = None) -> list[NDArray[np.float32]]:
    """One item a call, without handles: what every number is held against."""
    found = []
    for i in range(len(flat[2])):
        prefix = None if prefixes is None else [prefixes[i]]
        found.append(model.score(*one(flat, i), depth=depth, prefixes=prefix).logprobs)
    return found


def depths_by_the_rule(
    by_depth: dict[int, list[NDArray[np.float32]]], groups: NDArray[np.int32], margin: float
) -> list[int]:
    """The rule in words of its own: a row's two best sums, at one depth after the other."""
    depths = [0] * len(groups)
    for group in set(groups.tolist()):
        members = [i for i, g in enumerate(groups) if g == group]
        for depth in DEPTHS:
            sums = sorted(math.fsum(by_depth[depth][i].tolist()) for i in members)
            for i in members:
                depths[i] = depth
            if sums[-1] - sums[-2] >= margin:
                break
    return depths


def check_exact(result: CascadeResult, by_depth: dict[int, list[NDArray[np.float32]]]) -> None:
    for i, depth in enumerate(result.depths.tolist()):
        got = result.logprobs[result.offsets[i] : result.offsets[i + 1]]
        assert np.array_equal(got, by_depth[depth][i]), f"item {i} at depth {depth}"


@pytest.mark.parametrize("margin", [0.0, 0.5, 2.0, 6.0, math.inf])
def test_choices_follow_the_rule_with_the_numbers_of_plain_runs(model: Model, margin: float) -> None:
    flat, groups = items(41), rows_of_choices(41)
    by_depth = {depth: plain(model, flat, depth) for depth in DEPTHS}
    result = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=margin)
    assert result.depths.tolist() == depths_by_the_rule(by_depth, groups, margin)
    check_exact(result, by_depth)
    reached = set(result.depths.tolist())
    assert reached == ({2} if margin == 0 else {4} if margin == math.inf else reached)
    if margin == 2.0:
        assert reached == {2, 3, 4}, "the case is too easy: it never stops in between"
    rows = np.diff(flat[1]) - 1
    assert result.row_loops == (rows * result.depths).sum()
    assert result.full_row_loops == 4 * rows.sum()
    assert result.prefix_row_loops == 0


def test_greedy_flags_are_those_of_the_depth_reached(model: Model) -> None:
    flat, groups = items(20, seed=3), rows_of_choices(20)
    result = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=2.0)
    for depth in DEPTHS:
        full = model.score(*flat, depth=depth)
        at = np.repeat(result.depths == depth, flat[2])
        assert np.array_equal(result.greedy[at], full.greedy[at])


def test_equal_sums_are_a_margin_of_zero(model: Model) -> None:
    ids = np.tile(random_ids(9), 2)
    flat = (ids, np.array([0, 9, 18], np.int64), np.array([3, 3], np.int32))
    groups = np.zeros(2, np.int32)
    assert cascade(model, *flat, groups=groups, depths=DEPTHS, margin=0.0).depths.tolist() == [2, 2]
    assert cascade(model, *flat, groups=groups, depths=DEPTHS, margin=1e-30).depths.tolist() == [4, 4]


@pytest.mark.parametrize("threshold", [0.01, 0.2, 0.4, 1.0])
def test_items_without_choices_stop_where_their_gates_say(model: Model, threshold: float) -> None:
    ids, offsets, n_scored = items(30, seed=1)
    flat = (ids, offsets, np.minimum(n_scored, 2))
    result = cascade(
        model, *flat, groups=np.arange(30, dtype=np.int32), depths=DEPTHS, exit_threshold=threshold
    )
    full = model.score(*flat, depth=4, gates=True)
    left = 1 - np.cumprod(1 - full.gates.astype(np.float64), axis=0)
    for i, (begin, end) in enumerate(zip(full.offsets[:-1], full.offsets[1:], strict=True)):
        done = [depth for depth in DEPTHS if left[depth - 1, begin:end].min() >= threshold]
        assert result.depths[i] == (done[0] if done and threshold < 1 else 4)
    if threshold == 0.2:
        assert set(result.depths.tolist()) == {2, 3, 4}, "the case is too easy"
    check_exact(result, {depth: plain(model, flat, depth) for depth in DEPTHS})


def test_rows_with_and_without_choices_go_together(model: Model) -> None:
    flat = items(9)
    groups = np.array([5, 1, 5, 2, 1, 3, 3, 9, 3], np.int32)
    result = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=1.0, exit_threshold=0.3)
    by_depth = {depth: plain(model, flat, depth) for depth in DEPTHS}
    check_exact(result, by_depth)
    alone = cascade(
        model, *flat, groups=np.arange(9, dtype=np.int32), depths=DEPTHS, exit_threshold=0.3
    ).depths
    assert result.depths[[3, 7]].tolist() == alone[[3, 7]].tolist()
    choices = [0, 1, 2, 4, 5, 6, 8]
    kept = {depth: [found[i] for i in choices] for depth, found in by_depth.items()}
    assert result.depths[choices].tolist() == depths_by_the_rule(kept, groups[choices], 1.0)


@pytest.mark.parametrize("built", [2, 4])
def test_prefixes_serve_every_depth_and_are_deepened_for_the_groups_that_go_on(
    model: Model, built: int
) -> None:
    flat, groups = items(20, seed=2), rows_of_choices(20)
    with model.prefix(random_ids(13), depth=built) as a, model.prefix(random_ids(30, 7), depth=built) as b:
        prefixes: list[PrefixCache | None] = [(a, b, None)[i % 3] for i in range(20)]
        result = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=2.0, prefixes=prefixes)
        with model.prefix(a.token_ids, depth=4) as deep_a, model.prefix(b.token_ids, depth=4) as deep_b:
            deep = [(deep_a, deep_b, None)[i % 3] for i in range(20)]
            by_depth = {depth: plain(model, flat, depth, deep) for depth in DEPTHS}
        assert result.depths.tolist() == depths_by_the_rule(by_depth, groups, 2.0)
        check_exact(result, by_depth)
        deepest = [max(d for d, p in zip(result.depths, prefixes, strict=True) if p is x) for x in (a, b)]
        assert max(deepest) == 4
        added = sum(p.length * max(0, int(deep) - built) for p, deep in zip((a, b), deepest, strict=True))
        assert result.prefix_row_loops == added
        assert a.depth == built
        assert not a.closed


def test_slices_under_a_byte_budget_give_the_same_numbers_in_less_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat, groups = items(40, seed=4), rows_of_choices(40)
    with load_model(path, max_seq_len=64) as model:
        whole = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=math.inf)
        all_bytes = sum(
            2 * state_bytes(model.descriptor, int(n) - 1, model.block_bytes) for n in np.diff(flat[1])
        )
        base = model.vram_usage_bytes
    budget = all_bytes // 3
    # The account of the engine is the witness: it refuses what goes beyond.
    with load_model(path, max_seq_len=64, budget_bytes=base + budget) as model:
        sliced = cascade(
            model, *flat, groups=groups, depths=DEPTHS, margin=math.inf, handle_budget_bytes=budget
        )
        assert np.array_equal(sliced.logprobs, whole.logprobs)
        assert np.array_equal(sliced.depths, whole.depths)
        with pytest.raises(OutOfMemoryError):
            cascade(model, *flat, groups=groups, depths=DEPTHS, margin=math.inf)
        assert model.vram_usage_bytes == base
        with pytest.raises(InvalidInputError, match=r"handle_budget_bytes=1000: .* need \d+ bytes together"):
            cascade(model, *flat, groups=groups, margin=1.0, handle_budget_bytes=1000)
        assert model.counters["passes"] > 0


@pytest.mark.parametrize("family", ["ouro", "huginn", "retrofit", "hrm_text", "nanbeige", "loop_range"])
def test_every_family_cascades_and_holds_what_was_planned(tmp_path: Path, family: str) -> None:
    path = write_calm(tmp_path / "m.tloop", family, bits=8)
    flat, groups = items(12, seed=5), rows_of_choices(12)
    with load_model(path, max_seq_len=64) as model:
        result = cascade(model, *flat, groups=groups, depths=(1, 2, 4), margin=2.0)
        check_exact(result, {depth: plain(model, flat, depth) for depth in (1, 2, 4)})
        for handle, rows in zip(model.start_many(*flat, 1, 2), np.diff(flat[1]) - 1, strict=True):
            assert handle.bytes == state_bytes(model.descriptor, int(rows), model.block_bytes)
            handle.close()


@pytest.mark.parametrize("margin", [0.5, 2.0, math.inf])
def test_prompts_of_a_prefix_lm_model_stay_prompts_at_every_depth(tmp_path: Path, margin: float) -> None:
    path = write_calm(tmp_path / "m.tloop", "hrm_text", bits=8)
    flat, groups = items(20, seed=6), rows_of_choices(20)
    lens = np.array([i % int(n) for i, n in enumerate(np.diff(flat[1]))], np.int32)
    with load_model(path, max_seq_len=64) as model:
        by_depth = {
            depth: [
                model.score(*one(flat, i), depth=depth, prompt_lens=lens[i : i + 1]).logprobs
                for i in range(len(lens))
            ]
            for depth in DEPTHS
        }
        for budget in (None, 40_000):
            result = cascade(
                model,
                *flat,
                groups=groups,
                depths=DEPTHS,
                margin=margin,
                prompt_lens=lens,
                handle_budget_bytes=budget,
            )
            assert result.depths.tolist() == depths_by_the_rule(by_depth, groups, margin)
            check_exact(result, by_depth)
        causal = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=margin)
        assert not np.array_equal(causal.logprobs, result.logprobs), "the prompts make no difference"


def test_items_without_choices_are_scored_with_their_prompts(model: Model) -> None:
    """Causal models refuse a prompt, by the caller's number for the item; None and zeros are none."""
    flat, groups = items(6, seed=1), np.arange(6, dtype=np.int32)
    plainly = cascade(model, *flat, groups=groups, exit_threshold=0.3)
    zeros = np.zeros(6, np.int32)
    same = cascade(model, *flat, groups=groups, exit_threshold=0.3, prompt_lens=zeros)
    assert np.array_equal(same.logprobs, plainly.logprobs)
    zeros[4] = 1
    with pytest.raises(InvalidInputError, match="item 4 with prompt_len=1: the model is causal"):
        cascade(model, *flat, groups=groups, exit_threshold=0.3, prompt_lens=zeros)


@pytest.mark.parametrize(("loops", "steps"), [(1, [1]), (2, [1, 2]), (4, [3, 4]), (6, [5, 6])])
def test_the_default_is_the_last_two_loops_of_the_model(tmp_path: Path, loops: int, steps: list[int]) -> None:
    path = write_calm(tmp_path / "m.tloop", "ouro", bits=8, loops=loops)
    flat, groups = items(12, seed=2), rows_of_choices(12)
    with load_model(path, max_seq_len=64) as model:
        for margin, depth in ((0.0, steps[0]), (math.inf, steps[-1])):
            assert set(cascade(model, *flat, groups=groups, margin=margin).depths.tolist()) == {depth}


@pytest.mark.parametrize("nth", [1, 3, 9, 14])
def test_a_failure_on_the_way_leaves_no_handle(model: Model, nth: int) -> None:
    flat, groups = items(12), rows_of_choices(12)
    before = model.vram_usage_bytes
    model._fail_allocation(nth)
    with pytest.raises(OutOfMemoryError):
        cascade(model, *flat, groups=groups, depths=DEPTHS, margin=math.inf)
    assert model.vram_usage_bytes == before
    assert set(cascade(model, *flat, groups=groups, depths=DEPTHS, margin=math.inf).depths.tolist()) == {4}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"depths": ()}, r"depths=\(\)"),
        ({"depths": (0, 2)}, r"depths=\(0, 2\)"),
        ({"depths": (2, 2)}, r"depths=\(2, 2\)"),
        ({"depths": (4, 2)}, "rising"),
        ({"margin": -1.0}, "margin=-1.0"),
        ({"margin": math.nan}, "margin=nan"),
        ({"margin": None}, "without a margin"),
        ({"exit_threshold": 0.0}, "exit_threshold=0.0"),
        ({"exit_threshold": math.nan}, "exit_threshold=nan"),
        ({"groups": np.arange(6, dtype=np.int32)}, "give exit_threshold"),
        ({"groups": np.zeros(5, np.int32)}, "groups has 5 entries for 6 items"),
        ({"prefixes": [None]}, "1 prefixes for 6 items"),
        ({"prompt_lens": np.zeros(5, np.int32)}, "prompt_lens has 5 entries for 6 items"),
        ({"depths": (2, 5000)}, "depth"),
    ],
)
def test_unusable_arguments_are_named(model: Model, given: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"groups": np.zeros(6, np.int32), "margin": 1.0, **given}
    with pytest.raises(InvalidInputError, match=message):
        cascade(model, *items(6), **arguments)
    assert model.counters["rows"] == 0


def test_arrays_that_are_not_flat_items_are_refused(model: Model) -> None:
    ids, offsets, n_scored = items(6)
    groups = np.zeros(6, np.int32)
    with pytest.raises(TypeError, match="groups must be a numpy array of int32"):
        cascade(model, ids, offsets, n_scored, groups=groups.astype(np.int64), margin=1.0)
    with pytest.raises(TypeError, match=r"token_ids must be .* found <class 'list'>"):
        cascade(model, ids.tolist(), offsets, n_scored, groups=groups, margin=1.0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="offsets has 6 entries"):
        cascade(model, ids, offsets[1:], n_scored, groups=groups, margin=1.0)
    n_scored[2] = 0
    with pytest.raises(InvalidInputError, match=r"item 2 has \d+ ids and n_scored=0"):
        cascade(model, ids, offsets, n_scored, groups=groups, margin=1.0)


def test_no_items_are_no_work(model: Model) -> None:
    nothing = (np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))
    result = cascade(model, *nothing, groups=np.empty(0, np.int32), margin=1.0)
    assert (len(result.logprobs), result.row_loops, model.counters["rows"]) == (0, 0, 0)


def test_a_model_without_a_gate_needs_choices(tmp_path: Path) -> None:
    path = write_calm(tmp_path / "m.tloop", "nanbeige", bits=8)
    with (
        load_model(path, max_seq_len=64) as model,
        pytest.raises(InvalidInputError, match=r"2 items without choices: the exit gate .* model has none"),
    ):
        cascade(model, *items(2), groups=np.arange(2, dtype=np.int32), exit_threshold=0.5)


def test_a_prefix_that_cannot_be_deepened_is_a_mismatch(model: Model) -> None:
    flat, groups = items(4), np.zeros(4, np.int32)
    with (
        model.prefix(random_ids(9), depth=2, upgradable=False) as prefix,
        pytest.raises(MismatchError, match="kept no states"),
    ):
        cascade(model, *flat, groups=groups, depths=DEPTHS, margin=math.inf, prefixes=[prefix] * 4)


def test_state_bytes_of_the_shipped_shape() -> None:
    ouro = {"n_low": 0, "inject": "none", "hidden_size": 512}
    assert state_bytes(ouro, 1024) == 1024 * 512 * 4
    assert state_bytes({**ouro, "hidden_size": 3}, 1) == 64


def choices_with_bystanders(n_groups: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Groups of four items, of which the first two are compared."""
    groups = np.repeat(np.arange(n_groups, dtype=np.int32), 4)
    return groups, np.tile([True, True, False, False], n_groups)


def test_items_that_are_not_compared_go_where_their_group_goes(model: Model) -> None:
    flat = items(40, seed=5)
    groups, compared = choices_with_bystanders(10)
    by_depth = {depth: plain(model, flat, depth) for depth in DEPTHS}
    result = cascade(model, *flat, groups=groups, compared=compared, depths=DEPTHS, margin=2.0)
    some = {depth: [values[i] for i in np.flatnonzero(compared)] for depth, values in by_depth.items()}
    expected = depths_by_the_rule(some, groups[compared], 2.0)
    assert result.depths.tolist() == np.repeat(expected[::2], 4).tolist()
    assert len(set(result.depths.tolist())) > 1
    check_exact(result, by_depth)


@pytest.mark.parametrize("compare_all", [True, False])
def test_without_a_margin_a_group_stops_where_the_last_of_its_gates_says(
    model: Model, compare_all: bool
) -> None:
    ids, offsets, n_scored = items(40, seed=6)
    flat = (ids, offsets, np.minimum(n_scored, 2))
    groups, compared = choices_with_bystanders(10)
    compared = np.ones(40, np.bool_) if compare_all else compared
    alone = cascade(
        model, *flat, groups=np.arange(40, dtype=np.int32), depths=DEPTHS, exit_threshold=0.2
    ).depths
    result = cascade(model, *flat, groups=groups, compared=compared, depths=DEPTHS, exit_threshold=0.2)
    last = [max(alone[i] for i in range(k, k + 4) if compared[i]) for k in range(0, 40, 4)]
    assert result.depths.tolist() == np.repeat(last, 4).tolist()
    assert len(set(last)) > 1
    check_exact(result, {depth: plain(model, flat, depth) for depth in DEPTHS})
    rows = np.diff(offsets) - 1
    again = (alone < result.depths) & compared
    assert result.row_loops == (rows * result.depths).sum() + (rows * alone)[again].sum()


def test_a_group_that_nothing_decides_is_refused(model: Model) -> None:
    compared = np.array([True, True, False, False])
    with pytest.raises(InvalidInputError, match="no compared item"):
        cascade(
            model,
            *items(4),
            groups=np.array([0, 0, 1, 1], np.int32),
            compared=compared,
            depths=DEPTHS,
            margin=1,
        )


def test_zero_probabilities_are_equal() -> None:
    sums = np.array([-np.inf, -np.inf, -1.0, -np.inf, -1.0, -3.0])
    assert group_margins(sums, np.array([0, 0, 1, 1, 2, 2])).tolist() == [0.0, math.inf, 2.0]


def test_whoever_deepens_prefixes_owns_them(model: Model) -> None:
    """Nested prefixes, which an upgrade of one alone cannot serve: their owner upgrades parents first."""
    top = model.prefix(random_ids(9), depth=2)
    below = model.prefix(random_ids(5), depth=2, parent=top)
    flat, groups = items(24, seed=7, longest=12), np.repeat(np.arange(6, dtype=np.int32), 4)
    made: dict[tuple[int, int], PrefixCache] = {}

    def deepen(prefix: PrefixCache, depth: int) -> PrefixCache:
        if prefix.depth >= depth:
            return prefix
        if (id(prefix), depth) not in made:
            parent = deepen(top, depth) if prefix is below else None
            made[id(prefix), depth] = prefix.upgrade(depth, parent=parent)
        return made[id(prefix), depth]

    prefixes = [below, top, None, below] * 6
    deep = {3: deepen(below, 3), 4: deepen(below, 4)}
    by_depth = {
        depth: plain(
            model, flat, depth, [p and (deep[4] if p is below else deepen(top, 4)) for p in prefixes]
        )
        for depth in DEPTHS
    }
    with pytest.raises(MismatchError):
        cascade(model, *flat, groups=groups, depths=DEPTHS, margin=math.inf, prefixes=prefixes)
    result = cascade(model, *flat, groups=groups, depths=DEPTHS, margin=3.0, prefixes=prefixes, deepen=deepen)
    check_exact(result, by_depth)
    assert result.prefix_row_loops == 0
    gated = cascade(
        model, *flat, groups=groups, depths=DEPTHS, exit_threshold=0.2, prefixes=prefixes, deepen=deepen
    )
    check_exact(gated, by_depth)
    assert len(set(result.depths.tolist())) > 1
    for prefix in [*made.values(), below, top]:
        prefix.close()
