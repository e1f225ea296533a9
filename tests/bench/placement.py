"""Placement alone: decisions a second, planning a million requests, bytes of the index, many replicas.

Run as a script; it needs neither Ray nor a model. A decision is one item placed, its prefixes and evictions
included; seconds are of processor time, so that a busy machine does not count. Every command is answered at
once, as the router would see it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from commanded import TOKEN_BYTES, Pool
from tinyloop.cluster.costs import PlacementRules, Sizes
from tinyloop.cluster.items import Items
from tinyloop.cluster.keys import DEPTH_BYTES, IDS_BYTES
from tinyloop.cluster.mirror import Flight, Growth, Mirror
from tinyloop.cluster.placement import Placement
from tinyloop.cluster.plan import plan_window
from tinyloop.cluster.pool_tree import PoolTree
from tinyloop.cluster.segments import CutRules, cut_window
from tinyloop.cluster.wire import WindowHead
from tinyloop.workers.wire import DIGEST_BYTES, Ack, Inventory
from workloads import groups

REPLICAS = 8
FIRST_SLOT = 20  # whose bit is no small number, which Python would keep once anyway


def nested_items(count: int, fanouts: tuple[int, int, int], seed: int = 0) -> Items:
    """Requests under three nested prefixes of 24 ids and 16 own ids, shuffled: three keys a request.

    fanouts: requests below one prefix of each level, outermost first.
    """
    random = np.random.default_rng(seed)
    number = random.permutation(count)
    levels = [random.integers(1, 1000, (-(-count // fan), 24), dtype=np.int32) for fan in fanouts]
    parts = [level[number // fan] for level, fan in zip(levels, fanouts, strict=True)]
    rows = np.concatenate([*parts, random.integers(1, 1000, (count, 16), dtype=np.int32)], axis=1)
    offsets = np.arange(count + 1, dtype=np.int64) * rows.shape[1]
    return Items(rows.reshape(-1), offsets, np.full(count, 8, dtype=np.int32), 1)


def answer_all(placement: Placement) -> None:
    """Send and answer commands until nothing is left."""
    busy = True
    while busy:
        busy = False
        for slot, work in placement.replicas.items():
            while placement.next_command(slot, 0.0) is not None:
                busy = True
            while work.mirror.flights:
                placement.acknowledge(slot, _ack(work.mirror, work.mirror.flights[0]), 0.0)


def _ack(mirror: Mirror, flight: Flight) -> Ack:
    built = tuple((growth.digest, growth.size_bytes) for growth in flight.builds)
    total = mirror.confirmed_bytes - sum(flight.drops.values()) + sum(size for _, size in built)
    table = flight.table.to_bytes(DIGEST_BYTES, "little")
    return Ack(1, flight.sequence, "", built, total, table, flight.rows, 1e-4 * flight.rows, 0)


def attached(budget_bytes: int, batch: int) -> Placement:
    """Eight empty replicas; commands of at least `batch` items where there are as many."""
    rules = PlacementRules(chunk_items=batch, chunk_rows=batch * 16, chunk_seconds=1e-3)
    placement = Placement(rules, Sizes({}))
    for slot in range(REPLICAS):
        placement.attach(slot, 1, budget_bytes, Inventory(1, (), 0))
    return placement


def speed(count: int, batch: int) -> None:
    """Decisions a second, offline and as a stream of windows of 4,096, with and without evictions."""
    fanouts = (4096, 512, 128)
    whole = cut_window(nested_items(count, fanouts), CutRules("m", 1000), client="c", window=0)
    parts = [
        cut_window(nested_items(4096, fanouts, seed), CutRules("m", 1000), client="c", window=seed)
        for seed in range(count // 4096)
    ]
    for name, heads, stream in (("offline", [whole], False), ("stream, 4,096", parts, True)):
        for limit, budget_bytes in (("no pressure", 1 << 40), ("pressure", 2_000_000)):
            placement = attached(budget_bytes, batch)
            start_s = time.process_time()
            for number, head in enumerate(heads):
                placement.add_window(f"w{number}", head, stream=stream)
                answer_all(placement)
            spent_s = time.process_time() - start_s
            counters = placement.counters
            print(
                f"{name}, {limit}: {counters.items:,} items in {counters.chunks:,} commands of "
                f"{counters.items / counters.chunks:.0f}: {counters.items / spent_s:,.0f} decisions/s, "
                f"{1e6 * spent_s / counters.chunks:.0f} us a command, {counters.evictions:,} evictions"
            )


def planning(count: int) -> None:
    """Cut and plan one window of that many requests, three keys each."""
    items = nested_items(count, (4096, 256, 16))
    begun_s = time.process_time()
    head: WindowHead = cut_window(items, CutRules("m", 1000), client="c", window=0)
    cut_s = time.process_time()
    plan_window("w", head)
    planned_s = time.process_time()
    placement = attached(1 << 40, 64)
    adding_s = time.process_time()
    placement.add_window("w", head)
    added_s = time.process_time()
    print(
        f"planning {count:,} requests under {len(head.node_lengths):,} prefixes: cut {cut_s - begun_s:.2f} s "
        f"(client), lay out {planned_s - cut_s:.2f} s, whole add_window {added_s - adding_s:.2f} s (router)"
    )


def index_bytes(prefixes: int, holders: int) -> float:
    """Bytes of tree and mirrors for each pair of a prefix and a holder of it."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tree = PoolTree()
    mirrors = [Mirror(FIRST_SLOT + slot, 1, 1 << 40, tree) for slot in range(holders)]
    for number in range(prefixes):
        parent = _key(number // 8) if number >= 8 else b""
        length = 100 + 10 * (number % 190)
        for mirror in mirrors:
            mirror.add(Growth(_key(number), parent, length, 10, 640 + 64 * (number % 40)))
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / (prefixes * holders)


def _key(number: int) -> bytes:
    return number.to_bytes(IDS_BYTES, "big") + (1).to_bytes(DEPTH_BYTES, "little")


def flatness(windows: int) -> tuple[int, int]:
    """Bytes that placement holds after half and after all of many windows of new prefixes."""
    tracemalloc.start()
    placement = attached(400_000, 16)
    held: list[int] = []
    for number in range(windows):
        head = cut_window(
            nested_items(512, (256, 64, 16), number), CutRules("m", 1000), client="c", window=number
        )
        placement.add_window(f"w{number}", head, stream=bool(number % 2))
        answer_all(placement)
        if number + 1 in (windows // 2, windows):
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    return held[0], held[1]


def many(replicas: int, requests: int) -> None:
    """How well many simulated replicas are used: the bound over the makespan."""
    made = groups("many", requests // 20, 20, 2000, 200, 100_000)
    got = Pool(made, replicas, made.budget_tokens * TOKEN_BYTES).run()
    print(
        f"{replicas:,} replicas, {requests:,} requests: {100 / got.slowdown:.1f} % efficient, hit "
        f"{got.hit_share:.2f} % of ideal, {requests / got.decision_s:,.0f} decisions/s, {got.counters}"
    )


def main() -> None:
    """Everything, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000, help="in the window that is planned")
    options = parser.parse_args()
    speed(131_072, 128)
    for prefixes, holders in ((60_000, 1), (88_000, 1), (100_000, 1), (100_000, 2), (20_000, 8)):
        print(
            f"index of {prefixes:,} prefixes at {holders} holders each: "
            f"{index_bytes(prefixes, holders):.0f} B a (prefix, holder)"
        )
    early, late = flatness(400)
    print(f"after 200 windows of new prefixes {early:,} B, after 400 {late:,} B")
    many(64, 100_000)
    many(1024, 400_000)
    planning(options.requests)


if __name__ == "__main__":
    main()
