"""Workloads for the simulator, made from whole numbers alone: a tree of prefixes and requests at its nodes.

A node stands for a run of ids that nobody cuts: a system prompt, a turn, a document. No ids are made up;
lengths are enough, because equal prefixes are equal nodes. Shapes follow published benchmarks and traces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    parents: int64 [nodes], -1 for none, parents first. own: int64 [nodes] tokens after the parent's.
    leaves: int64 [requests] deepest node of each or -1. tails: int64 [requests] tokens of nobody else, >= 1.
    budget_tokens: memory of each replica under pressure.
    """

    name: str
    parents: IntArray
    own: IntArray
    leaves: IntArray
    tails: IntArray
    budget_tokens: int

    def __len__(self) -> int:
        return len(self.leaves)

    @cached_property
    def lengths(self) -> IntArray:
        """int64 [nodes + 1]: tokens up to the end of each node; the last is 0, for requests without one."""
        lengths = np.zeros(len(self.own) + 1, dtype=np.int64)
        for node, (parent, own) in enumerate(zip(self.parents.tolist(), self.own.tolist(), strict=True)):
            lengths[node] = lengths[parent] + own
        return lengths

    @cached_property
    def prompts(self) -> IntArray:
        """int64 [requests]: tokens of each."""
        return self.lengths[self.leaves] + self.tails

    @cached_property
    def paths(self) -> list[tuple[int, ...]]:
        """Nodes from the root to each node, itself included."""
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(self.parents.tolist()):
            paths.append((*(paths[parent] if parent >= 0 else ()), node))
        return paths

    @cached_property
    def unique_tokens(self) -> int:
        """Tokens to compute with one cache without limit."""
        return self.unique_of(np.arange(len(self)))

    def unique_of(self, requests: IntArray) -> int:
        """The same for some of the requests."""
        return int(self.own[self.used_by(requests)].sum() + self.tails[requests].sum())

    def used_by(self, requests: IntArray) -> NDArray[np.bool_]:
        """bool [nodes]: on the way to any of these requests."""
        used = np.zeros(len(self.own), dtype=np.bool_)
        used[self.used_by_leaves(self.leaves[requests])] = True
        return used

    def used_by_leaves(self, leaves: IntArray) -> IntArray:
        """Nodes on the way to any of these leaves, themselves included, parents first."""
        level = np.unique(leaves)
        found = [level]
        while len(level):
            level = np.unique(self.parents[level[level >= 0]])
            found.append(level)
        nodes = np.unique(np.concatenate(found))
        return nodes[nodes >= 0]

    @property
    def ideal_hit(self) -> float:
        """Share of all tokens that need not be computed."""
        return 1.0 - self.unique_tokens / int(self.prompts.sum())


def groups(name: str, count: int, each: int, shared: int, own: int, budget: int, seed: int = 0) -> Workload:
    """`count` prefixes of `shared` tokens, each followed by `each` different tails of `own`; shuffled."""
    random = np.random.default_rng(seed)
    leaves = random.permutation(np.repeat(np.arange(count), each))
    return _flat(name, np.full(count, shared), leaves, np.full(len(leaves), own), budget)


def rounds(name: str, count: int, each: int, repeats: int, shared: int, own: int, budget: int) -> Workload:
    """`each` users of every prefix ask the same question in every round."""
    random = np.random.default_rng(1)
    parents = np.concatenate([np.full(count, -1), np.repeat(np.arange(count), each)])
    lengths = np.concatenate([np.full(count, shared), np.full(count * each, own - 1)])
    asked = [random.permutation(np.arange(count, count + count * each)) for _ in range(repeats)]
    leaves = np.concatenate(asked)
    return Workload(name, parents, lengths, leaves, np.ones(len(leaves), dtype=np.int64), budget)


def zipf(name: str, pools: int, shared: int, own: int, requests: int, budget: int) -> Workload:
    """Pools as popular as one over their rank."""
    random = np.random.default_rng(2)
    weights = 1.0 / np.arange(1, pools + 1)
    leaves = random.choice(pools, requests, p=weights / weights.sum())
    return _flat(name, np.full(pools, shared), leaves, np.full(requests, own), budget)


def hot(
    name: str, pools: int, shared: int, own: int, requests: int, budget: int, share: float = 0.6
) -> Workload:
    """One pool takes a share of all requests, the rest is even."""
    random = np.random.default_rng(3)
    others = random.integers(1, pools, requests)
    leaves = np.where(random.random(requests) < share, 0, others)
    return _flat(name, np.full(pools, shared), leaves, np.full(requests, own), budget)


def conversations(
    name: str,
    requests: int,
    budget: int,
    *,
    common: int = 512,
    further: float = 0.36,
    first: float = 6500.0,
    turn: float = 1500.0,
    seed: int = 4,
) -> Workload:
    """Sessions that start at any time and whose every prompt is the whole talk so far.

    common: tokens that all share. further: chance of one more turn. first, turn: median tokens of the first
    and of each further prompt, log-normal.
    """
    random = np.random.default_rng(seed)
    parents, own, arrivals = ([-1], [common], []) if common else ([], [], [])
    while len(arrivals) < requests:
        node, when_s = (0 if common else -1), random.uniform(0.0, 3500.0)
        tokens = first * random.lognormal(0.0, 1.0)
        while True:
            parents.append(node)
            own.append(max(int(tokens), 16))
            node = len(own) - 1
            arrivals.append((when_s, node))
            if random.random() >= further:
                break
            when_s += random.exponential(90.0)
            tokens = turn * random.lognormal(0.0, 0.8)
    arrivals.sort()
    leaves = np.array([node for _, node in arrivals])
    tails = random.integers(8, 64, len(leaves))
    return Workload(name, np.array(parents), np.array(own), leaves, tails, budget)


def documents(name: str, requests: int, budget: int) -> Workload:
    """Some long documents asked about again and again, more short prompts asked once: no common start."""
    random = np.random.default_rng(5)
    parents: list[int] = []
    own: list[int] = []
    arrivals = []
    while len(arrivals) < requests:
        is_document = random.random() < 0.22
        own.append(max(int((19_000 if is_document else 4_500) * random.lognormal(0.0, 0.6)), 16))
        parents.append(-1)
        top, when_s = len(own) - 1, random.uniform(0.0, 1000.0)
        arrivals.append((when_s, top))
        for _ in range(int(random.geometric(0.24)) if is_document else 0):
            when_s += random.exponential(60.0)
            parents.append(top)
            own.append(max(int(600 * random.lognormal(0.0, 0.8)), 16))
            top = len(own) - 1 if random.random() < 0.5 else top
            arrivals.append((when_s, len(own) - 1))
    arrivals.sort()
    leaves = np.array([node for _, node in arrivals])
    return Workload(
        name, np.array(parents), np.array(own), leaves, random.integers(8, 64, len(leaves)), budget
    )


def unique(name: str, requests: int, tokens: int, budget: int) -> Workload:
    """Nothing is shared: the control, in which a router can only cost."""
    lengths = np.random.default_rng(6).integers(tokens // 2, 3 * tokens // 2, requests)
    none = np.full(requests, -1)
    return Workload(name, np.empty(0, np.int64), np.empty(0, np.int64), none, lengths, budget)


WORKLOADS: dict[str, Callable[[], Workload]] = {}


def _named(name: str, make: Callable[..., Workload], *sizes: int, **shape: float) -> None:
    WORKLOADS[name] = lambda: make(name, *sizes, **shape)


_named("gsp 64 x 16", groups, 64, 16, 2048, 128, 20_000)
_named("gsp 1,024 x 16", groups, 1024, 16, 2048, 128, 100_000)
_named("llm-d 150 x 5 x 8", rounds, 150, 5, 8, 6000, 1200, 307_000)
_named("zipf 2,000", zipf, 2000, 1500, 60, 40_000, 225_000)
_named("conversation 3M", conversations, 12_031, 3_000_000)
_named("conversation 0.5M", conversations, 12_031, 500_000)
_named("documents 0.5M", documents, 3_993, 500_000)
_named("hot pool 60 %", hot, 500, 4000, 100, 20_000, 256_000)
_named("few-shot 57", groups, 57, 246, 650, 110, 20_000)
_named("prefix repetition", groups, 10, 100, 256, 256, 20_000)
_named("tools 200, zipf", zipf, 200, 3000, 900, 5400, 60_000)
_named("unique (control)", unique, 4096, 2300, 100_000)


def _flat(name: str, shared: IntArray, leaves: IntArray, tails: IntArray, budget: int) -> Workload:
    return Workload(name, np.full(len(shared), -1), shared, leaves, tails, budget)
