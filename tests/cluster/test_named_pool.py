"""Named pools on Ray: shared, scaled, left by clients that die, owned by a router that may die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from collecting import expected, gather, values_of
from completions import completions, fake_alone, prompt_of
from generation_cases import Item
from simulated import shared_prefix_items
from tinyloop.cluster import registry
from tinyloop.cluster.cli import app
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.errors import UsageError
from tinyloop.cluster.fleet import PoolError
from tinyloop.cluster.named_pool import PoolDiffers, ask_status
from tinyloop.cluster.pool import ReplicaPool
from typer.testing import CliRunner

NAME = "named"
SLOW = {"row_seconds": 3e-4}
PROMPTS: list[Item] = [([i + 1, i + 2], {"max_new_tokens": 20}) for i in range(6)]
DEADLINE_S = 30.0


def wait_until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, json.dumps(ask_status(NAME), indent=1)
        time.sleep(0.05)


def pids_of(name: str) -> list[int]:
    body = ask_status(name)
    return [body["pid"], *(slot["pid"] for slot in body["slots"])]


def is_alive(pid: int) -> bool:
    try:
        return b"ray::" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture
def config(session: None, tmp_path: Path) -> Iterator[PoolConfig]:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SLOW))
    yield PoolConfig(model=path, factory="fake_model:load_model", replicas=1, chunk_rows=400)
    if NAME in registry.pool_names():
        pids = pids_of(NAME)
        registry.reap(NAME)
        assert not [pid for pid in pids if is_alive(pid)]
    assert registry._names_in(NAME) == []


def test_two_clients_share_a_pool_that_outlives_both(config: PoolConfig) -> None:
    items = [shared_prefix_items(12, 8, 64, 16, seed=seed) for seed in range(2)]
    with ReplicaPool.up(config, NAME) as one, ReplicaPool.connect(NAME) as two:
        one.submit(0, items[0])
        two.submit(0, items[1])
        assert gather(two, 0, items[1]) == expected(items[1])
        assert gather(one, 0, items[0]) == expected(items[0])
        assert len(one.status().clients) == 2
        # Generated ids come straight from the replicas, to each client its own.
        with one.stream([prompt_of(item) for item in PROMPTS]) as stream:
            next(stream)
            assert completions(two.generate([prompt_of(item) for item in PROMPTS])) == fake_alone(PROMPTS)
            wait_until(lambda: [client.streams for client in two.status().clients] == [1, 0])
        wait_until(lambda: ask_status(NAME)["counters"]["generated_tokens"] > 0)
    body = ask_status(NAME)
    assert (body["clients"], [slot["verdict"] for slot in body["slots"]]) == ([], ["ready"])
    # The same again joins it; another one is told what differs.
    with ReplicaPool.up(config, NAME) as again:
        assert again.status().replicas[0].pid == body["slots"][0]["pid"]
    with pytest.raises(PoolDiffers, match=r"chunk_rows: 400 there, 500 asked"):
        ReplicaPool.up(config.model_copy(update={"chunk_rows": 500}), NAME)


@pytest.mark.chaos
def test_a_router_that_dies_owns_its_replicas_again_and_replaces_the_dead(config: PoolConfig) -> None:
    items = shared_prefix_items(16, 8, 64, 16, seed=5)
    with ReplicaPool.up(config, NAME) as pool:
        pool.submit(0, items)
        found = dict(value for part in pool.collect(10.0) for value in values_of(part))
        before = ask_status(NAME)
        with pool.stream([prompt_of(item) for item in PROMPTS]) as stream:
            next(stream)
            os.kill(before["pid"], signal.SIGKILL)
            ended = sum(getattr(event, "finish_reason", None) == "length" for event in stream)
        assert ended == len(PROMPTS)
        assert gather(pool, 0, items, found) == expected(items)
        after = ask_status(NAME)
        assert after["pid"] != before["pid"]
        assert [slot["generation"] for slot in after["slots"]] == [1]
        # It knows what the replica holds: the same again builds nothing.
        computed = pool.status().tokens_computed
        pool.submit(1, items)
        assert gather(pool, 1, items) == expected(items)
        assert pool.status().tokens_computed - computed <= len(items) * 15 + 2 * 64
        # The new router replaces a replica that it did not start, under a generation never used before.
        os.kill(after["slots"][0]["pid"], signal.SIGKILL)
        pool.submit(2, items)
        assert gather(pool, 2, items) == expected(items)
        assert [slot["generation"] for slot in ask_status(NAME)["slots"]] == [2]


@pytest.mark.chaos
def test_a_router_that_is_frozen_is_replaced_by_whoever_asks(
    config: PoolConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinyloop.cluster.named_pool.ANSWER_S", 1.0)
    monkeypatch.setattr("tinyloop.cluster.named_pool.FROZEN_S", 0.5)
    ReplicaPool.up(config, NAME).close()
    before = ask_status(NAME)
    os.kill(before["pid"], signal.SIGSTOP)
    with ReplicaPool.connect(NAME) as pool:
        items = shared_prefix_items(4, 8, 64, 16, seed=9)
        pool.submit(0, items)
        assert gather(pool, 0, items) == expected(items)
        after = ask_status(NAME)
    assert after["pid"] != before["pid"]
    assert [slot["pid"] for slot in after["slots"]] == [slot["pid"] for slot in before["slots"]]


def test_a_pool_is_scaled_while_it_works_and_its_router_remembers(config: PoolConfig) -> None:
    items = shared_prefix_items(16, 8, 64, 16, seed=6)
    with ReplicaPool.up(config, NAME) as pool:
        pool.submit(0, items)
        pool.scale(2)
        assert gather(pool, 0, items) == expected(items)
        wait_until(lambda: pool.status().alive == 2)
        pool.submit(1, items)
        pool.scale(1)
        assert gather(pool, 1, items) == expected(items)
        wait_until(lambda: len(pool.status().replicas) == 1)
        status = pool.status()
        assert (status.deaths, status.wanted, status.mirror_differences) == (0, 1, 0)
        pool.scale(2)
        ray.kill(pool._router, no_restart=False)
        wait_until(lambda: pool.status().alive == 2)


CLIENT = """
import sys, time
import numpy as np
from tinyloop.cluster import named_pool
from tinyloop.cluster.items import Items
from tinyloop.cluster.pool import ReplicaPool
named_pool.LEASE_S = named_pool.NamedHome.lease_s = 1.0
named_pool.BEAT_S = 0.3
pool = ReplicaPool.connect(sys.argv[1], sys.argv[2])
ids = np.arange(1, 1 + 400 * 32, dtype=np.int32) % 900
pool.submit(0, Items(ids, np.arange(0, 400 * 32 + 1, 32, dtype=np.int64), np.full(400, 8, np.int32), 1))
print("submitted", flush=True)
time.sleep(600)
"""


@pytest.mark.chaos
def test_windows_of_a_client_that_dies_are_dropped_soon(config: PoolConfig) -> None:
    with ReplicaPool.up(config, NAME) as pool:
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-c", CLIENT, NAME, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "submitted\n"
            assert len(pool.status().clients) == 2
            assert pool.status().queued_items > 0
            client.kill()
            killed_s = time.monotonic()
        wait_until(lambda: len(pool.status().clients) == 1)
        assert time.monotonic() - killed_s < 5.0
        assert pool.status().queued_items == 0
        # Its ids are gone with it; the replica is none the worse.
        items = shared_prefix_items(4, 8, 64, 16, seed=7)
        pool.submit(0, items)
        assert gather(pool, 0, items) == expected(items)
        assert pool.status().deaths == 0


def test_a_cancelled_window_never_comes_back_and_a_late_one_comes_back_as_failed(config: PoolConfig) -> None:
    items = shared_prefix_items(24, 8, 64, 16, seed=8)
    with ReplicaPool.up(config, NAME) as pool:
        pool.submit(0, items)
        assert pool.cancel(0) == len(items)
        assert pool.cancel(0) == 0
        pool.submit(1, items, deadline_s=0.3)
        found = gather(pool, 1, items)
        late = [value for value in found.values() if not isinstance(value, bytes)]
        assert late
        assert {failed.error_class for failed in late} == {"timeout"}
        scored = {item: value for item, value in found.items() if isinstance(value, bytes)}
        assert scored == {item: value for item, value in expected(items).items() if item in scored}
        wait_until(lambda: pool.status().queued_items == 0)


@pytest.mark.chaos
def test_a_pool_whose_router_is_dead_is_said_to_be_so_and_goes_down_by_name(config: PoolConfig) -> None:
    ReplicaPool.up(config, NAME).close()
    pids = pids_of(NAME)
    ray.kill(registry.find_router(NAME))
    wait_until_no_router()
    with pytest.raises(PoolError, match=r"has no router any more: `tinyloop up`"):
        ReplicaPool.connect(NAME)
    # The same pool again: a new router takes the replica over.
    ReplicaPool.up(config, NAME).close()
    assert pids_of(NAME)[1] == pids[1]
    pids += pids_of(NAME)
    ray.kill(registry.find_router(NAME))
    wait_until_no_router()
    assert registry.reap(NAME) == 1
    assert not [pid for pid in pids if is_alive(pid)]
    with pytest.raises(registry.NoSuchPool, match=r"no pool 'named' on this cluster \(there is none\)"):
        registry.reap(NAME)


def wait_until_no_router() -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while registry.ROUTER in registry._names_in(NAME):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_pool_that_finds_no_room_says_what_it_asked_for(config: PoolConfig) -> None:
    too_much = config.model_copy(update={"device": "cuda", "start_timeout_s": 0.5})
    with pytest.raises(PoolError, match=r"was not ready in 0.5 s: it asked for .*the cluster has"):
        ReplicaPool.up(too_much, NAME)
    assert registry.pool_names() == []


def test_a_pool_that_cannot_load_says_why_and_leaves_nothing(config: PoolConfig, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps({"fail_load": "tensor embed: 12 of 16 bytes"}))
    with pytest.raises(PoolError, match=r"phase load: LoadError: tensor embed: 12 of 16 bytes"):
        ReplicaPool.up(config.model_copy(update={"model": bad}), NAME)
    assert registry.pool_names() == []


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_commands_start_score_scale_and_end_a_pool(session: None, tmp_path: Path) -> None:
    file = tmp_path / "pool.toml"
    file.write_text("replicas = 1\nmax_seq_len = 256\n")
    assert run("status") == "no pool is up on this cluster\n"
    assert "1 of 1 replicas ready" in run("up", str(file), "--name", NAME)
    try:
        assert "was up already" in run("up", str(file), "--name", NAME)
        rows = tmp_path / "rows.jsonl"
        rows.write_text('{"context": "2 + 2 =", "choices": [" 4", " 5"]}\n' * 3)
        arguments = ["score", "-i", str(rows), "-o", str(tmp_path / "out"), "--depth", "1", "--pool", NAME]
        assert "3 scored" in run(*arguments)
        with pytest.raises(UsageError, match=r"--pool named and --replicas: the pool has decided"):
            run(*arguments, "--replicas", "2", "--overwrite")
        assert "2 of 2 replicas ready" in run("scale", NAME, "--replicas", "2")
        body: dict[str, Any] = json.loads(run("status", NAME, "--json"))
        assert [slot["verdict"] for slot in body["slots"]] == ["ready", "ready"]
        assert "generation 1: ready" in run("status", NAME)
        file.write_text("replicas = 1\nmax_seq_len = 256\nchunk_rows = 7\n")
        with pytest.raises(UsageError, match="chunk_rows: 1000 there, 7 asked"):
            run("up", str(file), "--name", NAME)
    finally:
        assert "3 processes ended" in run("down", NAME)
    with pytest.raises(UsageError, match=f"no pool {NAME!r}"):
        run("status", NAME)
    file.write_text("replica = 1\n")
    with pytest.raises(UsageError, match="unknown key 'replica': did you mean 'replicas'"):
        run("up", str(file))
