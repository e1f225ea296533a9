"""How other routers choose, on replicas that keep their own caches: models of their rules, not their code.

Each sees requests one by one, in order of arrival, with a few in flight a replica, and pushes each at
once. A replica keeps what it computed, least recently used leaf out first. What a router believes of the
caches is its own affair: an unbounded history, an estimate of its own, or the truth.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush

from commanded import REQUEST_S, TOKEN_S, Outcome, bound_s
from workloads import Workload

IN_FLIGHT = 8  # a replica; in all, the requests that a router has sent and not got back


@dataclass
class Cache:
    """Nodes that a replica holds, leaf to root from the least recently used on."""

    workload: Workload
    budget_tokens: int
    held: OrderedDict[int, None] = field(default_factory=OrderedDict)
    tokens: int = 0
    evictions: int = 0

    def hit(self, node: int) -> int:
        """Tokens of the longest held start of the way to a node."""
        length = 0
        for step in self.workload.paths[node] if node >= 0 else ():
            if step not in self.held:
                break
            length = int(self.workload.lengths[step])
        return length

    def use(self, node: int) -> int:
        """Compute what is missing and keep it if there is room. Returns the tokens that were held."""
        if node < 0:
            return 0
        hit, path = self.hit(node), self.workload.paths[node]
        for step in path:
            if step not in self.held:
                self.tokens += int(self.workload.own[step])
        for step in reversed(path):
            self.held[step] = None
            self.held.move_to_end(step)
        while self.tokens > self.budget_tokens:
            oldest, _ = self.held.popitem(last=False)
            self.tokens -= int(self.workload.own[oldest])
            self.evictions += 1
        return hit


class Fleet:
    """What a router may know: queues by count and by seconds, and, for those who listen, the true caches."""

    def __init__(self, workload: Workload, replicas: int, budget_tokens: int) -> None:
        self.workload = workload
        self.caches = [Cache(workload, budget_tokens) for _ in range(replicas)]
        self.queued = [0] * replicas
        self.queued_tokens = [0] * replicas
        self.free_s = [0.0] * replicas
        self.now_s = 0.0

    def least(self, slots: list[int] | range) -> int:
        """The shortest queue."""
        return min(slots, key=lambda slot: self.queued[slot])

    @property
    def slots(self) -> range:
        return range(len(self.caches))


class Policy:
    """Where a request goes. Knows the requests that it has sent before and whatever a fleet shows."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.workload = fleet, fleet.workload
        self.random = random.Random(0)

    def choose(self, request: int) -> int:
        """The replica for a request."""
        raise NotImplementedError

    def node(self, request: int) -> int:
        """The deepest prefix that a request shares with any other."""
        return int(self.workload.leaves[request])

    def two(self, slots: list[int]) -> int:
        """The shorter of two random queues."""
        return self.fleet.least(self.random.sample(slots, min(2, len(slots))))


class RoundRobin(Policy):
    """In turn."""

    def choose(self, request: int) -> int:
        return request % len(self.fleet.caches)


class PowerOfTwo(Policy):
    """Ray Serve's default: two at random, the shorter queue."""

    def choose(self, request: int) -> int:
        return self.two(list(self.fleet.slots))


class LeastLoaded(Policy):
    """Fewest requests in flight."""

    def choose(self, request: int) -> int:
        return self.fleet.least(self.fleet.slots)


class History(Policy):
    """A policy with a tree of everything that it ever sent anywhere."""

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.sent_to: dict[int, set[int]] = {}
        self.sizes = [0] * len(fleet.caches)

    def match(self, node: int) -> tuple[int, list[int]]:
        """Tokens of the deepest step that was sent anywhere, and where."""
        for step in reversed(self.workload.paths[node] if node >= 0 else ()):
            if step in self.sent_to:
                return int(self.workload.lengths[step]), sorted(self.sent_to[step])
        return 0, []

    def note(self, node: int, slot: int) -> int:
        for step in self.workload.paths[node] if node >= 0 else ():
            seen = self.sent_to.setdefault(step, set())
            if slot not in seen:
                seen.add(slot)
                self.sizes[slot] += int(self.workload.own[step])
        return slot


class RayPrefix(History):
    """Ray Serve LLM: on the deepest match; below a tenth of the prompt the smallest trees; two choices."""

    def choose(self, request: int) -> int:
        node = self.node(request)
        matched, where = self.match(node)
        if matched < 0.1 * self.workload.prompts[request]:
            smallest = min(self.sizes)
            where = [slot for slot in self.fleet.slots if self.sizes[slot] == smallest]
        return self.note(node, self.two(where))


class CacheAware(History):
    """SGLang: the match above half of the prompt, else the smallest tree; shortest queue when uneven."""

    def choose(self, request: int) -> int:
        node, queued = self.node(request), self.fleet.queued
        if max(queued) - min(queued) > 32 and max(queued) > 1.1 * min(queued):
            return self.note(node, self.fleet.least(self.fleet.slots))
        matched, where = self.match(node)
        if matched > 0.5 * self.workload.prompts[request]:
            return self.note(node, where[0])
        return self.note(node, min(self.fleet.slots, key=lambda slot: self.sizes[slot]))


class Approximate(Policy):
    """GAIE and llm-d without events: matched share of the first 4,096 tokens plus emptiness of the queue."""

    CAPACITY_TOKENS = 31_250 * 16
    SEEN_TOKENS = 4096

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.guessed = [Cache(self.workload, self.CAPACITY_TOKENS) for _ in fleet.caches]

    def choose(self, request: int) -> int:
        node, queued = self.node(request), self.fleet.queued
        seen = min(int(self.workload.prompts[request]), self.SEEN_TOKENS)
        longest = max(max(queued), 1)

        def score(slot: int) -> tuple[float, float]:
            prefix = min(self.guessed[slot].hit(node), seen) / seen
            return prefix + 1.0 - queued[slot] / longest, self.random.random()

        slot = max(self.fleet.slots, key=score)
        self.guessed[slot].use(node)
        return slot


class BoundedHash(Policy):
    """KubeAI: a ring by the first characters; on to the next while the load is above 125 % of the mean."""

    VIRTUAL_NODES = 256

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        points = [
            (_hashed(f"{slot}/{point}"), slot) for slot in fleet.slots for point in range(self.VIRTUAL_NODES)
        ]
        self.ring = [slot for _, slot in sorted(points)]

    def choose(self, request: int) -> int:
        node = self.node(request)
        first = self.workload.paths[node][0] if node >= 0 else -1 - request
        start = _hashed(str(first)) * len(self.ring) >> 64
        limit = 1.25 * (sum(self.fleet.queued) + 1) / len(self.fleet.caches)
        for step in range(len(self.ring)):
            slot = self.ring[(start + step) % len(self.ring)]
            if self.fleet.queued[slot] + 1 <= max(limit, 1.0):
                return slot
        return self.fleet.least(self.fleet.slots)


class PrebleE2(History):
    """Preble: exploit holders if more matches than not, else explore by load; shed load above 1.5 times."""

    WINDOW_S = 180.0

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.recent: deque[tuple[float, int, float]] = deque()
        self.load_s = [0.0] * len(fleet.caches)

    def choose(self, request: int) -> int:
        node, prompt = self.node(request), int(self.workload.prompts[request])
        while self.recent and self.recent[0][0] < self.fleet.now_s - self.WINDOW_S:
            _, slot, seconds = self.recent.popleft()
            self.load_s[slot] -= seconds
        matched, where = self.match(node)
        if matched <= prompt - matched:
            where = list(self.fleet.slots)
        slot = min(where, key=lambda s: self.load_s[s])
        lightest = min(self.fleet.slots, key=lambda s: self.load_s[s])
        if self.load_s[slot] > 1.5 * self.load_s[lightest] + 1.0:
            slot = lightest
        known = matched if slot in where else 0
        seconds = REQUEST_S + TOKEN_S * (prompt - known)
        self.recent.append((self.fleet.now_s, slot, seconds))
        self.load_s[slot] += seconds
        return self.note(node, slot)


class Dynamo(Policy):
    """NVIDIA Dynamo: blocks still to compute here plus blocks active there; the true caches by events."""

    def choose(self, request: int) -> int:
        node, prompt = self.node(request), int(self.workload.prompts[request])
        fleet = self.fleet
        return min(
            fleet.slots, key=lambda s: prompt - fleet.caches[s].hit(node) + fleet.queued_tokens[s] + prompt
        )


class EarliestFinish(Policy):
    """Mooncake in shape: queue seconds plus seconds for what is missing; the true caches."""

    def choose(self, request: int) -> int:
        node, fleet = self.node(request), self.fleet
        return min(
            fleet.slots,
            key=lambda s: max(fleet.free_s[s] - fleet.now_s, 0.0) - TOKEN_S * fleet.caches[s].hit(node),
        )


POLICIES: dict[str, Callable[[Fleet], Policy]] = {
    "round robin": RoundRobin,
    "power of two": PowerOfTwo,
    "least loaded": LeastLoaded,
    "Ray prefix": RayPrefix,
    "SGLang": CacheAware,
    "GAIE approx.": Approximate,
    "CHWBL": BoundedHash,
    "Preble E2": PrebleE2,
    "Dynamo": Dynamo,
    "earliest finish": EarliestFinish,
}


def push(workload: Workload, replicas: int, budget_tokens: int, make: Callable[[Fleet], Policy]) -> Outcome:
    """Serve a workload by a policy that pushes."""
    fleet = Fleet(workload, replicas, budget_tokens)
    policy = make(fleet)
    queues: list[deque[int]] = [deque() for _ in range(replicas)]
    busy_s, computed, next_request = [0.0] * replicas, 0, 0
    events: list[tuple[float, int]] = []

    def start(slot: int) -> None:
        nonlocal computed
        request = queues[slot][0]
        missing = int(workload.prompts[request]) - fleet.caches[slot].use(int(workload.leaves[request]))
        seconds = REQUEST_S + TOKEN_S * missing
        computed += missing
        busy_s[slot] += seconds
        fleet.free_s[slot] = max(fleet.free_s[slot], fleet.now_s + seconds)
        heappush(events, (fleet.now_s + seconds, slot))

    while next_request < len(workload) or events:
        while next_request < len(workload) and sum(fleet.queued) < IN_FLIGHT * replicas:
            slot = policy.choose(next_request)
            queues[slot].append(next_request)
            prompt = int(workload.prompts[next_request])
            fleet.queued[slot] += 1
            fleet.queued_tokens[slot] += prompt
            hit = fleet.caches[slot].hit(int(workload.leaves[next_request]))
            waited_s = max(fleet.free_s[slot], fleet.now_s)
            if len(queues[slot]) == 1:
                start(slot)
            else:
                fleet.free_s[slot] = waited_s + REQUEST_S + TOKEN_S * (prompt - hit)
            next_request += 1
        fleet.now_s, slot = heappop(events)
        done = queues[slot].popleft()
        fleet.queued[slot] -= 1
        fleet.queued_tokens[slot] -= int(workload.prompts[done])
        if queues[slot]:
            start(slot)
    total = int(workload.prompts.sum())
    return Outcome(
        requests=len(workload),
        makespan_s=fleet.now_s,
        bound_s=bound_s(workload, replicas),
        busy_s=tuple(busy_s),
        hit=1.0 - computed / total,
        ideal_hit=workload.ideal_hit,
        counters={"evictions": sum(cache.evictions for cache in fleet.caches)},
    )


def _hashed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
