"""Generation by the pool: each completion is the model's own, and each id comes once, whatever dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import ray
from collecting import MakePool, expected, gather
from completions import as_found, completions, fake_alone, prompt_of
from generation_cases import Found, Item, mixed_items
from simulated import shared_prefix_items
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.generate_items import NotGenerated, Tokens
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.native import GenerateRequest, load_model
from tinyloop.native.models import default_model_path
from tinyloop.workers.status import decode_status

ENGINE = {"model_path": default_model_path(), "factory": "tinyloop.native:load_model", "max_seq_len": 256}


def engine_alone(items: Sequence[Item]) -> list[Found]:
    """Each request by itself, whole, on one model in this process."""
    found: list[Found] = []
    with load_model(default_model_path(), max_seq_len=256, threads=1) as model:
        for ids, settings in items:
            row: dict[str, Any] = {"stop_ids": [], "depth": 2, "max_new_tokens": 8, **settings}
            request = GenerateRequest(np.array(ids, np.int32), row.pop("max_new_tokens"), **row)
            found.append(as_found(model.generate([request])[0]))
    return found


class Read:
    """Events of a stream, checked as they come: ids in order, each once, nothing after an end."""

    def __init__(self) -> None:
        self.parts: dict[int, list[Tokens]] = {}
        self.failed: dict[int, NotGenerated] = {}
        self.ended: set[int] = set()
        self.events = 0

    def take(self, event: Tokens | NotGenerated) -> None:
        self.events += 1
        assert event.prompt not in self.ended
        if isinstance(event, NotGenerated):
            self.failed[event.prompt] = event
            self.ended.add(event.prompt)
            return
        parts = self.parts.setdefault(event.prompt, [])
        assert event.first == sum(len(part.token_ids) for part in parts)
        parts.append(event)
        if event.finish_reason is not None:
            self.ended.add(event.prompt)

    def found(self, prompt: int) -> Found:
        parts = self.parts[prompt]
        columns = [[getattr(part, name) for part in parts] for name in ("token_ids", "logprobs", "depths")]
        ids, logprobs, depths = (np.concatenate(column).tolist() for column in columns)
        return ids, logprobs, depths, str(parts[-1].finish_reason)


def shared_items(groups: int, each: int, shared: int, vocab: int, depths: int) -> list[Item]:
    """Mixed requests of which `each` start with the same ids."""
    random = np.random.default_rng(groups)
    starts = random.integers(1, vocab, (groups, shared)).tolist()
    mixed = mixed_items(groups * each, vocab, depths, length=12)
    return [([*starts[i % groups], *ids], settings) for i, (ids, settings) in enumerate(mixed)]


def replica_pid(pool: ReplicaPool, slot: int = 0) -> int:
    return pool.status().replicas[slot].pid


@pytest.fixture(scope="module")
def calm(session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicaPool]:
    """One replica of the fake model that no test kills: starting a pool takes most of a short test's time."""
    path = tmp_path_factory.mktemp("calm") / "model.json"
    path.write_text('{"token_seconds": 0.001}')
    # More threads than cores: Ray then sets no core aside, and the pools of other tests find theirs free.
    config = PoolConfig(model=path, factory="fake_model:load_model", threads=1024)
    with ReplicaPool.start(config) as pool:
        yield pool


def wait_until_idle(pool: ReplicaPool) -> None:
    """Until router and first replica have heard that nothing more is needed, which nobody waits for else."""
    deadline = time.monotonic() + 20
    while pool.status().queued_items or generating(pool):
        assert time.monotonic() < deadline


def generating(pool: ReplicaPool) -> int:
    """Completions in the batch of the first replica, as it says itself."""
    return decode_status(ray.get(pool._home.up()[0].actor.health.remote())).generating


def check_completions(pool: ReplicaPool, window: int) -> None:
    """Prompts that share prefixes, more of them than a replica may be sent, with scoring on the way."""
    items = shared_items(groups=12, each=20, shared=60, vocab=1000, depths=2)
    text, read = shared_prefix_items(8, 4, 32, 16, depth=2), Read()
    with pool.stream([prompt_of(item) for item in items]) as stream:
        pool.submit(window, text)
        read.take(next(stream))
        assert gather(pool, window, text) == expected(text)
        for event in stream:
            read.take(event)
    assert [read.found(i) for i in range(len(items))] == fake_alone(items)
    assert completions(pool.generate([prompt_of(item) for item in items[:20]])) == fake_alone(items[:20])
    wait_until_idle(pool)


def test_completions_are_the_models_own_whatever_else_is_done(calm: ReplicaPool) -> None:
    check_completions(calm, 1)
    status = calm.status()
    assert (status.mirror_differences, status.deaths) == (0, 0)


def test_completions_do_not_depend_on_the_number_of_replicas(make_pool: MakePool) -> None:
    pool = make_pool(2, {"token_seconds": 1e-3})
    check_completions(pool, 0)
    status = pool.status()
    assert (status.mirror_differences, status.deaths) == (0, 0)
    assert all(replica.busy_s > 0 for replica in status.replicas)


def test_ids_come_while_most_of_the_completions_are_still_to_come(calm: ReplicaPool) -> None:
    items: list[Item] = [([i + 1], {"max_new_tokens": 300}) for i in range(8)]
    began_s, read = time.monotonic(), Read()
    with calm.stream([prompt_of(item) for item in items]) as stream:
        while len(read.parts) < 8:
            read.take(next(stream))
        first_s = time.monotonic() - began_s
        for event in stream:
            read.take(event)
    assert [read.found(i) for i in range(8)] == fake_alone(items)
    assert first_s < (time.monotonic() - began_s) / 2
    # Many ids an event, and many completions a message.
    assert read.events < 8 * 300 / 4


@pytest.mark.chaos
def test_a_replica_that_is_killed_in_the_middle_loses_and_doubles_no_id(make_pool: MakePool) -> None:
    items = shared_items(groups=4, each=10, shared=30, vocab=1000, depths=2)
    items = [(ids, settings | {"max_new_tokens": 80, "stop_ids": []}) for ids, settings in items]
    pool = make_pool(2, {"token_seconds": 5e-3})
    read = Read()
    with pool.stream([prompt_of(item) for item in items]) as stream:
        while len(read.parts) < 20:
            read.take(next(stream))
        assert len(read.ended) < len(items)
        os.kill(replica_pid(pool), signal.SIGKILL)
        for event in stream:
            read.take(event)
    assert [read.found(i) for i in range(len(items))] == fake_alone(items)
    assert pool.status().deaths == 1


@pytest.mark.chaos
def test_a_killed_router_and_then_a_frozen_replica_lose_and_double_no_id(make_pool: MakePool) -> None:
    """A frozen replica owes no answer to any command here, so that nothing but a look at it tells."""
    items: list[Item] = [([i + 1], {"max_new_tokens": 100}) for i in range(10)]
    pool = make_pool(1, {"token_seconds": 5e-3}, hang_floor_s=2.0)
    for victim, sign, deaths in (
        (pool._router_pid, signal.SIGKILL, 0),
        (replica_pid(pool), signal.SIGSTOP, 1),
    ):
        read = Read()
        with pool.stream([prompt_of(item) for item in items]) as stream:
            read.take(next(stream))
            os.kill(victim, sign)
            for event in stream:
                read.take(event)
        assert [read.found(i) for i in range(len(items))] == fake_alone(items)
        assert pool.status().deaths == deaths


@pytest.mark.chaos
def test_a_prompt_that_kills_its_process_is_reported_and_the_rest_is_generated(make_pool: MakePool) -> None:
    items: list[Item] = [([i + 1], {"max_new_tokens": 5}) for i in range(6)]
    items[3] = ([999], {"max_new_tokens": 5})
    pool = make_pool(2, {"exit_on": 999})
    results = pool.generate([prompt_of(item) for item in items])
    lost = results.pop(3)
    assert isinstance(lost, NotGenerated)
    assert (lost.error_class, lost.attempts) == ("replica_lost", 5)
    assert completions(results) == fake_alone(items[:3] + items[4:])


def test_bad_prompts_among_good_ones_fail_alone(calm: ReplicaPool) -> None:
    items = mixed_items(12, 1000, 2)
    items[2], items[5], items[7] = ([5, 5000], {}), ([], {}), ([5], {"max_new_tokens": 5000})
    results = calm.generate([prompt_of(item) for item in items])
    failed = {i: r.error_class for i, r in enumerate(results) if isinstance(r, NotGenerated)}
    assert failed == {2: "token_out_of_range", 5: "invalid_request", 7: "invalid_request"}
    good = [i for i in range(12) if i not in failed]
    assert completions([results[i] for i in good]) == fake_alone([items[i] for i in good])
    for settings in ({"temperature": -1.0}, {"max_new_tokens": 0}, {"seed": -1}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match=f"{next(iter(settings))} .*1"):
            calm.generate([prompt_of(items[0]), prompt_of(([4], settings))])
    assert calm.generate([]) == []


def test_cancelled_prompts_end_at_once_and_replicas_forget_them(calm: ReplicaPool) -> None:
    """One that runs, and one that waits in the router; then a stream that is left in the middle."""
    items: list[Item] = [([i + 1], {"max_new_tokens": 150}) for i in range(120)]
    read = Read()
    with calm.stream([prompt_of(item) for item in items]) as stream:
        first = next(stream)
        read.take(first)
        # More than a replica may be sent at a time: of the others some have not left the router.
        others = [prompt for prompt in range(120) if prompt != first.prompt][::40]
        for prompt in (first.prompt, *others):
            stream.cancel(prompt)
        for event in stream:
            read.take(event)
    cancelled = {i for i in range(120) if read.parts[i][-1].finish_reason == "cancelled"}
    assert cancelled == {first.prompt, *others}
    whole = fake_alone(items)
    for i in range(120):
        ids = read.found(i)[0]
        assert ids == whole[i][0][: len(ids)]
        assert (len(ids) < 150) == (i in cancelled)
    with calm.stream([prompt_of(item) for item in items]) as stream:
        next(stream)
    assert list(stream) == []
    wait_until_idle(calm)
    assert completions(calm.generate([prompt_of(item) for item in items[:3]])) == whole[:3]


def test_a_caller_who_does_not_read_holds_up_itself_alone(calm: ReplicaPool) -> None:
    """No more is sent to a replica than a client may have there; scores and other streams go on."""
    items: list[Item] = [([i + 1], {"max_new_tokens": 2}) for i in range(400)]
    with calm.stream([prompt_of(item) for item in items]) as idle:
        next(idle)
        text = shared_prefix_items(4, 4, 32, 16, depth=2)
        calm.submit(2, text)
        assert gather(calm, 2, text) == expected(text)
        assert calm.status().queued_items >= 400 - 96 - 1
        read = Read()
        for event in idle:
            read.take(event)
    assert len(read.ended | {0}) == 400


def test_two_streams_are_read_in_turn(calm: ReplicaPool) -> None:
    items: list[Item] = [([i + 1], {"max_new_tokens": 40}) for i in range(20)]
    reads = [Read(), Read()]
    streams = [calm.stream([prompt_of(item) for item in part]) for part in (items[:10], items[10:])]
    open_streams = list(zip(streams, reads, strict=True))
    while open_streams:
        for pair in list(open_streams):
            event = next(pair[0], None)
            if event is None:
                open_streams.remove(pair)
            else:
                pair[1].take(event)
    whole = fake_alone(items)
    assert [reads[0].found(i) for i in range(10)] == whole[:10]
    assert [reads[1].found(i) for i in range(10)] == whole[10:]


# ---- the engine itself ---------------------------------------------------------------------------


@pytest.mark.chaos
def test_two_replicas_one_of_which_is_killed_give_the_bits_of_one_model(make_pool: MakePool) -> None:
    """Mixed requests on shared prefixes of which few fit, with a death in the middle of the stream."""
    items = shared_items(groups=4, each=6, shared=40, vocab=8000, depths=4)
    expected_bits = engine_alone(items)
    pool = make_pool(2, threads=1, prefix_budget_bytes=4 << 20, **ENGINE)
    read = Read()
    with pool.stream([prompt_of(item) for item in items]) as stream:
        while len(read.parts) < 6:
            read.take(next(stream))
        os.kill(replica_pid(pool), signal.SIGKILL)
        for event in stream:
            read.take(event)
    assert [read.found(i) for i in range(len(items))] == expected_bits
    assert pool.status().deaths == 1


def test_a_replica_short_of_memory_gives_the_bits_of_one_model(make_pool: MakePool) -> None:
    items = shared_items(groups=3, each=6, shared=40, vocab=8000, depths=4)
    with load_model(default_model_path(), max_seq_len=256, threads=1) as model:
        budget = model.vram_usage_bytes
        with model.prefix(np.arange(1, 201, dtype=np.int32), upgradable=False) as prefix:
            budget += 3 * prefix.bytes
    pool = make_pool(1, threads=1, model_budget_bytes=budget, **ENGINE)
    results = pool.generate([prompt_of(item) for item in items])
    assert completions(results) == engine_alone(items)
