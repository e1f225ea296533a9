"""What a pool says of itself: typed, from the counters of placement and the slots of its owner. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .ledger import Ledger


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What every replica of a pool has loaded."""

    digest: str
    numerics_id: str
    descriptor: Mapping[str, Any]
    max_seq_len: int
    replicas: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One slot. state: starting, up, draining, waiting or given up; verdict: the same for people, with why.

    busy_s: engine seconds; prefix_budget_bytes, memory_bytes: None if not known; generating: completions that
    it was sent and their clients need; pid: 0 if it never ran; trouble: of its last death; notice: of the
    process.
    """

    slot: int
    generation: int
    state: str
    verdict: str
    pid: int
    host: str
    in_flight: int
    backlog_s: float
    busy_s: float
    prefixes: int
    prefix_bytes: int
    generating: int
    generated_tokens: int
    trouble: str
    notice: str
    prefix_budget_bytes: int | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One client of the router. windows, streams: to score and to generate for it; unfetched: deliveries."""

    client: str
    label: str
    windows: int
    streams: int
    unfetched: int
    silent_s: float


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A snapshot. wanted: replicas that the pool should have.

    tokens_computed: run through the model for what this client has; tokens_total: the same if nothing were
    shared. tokens_sent: total of all that this client submitted; tokens_ideal: of that too, if each shared
    prefix of a window were computed once: of what is scored.
    tokens_generated: by all replicas for all clients, as of a second ago. That, the queue, prefixes and the
    counters after deaths are the router's and start anew with it.
    """

    replicas: tuple[ReplicaStatus, ...]
    wanted: int
    clients: tuple[ClientStatus, ...]
    queued_items: int
    finished_items: int
    tokens_computed: int
    tokens_total: int
    tokens_sent: int
    tokens_ideal: int
    tokens_generated: int
    prefixes: int
    prefix_bytes: int
    deaths: int
    refusals: int
    mirror_differences: int
    steals: int
    chunks: int
    evictions: int
    router_cpu_s: float

    @property
    def alive(self) -> int:
        """Replicas that take work."""
        return sum(replica.state == "up" for replica in self.replicas)

    @property
    def tokens_reused(self) -> int:
        """Tokens that were not computed because a prefix was held."""
        return max(self.tokens_total - self.tokens_computed, 0)

    @property
    def hit_rate(self) -> float:
        """Tokens reused over all tokens, 0 to 1."""
        return self.tokens_reused / self.tokens_total if self.tokens_total else 0.0


def pool_status(body: Mapping[str, Any], ledger: Ledger) -> PoolStatus:
    """Join what the router and the owner of the replicas say with what this client has counted."""
    counters = body["counters"]
    replicas = tuple(_replica(slot, body["replicas"].get(str(slot["slot"]), {})) for slot in body["slots"])
    return PoolStatus(
        replicas=replicas,
        wanted=body["wanted"],
        clients=tuple(ClientStatus(**client) for client in body["clients"]),
        queued_items=body["queued"],
        finished_items=counters["items"],
        tokens_computed=ledger.computed_rows,
        tokens_total=ledger.total_rows,
        tokens_sent=ledger.sent_rows,
        tokens_ideal=ledger.ideal_rows,
        tokens_generated=counters["generated_tokens"],
        prefixes=sum(replica.prefixes for replica in replicas),
        prefix_bytes=sum(replica.prefix_bytes for replica in replicas),
        deaths=body["deaths"],
        refusals=counters["refusals"],
        mirror_differences=counters["mirror_differences"],
        steals=counters["steals"],
        chunks=counters["chunks"],
        evictions=counters["evictions"],
        router_cpu_s=body["cpu_s"],
    )


def _replica(slot: Mapping[str, Any], seen: Mapping[str, Any]) -> ReplicaStatus:
    of_router: dict[str, int | float | None] = {
        "in_flight": 0,
        "backlog_s": 0.0,
        "busy_s": 0.0,
        "prefixes": 0,
    }
    of_router |= {"prefix_bytes": 0, "generating": 0, "generated_tokens": 0}
    of_router |= {"prefix_budget_bytes": None, "memory_bytes": None}
    known = {key: seen.get(key, default) for key, default in of_router.items()}
    return ReplicaStatus(**slot, **known)
