"""What a pool says of itself: typed, from the counters of placement and the slots of the supervisor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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
    """One slot. state: starting, up, waiting or given up; busy_s: engine seconds; pid: 0 if it never ran."""

    slot: int
    generation: int
    state: str
    pid: int
    in_flight: int
    backlog_s: float
    busy_s: float
    prefixes: int
    prefix_bytes: int
    trouble: str


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """A snapshot.

    tokens_computed: run through the model for what this client has; tokens_total: the same if nothing were
    shared; tokens_ideal: the same if each shared prefix of a window were computed once. The queue, prefixes
    and the counters after deaths are the router's and start anew with it.
    """

    replicas: tuple[ReplicaStatus, ...]
    queued_items: int
    finished_items: int
    tokens_computed: int
    tokens_total: int
    tokens_ideal: int
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


class SlotView(Protocol):
    """What is read of a supervisor's slot."""

    index: int
    generation: int
    state: str
    status: Any
    trouble: str


def pool_status(
    slots: Sequence[SlotView], deaths: int, ledger: Ledger, body: Mapping[str, Any]
) -> PoolStatus:
    """Join what the owner of the replicas, the client and the router know."""
    counters = body["counters"]
    replicas = tuple(_replica(slot, body["replicas"].get(str(slot.index), {})) for slot in slots)
    return PoolStatus(
        replicas=replicas,
        queued_items=body["queued"],
        finished_items=counters["items"],
        tokens_computed=ledger.computed_rows,
        tokens_total=ledger.total_rows,
        tokens_ideal=ledger.ideal_rows,
        prefixes=sum(replica.prefixes for replica in replicas),
        prefix_bytes=sum(replica.prefix_bytes for replica in replicas),
        deaths=deaths,
        refusals=counters["refusals"],
        mirror_differences=counters["mirror_differences"],
        steals=counters["steals"],
        chunks=counters["chunks"],
        evictions=counters["evictions"],
        router_cpu_s=body["cpu_s"],
    )


def _replica(slot: SlotView, seen: Mapping[str, Any]) -> ReplicaStatus:
    return ReplicaStatus(
        slot=slot.index,
        generation=slot.generation,
        state=slot.state,
        pid=slot.status.pid if slot.status is not None else 0,
        in_flight=seen.get("in_flight", 0),
        backlog_s=seen.get("backlog_s", 0.0),
        busy_s=seen.get("busy_s", 0.0),
        prefixes=seen.get("prefixes", 0),
        prefix_bytes=seen.get("prefix_bytes", 0),
        trouble=slot.trouble,
    )
