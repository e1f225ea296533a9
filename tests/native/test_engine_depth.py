"""What each depth gives, when items leave early, and what cannot be asked of a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_cases import parts, random_ids, score_items, write_calm
from numpy.typing import NDArray
from tinyloop.native import InvalidInputError, MismatchError, Model, ScoreResult, load_model
from tinyloop.native.reference import Reference

# Hidden states take more room than keys and values on models this small.
pytestmark = pytest.mark.filterwarnings("ignore:cache_mode:UserWarning")

# A gate is one product of a state and a sigmoid, of slope 1/4 at most: what float32 leaves of it.
GATE_MAX = 1e-5
# Of FP16 states, the slope of the sigmoid leaves a quarter of what log-probabilities may be off by.
GATE_MAX_FP16 = 7.5e-3
DEPTH = 4
TEXTS = [random_ids(n, seed=n) for n in (70, 9, 33, 2, 130, 18, 5)]
ITEMS = [(ids, n) for ids, n in zip(TEXTS, (3, 2, 1, 1, 40, 2, 1), strict=True)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("m")
    families = ("llama", "ouro", "nanbeige", "loop_range", "huginn", "hrm_text")
    return {family: write_calm(folder / f"{family}.tloop", family, bits=8) for family in families}


@pytest.fixture
def model(paths: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Model]:
    with load_model(paths[request.param], 256) as loaded:
        yield loaded


def on(*families: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("model", families, indirect=True)


# ---- by depth ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "cache_mode"),
    [
        ("llama", "fp16"),
        ("ouro", "h_int8"),
        ("nanbeige", "int8"),
        ("loop_range", "h_int4"),
        ("huginn", "int8"),
        ("hrm_text", "fp16"),
    ],
)
def test_rows_by_depth_are_the_runs_at_that_depth(
    paths: dict[str, Path], family: str, cache_mode: str
) -> None:
    depths = np.array([4, 1, 3, 5, 2, 4, 1], np.int32)
    with load_model(paths[family], 160, cache_mode=cache_mode) as model:  # several passes
        result = score_items(model, ITEMS, depth=depths, by_depth=True)
        assert result.by_depth is not None
        assert result.by_depth.shape == (5, len(result.logprobs))
        for depth in range(1, 6):
            fixed = parts(score_items(model, ITEMS, depth=depth))
            for i, at in enumerate(zip(result.offsets[:-1], result.offsets[1:], strict=True)):
                row = result.by_depth[depth - 1, slice(*at)]
                if depth > depths[i]:
                    assert np.isnan(row).all()
                else:
                    assert np.array_equal(row, fixed[i])
                if depth == depths[i]:
                    assert np.array_equal(result.logprobs[slice(*at)], row)


@on("ouro")
def test_by_depth_on_prefixes(model: Model) -> None:
    prefix_ids, tail = random_ids(70), random_ids(20, seed=1)
    with model.prefix(prefix_ids) as prefix:
        result = score_items(model, [(tail, 19)], prefixes=[prefix], by_depth=True)
    assert result.by_depth is not None
    for depth, row in enumerate(result.by_depth, 1):
        assert np.array_equal(row, model.score_tokens(np.concatenate([prefix_ids, tail]), depth)[70:])


@on("ouro")
def test_what_is_not_asked_for_is_not_there(model: Model) -> None:
    result = score_items(model, ITEMS)
    assert result.by_depth is None
    assert result.gates is None
    assert result.depths.tolist() == len(ITEMS) * [DEPTH]


# ---- gates ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("numbers", "limit"), [("fp32", GATE_MAX), ("fp16", GATE_MAX_FP16)])
def test_gates_are_the_references(paths: dict[str, Path], numbers: Any, limit: float) -> None:
    reference = Reference.load(paths["ouro"])
    depths = np.array([4, 1, 3, 4, 2, 4, 1], np.int32)
    with load_model(paths["ouro"], 160, numeric_mode=numbers) as model:
        result = score_items(model, ITEMS, depth=depths, gates=True)
    assert result.gates is not None
    another_loop = another_row = 0.0
    starts = zip(result.offsets[:-1], result.offsets[1:], strict=True)
    for (ids, n_scored), depth, at in zip(ITEMS, depths, starts, strict=True):
        # The row that predicts an id is the one before it.
        expected = reference.gates(ids, int(depth))[:, len(ids) - 1 - n_scored : len(ids) - 1]
        found = result.gates[:, slice(*at)]
        assert np.abs(found[:depth] - expected).max() <= limit
        assert np.isnan(found[depth:]).all()
        if depth > 1:
            another_loop = max(another_loop, np.abs(found[0] - expected[1]).max())
        if n_scored > 1:
            another_row = max(another_row, np.abs(found[:depth, 1:] - expected[:, :-1]).max())
    assert min(another_loop, another_row) > 10 * limit


@on("ouro")
def test_gates_do_not_depend_on_neighbours_or_prefixes(model: Model) -> None:
    def gates(*args: Any, **options: Any) -> NDArray[np.float32]:
        found = score_items(model, *args, gates=True, **options).gates
        assert found is not None
        return found

    alone = [gates([item]) for item in ITEMS]
    assert np.array_equal(gates(ITEMS), np.concatenate(alone, axis=1))
    ids, n_scored = ITEMS[0]
    with model.prefix(ids[:40]) as prefix:
        assert np.array_equal(gates([(ids[40:], n_scored)], prefixes=[prefix]), alone[0])


# ---- early exit ----------------------------------------------------------------------------------


def depth_by_the_rule(gates: NDArray[np.float32], threshold: float, min_depth: int) -> int:
    """gates: [most loops, rows]. The first loop at which every row has left with that probability."""
    left = 1 - np.cumprod(1 - gates.astype(np.float64), axis=0)
    for loops in range(min_depth, len(gates)):
        if (left[loops - 1] >= threshold).all():
            return loops
    return len(gates)


def check_exit(model: Model, threshold: float, min_depth: int, most: NDArray[np.int32]) -> ScoreResult:
    full = score_items(model, ITEMS, depth=most, gates=True)
    early = score_items(
        model, ITEMS, depth=most, exit_threshold=threshold, min_depth=min_depth, gates=True, by_depth=True
    )
    assert full.gates is not None
    assert early.gates is not None
    assert early.by_depth is not None
    for i, (begin, end) in enumerate(zip(full.offsets[:-1], full.offsets[1:], strict=True)):
        depth = depth_by_the_rule(full.gates[: most[i], begin:end], threshold, min_depth)
        assert early.depths[i] == depth
        alone = score_items(model, ITEMS[i : i + 1], depth=depth, by_depth=True)
        assert alone.by_depth is not None
        assert np.array_equal(early.logprobs[begin:end], alone.logprobs)
        assert np.array_equal(early.greedy[begin:end], alone.greedy)
        assert np.array_equal(early.by_depth[:depth, begin:end], alone.by_depth)
        assert np.array_equal(early.gates[:depth, begin:end], full.gates[:depth, begin:end])
        assert np.isnan(early.by_depth[depth:, begin:end]).all()
        assert np.isnan(early.gates[depth:, begin:end]).all()
    return early


@pytest.mark.parametrize("min_depth", [1, 3, 6])
@on("ouro")
def test_items_leave_by_the_rule_with_the_bits_of_that_depth(model: Model, min_depth: int) -> None:
    most = np.maximum(np.array([6, 6, 3, 6, 2, 6, 1], np.int32), min_depth).astype(np.int32)
    depths: set[int] = set()
    for threshold in (0.02, 0.3, 0.6, 0.8, 0.95, 0.999):
        depths |= set(check_exit(model, threshold, min_depth, most).depths.tolist())
    assert depths == set(range(min_depth, 7))


@on("ouro")
def test_the_threshold_is_reached_not_passed(model: Model) -> None:
    """At exactly the probability that a row has left with it leaves; one float further it stays."""
    gates = score_items(model, ITEMS[3:4], gates=True).gates
    assert gates is not None
    left = 1 - (1 - float(gates[0, 0])) * (1 - float(gates[1, 0]))
    for threshold, depth in ((left, 2), (np.nextafter(left, 1), 3)):
        assert score_items(model, ITEMS[3:4], exit_threshold=float(threshold)).depths.tolist() == [depth]


@pytest.mark.parametrize("cache_mode", ["int8", "h_int4"])
def test_early_exit_in_other_cache_modes(paths: dict[str, Path], cache_mode: str) -> None:
    most = np.full(len(ITEMS), DEPTH, np.int32)
    with load_model(paths["ouro"], 160, 48, cache_mode=cache_mode) as model:
        assert len(set(check_exit(model, 0.3, 1, most).depths)) > 1


@on("ouro")
def test_early_exit_on_a_prefix(model: Model) -> None:
    prefix_ids = random_ids(50)
    with model.prefix(prefix_ids) as prefix:
        prefixes = [prefix] * len(ITEMS)
        early = score_items(model, ITEMS, prefixes=prefixes, exit_threshold=0.15)
        fixed = score_items(model, ITEMS, prefixes=prefixes, depth=early.depths.copy())
    assert np.array_equal(early.logprobs, fixed.logprobs)
    assert len(set(early.depths)) > 1


@pytest.mark.parametrize("threshold", [1.0, 1.5, float("inf"), None])
@on("ouro", "huginn")  # the second has no gate to ask
def test_thresholds_of_one_and_more_mean_a_fixed_depth(model: Model, threshold: float | None) -> None:
    expected = score_items(model, ITEMS)
    found = score_items(model, ITEMS, exit_threshold=threshold)
    assert np.array_equal(found.logprobs, expected.logprobs)
    assert found.depths.tolist() == len(ITEMS) * [DEPTH]


# ---- what cannot be asked ------------------------------------------------------------------------


@on("llama", "nanbeige", "loop_range", "huginn", "hrm_text")
def test_gates_of_a_model_without_one_are_refused(model: Model) -> None:
    for options in ({"gates": True}, {"exit_threshold": 0.5}):
        with pytest.raises(InvalidInputError, match="exit gate: the model has none"):
            score_items(model, ITEMS, **options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"exit_threshold": 0.0}, "exit_threshold=0"),
        ({"exit_threshold": -0.5}, "exit_threshold=-0.5"),
        ({"exit_threshold": float("nan")}, "exit_threshold=nan"),
        ({"exit_threshold": 0.5, "min_depth": 0}, "min_depth=0"),
        ({"min_depth": -1}, "min_depth=-1"),
        ({"min_depth": 9}, "item 0 at depth 4 with min_depth=9"),
        ({"depth": np.array([1, 2], np.int32)}, "depth has 2 entries for 7 items"),
        ({"depth": np.array([1, 2, 3, 4, 0, 1, 1], np.int32)}, "depth 0"),
        ({"depth": np.array([1, 2, 3, 4, 5000, 1, 1], np.int32), "by_depth": True}, "depth 5000"),
        ({"prompt_lens": np.array([1], np.int32)}, "prompt_lens has 1 entries for 7 items"),
        ({"prompt_lens": np.array([0, 0, 5, 0, 0, 0, 0], np.int32)}, "item 2 with prompt_len=5.*causal"),
        ({"prefixes": []}, "0 prefixes for 7 items"),
        ({"prefixes": [None]}, "1 prefixes for 7 items"),
    ],
)
@on("ouro")
def test_options_that_mean_nothing_are_refused(model: Model, options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        score_items(model, ITEMS, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"depth": np.ones(7, np.int64)},
        {"depth": np.ones((7, 1), np.int32)},
        {"depth": np.ones(14, np.int32)[::2]},
        {"depth": [1] * 7},
        {"depth": 2.5},
        {"depth": 2**40},
        {"prompt_lens": np.zeros(7, np.int64)},
        {"prompt_lens": [0] * 7},
    ],
)
@on("ouro")
def test_options_of_another_type_are_refused(model: Model, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be"):
        score_items(model, ITEMS, **options)


@pytest.mark.parametrize("prompt_len", [-1, 18, 19, 2**31 - 1])
@on("hrm_text")
def test_prompts_that_leave_nothing_to_score_are_refused(model: Model, prompt_len: int) -> None:
    with pytest.raises(InvalidInputError, match=rf"prompt_len={prompt_len}: it must be 0\.\.17"):
        model.score_tokens(random_ids(18), prompt_len=prompt_len)


@on("hrm_text")
def test_a_prompt_after_a_prompt_is_refused(model: Model) -> None:
    tail = [(random_ids(10), 9)]
    with model.prefix(random_ids(20)) as prefix:
        with pytest.raises(InvalidInputError, match="its prefix is the whole prompt already"):
            score_items(model, tail, prefixes=[prefix], prompt_lens=np.array([3], np.int32))
        with pytest.raises(MismatchError, match="one prefix of the whole prompt"):
            model.prefix(random_ids(5), parent=prefix)


@on("loop_range", "huginn")
def test_a_prefix_serves_its_own_depth_alone_where_layers_follow_the_loops(model: Model) -> None:
    items = [(random_ids(10), 9), (random_ids(12), 5)]
    with model.prefix(random_ids(20), depth=2) as prefix:
        for depth in (1, 3):
            with pytest.raises(MismatchError, match=f"item 0 at depth {depth}.*built at depth 2"):
                score_items(model, items, prefixes=[prefix, None], depth=depth)
        with pytest.raises(MismatchError, match="built at depth 2"):
            model.prefix(random_ids(5), depth=1, parent=prefix)
        with pytest.raises(MismatchError, match="by depth on a prefix"):
            score_items(model, items, prefixes=[prefix, None], depth=2, by_depth=True)
        # The item without a prefix may go as deep as it likes.
        depths = np.array([2, 4], np.int32)
        mixed = parts(score_items(model, items, prefixes=[prefix, None], depth=depths))
    assert np.array_equal(mixed[1], parts(score_items(model, items, depth=4))[1])


@on("llama", "ouro")
def test_a_shallower_prefix_is_refused(model: Model) -> None:
    with (
        model.prefix(random_ids(20), depth=2) as prefix,
        pytest.raises(MismatchError, match=r"item 0 at depth 3.*built at depth 2; upgrade"),
    ):
        score_items(model, [(random_ids(10), 9)], prefixes=[prefix], depth=3)
