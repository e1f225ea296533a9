"""One engine thread on the fake model: every command is answered once, in order, and a refusal changes
nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import expected_logprobs
from tinyloop.workers.engine_thread import EngineThread, EngineUnfit
from tinyloop.workers.executor import WindowTokens
from tinyloop.workers.model import ReplicaSettings
from tinyloop.workers.wire import Build, Command

ITEMS = [[5, 6, 7, 8, 1, 2], [5, 6, 7, 8, 3, 4], [5, 6, 9, 9, 9], [11, 12, 13]]
SCORED = [1, 1, 2, 2]
LONG = list(range(20, 40))
A, B = bytes(15) + b"a", bytes(15) + b"b"
Start = Callable[..., EngineThread]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    threads: list[EngineThread] = []

    def make(gap_s: float = 5.0, budget: int = 10**6, **config: Any) -> EngineThread:
        path = tmp_path / "model.json"
        path.write_text(json.dumps(config))
        thread = EngineThread(ReplicaSettings(str(path), "fake_model:load_model", 1, budget, {}), gap_s)
        threads.append(thread)
        thread.loaded.result(10)
        return thread

    yield make
    assert all(thread.close(10) for thread in threads)


def window(items: list[list[int]] | None = None, scored: list[int] | None = None) -> WindowTokens:
    rows = ITEMS if items is None else items
    ids = np.array([token for row in rows for token in row], dtype=np.int32)
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    counts = SCORED if scored is None else scored
    for array in (ids, offsets):
        array.flags.writeable = False
    return WindowTokens(ids, offsets, np.array(counts, dtype=np.int32))


def command(sequence: int, items: list[int], *, epoch: int = 1, **fields: Any) -> Command:
    prefix_of = fields.pop("prefix_of", [-1] * len(items))
    defaults: dict[str, Any] = {"window": "w", "depth": 2, "drops": (), "builds": (), "prefixes": ()}
    return Command(
        epoch=epoch,
        sequence=sequence,
        items=np.array(items, dtype=np.int32),
        prefix_of=np.array(prefix_of, dtype=np.int32),
        **{**defaults, **fields},
    )


def shared(sequence: int, **fields: Any) -> Command:
    """Items 0 and 1 behind the prefix [5, 6, 7, 8] minus one id, which is built first."""
    built = {"builds": (Build(A, b"", 0, 0, 3),), "prefixes": (A,), "prefix_of": [0, 0], **fields}
    return command(sequence, [0, 1], **built)


def test_scores_are_those_of_the_whole_ids_with_and_without_a_prefix(start: Start) -> None:
    thread = start()
    ack, result = thread.submit(shared(0), window()).result(10)
    _, plain = thread.submit(command(1, [0, 1, 2, 3]), window()).result(10)
    assert ack.refused == ""
    assert ack.rows == 3 + 2 + 2
    assert result.logprobs.tobytes() == plain.logprobs[:2].tobytes()
    expected = [
        expected_logprobs(np.array(row, dtype=np.int32), 2)[-n:] for row, n in zip(ITEMS, SCORED, strict=True)
    ]
    assert plain.logprobs.tobytes() == np.concatenate(expected).tobytes()
    assert plain.offsets.tolist() == [0, 1, 2, 4, 6]


def test_commands_run_in_order_of_their_sequence(start: Start) -> None:
    thread = start()
    late = thread.submit(command(1, [0, 1], prefixes=(A,), prefix_of=[0, 0]), window())
    first = thread.submit(shared(0), window())
    assert first.result(10)[0].refused == ""
    assert late.result(10)[0].refused == ""
    assert late.result(10)[0].rows == 4


def test_a_missing_command_is_waited_for_and_then_named(start: Start) -> None:
    thread = start(gap_s=0.01)
    ack, _ = thread.submit(command(2, [0]), window()).result(10)
    assert ack.refused.startswith("gap: 2 arrived and 0 did not")


def test_an_old_epoch_is_refused_and_a_refusal_ends_its_epoch(start: Start) -> None:
    thread = start()
    assert thread.inventory().result(10).epoch == 1
    assert thread.inventory().result(10).epoch == 2
    assert thread.submit(command(0, [0], epoch=1), window()).result(10)[0].refused.startswith("old epoch: 1")
    refused = thread.submit(command(0, [0], epoch=2, prefixes=(A,), prefix_of=[0]), window()).result(10)[0]
    after = thread.submit(command(1, [0], epoch=2), window()).result(10)[0]
    assert refused.refused.startswith("missing:")
    assert after.refused.startswith("after a refusal:")
    assert thread.inventory().result(10).epoch == 3
    assert thread.submit(command(0, [0], epoch=3), window()).result(10)[0].refused == ""


@pytest.mark.parametrize("limit", [{"budget": 700}, {"memory_bytes": 2500}], ids=["budget", "out of memory"])
def test_a_refused_build_leaves_the_prefixes_as_they_were(start: Start, limit: dict[str, int]) -> None:
    thread = start(**limit)
    thread.submit(shared(0), window()).result(10)
    before = thread.inventory().result(10)
    big = command(0, [3], epoch=2, drops=(A,), builds=(Build(B, b"", 4, 0, 13),))
    refused, result = thread.submit(big, window([*ITEMS, LONG], [*SCORED, 1])).result(10)
    after = thread.inventory().result(10)
    assert refused.refused
    assert len(result.items) == 0
    assert [entry.digest for entry in before.entries] == [A]
    assert after.entries == before.entries


def test_a_drop_makes_room_for_a_build(start: Start) -> None:
    thread = start(budget=700)
    thread.submit(shared(0), window()).result(10)
    ack, _ = thread.submit(command(1, [3], drops=(A,), builds=(Build(B, b"", 3, 0, 2),)), window()).result(10)
    assert (ack.refused, ack.total_bytes, ack.built, ack.table) == ("", 400, ((B, 400),), B)


def test_a_bad_token_fails_its_item_alone(start: Start) -> None:
    thread = start()
    rows = [[1, 2, 3], [1, 5000, 3], [1, -1, 3], [4, 5, 6]]
    ack, result = thread.submit(command(0, [0, 1, 2, 3]), window(rows, [1, 1, 1, 1])).result(10)
    assert result.items.tolist() == [0, 3]
    assert [(f.item, f.error_class) for f in result.failures] == [
        (1, "token_out_of_range"),
        (2, "token_out_of_range"),
    ]
    assert ack.failed == 2


@pytest.mark.parametrize(
    ("config", "kind"), [({"oom_on": 12}, "out_of_memory"), ({"nan_on": 12}, "non_finite")]
)
def test_an_item_the_engine_cannot_score_fails_alone(start: Start, config: dict[str, int], kind: str) -> None:
    _, result = start(**config).submit(command(0, [0, 1, 2, 3]), window()).result(10)
    assert result.items.tolist() == [0, 1, 2]
    assert [(f.item, f.error_class) for f in result.failures] == [(3, kind)]


def test_a_prefix_that_is_not_the_items_own_is_never_used(start: Start) -> None:
    thread = start()
    thread.submit(shared(0), window()).result(10)
    _, result = thread.submit(command(1, [3], prefixes=(A,), prefix_of=[0]), window()).result(10)
    expected = expected_logprobs(np.array(ITEMS[3], dtype=np.int32), 2)
    assert result.logprobs.tobytes() == expected.tobytes()
    assert thread.status().mismatches == 1


def test_an_unknown_failure_makes_the_replica_unfit_and_answers_everything(start: Start) -> None:
    thread = start(break_on=12)
    answers = [thread.submit(command(0, [3]), window()), thread.submit(command(1, [0]), window())]
    for answer in answers:
        with pytest.raises(EngineUnfit, match="device lost"):
            answer.result(10)
    assert thread.status().state == "unfit"
    with pytest.raises(EngineUnfit):
        thread.submit(command(2, [0]), window()).result(10)


def test_a_failed_load_is_a_status_and_not_a_crash(start: Start) -> None:
    status = start(fail_load="weights: 12 bytes are missing").status()
    assert (status.state, status.phase) == ("unfit", "load")
    assert status.message == "LoadError: weights: 12 bytes are missing"


def test_a_drained_replica_answers_what_waits_and_refuses_the_rest(start: Start) -> None:
    thread = start()
    answered = thread.submit(command(0, [0]), window())
    assert thread.close(10)
    assert answered.result(0)[0].refused == ""
    assert thread.status().state == "closed"
    assert thread.submit(command(1, [0]), window()).result(0)[0].refused.startswith("closed")
    assert not [t for t in threading.enumerate() if t.name == "engine" and t.is_alive()]
