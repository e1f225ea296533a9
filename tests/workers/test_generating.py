"""One engine thread that generates between commands: exact, in order, and never in the way for long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_model import expected_completion, expected_logprobs
from generation_cases import PLAIN, Collected, Found, Item, mixed_items, prompts_of
from tinyloop.native import GenerateRequest, load_model
from tinyloop.native.models import default_model_path
from tinyloop.workers.engine_thread import SLICE_S, TURN_S, EngineThread, EngineUnfit
from tinyloop.workers.executor import WindowTokens
from tinyloop.workers.model import ReplicaSettings
from tinyloop.workers.wire import GENERATE, Build, Command

A = bytes(15) + b"a"
Start = Callable[..., EngineThread]
DEADLINE_S = 60.0


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    threads: list[EngineThread] = []

    def make(budget: int = 10**6, real: bool = False, **config: Any) -> EngineThread:
        path = tmp_path / "model.json"
        path.write_text(json.dumps(config))
        settings = (
            ReplicaSettings(
                str(default_model_path()),
                "tinyloop.native:load_model",
                1,
                budget,
                {"max_seq_len": 256} | config,
            )
            if real
            else ReplicaSettings(str(path), "fake_model:load_model", 1, budget, {})
        )
        threads.append(EngineThread(settings))
        threads[-1].loaded.result(30)
        return threads[-1]

    yield make
    assert all(thread.close(10) for thread in threads)


def to_generate(sequence: int, items: list[int], *, epoch: int = 1, **fields: Any) -> Command:
    prefix_of = fields.pop("prefix_of", [-1] * len(items))
    defaults: dict[str, Any] = {"window": "c/0/1", "depth": 2, "drops": (), "builds": (), "prefixes": ()}
    return Command(
        epoch=epoch,
        sequence=sequence,
        items=np.array(items, dtype=np.int32),
        prefix_of=np.array(prefix_of, dtype=np.int32),
        **{"kind": GENERATE, **defaults, **fields},
    )


def to_score(sequence: int, **fields: Any) -> tuple[Command, WindowTokens]:
    ids = np.arange(1, 41, dtype=np.int32)
    window = WindowTokens(ids, np.array([0, 20, 40], np.int64), np.array([19, 19], np.int32))
    return to_generate(sequence, [0, 1], window="c/9/2", kind="score", **fields), window


def collect(
    thread: EngineThread, until: Callable[[Collected], bool], before: Collected | None = None
) -> Collected:
    """Fetch bundles as a client does, woken by news."""
    news, collected = threading.Event(), before or Collected()
    thread.outbox.on_news = lambda who: news.set() if who == collected.client else None
    while not until(collected):
        news.clear()
        if not collected.fetch(thread.outbox):
            assert news.wait(DEADLINE_S), "nothing came"
    return collected


def all_ended(count: int) -> Callable[[Collected], bool]:
    return lambda collected: len(collected.ends) == count


def expected_of(items: list[Item]) -> list[Found]:
    found = []
    for ids, settings in items:
        row = PLAIN | settings
        found.append(expected_completion(np.array(ids, np.int32), row.pop("max_new_tokens"), **row))
    return found


def test_completions_are_the_models_own_and_a_command_is_answered_before_they_come(start: Start) -> None:
    thread, items = start(token_seconds=1e-4), mixed_items(40, 1000, 2)
    prompts = prompts_of(items)
    first, _ = thread.submit(to_generate(0, list(range(25))), prompts).result(10)
    second, result = thread.submit(to_generate(1, list(range(25, 40))), prompts).result(10)
    assert (first.refused, second.refused, second.failed, len(result.items)) == ("", "", 0, 0)
    collected = collect(thread, all_ended(40))
    assert [collected.completion(i) for i in range(40)] == expected_of(items)
    assert thread.status().generating == 0


def test_ids_come_long_before_the_end_and_many_in_one_bundle(start: Start) -> None:
    items: list[Item] = [([i + 1], {"max_new_tokens": 400}) for i in range(10)]
    thread = start(token_seconds=5e-4)
    thread.submit(to_generate(0, list(range(10))), prompts_of(items)).result(10)
    early = collect(thread, lambda c: len(c.ids) == 10)
    assert not early.ends
    assert max(len(ids) for ids, _, _ in early.ids.values()) < 300


def test_a_score_command_is_carried_out_in_its_order_while_completions_are_on_their_way(start: Start) -> None:
    """It waits for the commands before it and a turn of the batch, and its scores are as ever."""
    items: list[Item] = [([i + 1], {"max_new_tokens": 500}) for i in range(8)]
    thread = start(token_seconds=1e-3)
    prompts = prompts_of(items)
    generate = thread.submit(to_generate(0, list(range(8)), builds=()), prompts)
    scores = [thread.submit(*to_score(sequence)) for sequence in (2, 1, 3)]
    done = [answer.result(10) for answer in (generate, *scores)]
    assert [ack.refused for ack, _ in done] == [""] * 4
    assert thread.status().generating == 8, "the scores came while all of it was on its way"
    ids = np.arange(1, 41, dtype=np.int32)
    expected = np.concatenate([expected_logprobs(ids[:20], 2), expected_logprobs(ids[20:], 2)])
    assert all(result.logprobs.tobytes() == expected.tobytes() for _, result in done[1:])
    collected = collect(thread, all_ended(8))
    assert [collected.completion(i) for i in range(8)] == expected_of(items)


def test_commands_without_a_pause_leave_the_batch_its_share(start: Start) -> None:
    """Each scoring command is followed by a turn of the batch as long as it was, so neither starves."""
    thread = start(row_seconds=1e-3)  # a command of 38 rows: 38 ms; an id: 1 ms
    thread.submit(to_generate(0, [0]), prompts_of([([1], {"max_new_tokens": 100})])).result(10)
    commands = 0
    collected = Collected()
    while not collected.ends:
        commands += 1
        thread.submit(*to_score(commands)).result(10)
        collected.fetch(thread.outbox)
        assert commands < 60, "the batch got too little"
    assert commands >= 2
    assert SLICE_S < TURN_S


def test_prefixes_that_the_router_commanded_change_nothing(start: Start) -> None:
    """Also one that is deeper than a request, and one that is not the request's own."""
    thread, shared = start(), [7, 8, 9, 10, 11, 12]
    items: list[Item] = [([*shared, 20 + i], {"depth": 1 + i % 2}) for i in range(4)]
    items.append(([5, 6, 7, 8, 9, 10, 11], {}))
    build = (Build(A, b"", 0, 0, 6),)
    ack, _ = thread.submit(
        to_generate(0, [0, 1, 2, 3, 4], builds=build, prefixes=(A,), prefix_of=[0, 0, 0, -1, 0]),
        prompts_of(items),
    ).result(10)
    assert ack.refused == ""
    # One miss with all its ids; the foreign prefix is found out.
    assert ack.rows == 6 + 3 * 1 + 2 * 7
    collected = collect(thread, all_ended(5))
    assert [collected.completion(i) for i in range(5)] == expected_of(items)
    assert thread.status().mismatches == 1


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (([5, 5000], {}), "token_out_of_range"),
        (([5, -1], {}), "token_out_of_range"),
        (([], {}), "invalid_request"),
        (([5], {"max_new_tokens": 5000}), "invalid_request"),
        (([12], {}), "out_of_memory"),
    ],
)
def test_a_bad_request_among_good_ones_fails_alone(start: Start, bad: Item, kind: str) -> None:
    items = [*mixed_items(6, 1000, 2), bad, *mixed_items(3, 1000, 2)]
    thread = start(oom_on=12)
    ack, _ = thread.submit(to_generate(0, list(range(10))), prompts_of(items)).result(10)
    assert (ack.refused, ack.failed) == ("", 1)
    collected = collect(thread, all_ended(10))
    assert collected.failures == {(0, 6): kind}
    expected = expected_of([item for i, item in enumerate(items) if i != 6])
    assert [collected.completion(i) for i in range(10) if i != 6] == expected


def test_a_completion_without_a_number_fails_with_the_ids_before_it(start: Start) -> None:
    items: list[Item] = [([1], {"max_new_tokens": 12}), ([2], {"max_new_tokens": 12})]
    expected = expected_of(items)
    thread = start(nan_on=expected[0][0][7])
    thread.submit(to_generate(0, [0, 1]), prompts_of(items)).result(10)
    collected = collect(thread, all_ended(2))
    assert collected.failures == {(0, 0): "non_finite"}
    assert collected.ids[0, 0][0] == expected[0][0][:7]
    assert collected.completion(1) == expected[1]


def test_a_cancelled_request_sends_nothing_more_and_the_others_go_on(start: Start) -> None:
    items: list[Item] = [([i + 1], {"max_new_tokens": 200}) for i in range(3)]
    thread = start(token_seconds=1e-3)
    thread.submit(to_generate(0, [0, 1, 2]), prompts_of(items)).result(10)
    thread.cancel([("c", 0, 1), ("c", 0, 7), ("other", 0, 0)])
    collected = collect(thread, all_ended(2))
    assert collected.ends.keys() == {(0, 0), (0, 2)}
    assert len(collected.ids.get((0, 1), ([],))[0]) < 200
    assert thread.status().generating == 0


def test_an_inventory_leaves_completions_alone_unless_told_otherwise(start: Start) -> None:
    """A refused command ends its epoch; what is on its way was asked for before and goes on."""
    items: list[Item] = [([i + 1], {"max_new_tokens": 60}) for i in range(2)]
    thread, prompts = start(token_seconds=2e-3), prompts_of(items)
    thread.submit(to_generate(0, [0]), prompts).result(10)
    refused, _ = thread.submit(to_generate(1, [1], prefixes=(A,), prefix_of=[0]), prompts).result(10)
    assert refused.refused.startswith("missing")
    epoch = thread.inventory().result(10).epoch
    assert thread.status().generating == 1
    assert thread.submit(to_generate(0, [1], epoch=epoch), prompts).result(10)[0].refused == ""
    collected = collect(thread, all_ended(2))
    assert [collected.completion(i) for i in range(2)] == expected_of(items)
    thread.submit(to_generate(1, [0, 1], epoch=epoch), prompts).result(10)
    epoch = thread.inventory(cancel_all=True).result(10).epoch
    thread.submit(*to_score(0, epoch=epoch)).result(10)
    assert thread.status().generating == 0


def test_a_request_that_comes_again_takes_the_place_of_the_first(start: Start) -> None:
    items: list[Item] = [([3], {"max_new_tokens": 50})]
    thread, prompts = start(token_seconds=2e-3), prompts_of(items)
    thread.submit(to_generate(0, [0]), prompts).result(10)
    thread.submit(to_generate(1, [0]), prompts).result(10)
    collected = collect(thread, all_ended(1))
    assert collected.completion(0) == expected_of(items)[0]
    assert thread.status().generating == 0


def test_a_bundle_comes_again_until_the_next_is_asked_for(start: Start) -> None:
    thread, prompts = start(), prompts_of([([3], {"max_new_tokens": 5})])
    thread.submit(to_generate(0, [0]), prompts).result(10)
    collect(thread, all_ended(1))
    again = thread.outbox.take("c", 0)
    assert again is not None
    assert again.number >= 1
    assert thread.outbox.take("c", again.number) is None
    assert thread.outbox.take("c", again.number) is None


def test_windows_and_commands_of_other_kinds_are_refused(start: Start) -> None:
    thread = start()
    score, window = to_score(0)
    assert thread.submit(to_generate(0, [0]), window).result(10)[0].refused.startswith("kind:")
    thread.inventory().result(10)
    refused, _ = thread.submit(to_score(0, epoch=2)[0], prompts_of([([1], {})])).result(10)
    assert refused.refused.startswith("kind: a command to score")
    assert score.kind == "score"


def test_an_engine_that_breaks_in_a_slice_is_unfit(start: Start) -> None:
    items: list[Item] = [([1], {"max_new_tokens": 50})]
    thread = start(break_on=expected_of(items)[0][0][20])
    thread.submit(to_generate(0, [0]), prompts_of(items)).result(10)
    thread.ended.result(10)
    assert (thread.status().state, thread.status().message) == ("unfit", "RuntimeError: device lost")
    with pytest.raises(EngineUnfit):
        thread.submit(*to_score(1)).result(10)


def test_a_drained_replica_forgets_what_is_on_its_way(start: Start) -> None:
    thread = start(token_seconds=0.01)
    thread.submit(to_generate(0, [0]), prompts_of([([1], {"max_new_tokens": 1000})])).result(10)
    assert thread.close(10)
    assert thread.status().state == "closed"


# ---- the engine itself ---------------------------------------------------------------------------


def model_alone(items: list[Item], **options: Any) -> list[Found]:
    found: list[Found] = []
    with load_model(default_model_path(), max_seq_len=256, threads=1, **options) as model:
        for ids, settings in items:
            row = PLAIN | settings
            request = GenerateRequest(np.array(ids, np.int32), row.pop("max_new_tokens"), **row)
            (c,) = model.generate([request])
            found.append((c.token_ids.tolist(), c.logprobs.tolist(), c.depths.tolist(), c.finish_reason))
    return found


def test_the_real_engine_gives_the_bits_of_each_request_alone_among_scores_and_prefixes(start: Start) -> None:
    shared = np.random.default_rng(5).integers(0, 8000, 50).tolist()
    items = [
        ([*shared, *ids], settings | {"max_new_tokens": 1 + i % 9})
        for i, (ids, settings) in enumerate(mixed_items(12, 8000, 4, length=12))
    ]
    thread, prompts = start(10**9, real=True), prompts_of(items)
    build = {"builds": (Build(A, b"", 0, 0, 50),), "prefixes": (A,), "depth": 4}
    answers = [thread.submit(to_generate(0, list(range(6)), prefix_of=[0] * 6, **build), prompts)]
    again = {"prefixes": (A,), "depth": 4, "prefix_of": [0] * 6}
    answers += [
        thread.submit(*to_score(1)),
        thread.submit(to_generate(2, list(range(6, 12)), **again), prompts),
    ]
    answers += [thread.submit(*to_score(3))]
    assert [answer.result(60)[0].refused for answer in answers] == [""] * 4
    assert answers[1].result(0)[1].logprobs.tobytes() == answers[3].result(0)[1].logprobs.tobytes()
    collected = collect(thread, all_ended(12))
    assert not collected.failures
    assert [collected.completion(i) for i in range(12)] == model_alone(items)


def test_the_real_engine_makes_room_for_a_prefix_and_goes_on_to_the_same_bits(start: Start) -> None:
    """The sequences hold what the prefix needs: they are put back, and computed again."""
    items: list[Item] = [([5 + i], {"max_new_tokens": 40}) for i in range(4)]
    long = np.random.default_rng(5).integers(0, 8000, 200).tolist()
    items.append((long, {"max_new_tokens": 1}))
    expected = model_alone(items)
    with load_model(default_model_path(), max_seq_len=256, threads=1) as model:
        needed = model.vram_usage_bytes
        with model.prefix(np.array(long[:199], np.int32), depth=2) as prefix:
            needed += prefix.bytes + 1024
        with model.prefix(np.array(long[:120], np.int32), depth=2, upgradable=False) as prefix:
            needed += prefix.bytes
    thread, prompts = start(10**9, real=True, budget_bytes=needed), prompts_of(items)
    thread.submit(to_generate(0, [0, 1, 2, 3]), prompts).result(60)
    collected = collect(thread, lambda c: len(c.ids) == 4)
    assert not collected.ends
    build = {"builds": (Build(A, b"", 4, 0, 199),), "prefixes": (A,), "prefix_of": [0]}
    assert thread.submit(to_generate(1, [4], **build), prompts).result(60)[0].refused == ""
    collect(thread, all_ended(5), collected)
    assert not collected.failures
    assert [collected.completion(i) for i in range(5)] == expected
