"""Commands whose items go as deep as a rule says, on a real tiny model.

Each number is a plain run's, the depth is the rule's, and memory stays within its books, whatever the budget.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))

from engine_cases import VOCAB, write_calm
from tinyloop.native import Model, load_model
from tinyloop.workers.effort import Effort, GroupedTokens, grouped_from, grouped_payload
from tinyloop.workers.executor import Executor
from tinyloop.workers.wire import Build, Command, Result, WireError

DEPTHS = (1, 2, 4)
TOP, LEFT, RIGHT = (bytes(15) + bytes([name]) for name in b"tlr")
PLENTY = 1 << 24
MARGIN, THRESHOLD = 4.0, 0.05


@pytest.fixture(scope="module", params=["ouro", "huginn"])
def path(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A family with a gate, and one with layers after the loops, whose prefixes serve one depth alone."""
    return write_calm(tmp_path_factory.mktemp("m") / "m.tloop", request.param, bits=4)


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with load_model(path, max_seq_len=96, prefill_chunk=32) as loaded:
        yield loaded


def rows_of(n: int, seed: int = 0) -> list[list[NDArray[np.int32]]]:
    """Rows of two to four choices, then one that is not compared, behind one of two nested prefixes."""
    rng = np.random.default_rng(seed)
    top = rng.integers(0, VOCAB, 20)
    contexts = [np.concatenate([top, rng.integers(0, VOCAB, 9)]) for _ in range(2)]
    rows = []
    for number in range(n):
        choices = [rng.integers(0, VOCAB, rng.integers(2, 6)) for _ in range(rng.integers(2, 5))]
        context = np.concatenate([contexts[number % 2], [number % VOCAB]])
        texts = [np.concatenate([context, choice]) for choice in choices] + [rng.integers(0, VOCAB, 4)]
        rows.append([text.astype(np.int32) for text in texts])
    return rows


def window_of(rows: list[list[NDArray[np.int32]]], effort: Effort) -> GroupedTokens:
    texts = [text for row in rows for text in row]
    compared = [place < len(row) - 1 or len(row) == 1 for row in rows for place in range(len(row))]
    scored = [len(text) - 30 if is_compared else 3 for text, is_compared in zip(texts, compared, strict=True)]
    return grouped_from(
        grouped_payload(
            GroupedTokens(
                np.concatenate(texts).astype(np.int32),
                np.cumsum([0, *map(len, texts)], dtype=np.int64),
                np.array(scored, np.int32),
                np.cumsum([0, *map(len, rows)], dtype=np.int64),
                np.array(compared),
                effort,
            )
        )
    )


def command_of(window: GroupedTokens, sequence: int, groups: list[int], depth: int, **fields: Any) -> Command:
    """Groups 0, 2, ... stand on one context, the others on the other; both on what they share."""
    given: dict[str, Any] = {"drops": (), "builds": (), **fields}
    return Command(
        epoch=1,
        sequence=sequence,
        window="w",
        depth=depth,
        prefixes=(LEFT, RIGHT),
        items=np.array(groups, np.int32),
        prefix_of=np.array([group % 2 for group in groups], np.int32),
        **given,
    )


BUILDS = (Build(TOP, b"", 0, 0, 20), Build(LEFT, TOP, 0, 20, 29), Build(RIGHT, TOP, 1, 20, 29))


def plain(model: Model, window: GroupedTokens, depth: int) -> list[NDArray[np.float32]]:
    """Each item whole and alone, without prefix or handle."""
    found = []
    for item in range(len(window.n_scored)):
        values = np.asarray(model.score_tokens(window.item_ids(item), depth=depth))
        found.append(values[len(values) - window.n_scored[item] :])
    return found


def check(model: Model, window: GroupedTokens, result: Result, groups: list[int]) -> list[int]:
    """Numbers of plain runs, and depths of the margin's rule. Returns the depth of each group."""
    assert result.depths is not None
    assert not result.failures
    by_depth = {depth: plain(model, window, depth) for depth in DEPTHS}
    got = {}
    for k, item in enumerate(result.items.tolist()):
        depth = int(result.depths[k])
        got[item] = depth
        values = result.logprobs[result.offsets[k] : result.offsets[k + 1]]
        assert values.tobytes() == by_depth[depth][item].tobytes(), f"item {item} at depth {depth}"
    reached = []
    for group in groups:
        items = range(*window.group_offsets[group : group + 2].tolist())
        for depth in DEPTHS:
            sums = sorted(
                float(by_depth[depth][i].sum(dtype=np.float64)) for i in items if window.compared[i]
            )
            if sums[-1] - sums[-2] >= MARGIN:
                break
        assert {got[item] for item in items} == {depth}
        reached.append(depth)
    assert len(got) == sum(len(range(*window.group_offsets[g : g + 2].tolist())) for g in groups)
    return reached


def budget_for(model: Model, window: GroupedTokens, times: int) -> int:
    """What the prefixes take, so many times."""
    executor = Executor(model, PLENTY)
    executor.execute(command_of(window, 0, [], 1, builds=BUILDS), window)
    size = executor.table.total_bytes
    executor.table.close()
    return size * times


@pytest.mark.parametrize("times", [100, 9, 6, 3, 1])
def test_numbers_are_those_of_plain_runs_whatever_the_memory(model: Model, times: int) -> None:
    """Room for everything, for one path of prefixes at a time, for handles alone, and for nothing."""
    window = window_of(rows_of(16), Effort(DEPTHS, margin=MARGIN))
    start = model.vram_usage_bytes
    executor = Executor(model, budget_for(model, window, times))
    budget, deep = start + executor.table.free_bytes, executor._cascading._deep
    ack, result = executor.execute(command_of(window, 0, list(range(8)), 1, builds=BUILDS), window)
    assert not ack.refused
    reached = check(model, window, result, list(range(8)))
    assert len(set(reached)) > 1, "the case is too easy"
    assert ack.total_bytes == executor.table.total_bytes
    assert (deep.row_loops > 0) == (times >= 6) or times == 6
    assert model.vram_usage_bytes == start + executor.table.total_bytes + deep.total_bytes <= budget
    _, result = executor.execute(command_of(window, 1, list(range(8, 16)), 1), window)
    check(model, window, result, list(range(8, 16)))
    assert model.vram_usage_bytes == start + executor.table.total_bytes + deep.total_bytes <= budget
    drops = replace(command_of(window, 2, [], 1, drops=(LEFT, RIGHT, TOP)), prefixes=())
    assert not executor.execute(drops, window)[0].refused
    assert model.vram_usage_bytes == start, "an upgrade outlived its prefix"


def test_upgraded_prefixes_are_kept_for_the_next_command(model: Model) -> None:
    window = window_of(rows_of(16), Effort(DEPTHS, margin=math.inf))
    executor = Executor(model, PLENTY)
    executor.execute(command_of(window, 0, list(range(8)), 1, builds=BUILDS), window)
    assert executor._cascading._deep.row_loops == (20 + 9 + 9) * 3
    executor.execute(command_of(window, 1, list(range(8, 16)), 1), window)
    assert executor._cascading._deep.row_loops == (20 + 9 + 9) * 3
    executor.close()


def test_memory_never_passes_the_models_own_budget(path: Path) -> None:
    window = window_of(rows_of(16), Effort(DEPTHS, margin=MARGIN))
    with load_model(path, max_seq_len=96, prefill_chunk=32) as model:
        loaded = model.vram_usage_bytes
        need = budget_for(model, window, 1)
    for more in (0, 3_000, 30_000, 300_000):
        budget = loaded + need + more
        with load_model(path, max_seq_len=96, prefill_chunk=32, budget_bytes=budget) as model:
            executor = Executor(model, PLENTY, model_budget_bytes=budget)
            groups = list(range(16))
            ack, result = executor.execute(command_of(window, 0, groups, 1, builds=BUILDS), window)
            assert not ack.refused
            check(model, window, result, groups)
            executor.close()


def test_neither_order_nor_company_changes_a_group(model: Model) -> None:
    window = window_of(rows_of(12), Effort(DEPTHS, margin=MARGIN))
    executor = Executor(model, PLENTY)
    found: list[dict[int, tuple[bytes, int]]] = []
    executor.execute(command_of(window, 0, [], 1, builds=BUILDS), window)
    for groups in (
        [list(range(12))],
        [[7, 3, 11], [0, 2, 4, 6, 8, 10, 1, 5, 9]],
        [[g] for g in range(11, -1, -1)],
    ):
        one: dict[int, tuple[bytes, int]] = {}
        for sequence, some in enumerate(groups, 1):
            _, result = executor.execute(command_of(window, sequence, some, 1), window)
            assert result.depths is not None
            for k, item in enumerate(result.items.tolist()):
                values = result.logprobs[result.offsets[k] : result.offsets[k + 1]]
                one[item] = values.tobytes(), int(result.depths[k])
        found.append(one)
    assert found[0] == found[1] == found[2]
    executor.close()


def test_a_gate_decides_for_what_has_no_margin(path: Path) -> None:
    rows = rows_of(12)
    rows = [row if number % 3 else row[:1] for number, row in enumerate(rows)]
    with load_model(path, max_seq_len=96, prefill_chunk=32) as model:
        if not model.descriptor["exit_gate"]:
            window = window_of(rows, Effort(DEPTHS, margin=MARGIN, exit_threshold=THRESHOLD))
            executor = Executor(model, PLENTY)
            _, result = executor.execute(command_of(window, 0, list(range(12)), 1, builds=BUILDS), window)
            assert {failure.error_class for failure in result.failures} == {"internal"}
            assert all("exit gate" in failure.message for failure in result.failures)
            executor.close()
            return
        both = window_of(rows, Effort(DEPTHS, margin=MARGIN, exit_threshold=THRESHOLD))
        gate = window_of(rows, Effort((1, 4), exit_threshold=THRESHOLD))
        for window, depth, times in ((both, 1, 1000), (both, 1, 1), (gate, 4, 1000), (gate, 4, 4)):
            budget = budget_for(model, window, times)
            executor = Executor(model, budget)
            _, result = executor.execute(command_of(window, 0, list(range(12)), depth, builds=BUILDS), window)
            check_gates(model, window, result)
            executor._cascading.give_up()
            executor.table.close()


def check_gates(model: Model, window: GroupedTokens, result: Result) -> None:
    """Groups without a margin end where the last of their compared items leaves, by gates of a full run."""
    assert result.depths is not None
    assert not result.failures
    depth_of = dict(zip(result.items.tolist(), result.depths.tolist(), strict=True))
    reached = set()
    for k, item in enumerate(result.items.tolist()):
        values = np.asarray(model.score_tokens(window.item_ids(item), depth=depth_of[item]))
        got = result.logprobs[result.offsets[k] : result.offsets[k + 1]]
        assert got.tobytes() == values[len(values) - len(got) :].tobytes()
    for group in range(len(window)):
        items = range(*window.group_offsets[group : group + 2].tolist())
        compared = [item for item in items if window.compared[item]]
        if len(compared) > 1 and window.effort.margin is not None:
            continue
        last = max(gate_depth(model, window, item) for item in compared)
        assert {depth_of[item] for item in items} == {last}
        reached.add(last)
    assert len(reached) > 1, "the case is too easy"


def gate_depth(model: Model, window: GroupedTokens, item: int) -> int:
    ids = window.item_ids(item)
    offsets, scored = np.array([0, len(ids)], np.int64), window.n_scored[item : item + 1]
    gates = model.score(np.array(ids), offsets, scored, depth=4, gates=True).gates
    assert gates is not None
    left = 1 - np.cumprod(1 - gates.astype(np.float64), axis=0)
    assert window.effort.exit_threshold is not None
    done = [d for d in range(1, 5) if left[d - 1].min() >= window.effort.exit_threshold]
    return done[0] if done else 4


def test_a_bad_id_fails_its_group_alone(model: Model) -> None:
    window = window_of(rows_of(6), Effort(DEPTHS, margin=MARGIN))
    ids = window.token_ids.copy()
    ids[window.offsets[window.group_offsets[3]] + 31] = VOCAB
    window = replace(window, token_ids=ids)
    executor = Executor(model, PLENTY)
    _, result = executor.execute(command_of(window, 0, list(range(6)), 1, builds=BUILDS), window)
    bad = list(range(*window.group_offsets[3:5].tolist()))
    assert [failure.item for failure in result.failures] == bad
    assert {failure.error_class for failure in result.failures} == {"token_out_of_range"}
    assert sorted(result.items.tolist()) == [i for i in range(len(window.n_scored)) if i not in bad]
    executor.close()


def test_loops_are_counted_with_prefixes_and_rows_once(model: Model) -> None:
    window = window_of(rows_of(8), Effort(DEPTHS, margin=math.inf))
    executor = Executor(model, PLENTY)
    ack, result = executor.execute(command_of(window, 0, list(range(8)), 1, builds=BUILDS), window)
    lengths = np.diff(window.offsets)
    rows = 20 + 9 + 9 + int((lengths - 1 - 29 * window.compared).sum())
    assert ack.rows == rows
    assert result.row_loops == result.full_row_loops == 4 * rows
    executor.close()


def test_a_build_takes_the_room_of_upgrades(model: Model) -> None:
    window = window_of(rows_of(8), Effort(DEPTHS, margin=math.inf))
    need = budget_for(model, window, 1)
    executor = Executor(model, 12 * need)
    executor.execute(command_of(window, 0, list(range(8)), 1, builds=BUILDS), window)
    deep = executor._cascading._deep
    assert 0 < deep.total_bytes <= 6 * need
    loaded = model.vram_usage_bytes - executor.table.total_bytes - deep.total_bytes
    for sequence, name in enumerate(b"ABCDEFGHIJKLMNOP", 1):
        build = Build(bytes(15) + bytes([name]), b"", 2 * (sequence % 4), 0, 29)
        ack, _ = executor.execute(
            replace(command_of(window, sequence, [], 1, builds=(build,)), prefixes=()), window
        )
        assert not ack.refused or "budget" in ack.refused
        assert model.vram_usage_bytes - loaded <= 12 * need
    assert deep.total_bytes == 0
    executor.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"effort": Effort((2, 2), margin=1.0)}, "do not rise"),
        ({"effort": Effort((1, 2))}, "neither a margin nor"),
        ({"effort": Effort((1, 2), margin=-1.0)}, "margin is -1"),
        ({"effort": Effort((1, 2), exit_threshold=0.0)}, "threshold is 0"),
        ({"group_offsets": np.array([0, 2, 2])}, "cover"),
        ({"group_offsets": np.array([0, 2, 2, 9])}, "no item"),
        ({"compared": np.zeros(3, np.bool_)}, "cover"),
    ],
)
def test_groups_that_make_no_sense_are_refused(change: dict[str, Any], message: str) -> None:
    window = replace(window_of(rows_of(2), Effort((1, 2), margin=1.0)), **change)
    with pytest.raises(WireError, match=message):
        grouped_from(grouped_payload(window))
    with pytest.raises(WireError, match="7 arrays"):
        grouped_from(grouped_payload(window)[:5])
