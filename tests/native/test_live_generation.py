"""A batch that requests join between its steps: each comes to what it comes to alone, whatever happens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from engine_cases import random_ids, write_overflowing
from stateful_cases import NO_STOP, Ids, assert_same_bits, lasting_memory, load_family
from tinyloop.native import (
    ClosedHandleError,
    Completion,
    ConcurrentUseError,
    GenerateRequest,
    Generation,
    GenerationStep,
    InvalidInputError,
    Model,
    OutOfMemoryError,
    TinyLoopError,
    load_model,
)

Asked = tuple[Ids, int, dict[str, Any]]
Found = tuple[list[int], list[float], list[int], str]


class Told:
    """What the steps of one batch have brought, by key."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[tuple[int, float, int]]] = {}
        self.reasons: dict[int, str] = {}
        self.failed: dict[int, Exception] = {}

    def take(self, step: GenerationStep) -> None:
        assert step.keys.dtype == np.int64
        assert (step.token_ids.dtype, step.depths.dtype) == (np.int32, np.int32)
        columns = (step.keys, step.token_ids, step.logprobs, step.depths)
        for key, token, logprob, depth in zip(*(c.tolist() for c in columns), strict=True):
            assert key not in self.reasons, "a token came after the end"
            self.tokens.setdefault(key, []).append((token, logprob, depth))
        for key, reason in step.finished:
            assert key not in self.reasons
            self.reasons[key] = reason
        self.failed.update(step.failed)

    def completion(self, key: int) -> Found:
        ids, logprobs, depths = (list(column) for column in zip(*self.tokens[key], strict=True))
        return ids, logprobs, depths, self.reasons[key]


def as_found(completion: Completion) -> Found:
    columns = (completion.token_ids, completion.logprobs, completion.depths)
    return (*(column.tolist() for column in columns), completion.finish_reason)  # type: ignore[return-value]


def mixed(count: int) -> list[Asked]:
    """Greedy and drawn, of all depths, with stops, penalties and the gate's exit."""
    asked: list[Asked] = []
    for i in range(count):
        options: dict[str, Any] = {"depth": 1 + i % 4, "stop_ids": [i % 61] if i % 4 == 0 else NO_STOP}
        if i % 3 == 0:
            options |= {"temperature": 1.0, "seed": i, "top_p": 0.9, "min_p": 0.01}
        if i % 5 == 0:
            options |= {"repetition_penalty": 1.3}
        if i % 7 == 0:
            options |= {"depth": 4, "exit_threshold": 0.3}
        asked.append((random_ids(1 + (37 * i) % 120, seed=i), 1 + (11 * i) % 30, options))
    return asked


def alone(model: Model, asked: list[Asked]) -> list[Found]:
    return [as_found(model.generate([GenerateRequest(ids, new, **o)])[0]) for ids, new, o in asked]


def run_out(batch: Generation, told: Told) -> None:
    while batch.running or batch.waiting:
        told.take(batch.step())


@pytest.mark.parametrize("mode", ["fp16", "h_int8"])
@pytest.mark.parametrize("max_batch", [3, None])
def test_when_a_request_joins_and_what_the_model_does_meanwhile_does_not_matter(
    mode: str, max_batch: int | None
) -> None:
    """Requests join at any step, some are cancelled, and between the steps the model scores and prefills."""
    random, asked, told = Random(4), mixed(30), Told()
    text = random_ids(90, seed=8)
    with load_family("ouro", mode) as model, model.prefix(text[:70]) as held:
        expected, scores = alone(model, asked), model.score_tokens(text)
        before = lasting_memory(model)
        with model.generation(max_batch) as batch:
            coming = list(range(len(asked)))
            cancelled = set()
            while coming or batch.running or batch.waiting:
                for _ in range(min(random.randrange(3), len(coming))):
                    ids, new, options = asked[coming.pop(0)]
                    batch.add(ids, new, **options)
                told.take(batch.step())
                if random.random() < 0.3:
                    assert_same_bits(model.score_tokens(text), scores)
                    model.prefix(text[70:], parent=held).close()
                if random.random() < 0.05:
                    batch.put_back()
                if random.random() < 0.1 and batch.running:
                    key = len(asked) - len(coming) - 1
                    if batch.cancel(key):
                        cancelled.add(key)
            assert lasting_memory(model) == before
        for key, completion in enumerate(expected):
            if key not in cancelled:
                assert told.completion(key) == completion, f"request {key}"
        assert not cancelled & told.reasons.keys()
        assert 0 < len(cancelled) < len(asked) / 2
        assert not told.failed


def test_a_prefix_may_be_closed_once_a_request_stands_on_it() -> None:
    ids = random_ids(80)
    for mode in ("fp16", "h_fp16"):
        with load_family("ouro", mode) as model, model.generation() as batch:
            expected = alone(model, [(ids, 20, {"stop_ids": NO_STOP})])
            before = lasting_memory(model)
            with model.prefix(ids[:60]) as prefix:
                batch.add(ids[60:], 20, prefix=prefix, stop_ids=NO_STOP)
            told = Told()
            run_out(batch, told)
            assert told.completion(0) == expected[0]
            assert lasting_memory(model) == before


def test_sequences_that_were_put_back_go_on_to_the_same_bits_and_hold_nothing_meanwhile() -> None:
    asked = [(random_ids(40, seed=i), 60, {"stop_ids": NO_STOP, "seed": i}) for i in range(3)]
    with load_family("ouro") as model, model.generation() as batch:
        expected, told = alone(model, asked), Told()
        before = lasting_memory(model)
        for ids, new, options in asked:
            batch.add(ids, new, **options)
        for _ in range(25):
            told.take(batch.step())
        assert (batch.running, lasting_memory(model) > before) == (3, True)
        batch.put_back()
        assert (batch.running, batch.waiting, lasting_memory(model)) == (0, 3, before)
        run_out(batch, told)
        assert [told.completion(key) for key in range(3)] == expected


def test_a_request_that_cannot_be_taken_is_named_and_the_others_go_on() -> None:
    asked = mixed(6)
    with load_family("ouro") as model, model.generation() as batch:
        expected, told = alone(model, asked), Told()
        for ids, new, options in asked[:3]:
            batch.add(ids, new, **options)
        told.take(batch.step())
        with pytest.raises(InvalidInputError, match="token id 61 at index 1"):
            batch.add(np.array([5, 61], np.int32), 3)
        with pytest.raises(InvalidInputError, match="request 3: it could reach position 2049"):
            batch.add(random_ids(50), 2000)
        with pytest.raises(InvalidInputError, match="top_p=0"):
            batch.add(random_ids(50), 20, top_p=0.0)
        for ids, new, options in asked[3:]:
            batch.add(ids, new, **options)
        run_out(batch, told)
        assert [told.completion(key) for key in range(6)] == expected


def test_a_sequence_that_does_not_fit_alone_fails_and_the_others_go_on() -> None:
    small: list[Asked] = [(random_ids(30, seed=i), 10, {"stop_ids": NO_STOP}) for i in range(2)]
    with load_family("ouro") as model:
        expected, needed = alone(model, small), model.vram_usage_bytes
        with model.prefix(random_ids(200), upgradable=False) as prefix:
            room = 2 * prefix.bytes
    with load_family("ouro", budget_bytes=needed + room) as model, model.generation() as batch:
        before, told = lasting_memory(model), Told()
        batch.add(*small[0][:2], stop_ids=NO_STOP)
        batch.add(random_ids(20), 1500, stop_ids=NO_STOP)
        batch.add(random_ids(600), 10, stop_ids=NO_STOP)
        batch.add(*small[1][:2], stop_ids=NO_STOP)
        run_out(batch, told)
        assert [told.completion(key) for key in (0, 3)] == expected
        assert told.failed.keys() == {1, 2}
        assert all(type(error) is OutOfMemoryError for error in told.failed.values())
        assert 200 < len(told.tokens[1]) < 600
        assert lasting_memory(model) == before


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_have_no_number_fails_alone(tmp_path: Path, temperature: float) -> None:
    path, huge = write_overflowing(tmp_path / "m.tloop")
    options = {"temperature": temperature, "stop_ids": NO_STOP}
    with load_model(path, max_seq_len=64, threads=1) as model, model.generation() as batch:
        good: Asked = (np.arange(10, dtype=np.int32), 1, options)
        (expected,) = alone(model, [good])
        batch.add(*good[:2], **options)
        batch.add(np.array([3, huge], np.int32), 4, **options)
        told = Told()
        run_out(batch, told)
        assert told.completion(0) == expected
        assert type(told.failed[1]) is TinyLoopError
        assert "request 1" in str(told.failed[1])
        assert told.failed.keys() == {1}


class Enough(Exception):
    pass


def test_what_came_before_an_interruption_is_in_the_next_answer() -> None:
    """A signal ends the call between two layers; the batch goes on as if nothing had been."""

    def stop(*_: object) -> None:
        raise Enough

    asked: list[Asked] = [(random_ids(10, seed=i), 500, {"stop_ids": NO_STOP, "seed": i}) for i in range(3)]
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with load_family("ouro") as model, model.generation() as batch:
            expected, told = alone(model, asked), Told()
            for ids, new, options in asked:
                batch.add(ids, new, **options)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(Enough):
                batch.step(60.0)
            assert batch.running == 3
            told.take(batch.step())
            assert len(told.tokens[0]) > 1
            told.take(batch.step(600.0))
            assert (batch.running, batch.waiting) == (0, 0)
            assert [told.completion(key) for key in range(3)] == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def refused_by(error: type[Exception], calls: list[Callable[[], object]], match: str) -> None:
    for call in calls:
        with pytest.raises(error, match=match):
            call()


def test_a_batch_may_not_be_used_from_two_threads_or_when_closed() -> None:
    ids = random_ids(10)
    model = load_family("ouro")
    batch = model.generation()
    calls: list[Callable[[], object]] = [
        lambda: batch.add(ids, 2),
        lambda: batch.cancel(0),
        lambda: batch.put_back(),
        lambda: batch.step(),
    ]

    def from_on_token(*_: object) -> None:
        refused_by(ConcurrentUseError, calls, "another one runs")

    thread = threading.Thread(
        target=lambda: model.generate([GenerateRequest(ids, 1)], on_token=from_on_token)
    )
    thread.start()
    thread.join()
    assert batch.add(ids, 2) == 0
    assert not batch.cancel(7)
    with pytest.raises(InvalidInputError, match="seconds: it must be 0 or more"):
        batch.step(-1.0)
    model.close()
    refused_by(ClosedHandleError, calls, "the model")
    batch.close()
    batch.close()
    assert batch.closed
    refused_by(ClosedHandleError, calls, "the generation")
    with load_family("ouro") as other, pytest.raises(InvalidInputError, match="max_batch=0"):
        other.generation(0)


def test_an_empty_batch_has_nothing_to_do() -> None:
    with load_family("ouro") as model, model.generation() as batch:
        step = batch.step(5.0)
        assert (len(step.keys), step.finished, step.failed) == (0, [], [])


def test_an_allocation_that_fails_costs_at_most_the_request_that_made_it() -> None:
    """The first, the second and so on beyond the last: the others come to their bits, no byte stays."""
    asked: list[Asked] = [(random_ids(9, seed=i), 300, {"stop_ids": NO_STOP, "depth": 1}) for i in range(3)]
    with load_family("ouro") as model:
        expected = alone(model, asked)
        before, failures = lasting_memory(model), []
        for n in range(1, 12):
            with model.generation() as batch:
                told = Told()
                for ids, new, options in asked:
                    batch.add(ids, new, **options)
                model._fail_allocation(n)
                run_out(batch, told)
                model._fail_allocation(0)
            for key, error in told.failed.items():
                assert type(error) is OutOfMemoryError, f"request {key}, allocation {n}"
            for key in told.reasons:
                assert told.completion(key) == expected[key], f"request {key}, allocation {n}"
            assert len(told.failed) + len(told.reasons) == 3
            assert lasting_memory(model) == before
            failures.append(len(told.failed))
    # The first has nobody to wait for; later ones wait, or put another back, and there are two for each.
    assert failures == [1] + [0] * 10
