"""Long random lives of a model and its handles, counted from outside. Run by test_memory.py, or by hand:

LD_PRELOAD=allocation_count.so python memory_walk.py walk MODEL.tloop CACHE_MODE STEPS SEED
LD_PRELOAD=allocation_count.so python memory_walk.py loads MODEL.tloop CACHE_MODE
LD_PRELOAD=allocation_count.so python memory_walk.py steady MODEL.tloop CACHE_MODE
LD_PRELOAD=allocation_count.so python memory_walk.py orders MODEL.tloop CACHE_MODE

allocation_count.so is made of cpp/allocation_count.c by `cc -shared -fPIC -O2`. Ends with an error at the
first step after which the engine's books and the count differ.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinyloop.native import (
    GenerateRequest,
    InvalidInputError,
    MismatchError,
    Model,
    OutOfMemoryError,
    PrefixCache,
    PrefixPool,
    ResumeHandle,
    load_model,
)

ROWS = 64
MOST_HELD = 30
COUNT = ctypes.CDLL(None)
COUNT.counted_live_bytes.restype = COUNT.counted_allocations.restype = ctypes.c_size_t


def live_bytes() -> int:
    return int(COUNT.counted_live_bytes())


class Walk:
    """What a caller might hold, and every thing it might do next. Any call may be refused; none may leak."""

    def __init__(self, model: Model, seed: int) -> None:
        self.model = model
        self.rng = np.random.default_rng(seed)
        self.prefixes: list[PrefixCache] = []
        self.handles: list[ResumeHandle] = []
        self.pools: list[PrefixPool] = []
        self.done: Counter[str] = Counter()

    def ids(self, most: int = ROWS) -> NDArray[np.int32]:
        return self.rng.integers(0, 61, self.rng.integers(2, most)).astype(np.int32)

    def depth(self) -> int:
        return int(self.rng.integers(1, 5))

    def one(self, things: list[Any]) -> Any:
        return things[int(self.rng.integers(len(things)))] if things else None

    def build(self) -> None:
        self.prefixes.append(self.model.prefix(self.ids(), self.depth(), upgradable=self.rng.random() < 0.7))

    def extend(self) -> None:
        if parent := self.one(self.prefixes):
            self.prefixes.append(self.model.prefix(self.ids(20), parent.depth, parent))

    def deepen(self) -> None:
        if prefix := self.one(self.prefixes):
            self.prefixes.append(prefix.upgrade(prefix.depth + 1))

    def start(self) -> None:
        base = self.one(self.prefixes) if self.rng.random() < 0.4 else None
        depth = base.depth if base is not None else self.depth()
        keep = bool(self.rng.random() < 0.5)
        self.handles.append(self.model.start(self.ids(), depth, 5, base, keep_cache=keep))

    def start_many(self) -> None:
        items = [self.ids(30) for _ in range(4)]
        offsets = np.cumsum([0, *map(len, items)])
        ones = np.ones(4, np.int32)
        self.handles += self.model.start_many(np.concatenate(items), offsets, ones, self.depth(), 5)

    def upgrade(self) -> None:
        chosen = [handle for handle in self.handles if self.rng.random() < 0.3]
        self.model.upgrade(chosen, max((handle.depth for handle in chosen), default=1) + 1)

    def share(self) -> None:
        if handle := self.one(self.handles):
            self.prefixes.append(handle.prefix())

    def score(self) -> None:
        base = self.one(self.prefixes)
        ids = self.ids()
        depth = base.depth if base is not None else self.depth()
        ends, ones = np.array([0, len(ids)]), np.ones(1, np.int32)
        self.model.score(ids, ends, ones, prefixes=[base], depth=depth)

    def generate(self) -> None:
        requests = []
        for _ in range(int(self.rng.integers(1, 4))):
            base = self.one(self.prefixes) if self.rng.random() < 0.5 else None
            depth = base.depth if base is not None else self.depth()
            requests.append(
                GenerateRequest(
                    self.ids(), int(self.rng.integers(1, 8)), prefix=base, depth=depth, temperature=1.0
                )
            )
        self.model.generate(requests, max_batch=2)

    def pool(self) -> None:
        if len(self.pools) < 3:
            self.pools.append(PrefixPool(self.model, int(self.rng.integers(10**5, 10**6))))

    def create(self) -> None:
        if pool := self.one(self.pools):
            pool.create(self.ids(), self.depth(), self.one([None, *pool.keys()]))

    def put(self) -> None:
        pool, prefix = self.one(self.pools), self.one(self.prefixes)
        if pool and prefix:
            pool.put(prefix)

    def take(self) -> None:
        if (pool := self.one(self.pools)) and (key := self.one(pool.keys())):
            self.prefixes.append(pool.get(key))

    def evict(self) -> None:
        if (pool := self.one(self.pools)) and (key := self.one(pool.keys())):
            pool.evict(key)

    def close(self) -> None:
        things = self.one([self.prefixes, self.handles, self.pools, self.prefixes, self.handles])
        if things:
            things.pop(int(self.rng.integers(len(things)))).close()

    def step(self) -> None:
        names = ["build", "extend", "deepen", "start", "start_many", "upgrade", "share", "score"]
        names += ["generate", "pool", "create", "put", "take", "evict", *["close"] * 6]
        full = len(self.prefixes) + len(self.handles) > MOST_HELD
        name = "close" if full else str(self.rng.choice(names))
        fails = int(self.rng.integers(1, 6)) if self.rng.random() < 0.2 else 0
        self.model._fail_allocation(fails)
        before = self.model.vram_usage_bytes
        action: Callable[[], None] = getattr(self, name)
        try:
            action()
            self.done[name] += 1
        except (InvalidInputError, MismatchError):
            self.done["refused"] += 1
            assert self.model.vram_usage_bytes <= before
        except OutOfMemoryError:
            self.done["out of memory"] += 1
        self.model._fail_allocation(0)


def open_model(path: str, mode: str, **options: Any) -> Model:
    return load_model(path, ROWS, 20, cache_mode=mode, threads=1, **options)


def walk(path: str, mode: str, steps: int, seed: int) -> None:
    empty = live_bytes()
    model = open_model(path, mode)
    start = model.vram_usage_bytes
    assert start == live_bytes() - empty
    life = Walk(model, seed)
    for _ in range(steps):
        life.step()
        report = model.memory_report()
        assert model.vram_usage_bytes == sum(report.values()) == live_bytes() - empty, life.done
    assert len(life.done) == 17, life.done  # each kind of step came to pass, and each kind of refusal
    life.pool()
    for thing in (*life.pools, *life.prefixes, *life.handles):
        thing.close()
    report = model.memory_report()
    assert not report["prefix"]
    assert not report["resume"]
    fresh = open_model(path, mode)
    grown = {"logit_row", "rebuild"}
    assert {k: v for k, v in report.items() if k not in grown} == {
        k: v for k, v in fresh.memory_report().items() if k not in grown
    }
    fresh.close()
    last = model.prefix(np.arange(5, dtype=np.int32), 1)
    model.close()
    assert live_bytes() > empty  # held by the last handle
    last.close()
    assert live_bytes() == empty  # though every closed thing is still here
    print(f"{steps} steps:", dict(life.done))


def loads(path: str, mode: str) -> None:
    """Every allocation of a load fails once, by the smallest budget that lets the one before it pass."""
    empty = live_bytes()
    budget, failures = 1, 0
    while True:
        try:
            model = open_model(path, mode, budget_bytes=budget)
        except OutOfMemoryError as error:
            message = str(error)
        else:
            break
        assert live_bytes() == empty, f"{message}: {live_bytes() - empty} bytes are left"
        asked, held = map(int, re.findall(r"allocate (\d+) bytes .* (\d+) bytes are live", message)[0])
        assert asked + held > budget
        budget = asked + held
        failures += 1
    assert model.vram_usage_bytes == budget == live_bytes() - empty
    print("failed loads:", failures)


def steady(path: str, mode: str) -> None:
    """Once warm, scoring allocates nothing, whatever is scored."""
    model = open_model(path, mode)
    rng = np.random.default_rng(0)
    base = model.prefix(rng.integers(0, 61, 60).astype(np.int32), 2)
    calls = 0
    for i in range(100):
        if i == 1:
            calls = COUNT.counted_allocations()
        ids = rng.integers(0, 61, 200).astype(np.int32)
        offsets = np.array([0, 61, 100, 103, 140, 200])
        prefixes = [base if i == 0 or rng.random() < 0.5 else None for _ in range(5)]
        model.score(ids, offsets, np.ones(5, np.int32), prefixes=prefixes, depth=2)
        model.score_tokens(ids[:50], depth=1 + i % 4)
    assert calls > 0
    assert COUNT.counted_allocations() == calls


def orders(path: str, mode: str) -> None:
    """Whatever closes last, nothing is held after it, though the closed objects themselves live on."""
    empty = live_bytes()
    ids = np.arange(10, dtype=np.int32)
    for order in itertools.permutations(range(6)):
        model = open_model(path, mode)
        parent = model.prefix(ids, 2)
        child = model.prefix(ids, 2, parent)
        handle = model.start(ids, 2, 3, child)
        pool = PrefixPool(model, None)
        pool.put(child)
        things = [model, parent, child, parent.upgrade(3), handle, pool]
        for i in order:
            assert live_bytes() > empty
            things[i].close()
        assert live_bytes() == empty, [type(things[i]).__name__ for i in order]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    command, *arguments = sys.argv[1:]
    if command == "walk":
        walk(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))
    else:
        {"loads": loads, "steady": steady, "orders": orders}[command](*arguments)
