"""Generation by a pool beside the same requests on one model: ids a second, the first id, scores meanwhile.

    python tests/bench/generation.py [--replicas 1] [--prompts 96] [--tokens 64] [--device cpu] [--model FILE]

Every figure is of one run, after a warm-up; prompts of each group of 8 share their first 96 ids.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from tinyloop.cluster.config import PoolConfig
from tinyloop.cluster.generate_items import NotGenerated, Prompt
from tinyloop.cluster.items import Items
from tinyloop.cluster.pool import ReplicaPool
from tinyloop.native import GenerateRequest, load_model
from tinyloop.native.models import default_model_path

SHARED, OWN, GROUP, MAX_SEQ_LEN = 96, 32, 8, 1024


def prompts_of(count: int, tokens: int, vocab: int) -> list[Prompt]:
    random = np.random.default_rng(0)
    starts = random.integers(1, vocab, (-(-count // GROUP), SHARED), dtype=np.int32)
    return [
        Prompt(
            np.concatenate([starts[i // GROUP], random.integers(1, vocab, OWN, dtype=np.int32)]),
            max_new_tokens=tokens,
            stop_ids=[],
            temperature=float(i % 2),
            seed=i,
        )
        for i in range(count)
    ]


def alone(options: dict[str, Any], prompts: list[Prompt]) -> tuple[float, list[list[int]]]:
    """Seconds of one call of the engine in this process, and its ids. It shares no prefix."""
    with load_model(**options) as model:
        requests = [
            GenerateRequest(
                np.asarray(p.token_ids, np.int32),
                p.max_new_tokens,
                stop_ids=[],
                temperature=p.temperature,
                seed=p.seed,
            )
            for p in prompts
        ]
        model.generate(requests[:2])
        began_s = time.perf_counter()
        found = model.generate(requests)
        return time.perf_counter() - began_s, [completion.token_ids.tolist() for completion in found]


def by_pool(pool: ReplicaPool, prompts: list[Prompt]) -> tuple[dict[str, float], list[list[int]]]:
    """Figures of one stream, and its ids."""
    began_s, events, firsts = time.perf_counter(), 0, {}
    ids: list[list[int]] = [[] for _ in prompts]
    with pool.stream(prompts) as stream:
        for event in stream:
            assert not isinstance(event, NotGenerated), event
            events += 1
            firsts.setdefault(event.prompt, time.perf_counter() - began_s)
            ids[event.prompt] += event.token_ids.tolist()
    figures = {"seconds": time.perf_counter() - began_s, "events": float(events)}
    return figures | {"first_s": min(firsts.values())}, ids


def score_meanwhile(pool: ReplicaPool, prompts: list[Prompt]) -> tuple[float, float]:
    """Seconds for one short text to be scored: on an idle pool, and while it generates."""
    ids = np.arange(1, 33, dtype=np.int32)
    text = Items(ids, np.array([0, 32], np.int64), np.array([8], np.int32), 2)
    waits = []
    for window in range(6):
        stream = pool.stream(prompts) if window % 2 else None
        if stream is not None:
            next(stream)
        began_s = time.perf_counter()
        pool.submit(window, text)
        while not pool.collect(1.0):
            pass
        waits.append(time.perf_counter() - began_s)
        if stream is not None:
            stream.close()
    return min(waits[::2]), max(waits[1::2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", type=Path, default=default_model_path())
    args = parser.parse_args()
    prompts = prompts_of(args.prompts, args.tokens, 8000)
    total = args.prompts * args.tokens
    options = {"path": args.model, "max_seq_len": MAX_SEQ_LEN, "device": args.device}
    alone_s, expected = alone(options, prompts)
    print(f"one model:   {total / alone_s:9.0f} ids/s in one call without shared prefixes")
    config = PoolConfig(model=args.model, replicas=args.replicas, max_seq_len=MAX_SEQ_LEN, device=args.device)
    with ReplicaPool.start(config) as pool:
        by_pool(pool, prompts[:4])
        figures, found = by_pool(pool, prompts)
        same = "the same ids" if found == expected else "OTHER IDS"
        print(f"pool of {args.replicas}:   {total / figures['seconds']:9.0f} ids/s, {same}")
        print(
            f"first id:    {1e3 * figures['first_s']:9.1f} ms, {total / figures['events']:.1f} ids an event"
        )
        idle_s, busy_s = score_meanwhile(pool, prompts)
        print(
            f"a score:     {1e3 * idle_s:9.1f} ms on an idle pool, {1e3 * busy_s:.1f} ms while it generates"
        )
        print(f"router:      {pool.status().router_cpu_s:9.2f} s of CPU")
    ray.shutdown()


if __name__ == "__main__":
    main()
